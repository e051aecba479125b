"""What both sides of the recorded detectors of TensorFlow 2 begin with: configurations, images, objects and weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "keras_detectors_golden.npz"
SIDES = (128, 256)
SAMPLES = 64


def _center_net(extractor: str, of_extractor: str = "", of_heads: str = "") -> str:
    return f"""center_net {{
  num_classes: 3
  feature_extractor {{ type: "{extractor}" {of_extractor} }}
  image_resizer {{ fixed_shape_resizer {{ height: {SIDES[0]} width: {SIDES[1]} }} }}
  object_detection_task {{
    task_loss_weight: 0.5 offset_loss_weight: 0.8 localization_loss {{ l1_localization_loss {{ }} }}
    {of_heads}
  }}
  object_center_params {{
    object_center_loss_weight: 0.7 max_box_predictions: 20
    classification_loss {{ penalty_reduced_logistic_focal_loss {{ alpha: 2.0 beta: 4.0 }} }}
  }}
}}"""


CONFIGS = {
    "resnet v1": _center_net("resnet_v1_50_fpn"),
    "resnet v2": _center_net("resnet_v2_50", "channel_means: [1, 2, 3] channel_stds: [1, 1.1, 1.2]"),
    "mobilenet": _center_net(
        "mobilenet_v2", of_heads="scale_head_params { num_filters: [24, 16] kernel_sizes: [3, 1] }"
    ),
    "mobilenet pyramid": _center_net("mobilenet_v2_fpn"),
    "hourglass": _center_net(
        "hourglass_104", "bgr_ordering: true channel_means: [104, 114, 120] channel_stds: [74, 70, 71]"
    ),
}
"""Messages of the model."""
GAINS = {"resnet v1": 0.2, "hourglass": 10.0}
"""Factor of the weights of the last layers of a detector, others 20, so that scores are neither alike nor all 1."""

Array = npt.NDArray[np.float32]


def images() -> Array:
    """Two images from 0 to 255, (batch, height, width, 3)."""
    return np.random.default_rng(0).uniform(0, 255, (2, *SIDES, 3)).astype(np.float32)


def objects() -> tuple[list[Array], list[Array]]:
    """The boxes of the objects on each image, as shares, and their classes, one-hot; two lie over each other."""
    boxes = [[[0.1, 0.2, 0.6, 0.7], [0.5, 0.5, 0.95, 0.9], [0.15, 0.2, 0.65, 0.75]], [[0.3, 0.05, 0.5, 0.4]]]
    classes = [[0, 2, 0], [1]]
    return (
        [np.array(each, np.float32) for each in boxes],
        [np.eye(3, dtype=np.float32)[each] for each in classes],
    )


def weights(name: str, shape: Sequence[int], gain: float) -> Array:
    """The value of a parameter or buffer of torch, by its name and shape; activations keep their size."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).random(shape, dtype=np.float32)
    if len(shape) > 1:
        factor = gain if "predictor" in name else 1.0
        return (drawn - np.float32(0.5)) * np.float32(factor * np.sqrt(6 / np.prod(shape[1:])))
    if name.endswith(("bias", "running_mean")):
        return (drawn - np.float32(0.5)) / np.float32(5)
    return drawn + np.float32(0.5)


def sample(values: Array) -> Array:
    """A few values, spread over all, or all where they are few."""
    flat = values.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64)]
