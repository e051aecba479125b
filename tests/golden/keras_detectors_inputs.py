"""What both sides of the recorded detectors of TensorFlow 2 begin with: configurations, images, objects and weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "keras_detectors_golden.npz"
SIDES, LARGER_SIDES = (128, 256), (256, 384)
"""Of images for CenterNets; for EfficientDets, whose smallest side is 129."""
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


_LAYERS = """
  conv_hyperparams {
    force_use_bias: true activation: SWISH regularizer { l2_regularizer { weight: 0.00004 } }
    initializer { truncated_normal_initializer { stddev: 0.03 } }
    batch_norm { scale: true decay: 0.99 epsilon: 0.001 }
  }"""


def _efficientdet(size: int) -> str:
    return f"""ssd {{
  num_classes: 3 add_background_class: false normalize_loc_loss_by_codesize: true encode_background_as_zeros: true
  box_coder {{ faster_rcnn_box_coder {{ y_scale: 10 x_scale: 10 height_scale: 5 width_scale: 5 }} }}
  matcher {{ argmax_matcher {{ matched_threshold: 0.5 unmatched_threshold: 0.5 force_match_for_each_row: true }} }}
  similarity_calculator {{ iou_similarity {{ }} }}
  anchor_generator {{ multiscale_anchor_generator {{ aspect_ratios: [1, 2, 0.5] scales_per_octave: 3 }} }}
  image_resizer {{ fixed_shape_resizer {{ height: {LARGER_SIDES[0]} width: {LARGER_SIDES[1]} }} }}
  box_predictor {{ weight_shared_convolutional_box_predictor {{
    depth: 32 num_layers_before_predictor: 2 kernel_size: 3 class_prediction_bias_init: -4.6 use_depthwise: true
    {_LAYERS} }} }}
  feature_extractor {{ type: "ssd_efficientnet-b{size}_bifpn_keras"
    bifpn {{ min_level: 3 max_level: 7 num_iterations: 2 num_filters: 32 }} {_LAYERS} }}
  loss {{
    classification_loss {{ weighted_sigmoid_focal {{ alpha: 0.25 gamma: 1.5 }} }}
    localization_loss {{ weighted_smooth_l1 {{ }} }}
  }}
  post_processing {{
    batch_non_max_suppression {{ score_threshold: 1e-8 max_detections_per_class: 20 max_total_detections: 20 }}
    score_converter: SIGMOID
  }}
}}"""


CONFIGS = {
    "efficientdet b0": _efficientdet(0),
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
GAINS = {
    "efficientdet b0": (24, 0.003),
    "resnet v1": (6, 0.2),
    "resnet v2": (12, 20),
    "mobilenet": (24, 5),
    "mobilenet pyramid": (24, 0.3),
    "hourglass": (6, 10),
}
"""Factors of the variance of weights, and of the weights of the last layers: so that images give different scores."""

REGIONS, REGION_SIDES, REGION_GAINS = "inception resnet v2", (161, 160), (12.0, 1.0)
"""The extractor of a Faster R-CNN, whose maps are 11 x 10 cells of an image of these sides; and its `GAINS`."""

Array = npt.NDArray[np.float32]


def sides(name: str) -> tuple[int, int]:
    """Height and width of the images of a configuration."""
    return LARGER_SIDES if name.startswith("efficientdet") else SIDES


def images(name: str) -> Array:
    """Two images from 0 to 255, (batch, height, width, 3)."""
    return np.random.default_rng(0).uniform(0, 255, (2, *sides(name), 3)).astype(np.float32)


def objects() -> tuple[list[Array], list[Array]]:
    """The boxes of the objects on each image, as shares, and their classes, one-hot; two lie over each other."""
    boxes = [[[0.1, 0.2, 0.6, 0.7], [0.5, 0.5, 0.95, 0.9], [0.15, 0.2, 0.65, 0.75]], [[0.3, 0.05, 0.5, 0.4]]]
    classes = [[0, 2, 0], [1]]
    return (
        [np.array(each, np.float32) for each in boxes],
        [np.eye(3, dtype=np.float32)[each] for each in classes],
    )


def weights(name: str, shape: Sequence[int], gains: tuple[float, float]) -> Array:
    """The value of a parameter or buffer of torch, by its name and shape; activations keep their size."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).random(shape, dtype=np.float32)
    if len(shape) > 1:
        factor = gains[1] if "predictor" in name else 1.0
        return (drawn - np.float32(0.5)) * np.float32(factor * np.sqrt(gains[0] / np.prod(shape[1:])))
    if name.endswith(("bias", "running_mean")):
        return (drawn - np.float32(0.5)) / np.float32(5)
    return drawn + np.float32(0.5)


def sample(values: Array) -> Array:
    """A few values, spread over all, or all where they are few."""
    flat = values.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64)]
