"""What a backward kernel reads, read no earlier than its gradient is there.

A tensor that a gradient computes from what was kept, without the incoming gradient, may be computed early, or be found equal
to one of the forward pass and kept instead of it: by TensorFlow's executor and graph optimizer between operations, by XLA
inside one compiled step. Both would keep float32 tensors that lean gradients are there to do without.
"""

from __future__ import annotations

from typing import Any

from mp_hydra.activation_memory.kernels import xla_problem


def after(gradient: Any, *kept: Any) -> tuple[Any, ...]:
    """The gradient and the kept tensors, none of which can be used before the gradient is there.

    For use inside the function of a backward `kernel`. It has no gradient of its own.

    Returns:
        The gradient, then the kept tensors in their order; the same values.
    """
    import tensorflow as tf

    if xla_problem() is None:
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops

        return tuple(gen_xla_ops.xla_optimization_barrier([gradient, *kept]))
    with tf.control_dependencies([gradient]):
        return (gradient, *(tf.identity(tensor) for tensor in kept))
