#!/bin/sh
# A sweep on SLURM, one job of the cluster for each job of the sweep. Needs: pip install 'mp_hydra[slurm]'
# All nodes must see this directory, and one tracking server. Without sbatch on the machine the jobs run here, all at once, as
# submitit does it locally, to show what would be submitted. Settings of the queue: hydra.launcher.partition=gpu
# hydra.launcher.gpus_per_node=1 hydra.launcher.timeout_min=120
# Four jobs on digits. About 20 seconds on two CPU cores.
launcher=slurm_local
if command -v sbatch >/dev/null; then launcher=slurm; fi
exec python train.py --multirun "hydra/launcher=$launcher" "precision=${PRECISIONS:-fp32,mixed_bfloat16}" "seed=${SEEDS:-0,1}" "$@"
