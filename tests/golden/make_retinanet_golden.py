"""Record RetinaNets and FPNLite of the Object Detection API by its own code. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim tf-keras
    /tmp/tensorflow/bin/pip install --no-deps tf-object-detection==0.0.3
    /tmp/tensorflow/bin/python tests/golden/make_retinanet_golden.py

It writes `retinanet_golden.npz` beside itself: of each detector the shapes of its variables, by the names that those of
TF-Slim's layers have, samples of its codes and logits, and its losses. The package is of 2020, with the layers of
TF-Slim and those of Keras; what it asks TensorFlow 1 for, and these detectors do not use, is stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"

import numpy as np
import retinanet_inputs as inputs
import tf_keras
from slim_nets_inputs import weights
from tensorflow_graphs import slim, tf
from tf_keras.src import legacy_tf_layers
from tf_keras.src.legacy_tf_layers import base, convolutional, core, normalization, pooling

ABSENT = ("tensorflow.contrib", "matplotlib", "PIL", "pycocotools", "object_detection.utils.visualization_utils")
PYRAMID = r"FeatureExtractor/{net}/fpn/"
HEAD = "WeightSharedConvolutionalBoxPredictor/"
KINDS = {
    r"/(depthwise|pointwise)_kernel$": r"/\1_weights",
    r"/kernel$": "/weights",
    r"/bias$": "/biases",
    r"^.*feature_extractor/": "",
    r"(?<=\d)_depthwise/depthwise_weights$": "/depthwise/depthwise_weights",
    r"(?<=conv)_depthwise/depthwise_weights$": "/depthwise/depthwise_weights",
    r"_(expand|project)/weights$": r"/\1/weights",
    r"_(expand|depthwise|project)_BN/": r"/\1/BatchNorm/",
}
RESNET = {
    r"(?:.*/)?conv1_conv/": "conv1/",
    r"(?:.*/)?conv1_bn/": "conv1/BatchNorm/",
    r"(?:.*/)?conv(\d)_block(\d+)_0_conv/": r"block\1/unit_\2/bottleneck_v1/shortcut/",
    r"(?:.*/)?conv(\d)_block(\d+)_0_bn/": r"block\1/unit_\2/bottleneck_v1/shortcut/BatchNorm/",
    r"(?:.*/)?conv(\d)_block(\d+)_(\d)_conv/": r"block\1/unit_\2/bottleneck_v1/conv\3/",
    r"(?:.*/)?conv(\d)_block(\d+)_(\d)_bn/": r"block\1/unit_\2/bottleneck_v1/conv\3/BatchNorm/",
}
MOBILENET = {
    r"(?:.*/)?Conv1/": "Conv/",
    r"(?:.*/)?bn_Conv1/": "Conv/BatchNorm/",
    r"(?:.*/)?Conv_1/": "Conv_1/",
    r"(?:.*/)?Conv_1_bn/": "Conv_1/BatchNorm/",
    r"(?:.*/)?block_(\d+)/": r"expanded_conv_\1/",
}


class Absent(types.ModuleType):
    """Has whatever is asked for, and does nothing."""

    __path__ = ()
    slim = framework = layers = slim

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


def prepare() -> None:
    """Let the package find TensorFlow 1, with what is absent stood in for."""
    tf.disable_v2_behavior()
    tf.keras, tf.contrib = tf_keras, Absent("contrib")
    slim.is_tensor = tf.is_tensor
    sys.modules["tensorflow"] = tf
    sys.modules["tf_keras.legacy_tf_layers"] = legacy_tf_layers
    for layers in (base, convolutional, core, normalization, pooling):
        sys.modules[layers.__name__.replace(".src", "")] = layers
    sys.meta_path.insert(0, Finder())


def main() -> None:
    prepare()
    recorded: dict[str, Any] = {}
    for name, text in inputs.CONFIGS.items():
        with tf.Graph().as_default(), tf.Session() as session:
            variables, values = record(session, text)
        recorded[f"{name}/variables"] = json.dumps(variables, separators=(",", ":"))
        recorded |= {f"{name}/{key}": value for key, value in values.items()}
        print(name, len(variables), {key: (value.shape, float(value.std())) for key, value in values.items()})
    np.savez_compressed(Path(inputs.PATH), **recorded)


def record(session: Any, text: str) -> tuple[dict[str, list[int]], dict[str, Any]]:
    from google.protobuf import text_format
    from object_detection.builders import model_builder
    from object_detection.models import ssd_resnet_v1_fpn_keras_feature_extractor as keras
    from object_detection.protos import model_pb2

    # The class is there, and the release has no name for it yet.
    known = model_builder.SSD_KERAS_FEATURE_EXTRACTOR_CLASS_MAP
    known["ssd_resnet50_v1_fpn_keras"] = lambda use_depthwise, **given: keras.SSDResNet50V1FpnKerasFeatureExtractor(
        **given
    )
    config = text_format.Parse(text, model_pb2.DetectionModel())
    model = model_builder.build(config, is_training=False, add_summaries=False)
    images = tf.constant(inputs.images())
    shapes = tf.constant([[*inputs.SIDES, 3]] * len(inputs.images()), tf.int32)
    predicted = model.predict(model.preprocess(images)[0], shapes)
    boxes, classes = inputs.objects()
    model.provide_groundtruth([*map(tf.constant, boxes)], [*map(tf.constant, classes)])
    losses = model.loss(predicted, shapes)
    extractor = config.ssd.feature_extractor.type
    drawn = {}
    for variable in tf.global_variables():
        name, shape = slim_name(variable.op.name, extractor), variable.shape.as_list()
        assert name not in drawn, name
        drawn[name] = shape
        variable.load(weights(name, shape), session)
    values = session.run(
        {
            "codes": predicted["box_encodings"],
            "logits": predicted["class_predictions_with_background"],
            "anchors": predicted["anchors"],
            "localization": losses["Loss/localization_loss"],
            "classification": losses["Loss/classification_loss"],
        }
    )
    return drawn, {key: inputs.sample(np.asarray(value, np.float32)) for key, value in values.items()}


def slim_name(name: str, extractor: str) -> str:
    """The name that a variable of Keras's layers would have in those of TF-Slim."""
    if not extractor.endswith("_keras"):
        return name
    is_resnet = "resnet" in extractor
    net = "resnet_v1_50" if is_resnet else "MobilenetV2"
    for pattern, kind in KINDS.items():
        name = re.sub(pattern, kind, name)
    if head := re.search(r"((?:Box|Class)?PredictionTower|BoxPredictor|ClassPredictor)/(?!.*Predict.*/).*", name):
        return HEAD + head.group()
    if level := re.search(
        r"(projection|smoothing|bottom_up_\w*?)_?(\d+)(?:_depthwise)?(?:_conv|_batchnorm)?/(.*)", name
    ):
        kind = "BatchNorm/" if "_batchnorm/" in name else ""
        between = "" if level[1].endswith("block") else "_"
        return f"FeatureExtractor/{net}/fpn/{level[1]}{between}{level[2]}/{kind}{level[3]}"
    for pattern, slim_pattern in (RESNET if is_resnet else MOBILENET).items():
        name, count = re.subn(f"^{pattern}", slim_pattern, name)
        if count:
            break
    name = re.sub(r"block(\d)/unit", lambda found: f"block{int(found[1]) - 1}/unit", name)
    return f"FeatureExtractor/{net}/{name}"


if __name__ == "__main__":
    main()
