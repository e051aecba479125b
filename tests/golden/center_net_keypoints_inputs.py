"""What both sides of the recorded keypoints of CenterNets begin with: configurations, objects and predictions."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "center_net_keypoints_golden.json"
SIDES, CELLS, OUTPUTS = (64, 96), (16, 24), 2
"""Of images in pixels, of maps in cells; and how many maps are predicted of each kind."""
SAMPLES = 6

LABEL_MAP = Path(__file__).parents[1] / "fixtures" / "label_maps" / "people_and_dogs.pbtxt"
SPREAD = r'keypoint_label_to_std { key: "(\w+)" value: ([\d.]+) }'
"""A spread in a configuration, which the messages of the reference's package are too old for."""
_TASK = """keypoint_estimation_task {
    task_name: "%s pose" keypoint_class_name: "%s" %s
    loss {
      localization_loss { l1_localization_loss { } }
      classification_loss { penalty_reduced_logistic_focal_loss { alpha: 2.0 beta: 4.0 } }
    }
  }"""
_PERSON = """
    per_keypoint_offset: true offset_peak_radius: 2 task_loss_weight: 0.8 keypoint_regression_loss_weight: 0.1
    keypoint_heatmap_loss_weight: 0.9 keypoint_offset_loss_weight: 0.7
    keypoint_label_to_std { key: "foot" value: 0.6 } keypoint_label_to_std { key: "nose" value: 1.7 }
    num_candidates_per_keypoint: 9"""
_DOG = """
    candidate_ranking_mode: "score_distance_ratio" score_distance_offset: 9 unmatched_keypoint_score: 0.03
    keypoint_candidate_score_threshold: 0.5 box_scale: 1.5"""


def _config(num_classes: int, *tasks: str) -> str:
    return f"""center_net {{
  num_classes: {num_classes}
  feature_extractor {{ type: "mobilenet_v2_fpn" }}
  image_resizer {{ fixed_shape_resizer {{ height: {SIDES[0]} width: {SIDES[1]} }} }}
  object_detection_task {{ localization_loss {{ l1_localization_loss {{ }} }} }}
  object_center_params {{
    max_box_predictions: 8
    classification_loss {{ penalty_reduced_logistic_focal_loss {{ alpha: 2.0 beta: 4.0 }} }}
  }}
  keypoint_label_map_path: "LABEL_MAP"
  {" ".join(tasks)}
}}"""


CONFIGS = {
    "two classes": _config(3, _TASK % ("human", "person", _PERSON), _TASK % ("dog", "dog", _DOG)),
    "scaled ratio": _config(
        1,
        _TASK
        % (
            "human",
            "person",
            'candidate_ranking_mode: "score_scaled_distance_ratio" score_distance_multiplier: 0.4 box_scale: 0.9 '
            "offset_peak_radius: 1 peak_max_pool_kernel_size: 4 candidate_search_scale: 0.6",
        ),
    ),
    "gaussian": _config(
        1,
        _TASK
        % (
            "human",
            "person",
            'candidate_ranking_mode: "gaussian_weighted" std_dev_multiplier: 3 per_keypoint_offset: true '
            "num_candidates_per_keypoint: 40 peak_max_pool_kernel_size: 1 candidate_search_scale: 0.4 "
            'keypoint_label_to_std { key: "hand" value: 2.5 }',
        ),
    ),
}
"""Messages of the model, whose label map is to be named."""

Array = npt.NDArray[np.float32]


def label_map(name: str) -> str:
    """The label map of a configuration, whose only class is the person where it has one class."""
    text = LABEL_MAP.read_text()
    return text if name == "two classes" else text.replace('"tree" id: 1', '"tree" id: 2').replace("id: 2 d", "id: 1 d")


def objects(name: str) -> dict[str, list[Array]]:
    """Boxes and keypoints as shares, NaN where not labelled, classes, one-hot, and weights, of each of three images.

    The second image is empty. On the first are people, one without keypoints as a crowd is, and one that counts half.
    """
    none = np.nan
    boxes = [
        [
            [0.1, 0.2, 0.8, 0.5],
            [0.3, 0.4, 0.95, 0.99],
            [0.0, 0.55, 0.3, 0.9],
            [0.5, 0.0, 0.99, 0.3],
            [0, 0.1, 0.2, 0.2],
        ],
        [],
        [[0.2, 0.3, 0.6, 0.6], [0.5, 0.5, 0.9, 0.8]],
    ]
    person = [
        [[0.15, 0.3], [0.4, 0.22], [0.75, 0.4]],
        [[0.36, 0.7], [none, none], [0.93, 0.999]],
        [[none, none]] * 3,
        [[0.52, 0.001], [0.7, 0.29], [none, none]],
        [[0.0, 0.12], [0.15, 0.13], [0.19, 0.19]],
    ]
    dog = [[[0.25, 0.33], [0.55, 0.58]], [[none, none]] * 2]
    pad = [[none, none]]
    points = [[each + pad * 2 for each in person], [], [pad * 3 + each for each in dog]]
    classes, weights = [[1, 1, 1, 1, 1], [], [2, 0]], [[1, 1, 1, 0.5, 1], [], [1, 1]]
    if name != "two classes":
        points, classes = [[each[:3] for each in own] for own in points], [[0] * len(own) for own in classes]
    number, kinds = (5, 3) if name == "two classes" else (3, 1)
    return {
        "boxes": [np.array(own, np.float32).reshape(-1, 4) for own in boxes],
        "keypoints": [np.array(own, np.float32).reshape(-1, number, 2) for own in points],
        "classes": [np.eye(kinds, dtype=np.float32)[np.array(own, int)] for own in classes],
        "weights": [np.array(own, np.float32) for own in weights],
    }


def predictions(key: str, channels: int) -> list[Array]:
    """Maps of the three images, (3, height, width, channels): of heat maps logits; sizes and places in cells."""
    low, high = {"object_center": (-6, 1), "heatmap": (-4, 1), "scale": (1, 14), "offset": (0, 1)}.get(
        key.split("/")[-1], (-4, 4)
    )
    return [
        np.random.default_rng(zlib.crc32(f"{key} {number}".encode()))
        .uniform(low, high, (3, *CELLS, channels))
        .astype(np.float32)
        for number in range(OUTPUTS)
    ]


def sample(values: Array) -> list[float]:
    """Numbers that differ where values do: their sum, that of their sizes, a weighted sum, and some of the largest."""
    flat = values.astype(np.float64).reshape(-1)
    drawn = np.random.default_rng(0).uniform(-1, 1, flat.size)
    places = np.argsort(-np.abs(flat), kind="stable")[:: max(flat.size // (8 * SAMPLES), 1)][:SAMPLES]
    found = [flat.sum(), np.abs(flat).sum(), flat @ drawn, *np.sort(flat[places])]
    return [float(f"{each:.7g}") for each in found]
