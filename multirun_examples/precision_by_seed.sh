#!/bin/sh
# Every precision with three seeds: what a precision costs or saves, told apart from the luck of a seed.
# Nine jobs on digits. About 40 seconds on two CPU cores.
exec python train.py --multirun "precision=${PRECISIONS:-fp32,mixed_float16,mixed_bfloat16}" "seed=${SEEDS:-0,1,2}" "$@"
