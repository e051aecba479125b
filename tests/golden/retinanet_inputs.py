"""What both sides of the recorded RetinaNets begin with: configurations, images and objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "retinanet_golden.npz"
SIDES = (160, 192)
SAMPLES = 96
LAYERS = """
  conv_hyperparams {
    activation: RELU_6 regularizer { l2_regularizer { weight: 0.0004 } }
    initializer { truncated_normal_initializer { stddev: 0.03 } }
    batch_norm { scale: true decay: 0.997 epsilon: 0.001 }
  }"""

TARGETS = """normalize_loc_loss_by_codesize: true encode_background_as_zeros: true
  box_coder { faster_rcnn_box_coder { y_scale: 10 x_scale: 10 height_scale: 5 width_scale: 5 } }
  matcher { argmax_matcher { matched_threshold: 0.5 unmatched_threshold: 0.5 force_match_for_each_row: true } }
  similarity_calculator { iou_similarity { } }"""
LOSS_AND_SCORES = """loss {
    classification_loss { weighted_sigmoid_focal { alpha: 0.25 gamma: 2 } }
    localization_loss { weighted_smooth_l1 { } }
  }
  post_processing { batch_non_max_suppression { score_threshold: 1e-8 } score_converter: SIGMOID }"""


def _model(extractor: str, of_predictor: str = "", of_extractor: str = "", depth: int = 24) -> str:
    return f"""ssd {{
  num_classes: 3 {TARGETS}
  anchor_generator {{ multiscale_anchor_generator {{ aspect_ratios: [1, 2, 0.5] scales_per_octave: 2 }} }}
  image_resizer {{ fixed_shape_resizer {{ height: {SIDES[0]} width: {SIDES[1]} }} }}
  box_predictor {{ weight_shared_convolutional_box_predictor {{
    depth: 16 num_layers_before_predictor: 2 kernel_size: 3 class_prediction_bias_init: -4.6
    {of_predictor} {LAYERS} }} }}
  feature_extractor {{ type: "{extractor}" fpn {{ additional_layer_depth: {depth} }}
    override_base_feature_extractor_hyperparams: true {of_extractor} {LAYERS} }}
  {LOSS_AND_SCORES}
}}"""


CONFIGS = {
    "retinanet": _model("ssd_resnet50_v1_fpn"),
    # This one has 256 channels in the reference, whatever is said.
    "retinanet keras": _model("ssd_resnet50_v1_fpn_keras", depth=256),
    "fpnlite keras": _model(
        "ssd_mobilenet_v2_fpn_keras", "use_depthwise: true share_prediction_tower: true", "use_depthwise: true"
    ),
}
"""Messages of the model, with the text of a feature extractor that is RetinaNet's or FPNLite's."""

Array = npt.NDArray[np.float32]


def images() -> Array:
    """Two images from 0 to 255, (batch, height, width, 3)."""
    return np.random.default_rng(0).uniform(0, 255, (2, *SIDES, 3)).astype(np.float32)


def objects() -> tuple[list[Array], list[Array]]:
    """The boxes of the objects on each image, as shares, and their classes, one-hot."""
    boxes = [[[0.1, 0.2, 0.6, 0.7], [0.5, 0.5, 0.95, 0.9]], [[0.3, 0.05, 0.5, 0.4]]]
    classes = [[0, 2], [1]]
    return (
        [np.array(each, np.float32) for each in boxes],
        [np.eye(3, dtype=np.float32)[each] for each in classes],
    )


def sample(values: Array) -> Array:
    """A few values, spread over all, or all where they are few."""
    flat = values.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64)]
