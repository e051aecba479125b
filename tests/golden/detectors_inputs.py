"""What both sides of the recorded detectors on Inception nets, and of R-FCN, begin with: configurations and images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from retinanet_inputs import LAYERS, LOSS_AND_SCORES, TARGETS, sample

PATH = Path(__file__).parent / "detectors_golden.npz"
SIDES = (96, 128)
MOST_PROPOSALS = 6
_SSD = f"""ssd {{
  num_classes: 3 {TARGETS}
  anchor_generator {{ ssd_anchor_generator {{ num_layers: 6 min_scale: 0.2 max_scale: 0.95 }} }}
  image_resizer {{ fixed_shape_resizer {{ height: {SIDES[0]} width: {SIDES[1]} }} }}
  box_predictor {{ convolutional_box_predictor {{ kernel_size: 3 use_dropout: false {LAYERS} }} }}
  feature_extractor {{
    type: "ssd_inception_v2" depth_multiplier: 0.5 min_depth: 16 override_base_feature_extractor_hyperparams: true
    {LAYERS} }}
  {LOSS_AND_SCORES}
}}"""
_DRAWN = "initializer { truncated_normal_initializer { stddev: 0.01 } }"
_MASKS = f"""predict_instance_masks: true mask_height: 9 mask_width: 9 mask_prediction_conv_depth: 0
  mask_prediction_num_conv_layers: 2 conv_hyperparams {{ {_DRAWN} }}"""
_RFCN = f"""rfcn_box_predictor {{
  depth: 24 crop_height: 6 crop_width: 4 num_spatial_bins_height: 3 num_spatial_bins_width: 2
  conv_hyperparams {{ {_DRAWN} }} }}"""


def _two_stages(extractor: str, stride: int, predictor: str, pooling: str = "", first_stage: str = "") -> str:
    return f"""faster_rcnn {{
  num_classes: 3
  image_resizer {{ fixed_shape_resizer {{ height: {SIDES[0]} width: {SIDES[1]} }} }}
  feature_extractor {{ type: "{extractor}" first_stage_features_stride: {stride} }}
  first_stage_anchor_generator {{ grid_anchor_generator {{
    height: 64 width: 64 scales: [0.5, 1] aspect_ratios: [0.5, 1, 2]
    height_stride: {stride} width_stride: {stride} }} }}
  first_stage_box_predictor_conv_hyperparams {{ {_DRAWN} }} {first_stage}
  first_stage_box_predictor_depth: 32
  first_stage_minibatch_size: 4096 first_stage_positive_balance_fraction: 1
  first_stage_max_proposals: {MOST_PROPOSALS} first_stage_nms_iou_threshold: 0.6
  {pooling}
  second_stage_box_predictor {{ {predictor} }}
  second_stage_batch_size: {MOST_PROPOSALS} second_stage_balance_fraction: 1
  second_stage_post_processing {{ batch_non_max_suppression {{ score_threshold: 0.1 }} score_converter: SOFTMAX }}
}}"""


def _boxes(masks: str = "") -> str:
    return f"mask_rcnn_box_predictor {{ fc_hyperparams {{ op: FC {_DRAWN} }} {masks} }}"


CONFIGS = {
    "ssd_inception_v2": _SSD,
    "faster_rcnn_inception_v2": _two_stages(
        "faster_rcnn_inception_v2", 16, _boxes(_MASKS), "initial_crop_size: 14 maxpool_kernel_size: 2 maxpool_stride: 2"
    ),
    "faster_rcnn_inception_resnet_v2": _two_stages(
        "faster_rcnn_inception_resnet_v2",
        8,
        _boxes(),
        "initial_crop_size: 9 maxpool_kernel_size: 1 maxpool_stride: 1",
        "first_stage_atrous_rate: 2",
    ),
    "rfcn": _two_stages("faster_rcnn_resnet50", 16, _RFCN),
}
"""Messages of the model; two stages draw all that they find to learn from."""

Array = npt.NDArray[np.float32]


def images() -> Array:
    """Two images from 0 to 255, (batch, height, width, 3)."""
    return np.random.default_rng(0).uniform(0, 255, (2, *SIDES, 3)).astype(np.float32)


def few(values: Array) -> Array:
    """A few values, spread over all, or all where they are few."""
    return sample(values)[::3]
