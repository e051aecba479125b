"""Record detectors of TensorFlow 2 by the Object Detection API's own code. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim tf-keras scipy pillow
    /tmp/tensorflow/bin/pip install --no-deps tf-models-research-object-detection==2.8.0.post1
    /tmp/tensorflow/bin/python tests/golden/make_keras_detectors_golden.py

It writes `keras_detectors_golden.npz` beside itself: of each detector samples of what it predicts, its losses and its
detections. Weights follow from the names of torch's parameters; a bias before a norm, which those lack, is 0. What the
package asks for and these detectors do not use is stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

os.environ |= {
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
    "TF_USE_LEGACY_KERAS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}

import keras_detectors_inputs as inputs
import numpy as np
import tensorflow as tf

ABSENT = (
    "tensorflow_models",
    "tensorflow_addons",
    "tensorflow_hub",
    "tensorflow_io",
    "tensorflow_datasets",
    "sentencepiece",
    "lvis",
    "matplotlib",
    "pycocotools",
    "object_detection.utils.visualization_utils",
)


LEAST_DEVIATION = 1e-4
"""Detections whose scores are more alike come in an order by chance, and are not recorded."""


class Absent(types.ModuleType):
    """Has whatever is asked for, and does nothing."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object if name[0].isupper() else Absent(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        absent = any(name == each or name.startswith(f"{each}.") for each in ABSENT)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main() -> None:
    sys.meta_path.insert(0, Finder())
    from object_detection.models.keras_models import mobilenet_v2

    if sys.argv[1:] == ["--regions"]:
        with np.load(inputs.PATH) as file:
            recorded = dict(file)
        recorded |= {f"{inputs.REGIONS}/{key}": inputs.sample(value) for key, value in record_regions().items()}
        np.savez_compressed(inputs.PATH, **recorded)
        return
    make = mobilenet_v2.mobilenet_v2
    mobilenet_v2.mobilenet_v2 = lambda **given: make(**given | {"weights": None})  # it would fetch some
    recorded: dict[str, Any] = {}
    for name in inputs.CONFIGS:
        values = {key: np.asarray(value, np.float32) for key, value in record(name).items()}
        if values["scores"].std() < LEAST_DEVIATION:
            values = {key: value for key, value in values.items() if key not in ("scores", "labels", "boxes")}
        recorded |= {f"{name}/{key}": inputs.sample(value) for key, value in values.items()}
        print(name, {key: (value.shape, float(value.std())) for key, value in values.items()})
    recorded |= {f"{inputs.REGIONS}/{key}": inputs.sample(value) for key, value in record_regions().items()}
    np.savez_compressed(inputs.PATH, **recorded)


def record_regions() -> dict[str, Any]:
    """The maps of both stages of the extractor of a Faster R-CNN; those of the second are of the first one's map."""
    from object_detection.models import faster_rcnn_inception_resnet_v2_keras_feature_extractor as extractors

    extractor = extractors.FasterRCNNInceptionResnetV2KerasFeatureExtractor(
        is_training=False, first_stage_features_stride=16
    )
    first = extractor.get_proposal_feature_extractor_model("first")
    second = extractor.get_box_classifier_feature_extractor_model("second")
    net = extractor.classification_backbone
    assign(inception_resnet_layers(net), {id(each): each for each in net.variables}, inputs.REGION_GAINS)
    drawn = np.random.default_rng(0).uniform(0, 255, (1, *inputs.REGION_SIDES, 3)).astype(np.float32)
    maps = first(extractor.preprocess(tf.constant(drawn)))
    found = {"maps": maps.numpy(), "regions": second(maps).numpy()}
    print(inputs.REGIONS, {key: (value.shape, float(value.std())) for key, value in found.items()})
    return found


