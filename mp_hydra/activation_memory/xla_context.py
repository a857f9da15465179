"""Whether XLA compiles what is being traced, as part of a larger function."""

from __future__ import annotations

from mp_hydra.activation_memory.kernels import xla_problem


def being_compiled_by_xla() -> bool:
    """Whether what is traced now becomes part of a function with jit_compile=True; True as well if TensorFlow does not say."""
    import tensorflow as tf

    if tf.executing_eagerly():
        return False
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return True
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def must_order() -> bool:
    """Whether a backward kernel called now must see to the order of its operations itself (`ordering.after`).

    A kernel that is compiled alone starts when its arguments are there, the incoming gradient among them. One that becomes part
    of a larger compiled function, or runs as single operations, has no such start.
    """
    return xla_problem() is not None or being_compiled_by_xla()
