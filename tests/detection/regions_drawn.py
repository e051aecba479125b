"""Small detectors of two stages, two images of 96 x 96, and objects on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.detection.blocks import GridAnchorGenerator
from lockstep.detection.detector import Targets
from lockstep.detection.tf_configs import FasterRcnn, MaskRcnnBoxPredictor
from lockstep.detection.tf_faster_rcnn import TfFasterRcnn
from lockstep.detection.values import FasterRcnnFpn
from lockstep.models.resnet import Bottleneck
from lockstep.recipes.pipeline_config import import_pipeline

FIXTURES = Path(__file__).parents[1] / "fixtures" / "odapi_configs"

SMALL = FasterRcnnFpn(
    num_classes=3,
    anchor_sizes=(8, 16, 32, 64, 96),
    rpn_pre_nms_top_n_train=50,
    rpn_post_nms_top_n_train=30,
    rpn_pre_nms_top_n_test=40,
    rpn_post_nms_top_n_test=20,
    rpn_batch_size_per_image=32,
    box_batch_size_per_image=16,
    max_detections=10,
    freeze_batchnorm=False,
)


def images(seed: int = 0) -> Tensor:
    return torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(seed)) * 255


def targets(*boxes: list[list[float]], is_crowd: bool = False) -> Targets:
    """The objects of each image; the labels are 1, 2, 3, 1 ..., the masks ellipses within the boxes."""
    of_images = [torch.tensor(each).view(-1, 4) for each in boxes]
    labels = [torch.arange(len(each)) % 3 + 1 for each in of_images]
    return Targets(
        boxes=of_images,
        labels=labels,
        classes=[torch.eye(3)[each - 1] for each in labels],
        weights=[torch.ones(len(each)) for each in of_images],
        is_crowd=[torch.full((len(each),), is_crowd) for each in of_images],
        shape=(96, 96),
        masks=[ellipses(each) for each in of_images],
    )


def ellipses(boxes: Tensor) -> Tensor:
    """uint8 (n, 96, 96)."""
    centre, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2
    places = torch.arange(96) + 0.5
    rows, columns = ((places - centre[:, axis, None]) / half[:, axis, None] for axis in (0, 1))
    return (rows[:, :, None] ** 2 + columns[:, None] ** 2 <= 1).to(torch.uint8)


def published(name: str) -> FasterRcnn:
    """The config with small anchors and few proposals, classes and layers, so that it is quick."""
    path = FIXTURES / f"{name}.config"
    model = import_pipeline(path.read_text(), path.name, path.stem).recipe.model
    assert isinstance(model, FasterRcnn)
    anchors = model.first_stage_anchor_generator
    assert isinstance(anchors, GridAnchorGenerator)
    predictor = model.second_stage_box_predictor
    assert isinstance(predictor, MaskRcnnBoxPredictor)
    return replace(
        model,
        num_classes=3,
        first_stage_anchor_generator=replace(anchors, height=64, width=64),
        feature_extractor=replace(model.feature_extractor, type="faster_rcnn_resnet50"),
        first_stage_max_proposals=12,
        second_stage_batch_size=8,
        second_stage_box_predictor=replace(predictor, mask_prediction_conv_depth=8),
    )


def calm(net: TfFasterRcnn) -> TfFasterRcnn:
    """Fixed statistics of no data do not normalise: without this the features of first weights are far too large."""
    for module in net.modules():
        if isinstance(module, Bottleneck):
            nn.init.constant_(module.bn3.get_parameter("weight"), 0.1)
    return net