def inception_resnet_layers(net: Any) -> Layers:
    """The layers by the order in which they are made, which the numbers in the names of most of them tell."""
    three = ["branch2.0", "branch2.1", "branch2.2"]
    of_block = ["branch0", "branch1.0", "branch1.1", "branch1.2"]
    blocks = {
        **{f"repeat.{i}": ["branch0", "branch1.0", "branch1.1", *three] for i in range(10)},
        "mixed_6a": of_block,
        **{f"repeat_1.{i}": of_block for i in range(20)},
        "mixed_7a": ["branch0.0", "branch0.1", "branch1.0", "branch1.1", *three],
        **{f"repeat_2.{i}": of_block for i in range(9)},
        "block8": of_block,
    }
    first = [f"conv2d_{each}" for each in ("1a", "2a", "2b", "3b", "4a")]
    mixed = [f"mixed_5b.{each}" for each in ("branch0", "branch1.0", "branch1.1", *three, "branch3.1")]
    names = [*first, *mixed, *(f"{block}.{part}" for block, parts in blocks.items() for part in parts)]
    for kind, start in {"conv": "conv2d", "bn": "freezable_batch_norm"}.items():
        own = [each for each in net.layers if re.fullmatch(rf"{start}(_\d+)?", each.name)]
        layers = sorted(own, key=lambda each: number_of(each.name))
        yield from ((f"{name}.{kind}", layer) for name, layer in zip(names, layers, strict=True))
    yield "conv2d_7b.conv", net.get_layer("conv_7b")
    yield "conv2d_7b.bn", net.get_layer("conv_7b_bn")
    for block in (each for each in blocks if not each.startswith("mixed")):
        kind, _, place = block.partition(".")
        theirs = {"repeat": "block35", "repeat_1": "block17"}.get(kind, "block8")
        number = int(place) + 1 if place else 10
        yield f"{block}.conv2d+bias", net.get_layer(f"{theirs}_{number}_conv")


def record(name: str) -> dict[str, Any]:
    from google.protobuf import text_format
    from object_detection.builders import model_builder
    from object_detection.protos import model_pb2

    config = text_format.Parse(inputs.CONFIGS[name], model_pb2.DetectionModel())
    model = model_builder.build(config, is_training=False, add_summaries=False)
    images = tf.constant(inputs.images(name))
    shapes = tf.constant([[*inputs.sides(name), 3]] * len(images), tf.int32)
    prepared = model.preprocess(images)[0]
    model.predict(prepared, shapes)  # which makes the variables
    is_center_net = config.WhichOneof("model") == "center_net"
    if is_center_net:
        layers = center_net_layers(model, config.center_net.feature_extractor.type)
    else:
        layers = efficientdet_layers(model)
    load(model, layers, inputs.GAINS[name])
    predicted = model.predict(prepared, shapes)
    boxes, classes = inputs.objects()
    ones = [tf.ones(len(each)) for each in boxes]
    model.provide_groundtruth([*map(tf.constant, boxes)], [*map(tf.constant, classes)], groundtruth_weights_list=ones)
    losses = {key.removeprefix("Loss/"): value for key, value in model.loss(predicted, shapes).items()}
    found = model.postprocess(predicted, shapes)
    detections = {
        "scores": found["detection_scores"],
        "labels": found["detection_classes"] + 1,
        "boxes": found["detection_boxes"],
    }
    if not is_center_net:
        return detections | {
            "logits": predicted["class_predictions_with_background"],
            "codes": predicted["box_encodings"],
            "localization": losses["localization_loss"],
            "classification": losses["classification_loss"],
        }
    return detections | {
        "logits": predicted["object_center"][-1],
        "sizes": predicted["box/scale"][-1],
        "offsets": predicted["box/offset"][-1],
        "classification": losses["object_center"],
        "scale": losses["box/scale"],
        "offset": losses["box/offset"],
    }


Layers = Iterator[tuple[str, Any]]
"""Keras's layers, after torch's names of theirs."""


KINDS = {
    "kernel": "weight",
    "depthwise_kernel": "weight",
    "pointwise_kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "bifpn_combine_weights": "shares",
}


def load(model: Any, layers: Layers, gains: tuple[float, float]) -> None:
    """Give each variable the weights of its name, and the others 0; a layer has a bias where torch's has one.

    A name of a separable layer is of the depthwise part, and after "|" of the other.
    """
    left = assign(layers, {id(each): each for each in model_variables(model)}, gains)
    for variable in left.values():
        assert "/bias" in variable.name or variable.name.startswith("post_bn"), variable.name
        variable.assign(np.zeros(variable.shape, np.float32))


def assign(layers: Layers, left: dict[int, Any], gains: tuple[float, float]) -> dict[int, Any]:
    """Give the variables of layers the weights of their names, and return what is left of others."""
    for name, layer in layers:
        for variable in layer.variables:
            kind = variable.name.split("/")[-1].split(":")[0]
            if kind == "bias" and not name.endswith("+bias"):
                continue
            first, _, second = name.removesuffix("+bias").partition("|")
            shape = variable.shape.as_list()
            axes = (2, 3, 0, 1) if kind == "depthwise_kernel" else (3, 2, 0, 1)
            turned = [shape[axis] for axis in axes] if len(shape) == 4 else shape[:1]
            part = second if second and kind != "depthwise_kernel" else first
            value = inputs.weights(f"{part}.{KINDS[kind]}", turned, gains)
            variable.assign(value.transpose(np.argsort(axes)) if len(shape) == 4 else value.reshape(shape))
            left.pop(id(variable), None)
    return left


