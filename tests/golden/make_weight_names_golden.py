"""Have TensorFlow and torchvision name the variables of their nets. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tf
    /tmp/tf/bin/pip install "tensorflow-cpu==2.21.0" "tf-slim==1.1.0"
    /tmp/tf/bin/python tests/golden/make_weight_names_golden.py tensorflow
    python3.11 -m venv /tmp/tv
    /tmp/tv/bin/pip install "torchvision==0.29.2"
    /tmp/tv/bin/python tests/golden/make_weight_names_golden.py torchvision

It writes `weight_names_golden.json.gz` beside itself: the shape of every variable by its name, a net each. The nets are
Inception-v3 of tf_slim.nets, Inception-v3 of torchvision, Inception-v3 of the package inception.slim that the ImageNet
trainer of tensorflow/models had (its layers are listed here; the names are made by TensorFlow, as it had them made),
and the net of the MNIST trainer with what its optimizer and its moving averages add.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "weight_names_golden.json.gz"

# Width, kernel height and kernel width of the convolutions of a branch, in the order in which they are made.
Branch = list[tuple[int, int, int]]


def mixed_35(pool: int) -> dict[str, Branch]:
    return {
        "branch1x1": [(64, 1, 1)],
        "branch5x5": [(48, 1, 1), (64, 5, 5)],
        "branch3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
        "branch_pool": [(pool, 1, 1)],
    }


def mixed_17(width: int) -> dict[str, Branch]:
    tall, flat = (width, 7, 1), (width, 1, 7)
    return {
        "branch1x1": [(192, 1, 1)],
        "branch7x7": [(width, 1, 1), flat, (192, 7, 1)],
        "branch7x7dbl": [(width, 1, 1), tall, flat, tall, (192, 1, 7)],
        "branch_pool": [(192, 1, 1)],
    }


MIXED_8: dict[str, Branch] = {
    "branch1x1": [(320, 1, 1)],
    "branch3x3": [(384, 1, 1), (384, 1, 3), (384, 3, 1)],
    "branch3x3dbl": [(448, 1, 1), (384, 3, 3), (384, 1, 3), (384, 3, 1)],
    "branch_pool": [(192, 1, 1)],
}
INCEPTION_SLIM: dict[str, dict[str, Branch]] = {
    "mixed_35x35x256a": mixed_35(32),
    "mixed_35x35x288a": mixed_35(64),
    "mixed_35x35x288b": mixed_35(64),
    "mixed_17x17x768a": {"branch3x3": [(384, 3, 3)], "branch3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)]},
    "mixed_17x17x768b": mixed_17(128),
    "mixed_17x17x768c": mixed_17(160),
    "mixed_17x17x768d": mixed_17(160),
    "mixed_17x17x768e": mixed_17(192),
    "mixed_17x17x1280a": {
        "branch3x3": [(192, 1, 1), (320, 3, 3)],
        "branch7x7x3": [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
    },
    "mixed_8x8x2048a": MIXED_8,
    "mixed_8x8x2048b": MIXED_8,
}
POOLED = {"mixed_17x17x768a", "mixed_17x17x1280a"}
"""These end with the maximum of what came in, beside their branches."""
FORKS = {("branch3x3", 1), ("branch3x3dbl", 2)}
"""In an 8x8 block, the next two convolutions both see what came before, and their outputs are joined."""


def main(system: str) -> None:
    nets = {"tensorflow": tensorflow_nets, "torchvision": torchvision_nets}[system]()
    golden = (json.loads(gzip.decompress(PATH.read_bytes())) if PATH.exists() else {}) | nets
    lines = [f"{json.dumps(name)}: {json.dumps(golden[name], separators=(',', ':'))}" for name in sorted(golden)]
    PATH.write_bytes(gzip.compress(("{\n" + ",\n".join(lines) + "\n}\n").encode(), mtime=0))


def torchvision_nets() -> dict[str, Any]:
    from torchvision.models import inception_v3

    net = inception_v3(weights=None, init_weights=False)
    return {"torchvision_inception_v3": {name: list(value.shape) for name, value in net.state_dict().items()}}


def tensorflow_nets() -> dict[str, Any]:
    return {"slim_inception_v3": slim_inception(), "inception_slim": inception_slim(), "mnist": mnist()}


def slim_inception() -> dict[str, list[int]]:
    import tensorflow.compat.v1 as tf
    import tf_slim
    from tensorflow.python.framework import ops
    from tf_slim.nets import inception

    with tf.Graph().as_default():
        # TF-Slim looks for the class where it was; updates that are collected ask for a module that is gone.
        ops.Tensor = tf.Tensor
        with tf_slim.arg_scope(inception.inception_v3_arg_scope(updates_collections=None)):
            inception.inception_v3(tf.zeros([1, 299, 299, 3]), num_classes=1000)
        return variables(tf.global_variables())


def inception_slim() -> dict[str, list[int]]:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        channels = 3
        for index, (width, size) in enumerate([(32, 3), (32, 3), (64, 3), (80, 1), (192, 3)]):
            channels = convolution(tf, channels, (width, size, size), f"conv{index}")
        for block, branches in INCEPTION_SLIM.items():
            channels = mixed(tf, block, branches, channels)
            if block == "mixed_17x17x768e":
                with tf.variable_scope("aux_logits"):
                    width = convolution(tf, channels, (128, 1, 1), "proj")
                    dense(tf, convolution(tf, width, (768, 5, 5)), 1000)
        with tf.variable_scope("logits"):
            dense(tf, channels, 1000, "logits")
        return variables(tf.global_variables())


def mixed(tf: Any, block: str, branches: dict[str, Branch], channels: int) -> int:
    """One block; the channels of its output."""
    outputs = channels if block in POOLED else 0
    with tf.variable_scope(block):
        for branch, kernels in branches.items():
            with tf.variable_scope(branch):
                inputs, forks = channels, False
                for index, kernel in enumerate(kernels):
                    forks |= block.startswith("mixed_8x8") and (branch, index) in FORKS
                    width = convolution(tf, inputs, kernel)
                    inputs = inputs if forks else width
                outputs += 2 * width if forks else width
    return outputs


def convolution(tf: Any, channels: int, kernel: tuple[int, int, int], scope: str | None = None) -> int:
    """A convolution with batch norm, which has no gamma; its width."""
    width, height, breadth = kernel
    with tf.variable_scope(scope, "Conv", [tf.zeros([])]):
        tf.get_variable("weights", [height, breadth, channels, width])
        with tf.variable_scope(None, "BatchNorm", [tf.zeros([])]):
            for name in ("beta", "moving_mean", "moving_variance"):
                tf.get_variable(name, [width])
    return width


def dense(tf: Any, channels: int, width: int, scope: str | None = None) -> None:
    with tf.variable_scope(scope, "FC", [tf.zeros([])]):
        tf.get_variable("weights", [channels, width])
        tf.get_variable("biases", [width])


def mnist() -> dict[str, list[int]]:
    """The trainer's net, whose dense layers mix "weights" and "weight", with slots, averages and the step."""
    import tensorflow.compat.v1 as tf

    tf.disable_resource_variables()
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        kernels = {"conv1": [5, 5, 1, 32], "conv2": [5, 5, 32, 64], "local3": [3136, 1024], "local4": [1024, 10]}
        for layer, shape in {**kernels, "softmax_linear": [10, 10]}.items():
            with tf.variable_scope(layer):
                tf.get_variable("weight" if layer in ("local4", "softmax_linear") else "weights", shape)
                tf.get_variable("biases", shape[-1:])
        trained = tf.trainable_variables()
        loss = tf.add_n([tf.reduce_sum(variable) for variable in trained])
        tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True).minimize(loss, step)
        tf.train.AdamOptimizer(0.1).minimize(loss)
        tf.train.RMSPropOptimizer(0.1).minimize(loss)
        tf.train.ExponentialMovingAverage(0.9999, step).apply(trained)
        return variables(tf.global_variables())


def variables(found: list[Any]) -> dict[str, list[int]]:
    return {variable.op.name: variable.shape.as_list() for variable in found}


if __name__ == "__main__":
    main(sys.argv[1])
