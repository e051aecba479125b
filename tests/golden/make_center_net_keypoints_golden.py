"""Record the keypoints of CenterNets by the Object Detection API's own code. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim tf-keras scipy pillow
    /tmp/tensorflow/bin/pip install --no-deps tf-models-research-object-detection==2.8.0.post1
    /tmp/tensorflow/bin/python tests/golden/make_center_net_keypoints_golden.py

It writes `center_net_keypoints_golden.json` beside itself: of predictions that follow from their names the losses, the
gradients of their sum, and the detections with their keypoints. The map `keypoint_label_to_std` is read here, as the
package's messages are too old for that.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import center_net_keypoints_inputs as inputs
from make_keras_detectors_golden import Finder  # which sets up the environment first

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip


def main() -> None:
    sys.meta_path.insert(0, Finder())
    from object_detection.models.keras_models import mobilenet_v2

    make = mobilenet_v2.mobilenet_v2
    mobilenet_v2.mobilenet_v2 = lambda **given: make(**given | {"weights": None})  # it would fetch some
    recorded = {name: record(name) for name in inputs.CONFIGS}
    inputs.PATH.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


def record(name: str) -> dict[str, Any]:
    from google.protobuf import text_format
    from object_detection.builders import model_builder
    from object_detection.protos import model_pb2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "label_map.pbtxt"
        path.write_text(inputs.label_map(name))
        text = inputs.CONFIGS[name].replace("LABEL_MAP", str(path))
        config = text_format.Parse(re.sub(inputs.SPREAD, "", text), model_pb2.DetectionModel())
        make = model_builder.keypoint_proto_to_params
        model_builder.keypoint_proto_to_params = lambda *given: with_spreads(make(*given), text)
        model = model_builder.build(config, is_training=False, add_summaries=False)
        model_builder.keypoint_proto_to_params = make
    predicted = {
        key: [tf.constant(each) for each in inputs.predictions(key, nets[0].layers[-1].filters)]
        for key, nets in model.prediction_head_dict.items()
    }
    objects = {key: [tf.constant(each) for each in own] for key, own in inputs.objects(name).items()}
    model.provide_groundtruth(
        objects["boxes"],
        objects["classes"],
        groundtruth_keypoints_list=objects["keypoints"],
        groundtruth_weights_list=objects["weights"],
    )
    shapes = tf.constant([[*inputs.SIDES, 3]] * 3, tf.int32)
    pixels = {"preprocessed_inputs": tf.zeros((3, *inputs.SIDES, 3))}
    with tf.GradientTape() as tape:
        tape.watch(predicted)
        losses = model.loss(predicted | pixels, shapes)
        total = tf.add_n([*losses.values()])
    gradients = tape.gradient(total, predicted)
    found = model.postprocess(predicted | pixels, shapes)
    points = found["detection_keypoints"].numpy() * np.array(inputs.SIDES, np.float32)
    print(name, {key: float(value) for key, value in losses.items()}, points.shape)
    return {
        "losses": {key.removeprefix("Loss/"): float(f"{value:.7g}") for key, value in losses.items()},
        "gradients": {key: [inputs.sample(each.numpy()) for each in own] for key, own in gradients.items()},
        "scores": rounded(found["detection_scores"].numpy()),
        "labels": (found["detection_classes"].numpy() + 1).astype(int).tolist(),
        "keypoints": rounded(points),
        "keypoint_scores": rounded(found["detection_keypoint_scores"].numpy()),
    }


def with_spreads(task: Any, text: str) -> Any:
    (own,) = (each for each in text.split("keypoint_estimation_task")[1:] if f'"{task.task_name}"' in each)
    spreads = dict(re.findall(inputs.SPREAD, own))
    return task._replace(keypoint_std_dev=[float(spreads.get(label, 1)) for label in task.keypoint_labels])


def rounded(values: Any) -> Any:
    return np.array([float(f"{each:.6g}") for each in values.reshape(-1)]).reshape(values.shape).tolist()


if __name__ == "__main__":
    main()