def model_variables(model: Any) -> list[Any]:
    heads = getattr(model, "_prediction_head_dict", {}).values()
    features = model._feature_extractor
    of_efficientdet = [features._efficientnet, features._bifpn_stage, model._box_predictor] if not heads else []
    parts = of_efficientdet or [features, *(head for each in heads for head in each)]
    return [each for part in parts for each in part.variables]


def efficientdet_layers(model: Any) -> Layers:
    features, head = model._feature_extractor, model._box_predictor
    yield from efficientnet_layers(features._efficientnet)
    pyramid = features._bifpn_stage
    for i, (blocks, combine, post) in enumerate(
        zip(pyramid.node_input_blocks, pyramid.node_combine_op, pyramid.node_post_combine_block, strict=True)
    ):
        node = f"backbone.extra.{i}"
        for k, (_, block) in enumerate(blocks):
            own = [layer for layer in block if layer.variables]
            yield from ((f"{node}.project.{k}.{n}", layer) for n, layer in enumerate(own))
        if post:
            yield node, combine
            _, separable, norm = post
            yield f"{node}.depthwise|{node}.pointwise.0", separable
            yield f"{node}.pointwise.1", norm
    kinds = {"box": "box_encodings", "class": "class_predictions_with_background"}
    for ours, theirs in kinds.items():
        for level, tower in enumerate(head._base_tower_layers_for_heads[theirs]):
            own = [layer for layer in tower if layer.variables]
            for i, (separable, norm) in enumerate(zip(own[::2], own[1::2], strict=True)):
                start = f"head.{ours}_tower.convolutions.{i}"
                yield f"{start}.depthwise|{start}.convolution", separable
                yield f"head.{ours}_tower.norms.{i}.{level}", norm
    for ours, part in {"box": head._box_prediction_head, "class": head._prediction_heads[kinds["class"]]}.items():
        (last,) = (
            (each for each in part._box_encoder_layers if each.variables)
            if ours == "box"
            else (each for each in part._class_predictor_layers if each.variables)
        )
        yield f"head.{ours}_predictor.depthwise|head.{ours}_predictor.convolution+bias", last


def efficientnet_layers(net: Any) -> Layers:
    for layer in net.layers:
        if found := re.fullmatch(r"stack_(\d)/block_(\d+)/(\w+?)_(conv2d|bn)", layer.name):
            place = ["expand", "depthwise", "se", "project"].index(found[3].split("_")[0]) - (found[1] == "0")
            block = f"backbone.features.{int(found[1]) + 1}_{found[2]}.block.{place}"
            if found[3].startswith("se_"):
                yield f"{block}.{'fc1' if found[3] == 'se_reduce' else 'fc2'}+bias", layer
            else:
                yield f"{block}.{int(found[4] == 'bn')}", layer
        elif layer.name in ("stem_conv2d", "stem_bn"):
            yield f"backbone.features.stem.{int(layer.name == 'stem_bn')}", layer


def center_net_layers(model: Any, extractor: str) -> Layers:
    for head, ours in {"object_center": "logits", "box/scale": "sizes", "box/offset": "offsets"}.items():
        for index, net in enumerate(model._prediction_head_dict[head]):
            *hidden, last = (layer for layer in net.layers if layer.variables)
            yield from ((f"head.{ours}.{index}.conv{i}+bias", layer) for i, layer in enumerate(hidden))
            yield f"head.{ours}.{index}.predictor+bias", last
    features = model._feature_extractor
    if extractor.startswith("hourglass"):
        yield from hourglass_layers(features._network)
        return
    whole = getattr(features, "_feature_extractor_model", None) or features._network
    base = getattr(features, "_base_model", None) or next(each for each in whole.layers if hasattr(each, "layers"))
    made = {"resnet_v1": resnet_layers, "resnet_v2": resnet_v2_layers, "mobilenet": mobilenet_layers}
    yield from next(make for start, make in made.items() if extractor.startswith(start))(base)
    own = [layer for layer in whole.layers if layer.variables and layer not in base.layers]
    by_kind = {
        kind: sorted((each for each in own if type(each).__name__ == kind), key=lambda each: number_of(each.name))
        for kind in ("Conv2D", "Conv2DTranspose", "BatchNormalization")
    }
    convolutions, norms = by_kind["Conv2D"], by_kind["BatchNormalization"]
    if by_kind["Conv2DTranspose"]:
        for i, (first, second) in enumerate(zip(convolutions, by_kind["Conv2DTranspose"], strict=True)):
            yield from {
                f"backbone.doubling.{2 * i}.0": first,
                f"backbone.doubling.{2 * i}.1": norms[2 * i],
                f"backbone.doubling.{2 * i + 1}.0": second,
                f"backbone.doubling.{2 * i + 1}.1": norms[2 * i + 1],
            }.items()
        return
    yield "backbone.lateral.3+bias", convolutions[0]
    for i in range(3):
        yield f"backbone.lateral.{2 - i}+bias", convolutions[1 + 2 * i]
        yield f"backbone.smoothing.{2 - i}.0", convolutions[2 + 2 * i]
        yield f"backbone.smoothing.{2 - i}.1", norms[i]


