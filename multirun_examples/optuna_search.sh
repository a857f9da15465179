#!/bin/sh
# A search with Optuna for the learning rate and the loss scale that give the best test accuracy under mixed_float16; a job that
# runs out of memory counts as a failed trial, and the search goes on. Needs: pip install 'mp_hydra[optuna]'
# Eight jobs on digits, one after another. About 25 seconds on two CPU cores.
exec python train.py --multirun hydra/sweeper=optuna hydra.sweeper.n_trials=8 hydra.sweeper.direction=maximize \
  precision=mixed_float16 loss_scale=fixed 'loss_scale.value=tag(log,interval(1,65536))' \
  'optimizer.learning_rate=tag(log,interval(1e-4,1e-2))' "$@"
