#!/bin/sh
# Three kinds of model in three precisions: which of them gain from 16 bits, and which do not.
# Nine jobs on digits. About 60 seconds on two CPU cores.
exec python train.py --multirun "model=${MODELS:-mlp,cnn,resnet}" "precision=${PRECISIONS:-fp32,mixed_float16,mixed_bfloat16}" "$@"
