#!/bin/sh
# Throughput at an equal batch and at the largest one that fits: each precision's own, found by dry runs and tried out before the run.
# Four jobs on digits, 12 MB for a step and all that goes with it. About 45 seconds on two CPU cores.
exec python train.py --multirun "precision=${PRECISIONS:-fp32,mixed_bfloat16}" "batch_size=${SIZES:-64,max}" \
    "memory.limit=${LIMIT:-12MB}" "$@"
