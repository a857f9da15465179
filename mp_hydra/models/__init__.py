"""Models that `conf/model` names: functions from a data set's input shape and number of outputs to a `keras.Model`.

All of them are functional models that take float32 inputs (token ids: int32), compute in the global dtype policy, and
end in one Dense layer named "logits" that computes in float32 without an activation: a 16-bit softmax or sigmoid loses
the gradient of confident mistakes. They are made of stock Keras layers only, so what they save opens in plain Keras.
"""

from __future__ import annotations

from mp_hydra.models.applications import application
from mp_hydra.models.attention import transformer, vit
from mp_hydra.models.convolutional import cnn
from mp_hydra.models.perceptron import mlp
from mp_hydra.models.residual import resnet

__all__ = ["application", "cnn", "mlp", "resnet", "transformer", "vit"]
