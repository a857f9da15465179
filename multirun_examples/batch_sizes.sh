#!/bin/sh
# Batch sizes in two precisions: how training memory and throughput grow with the batch. A batch that does not fit is a result
# (outcome out_of_memory), and the sweep goes on.
# Eight jobs on digits. About 35 seconds on two CPU cores.
exec python train.py --multirun "precision=${PRECISIONS:-fp32,mixed_bfloat16}" "batch_size=${SIZES:-32,64,128,256}" "$@"
