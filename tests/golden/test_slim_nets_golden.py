"""Nets of TF-Slim and SSDs of the Object Detection API, with TensorFlow's weights: they give TensorFlow's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import slim_nets_inputs as inputs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.detection.tf_configs import (
    BatchNorm,
    ConvolutionalBoxPredictor,
    FeaturePyramidNetworks,
    Hyperparams,
    SsdFeatureExtractor,
    WeightSharedConvolutionalBoxPredictor,
)
from lockstep.detection.tf_feature_maps import feature_maps
from lockstep.detection.tf_ssd import ConvolutionalHead, WeightSharedHead
from lockstep.models.layers import IntermediateLayerGetter
from lockstep.models.mobilenet import mobilenet_v3_features
from lockstep.models.resnet import ResNet

TOLERANCE = 1e-4
"""Of the largest value: the kernels of both systems add up in float32, in an order of their own."""
HYPERPARAMS = Hyperparams(activation="relu_6", batch_norm=BatchNorm(decay=0.9997, scale=True))
SSDS = {
    "ssd_mobilenet_v1": (SsdFeatureExtractor("ssd_mobilenet_v1", depth_multiplier=0.75), 1),
    "ssdlite_mobilenet_v1": (
        SsdFeatureExtractor("ssd_mobilenet_v1", depth_multiplier=0.75, use_depthwise=True, use_explicit_padding=True),
        3,
    ),
    "ssd_mobilenet_v2": (SsdFeatureExtractor("ssd_mobilenet_v2"), 3),
    "ssdlite_mobilenet_v3_small": (SsdFeatureExtractor("ssd_mobilenet_v3_small", use_depthwise=True), 3),
    "ssd_inception_v3": (
        SsdFeatureExtractor(
            "ssd_inception_v3", depth_multiplier=0.25, override_base_feature_extractor_hyperparams=True
        ),
        3,
    ),
}


class Recorded:
    """A net as TensorFlow had it."""

    def __init__(self, name: str) -> None:
        with np.load(inputs.PATH, allow_pickle=False) as file:
            self.variables: Mapping[str, Sequence[int]] = json.loads(str(file[f"{name}/variables"]))
            self.shapes: Mapping[str, Sequence[int]] = json.loads(str(file[f"{name}/shapes"]))
            self.maps = {end: file[f"{name}/maps/{end}"] for end in self.shapes}

    def load(self, model: nn.Module, name_map: str) -> None:
        """Give a model the weights that TensorFlow's had: all of them are used, and nothing is missing."""
        values = {name: inputs.weights(name, shape) for name, shape in self.variables.items()}
        state = ls.TrainState(model, ls.optim.SGD(lr=0.1))
        report = ls.warm_start(state, values, ls.weights.WarmStart(name_map=name_map))
        assert not report.unexpected
        assert {name.rpartition(".")[2] for name in report.missing} <= {"num_batches_tracked"}
        assert report.share == 1.0
        model.eval()

    def check(self, end: str, ours: Tensor) -> None:
        """Compare an output with TensorFlow's; maps have their channels last there."""
        values: npt.NDArray[np.float32] = (ours.permute(0, 2, 3, 1) if ours.ndim == 4 else ours).numpy()
        assert list(values.shape) == self.shapes[end]
        found, expected = inputs.sample(np.ascontiguousarray(values)), self.maps[end]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=end)


class Ssd(nn.Module):
    """The layers of an SSD, under the names that they have in one."""

    def __init__(self, extractor: SsdFeatureExtractor, kernel_size: int) -> None:
        super().__init__()
        self.backbone: Any = feature_maps(extractor)
        predictor = ConvolutionalBoxPredictor(
            HYPERPARAMS, kernel_size=kernel_size, use_depthwise=extractor.use_depthwise, use_dropout=False
        )
        per_cell = [3, 6, 6, 6, 6, 6]
        self.head = ConvolutionalHead(predictor, self.backbone.out_channels, per_cell, inputs.NUM_CLASSES + 1)


class Pyramid(nn.Module):
    """The layers of a pyramid, under the names that they have in a detector."""

    def __init__(self, extractor: SsdFeatureExtractor) -> None:
        super().__init__()
        self.backbone: Any = feature_maps(extractor)
        predictor = WeightSharedConvolutionalBoxPredictor(HYPERPARAMS, num_layers_before_predictor=2, depth=12)
        self.head = WeightSharedHead(predictor, self.backbone.out_channels, [4] * 4, inputs.NUM_CLASSES + 1)


@pytest.fixture
def slim_sixth(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF-Slim's squeeze and excitation multiplies by 0.16667 where the publication, torchvision and we divide by 6."""
    monkeypatch.setattr(F, "hardsigmoid", lambda hidden: F.relu6(hidden + 3) * 0.16667)


def images() -> Tensor:
    return torch.from_numpy(inputs.images()).permute(0, 3, 1, 2).contiguous()


@pytest.mark.usefixtures("slim_sixth")
@pytest.mark.parametrize("name", SSDS)
@torch.no_grad()
def test_an_ssd_predicts_what_tensorflow_does(name: str) -> None:
    extractor, kernel_size = SSDS[name]
    recorded = Recorded(name)
    model = Ssd(replace(extractor, conv_hyperparams=HYPERPARAMS), kernel_size)
    recorded.load(model, extractor.type)
    maps = model.backbone(images())
    logits, codes = model.head(maps)
    for end, ours in zip(recorded.maps, [*maps, codes, logits], strict=True):
        recorded.check(end, ours)


@torch.no_grad()
def test_a_pyramid_predicts_what_tensorflow_does() -> None:
    recorded = Recorded("ssd_mobilenet_v2_fpn")
    extractor = SsdFeatureExtractor(
        "ssd_mobilenet_v2_fpn", 0.5, 8, HYPERPARAMS, use_explicit_padding=True, fpn=FeaturePyramidNetworks(3, 6, 40)
    )
    model = Pyramid(extractor)
    recorded.load(model, extractor.type)
    maps = model.backbone(images())
    logits, codes = model.head(maps)
    for end, ours in zip(recorded.maps, [*maps, codes, logits], strict=True):
        recorded.check(end, ours)


@pytest.mark.parametrize(("name", "output_stride"), [("resnet_v1_50", 16), ("resnet_v1_50_atrous", 8)])
@torch.no_grad()
def test_a_resnet_gives_the_maps_of_slim(name: str, output_stride: Any) -> None:
    recorded = Recorded(name)
    net = ResNet(50, output_stride=output_stride, style="slim")
    maps = IntermediateLayerGetter(net, {f"layer{index}": f"block{index}" for index in range(1, 5)})
    recorded.load(maps, "slim_resnet_v1")
    for end, ours in maps(images()).items():
        recorded.check(end, ours)


@pytest.mark.usefixtures("slim_sixth")
@torch.no_grad()
def test_the_large_mobilenet_v3_gives_the_maps_of_slim() -> None:
    recorded = Recorded("mobilenet_v3_large")
    net = mobilenet_v3_features("large", reduced_tail=True, padding="same")
    maps = IntermediateLayerGetter(net, {"13.expansion": "layer_14/expansion_output", "16": "layer_17"})
    recorded.load(maps, "slim_mobilenet_v3_large")
    for end, ours in maps(images()).items():
        recorded.check(end, ours)
