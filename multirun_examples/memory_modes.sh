#!/bin/sh
# Stock Keras, lean and recompute in fp32 and mixed_bfloat16: what each saves in memory, and what it costs in time. A vision
# transformer on digits, six jobs. About two minutes on two CPU cores.
exec python train.py --multirun model=vit dataset=digits "precision=${PRECISIONS:-fp32,mixed_bfloat16}" \
    "memory=${MODES:-stock,lean,recompute}" "$@"
