"""TensorFlow's graphs in either float width, and its numbers as text. Imported where golden numbers are recorded.

TensorFlow turns Python's numbers into float32, and some of its functions always calculate in float32 (the decay of an
average, losses, a cosine). So the float64 runs are given numpy's float64 numbers, and those functions then find float64
where they ask for float32: the rules are TensorFlow's own code, with all the digits.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # The kernels that TensorFlow had from the start, the same on each machine.

import keras
import numpy as np
import tensorflow as tf2
import tf_slim as slim
from tensorflow.python.framework import ops
from tensorflow.python.keras.optimizer_v2 import learning_rate_schedule
from tensorflow.python.ops.losses import losses_impl
from tensorflow.python.training import moving_averages

__all__ = ["as_text", "both", "graph", "in_both", "keras", "slim", "tf", "tf2", "widened"]

tf = tf2.compat.v1
# TF-Slim 1.1 asks for these classes where TensorFlow no longer keeps them.
ops.IndexedSlices, ops.Tensor = tf2.IndexedSlices, tf2.Tensor
DTYPES = ("float64", "float32")


def in_both(record: Callable[..., Any], kind: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "kwargs": kwargs, **both(lambda dtype: record(kind, kwargs, dtype))}


def both(record: Callable[[str], Any]) -> dict[str, Any]:
    return {dtype: record(dtype) for dtype in DTYPES}


@contextlib.contextmanager
def graph(dtype: str) -> Iterator[Any]:
    """A session in a graph of its own; with float64, TensorFlow's fixed float32 is float64 in what we record."""
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with contextlib.ExitStack() as stack:
        for module in (moving_averages, losses_impl):
            stack.enter_context(changed(module, "dtypes", float32=tf.as_dtype(dtype)))
        stack.enter_context(changed(learning_rate_schedule, "math", pi=np.dtype(dtype).type(np.pi)))
        stack.enter_context(changed(learning_rate_schedule, "array_ops", where_v2=where_of_one_dtype))
        stack.enter_context(tf.Graph().as_default())
        yield stack.enter_context(tf.Session(config=config))


def changed(module: Any, name: str, **replacements: Any) -> Any:
    """While it is entered, the module sees another module, by that name, with other values in it."""
    return mock.patch.object(module, name, SimpleNamespace(**{**vars(getattr(module, name)), **replacements}))


def where_of_one_dtype(condition: Any, number: float, tensor: Any) -> Any:
    return tf2.where(condition, tf.cast(number, tensor.dtype), tensor)


def widened(value: Any, dtype: str) -> Any:
    """Numbers of that dtype: a plain Python number would be rounded to float32, whatever the variables are."""
    if isinstance(value, float):
        return np.dtype(dtype).type(value)
    if isinstance(value, list):
        return [widened(v, dtype) for v in value]
    return {k: widened(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def as_text(value: Any, indent: str = "\n") -> str:
    """JSON with a name's arrays on one line."""
    if not isinstance(value, dict):
        return json.dumps(as_numbers(value), separators=(",", ":"))
    inner = indent + " "
    return "{" + ",".join(f"{inner}{json.dumps(k)}: {as_text(v, inner)}" for k, v in value.items()) + indent + "}"


def as_numbers(value: Any) -> Any:
    """Lists of Python's numbers; those of float32 with as few digits as tell them apart."""
    if isinstance(value, list | tuple):
        return [as_numbers(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return as_numbers(value.tolist()) if value.dtype != np.float32 else as_numbers32(value)
    return value


def as_numbers32(value: Any) -> Any:
    return [as_numbers32(v) for v in value] if np.ndim(value) else float(str(value))
