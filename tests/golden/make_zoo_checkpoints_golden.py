"""Record checkpoints of TensorFlow 2 detectors by the Object Detection API's own code. Run by hand, never in tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim tf-keras scipy pillow
    /tmp/tensorflow/bin/pip install --no-deps tf-models-research-object-detection==2.8.0.post1
    /tmp/tensorflow/bin/python tests/golden/make_zoo_checkpoints_golden.py [FOLDER [NAME...]]

Detectors are saved as the API's exporter saves those of its zoo. `zoo_checkpoints_golden.json.gz` gets the key and the
shape of each variable, and a few of the numbers that the detector predicts where the variables have the weights that
follow from their keys. The checkpoints themselves stay in FOLDER, if one is named: `check_zoo_checkpoints.py` reads
them. With names of configurations these alone are recorded anew.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import zoo_checkpoints_inputs as inputs
from make_keras_detectors_golden import Finder  # which sets up the environment first

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip
from tensorflow.python.checkpoint import graph_view  # isort: skip
from tensorflow.python.trackable import trackable_utils  # isort: skip

WANTED = {
    "box_encodings": "codes",
    "class_predictions_with_background": "logits",
    "refined_box_encodings": "codes",
    "rpn_objectness_predictions_with_background": "objectness",
    "rpn_box_encodings": "anchor_codes",
    "object_center": "logits",
    "box/scale": "sizes",
    "box/offset": "offsets",
    **{
        f"{task} pose/keypoint/{theirs}": f"{task}_pose_{ours}"
        for task in ("human", "dog")
        for theirs, ours in {"heatmap": "heat_maps", "offset": "offsets", "regression": "regressions"}.items()
    },
}
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def main() -> None:
    sys.meta_path.insert(0, Finder())
    from object_detection.models.keras_models import mobilenet_v2

    make = mobilenet_v2.mobilenet_v2
    mobilenet_v2.mobilenet_v2 = lambda **given: make(**given | {"weights": None})  # it would fetch some
    names = sys.argv[2:]
    recorded = inputs.read() if names else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for name in names or inputs.CONFIGS:
            recorded[name] = record(folder / name.replace(" ", "_"), name)
            predicted = {key: np.std(value).round(6) for key, value in recorded[name].items() if key != "variables"}
            print(name, len(recorded[name]["variables"]), predicted, flush=True)
    inputs.write(recorded)


def record(folder: Path, name: str) -> dict[str, Any]:
    from google.protobuf import text_format
    from object_detection.builders import model_builder
    from object_detection.protos import model_pb2

    config = text_format.Parse(inputs.CONFIGS[name], model_pb2.DetectionModel())
    model = model_builder.build(config, is_training=False, add_summaries=False)
    images, shapes = tf.constant(inputs.images(name)), tf.constant([[*inputs.sides(name), 3]], tf.int32)
    prepared = model.preprocess(images)[0]
    model.postprocess(model.predict(prepared, shapes), shapes)  # which makes the variables, those of masks too
    checkpoint = tf.train.Checkpoint(model=model)
    shapes_of = {}
    for key, variable in variables(checkpoint):
        shapes_of[key] = variable.shape.as_list()
        variable.assign(inputs.weights(key, shapes_of[key]))
    tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=1).save(checkpoint_number=0)
    saved = tf.train.load_checkpoint(str(folder / "ckpt-0")).get_variable_to_shape_map()
    assert shapes_of.keys() == {key for key in saved if key.startswith("model/")}
    predicted = model.predict(prepared, shapes)
    return {"variables": shapes_of} | {
        ours: inputs.sample(predicted[key][-1] if isinstance(predicted[key], list) else predicted[key])
        for key, ours in WANTED.items()
        if key in predicted
    }


def variables(checkpoint: Any) -> list[tuple[str, Any]]:
    """The variables that a checkpoint saves, by their keys."""
    objects, paths = graph_view.ObjectGraphView(checkpoint).breadth_first_traversal()
    named = [(trackable_utils.object_path_to_string(paths[each]), each) for each in objects]
    return [
        (name + SUFFIX, each) for name, each in named if isinstance(each, tf.Variable) and "save_counter" not in name
    ]


if __name__ == "__main__":
    main()
