"""Sweeps on other machines, and searches: what the launchers `ray` and `slurm` and the sweeper `optuna` do."""
