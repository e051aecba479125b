"""Record the nets of TF-Slim and the SSDs of the Object Detection API in real TensorFlow. Run by hand.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim
    /tmp/tensorflow/bin/python tests/golden/make_slim_nets_golden.py

It writes `slim_nets_golden.npz` beside itself: of each net the shapes of its variables by their names, and a sample and
the shape of each of its outputs. ResNets and Inception-v3 are those of tf_slim.nets. The MobileNets were in
tensorflow/models, research/slim, and the SSD layers in research/object_detection: what they consist of is listed here,
while layers and names are made by TensorFlow and TF-Slim.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import slim_nets_inputs as inputs
from tensorflow_graphs import graph, slim, tf
from tf_slim.nets import inception, resnet_v1

Maps = dict[str, Any]
# With a collection of another name TF-Slim's own batch norm runs, and not that of a layer of an older Keras.
UPDATES = "updates"

V1 = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
V2 = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
# Kernel, expanded, outputs, squeeze and excitation, hard swish, stride.
V3_SMALL = [
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 48, True, True, 2),
    (5, 288, 48, True, True, 1),
    (5, 288, 48, True, True, 1),
]
V3_LARGE = [
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 80, True, True, 2),
    (5, 480, 80, True, True, 1),
    (5, 480, 80, True, True, 1),
]


def main() -> None:
    tf.disable_v2_behavior()
    recorded: dict[str, Any] = {}
    for name, (make, is_explicit) in NETS.items():
        with graph("float32") as session, scope("SAME"):
            variables, maps = record(session, make, is_explicit)
        recorded[f"{name}/variables"] = json.dumps(variables, separators=(",", ":"))
        recorded[f"{name}/shapes"] = json.dumps({end: list(value.shape) for end, value in maps.items()})
        recorded |= {f"{name}/maps/{end}": inputs.sample(value) for end, value in maps.items()}
        print(name, len(variables), {end: (value.shape, float(value.std())) for end, value in maps.items()})
    np.savez_compressed(inputs.PATH, **recorded)


def record(session: Any, make: Callable[[Any, bool], Maps], is_explicit: bool) -> tuple[dict[str, list[int]], Maps]:
    images = tf.placeholder(tf.float32, [2, *inputs.IMAGE, 3])
    maps = make(images, is_explicit)
    shapes = {variable.op.name: variable.shape.as_list() for variable in tf.global_variables()}
    session.run(
        [variable.initializer for variable in tf.global_variables()],
        {v.initial_value: inputs.weights(v.op.name, shapes[v.op.name]) for v in tf.global_variables()},
    )
    return shapes, session.run(maps, {images: inputs.images()})


@contextlib.contextmanager
def scope(padding: str) -> Any:
    """Layers as the MobileNets have them."""
    layers = [slim.conv2d, slim.separable_conv2d]
    normed = {"normalizer_fn": slim.batch_norm, "activation_fn": tf.nn.relu6, "padding": padding}
    with (
        slim.arg_scope(layers, **normed),
        slim.arg_scope([slim.batch_norm], is_training=False, updates_collections=UPDATES, **inputs.BATCH_NORM),
    ):
        yield


def fixed(net: Any, kernel: int, is_explicit: bool) -> tuple[Any, str]:
    """Pad as "use_explicit_padding" has it: alike on both sides, whatever the size."""
    if not is_explicit:
        return net, "SAME"
    before, after = (kernel - 1) // 2, kernel - 1 - (kernel - 1) // 2
    return tf.pad(net, [[0, 0], [before, after], [before, after], [0, 0]]), "VALID"


def conv(
    net: Any, width: int, kernel: int, stride: int, is_explicit: bool, name: str | None = None, **given: Any
) -> Any:
    net, padding = fixed(net, kernel, is_explicit)
    return slim.conv2d(net, width, [kernel, kernel], stride=stride, padding=padding, scope=name, **given)


def depthwise(net: Any, kernel: int, stride: int, is_explicit: bool, name: str, **given: Any) -> Any:
    net, padding = fixed(net, kernel, is_explicit)
    return slim.separable_conv2d(
        net, None, [kernel, kernel], depth_multiplier=1, stride=stride, padding=padding, scope=name, **given
    )


def mobilenet_v1(images: Any, is_explicit: bool, multiplier: float = 0.75) -> Maps:
    maps = {}
    with tf.variable_scope("MobilenetV1"):
        net = conv(images, int(32 * multiplier), 3, 2, is_explicit, "Conv2d_0")
        for index, (width, stride) in enumerate(V1, start=1):
            net = depthwise(net, 3, stride, is_explicit, f"Conv2d_{index}_depthwise")
            maps[f"Conv2d_{index}_pointwise"] = net = conv(
                net, int(width * multiplier), 1, 1, is_explicit, f"Conv2d_{index}_pointwise"
            )
    return {name: maps[name] for name in ("Conv2d_11_pointwise", "Conv2d_13_pointwise")}


def hard_swish(net: Any) -> Any:
    return net * tf.nn.relu6(net + 3.0) * np.float32(1 / 6)


def excited(net: Any) -> Any:
    """The reference divides by 6 as a factor of 0.16667, which is the digits' end and nothing meant."""
    width = net.shape.as_list()[3]
    with tf.variable_scope("squeeze_excite"):
        pooled = tf.reduce_mean(net, [1, 2], keepdims=True)
        unnormed = {"normalizer_fn": None}
        squeezed = slim.conv2d(pooled, divisible(width // 4), [1, 1], activation_fn=tf.nn.relu, **unnormed)
        scale = slim.conv2d(squeezed, width, [1, 1], activation_fn=None, **unnormed)
        return net * tf.nn.relu6(scale + 3.0) * np.float32(0.16667)


def divisible(width: float) -> int:
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * width else rounded


def expanded_conv(
    net: Any, kernel: int, expanded: int, width: int, stride: int, is_explicit: bool, activation: Any, excite: bool
) -> tuple[Any, Any]:
    """A block; its output, and what its first convolution makes."""
    before, expansion = net, net
    with tf.variable_scope(None, "expanded_conv"):
        if expanded > net.shape.as_list()[3]:
            expansion = net = conv(net, expanded, 1, 1, is_explicit, "expand", activation_fn=activation)
        net = depthwise(net, kernel, stride, is_explicit, "depthwise", activation_fn=activation)
        net = excited(net) if excite else net
        net = conv(net, width, 1, 1, is_explicit, "project", activation_fn=None)
    is_residual = stride == 1 and width == before.shape.as_list()[3]
    return net + before if is_residual else net, expansion


def mobilenet_v2(images: Any, is_explicit: bool, multiplier: float = 1.0) -> Maps:
    maps = mobilenet_v2_layers(images, is_explicit, multiplier)
    return {name: maps[name] for name in ("layer_15/expansion_output", "layer_19")}


def mobilenet_v2_layers(images: Any, is_explicit: bool, multiplier: float) -> Maps:
    maps, layer = {}, 1
    with tf.variable_scope("MobilenetV2"):
        net = conv(images, divisible(32 * multiplier), 3, 2, is_explicit)
        for factor, width, count, first_stride in V2:
            for index in range(count):
                layer += 1
                stride, expanded = first_stride if index == 0 else 1, factor * net.shape.as_list()[3]
                net, maps[f"layer_{layer}/expansion_output"] = expanded_conv(
                    net, 3, expanded, divisible(width * multiplier), stride, is_explicit, tf.nn.relu6, False
                )
                maps[f"layer_{layer}"] = net
        maps["layer_19"] = conv(net, divisible(1280 * multiplier), 1, 1, is_explicit)
    return maps


def mobilenet_v3(blocks: Sequence[Any], wanted: int, images: Any, is_explicit: bool) -> Maps:
    maps = {}
    with tf.variable_scope("MobilenetV3"):
        net = conv(images, 16, 3, 2, is_explicit, activation_fn=hard_swish)
        for layer, (kernel, expanded, width, excite, swish, stride) in enumerate(blocks, start=2):
            activation = hard_swish if swish else tf.nn.relu
            net, expansion = expanded_conv(net, kernel, expanded, width, stride, is_explicit, activation, excite)
            if layer == wanted:
                maps[f"layer_{layer}/expansion_output"] = expansion
        maps[f"layer_{len(blocks) + 2}"] = conv(net, 6 * width, 1, 1, is_explicit, activation_fn=hard_swish)
    return maps


def inception_v3(images: Any, is_explicit: bool) -> Maps:
    _, ends = inception.inception_v3_base(images, depth_multiplier=0.25, scope="InceptionV3")
    return {name: ends[name] for name in ("Mixed_5d", "Mixed_6e", "Mixed_7c")}


def resnet(depth: int, output_stride: int) -> Callable[[Any, bool], Maps]:
    def made(images: Any, is_explicit: bool) -> Maps:
        name, net = f"resnet_v1_{depth}", getattr(resnet_v1, f"resnet_v1_{depth}")
        norm = {"decay": 0.997, "epsilon": 1e-5, "scale": True, "updates_collections": UPDATES}
        scope = resnet_v1.resnet_arg_scope()
        with slim.arg_scope(scope), slim.arg_scope([slim.conv2d], normalizer_params=norm):
            _, ends = net(images, global_pool=False, is_training=False, output_stride=output_stride)
        return {f"block{index}": ends[f"{name}/block{index}"] for index in range(1, 5)}

    return made


def ssd(
    make: Callable[[Any, bool], Maps],
    backbone: str,
    depths: Sequence[int],
    *,
    lite: bool,
    activation: Any = None,
    kernel: int = 1,
) -> Callable[[Any, bool], Maps]:
    """A backbone, the further maps and the box predictor of an SSD; anchors: 3 a cell of the first map, then 6."""

    def made(images: Any, is_explicit: bool) -> Maps:
        with tf.variable_scope("FeatureExtractor"):
            maps = make(images, is_explicit)
            with tf.variable_scope(backbone):
                maps |= further(maps, depths, lite, is_explicit)
        heads = [predictor(net, index, lite, kernel) for index, net in enumerate(maps.values())]
        boxes, scores = (tf.concat(each, 1) for each in zip(*heads, strict=True))
        return maps | {"boxes": boxes, "scores": scores}

    return made


def further(maps: Maps, depths: Sequence[int], lite: bool, is_explicit: bool) -> Maps:
    (*_, (base, net)), found = maps.items(), {}
    for index, depth in enumerate(depths, start=len(maps)):
        name = f"{base}_1_Conv2d_{index}_1x1_{depth // 2}"
        net = slim.conv2d(net, depth // 2, [1, 1], scope=name)
        name = f"{base}_2_Conv2d_{index}_3x3_s2_{depth}"
        if lite:
            net = depthwise(net, 3, 2, is_explicit, f"{name}_depthwise")
            net = slim.conv2d(net, depth, [1, 1], scope=name)
        else:
            net = conv(net, depth, 3, 2, is_explicit, name)
        found[name] = net
    return found


def predictor(net: Any, index: int, lite: bool, kernel: int) -> tuple[Any, Any]:
    per_cell, outputs = 3 if index == 0 else 6, []
    plain = {"activation_fn": None, "normalizer_fn": None}
    with tf.variable_scope(f"BoxPredictor_{index}"):
        for name, codes in (("BoxEncodingPredictor", 4), ("ClassPredictor", inputs.NUM_CLASSES + 1)):
            hidden = depthwise(net, kernel, 1, False, f"{name}_depthwise") if lite else net
            size = 1 if lite else kernel
            made = slim.conv2d(hidden, per_cell * codes, [size, size], scope=name, **plain)
            outputs.append(tf.reshape(made, [2, -1, codes]))
    return outputs[0], outputs[1]


def pyramid(images: Any, is_explicit: bool, depth: int = 20) -> Maps:
    """Levels 3 to 6 on MobileNet v2, and RetinaNet's predictor, of two layers and four anchors a cell."""
    with tf.variable_scope("FeatureExtractor"):
        maps = mobilenet_v2_layers(images, is_explicit, 0.5)
        features = [maps[name] for name in ("layer_7", "layer_14", "layer_19")]
        plain = {"activation_fn": None, "normalizer_fn": None}
        with tf.variable_scope("MobilenetV2/fpn"):
            summed = slim.conv2d(features[-1], depth, [1, 1], scope="projection_3", **plain)
            levels = [summed]
            for level in (2, 1):
                lateral = slim.conv2d(features[level - 1], depth, [1, 1], scope=f"projection_{level}", **plain)
                _, height, width, _ = summed.shape.as_list()
                coarser = tf.image.resize_nearest_neighbor(summed, [2 * height, 2 * width])
                _, height, width, _ = lateral.shape.as_list()
                summed = lateral + coarser[:, :height, :width]
                levels.insert(0, conv(summed, depth, 3, 1, is_explicit, f"smoothing_{level}"))
            levels.append(conv(levels[-1], depth, 3, 2, is_explicit, "bottom_up_Conv2d_20"))
    boxes, scores = (tf.concat(each, 1) for each in zip(*map(shared_predictor, range(4), levels), strict=True))
    return {f"level_{index}": level for index, level in enumerate(levels, start=3)} | {"boxes": boxes, "scores": scores}


def shared_predictor(index: int, level: Any) -> tuple[Any, Any]:
    plain, outputs = {"activation_fn": None, "normalizer_fn": None}, []
    with tf.variable_scope("WeightSharedConvolutionalBoxPredictor", reuse=tf.AUTO_REUSE):
        for tower, name, codes in (("Box", "BoxPredictor", 4), ("Class", "ClassPredictor", inputs.NUM_CLASSES + 1)):
            net = level
            for layer in range(2):
                scope = f"{tower}PredictionTower/conv2d_{layer}"
                # A function in place of a norm leaves the bias out.
                unbiased = {"activation_fn": None, "normalizer_fn": tf.identity}
                net = slim.conv2d(net, 12, [3, 3], scope=scope, **unbiased)
                net = tf.nn.relu6(slim.batch_norm(net, scope=f"{scope}/BatchNorm/feature_{index}"))
            outputs.append(tf.reshape(slim.conv2d(net, 4 * codes, [3, 3], scope=name, **plain), [2, -1, codes]))
    return outputs[0], outputs[1]


def small(images: Any, is_explicit: bool) -> Maps:
    return mobilenet_v3(V3_SMALL, 10, images, is_explicit)


def large(images: Any, is_explicit: bool) -> Maps:
    return mobilenet_v3(V3_LARGE, 14, images, is_explicit)


FURTHER = (512, 256, 256, 128)
# A net, and whether it pads explicitly.
NETS = {
    "ssd_mobilenet_v1": (ssd(mobilenet_v1, "MobilenetV1", (384, 192, 192, 96), lite=False), False),
    "ssdlite_mobilenet_v1": (ssd(mobilenet_v1, "MobilenetV1", (384, 192, 192, 96), lite=True, kernel=3), True),
    "ssd_mobilenet_v2": (ssd(mobilenet_v2, "MobilenetV2", FURTHER, lite=False, kernel=3), False),
    "ssdlite_mobilenet_v3_small": (ssd(small, "MobilenetV3", FURTHER, lite=True, kernel=3), False),
    "ssd_mobilenet_v2_fpn": (pyramid, True),
    "mobilenet_v3_large": (large, False),
    "ssd_inception_v3": (ssd(inception_v3, "InceptionV3", (128, 64, 32), lite=False, kernel=3), False),
    "resnet_v1_50": (resnet(50, 16), False),
    "resnet_v1_50_atrous": (resnet(50, 8), False),
}

if __name__ == "__main__":
    main()
