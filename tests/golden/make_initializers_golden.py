"""Have TensorFlow and TF-Slim draw first weights. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tf
    /tmp/tf/bin/pip install "tensorflow-cpu==2.21.0" "tf-slim==1.1.0"
    /tmp/tf/bin/python tests/golden/make_initializers_golden.py

It writes `initializers_golden.json.gz` beside itself: for each case the shape of TensorFlow's weights, and of some
400,000 values of several draws their number, mean, standard deviation, least and greatest value, and 63 quantiles.
The cases of TF-Slim are the variables that its layers make where nothing is said of their first values.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_slim as slim

v1 = tf.compat.v1

PATH = Path(__file__).parent / "initializers_golden.json.gz"
CONVOLUTION, DENSE, VECTOR = (3, 3, 16, 48), (150, 50), (2000,)
MIN_VALUES = 400_000
NUM_BINS = 64


def convolution_of_slim(shape: tuple[int, ...]) -> dict[str, Any]:
    height, width, inputs, outputs = shape
    slim.conv2d(tf.zeros((1, 8, 8, inputs)), outputs, (height, width), scope="layer")
    return {variable.op.name: variable for variable in v1.global_variables()}


def dense_of_slim(shape: tuple[int, ...]) -> dict[str, Any]:
    slim.fully_connected(tf.zeros((1, shape[0])), shape[1], scope="layer")
    return {variable.op.name: variable for variable in v1.global_variables()}


def of_slim(layer: Callable[[tuple[int, ...]], dict[str, Any]], name: str) -> Callable[[tuple[int, ...]], Any]:
    return lambda shape: layer(shape)[name].initial_value


def cases() -> dict[str, tuple[tuple[int, ...], Callable[[tuple[int, ...]], Any]]]:
    found = {
        "truncated_normal(0.1)": (DENSE, v1.truncated_normal_initializer(stddev=0.1)),
        "truncated_normal(0.5, 2)": (DENSE, v1.truncated_normal_initializer(mean=2.0, stddev=0.5)),
        "xavier normal": (CONVOLUTION, slim.xavier_initializer(uniform=False)),
        "slim.conv2d weights": (CONVOLUTION, of_slim(convolution_of_slim, "layer/weights")),
        "slim.conv2d biases": (CONVOLUTION, of_slim(convolution_of_slim, "layer/biases")),
        "slim.fully_connected weights": (DENSE, of_slim(dense_of_slim, "layer/weights")),
        "slim.fully_connected biases": (DENSE, of_slim(dense_of_slim, "layer/biases")),
    }
    for mode in ("fan_in", "fan_out", "fan_avg"):
        for distribution in ("truncated_normal", "untruncated_normal", "uniform"):
            initializer = v1.variance_scaling_initializer(2.0, mode, distribution)
            for name, shape in (("convolution", CONVOLUTION), ("dense", DENSE)):
                found[f"variance_scaling({mode}, {distribution}) {name}"] = (shape, initializer)
    found["variance_scaling(vector)"] = (VECTOR, v1.variance_scaling_initializer(1.0, "fan_in", "uniform"))
    return found


def drawn(shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Any]) -> Any:
    with tf.Graph().as_default():
        v1.set_random_seed(7)
        weights = make(shape)
        if callable(weights):
            weights = weights()
        with v1.Session() as session:
            values = [session.run(weights)]
            while sum(value.size for value in values) < MIN_VALUES and values[0].any():
                values.append(session.run(weights))
    return np.stack(values)


def rounded(values: Any) -> Any:
    return np.vectorize(lambda value: float(f"{value:.7g}"))(values).tolist()


def main() -> None:
    v1.disable_eager_execution()
    golden = {}
    for name, (shape, make) in cases().items():
        values = drawn(shape, make)
        flat = values.astype(np.float64).ravel()
        golden[name] = {
            "shape": list(values.shape[1:]),
            "num": flat.size,
            "mean": rounded(flat.mean()),
            "stddev": rounded(flat.std()),
            "least": rounded(flat.min()),
            "greatest": rounded(flat.max()),
            "quantiles": rounded(np.quantile(flat, np.arange(1, NUM_BINS) / NUM_BINS)) if flat.any() else [],
        }
    PATH.write_bytes(gzip.compress((json.dumps(golden, separators=(",", ":")) + "\n").encode(), mtime=0))


if __name__ == "__main__":
    main()
