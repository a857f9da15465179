#!/bin/sh
# A sweep on Ray, a fresh worker for every job. Needs: pip install 'mp_hydra[ray]'
# As it stands it starts a cluster on this machine. On a cluster of several machines, all of which must reach one tracking server:
#   RAY_ADDRESS=HEAD:6379 multirun_examples/ray_cluster.sh +hydra.launcher.remote.num_gpus=1 tracking=server tracking.uri=...
# Four jobs on digits. About 25 seconds on two CPU cores.
exec python train.py --multirun hydra/launcher=ray "precision=${PRECISIONS:-fp32,mixed_bfloat16}" "seed=${SEEDS:-0,1}" "$@"