def number_of(name: str) -> int:
    found = re.search(r"_(\d+)$", name)
    return int(found[1]) if found else 0


def resnet_layers(base: Any, parts: dict[str, str] | None = None) -> Layers:
    parts = parts or {"conv": "conv", "bn": "bn", "0_conv": "downsample.0", "0_bn": "downsample.1"}
    for layer in base.layers:
        if found := re.fullmatch(r"conv(\d)_block(\d+)_(?:(\d)_(conv|bn)|(preact)_bn)", layer.name):
            kind = found[5] or parts.get(f"{found[3]}_{found[4]}") or f"{found[4]}{found[3]}"
            name = f"backbone.features.layer{int(found[1]) - 1}.{int(found[2]) - 1}.{parts.get(kind, kind)}"
            yield (f"{name}+bias" if kind in parts.get("biased", "").split() else name), layer
        elif layer.name in ("conv1_conv", "conv1_bn"):
            is_biased = "biased" in parts and layer.name == "conv1_conv"
            yield f"backbone.features.{'bn1' if layer.name == 'conv1_bn' else 'conv1'}{'+bias' * is_biased}", layer


def resnet_v2_layers(base: Any) -> Layers:
    return resnet_layers(base, {"preact": "norm", "0_conv": "downsample", "biased": "conv3 downsample"})


def mobilenet_layers(base: Any) -> Layers:
    within = {"expand": ("0.0", "0.1"), "depthwise": ("{}.0", "{}.1"), "project": ("{}", "{}")}
    for layer in base.layers:
        ends = {"Conv1": "0.0", "bn_Conv1": "0.1", "Conv_1": "18.0", "Conv_1_bn": "18.1"}
        if layer.name in ends:
            yield f"backbone.features.{ends[layer.name]}", layer
        elif found := re.fullmatch(r"(?:block_(\d+)|expanded_conv)_(expand|depthwise|project)(_BN)?", layer.name):
            block = int(found[1] or 0)
            place = within[found[2]][bool(found[3])]
            after = (block > 0) + (found[2] == "project") + (found[2] == "project" and bool(found[3]))
            yield f"backbone.features.{block + 1}.conv.{place.format(after)}", layer


def hourglass_layers(net: Any) -> Layers:
    yield from block_layers("backbone.stem.0", net.downsample_input.conv_block)
    yield from pair_layers("backbone.stem.1", net.downsample_input.residual_block)
    for i, (inside, output) in enumerate(zip(net.hourglass_network, net.output_conv, strict=True)):
        yield from coder_layers(f"backbone.hourglasses.{i}", inside)
        yield from block_layers(f"backbone.outputs.{i}", output)
    parts = zip(net.intermediate_conv1, net.intermediate_conv2, net.intermediate_residual, strict=True)
    for i, (of_input, of_output, merged) in enumerate(parts):
        yield from block_layers(f"backbone.of_input.{i}", of_input)
        yield from block_layers(f"backbone.of_output.{i}", of_output)
        yield from pair_layers(f"backbone.merged.{i}", merged)


def coder_layers(name: str, coder: Any) -> Layers:
    parts = {"skip": coder.encoder_block1, "down": coder.encoder_block2, "up": coder.decoder_block}
    if len(coder.inner_block) == 1:
        yield from coder_layers(f"{name}.inside", coder.inner_block[0])
    else:
        parts["inside"] = coder.inner_block
    for part, blocks in parts.items():
        for i, block in enumerate(blocks):
            yield from pair_layers(f"{name}.{part}.{i}", block)


def pair_layers(name: str, block: Any) -> Layers:
    yield from block_layers(f"{name}.conv1", block.conv_block)
    yield from ((f"{name}.conv2.conv", block.conv), (f"{name}.conv2.norm", block.norm))
    if hasattr(block.skip, "conv"):
        yield from block_layers(f"{name}.shortcut", block.skip)


def block_layers(name: str, block: Any) -> Layers:
    yield from ((f"{name}.0", block.conv), (f"{name}.1", block.norm))


if __name__ == "__main__":
    main()
