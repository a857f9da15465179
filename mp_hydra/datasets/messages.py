"""TensorFlow's error messages for people."""

from __future__ import annotations

import re
from typing import Any


def reason(error: Any) -> str:
    """What a `tf.errors.OpError` says, without the names of graph nodes.

    >>> class Failure(Exception):
    ...     message = "{{function_node __wrapped__DecodeImage}} Unknown image file format. [Op:DecodeImage]"
    >>> reason(Failure())
    'Unknown image file format'
    """
    lines = re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*?\]", "", str(error.message)).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
