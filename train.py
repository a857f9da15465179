"""Train one model, or with --multirun a sweep: `python train.py --help`."""

from mp_hydra.app import main

if __name__ == "__main__":
    main()
