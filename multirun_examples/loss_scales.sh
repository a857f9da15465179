#!/bin/sh
# Fixed loss scales under mixed_float16: too small a scale loses small gradients to underflow, too large a one makes steps
# overflow, which are then skipped (loss_scale/skipped_steps). From about 2^20 on every step of this one overflows: that job fails.
# Four jobs on digits. About 20 seconds on two CPU cores.
exec python train.py --multirun precision=mixed_float16 loss_scale=fixed "loss_scale.value=${SCALES:-1,64,4096,65536}" "$@"
