"""Record detectors on Inception nets, and R-FCN, by the Object Detection API's own code. Run by hand, never in tests.

The packages are those of `make_retinanet_golden.py`, and `make_detectors_golden.py` is run like it. It writes
`detectors_golden.npz` beside itself: of each detector the shapes of its variables, samples of its codes and logits, its
proposals, and its losses. Two stages are built twice: as they detect, and as they learn, which gives the losses.
"""

from __future__ import annotations

import json
from typing import Any

import detectors_inputs as inputs
import numpy as np
from make_retinanet_golden import prepare
from retinanet_inputs import objects
from slim_nets_inputs import weights
from tensorflow_graphs import tf


def main() -> None:
    prepare()
    recorded: dict[str, Any] = {}
    for name, text in inputs.CONFIGS.items():
        values: dict[str, Any] = {}
        for learns in (False, True):
            with tf.Graph().as_default(), tf.Session() as session:
                variables, found = record(session, text, learns=learns)
            values |= found
        recorded[f"{name}/variables"] = json.dumps(variables, separators=(",", ":"))
        recorded |= {f"{name}/{key}": inputs.few(np.asarray(value, np.float32)) for key, value in values.items()}
        print(name, len(variables), {key: (np.shape(value), float(np.std(value))) for key, value in values.items()})
    np.savez_compressed(inputs.PATH, **recorded)


def record(session: Any, text: str, *, learns: bool) -> tuple[dict[str, list[int]], dict[str, Any]]:
    from google.protobuf import text_format
    from object_detection.builders import model_builder
    from object_detection.protos import model_pb2

    config = text_format.Parse(text, model_pb2.DetectionModel())
    has_two_stages = config.WhichOneof("model") == "faster_rcnn"
    model = model_builder.build(config, is_training=learns and has_two_stages, add_summaries=False)
    images = tf.constant(inputs.images())
    shapes = tf.constant([[*inputs.SIDES, 3]] * len(inputs.images()), tf.int32)
    boxes, classes = objects()
    masks = [tf.ones((len(each), *inputs.SIDES)) for each in boxes]
    model.provide_groundtruth([*map(tf.constant, boxes)], [*map(tf.constant, classes)], masks)
    predicted = model.predict(model.preprocess(images)[0], shapes)
    wanted = model.loss(predicted, shapes) if learns else predicted
    wanted = {key: value for key, value in wanted.items() if tf.is_tensor(value)}
    variables = tf.global_variables()
    drawn = {variable.op.name: variable.shape.as_list() for variable in variables}
    given = {each.initial_value: weights(each.op.name, drawn[each.op.name]) for each in variables}
    session.run([each.initializer for each in variables], given)
    values = session.run(wanted)
    return drawn, values if learns else predictions(values)


def predictions(values: dict[str, Any]) -> dict[str, Any]:
    """The predictions of both stages; those of rows that hold no proposal are left out."""
    if "proposal_boxes" not in values:
        return {"codes": values["box_encodings"], "logits": values["class_predictions_with_background"]}
    counts, most = values["num_proposals"], inputs.MOST_PROPOSALS
    is_there = np.concatenate([np.arange(most) < count for count in counts])
    return {
        "objectness": values["rpn_objectness_predictions_with_background"],
        "anchor_codes": values["rpn_box_encodings"],
        "regions": values["proposal_boxes"].reshape(-1, 4)[is_there],
        "codes": values["refined_box_encodings"][is_there],
        "logits": values["class_predictions_with_background"][is_there],
    }


if __name__ == "__main__":
    main()
