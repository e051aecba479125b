"""Box predictors: what they are made of, and the shapes and first biases of what they predict."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from lockstep.detection.tf_configs import (
    BatchNorm,
    BoxEncodingsClipRange,
    ConvolutionalBoxPredictor,
    Hyperparams,
    TruncatedNormalInitializer,
    WeightSharedConvolutionalBoxPredictor,
)
from lockstep.detection.tf_ssd import ConvolutionalHead, WeightSharedHead

NORMED = Hyperparams(batch_norm=BatchNorm(), initializer=TruncatedNormalInitializer(stddev=1e-6))
OWN = ConvolutionalBoxPredictor(NORMED, class_prediction_bias_init=-4.6, use_dropout=False)
SHARED = WeightSharedConvolutionalBoxPredictor(NORMED, 2, 8, class_prediction_bias_init=-4.6)


def maps(channels: tuple[int, ...] = (6, 4)) -> list[Tensor]:
    drawn = Generator().manual_seed(0)
    return [torch.rand(2, count, size, size, generator=drawn) for count, size in zip(channels, (3, 2), strict=True)]


def own(**given: object) -> ConvolutionalHead:
    return ConvolutionalHead(replace(OWN, **given), (6, 4), (3, 6), 5, generator=Generator().manual_seed(1))


def shared(channels: tuple[int, ...] = (6, 6), **given: object) -> WeightSharedHead:
    return WeightSharedHead(replace(SHARED, **given), channels, (2, 2), 5, generator=Generator().manual_seed(1))


@pytest.mark.parametrize(
    "given", [{}, {"use_depthwise": True, "kernel_size": 3}, {"max_depth": 4, "num_layers_before_predictor": 2}]
)
def test_own_layers_predict_for_each_anchor_and_start_at_the_bias(given: dict[str, object]) -> None:
    logits, codes = own(**given)(maps())
    assert logits.shape == (2, 3 * 9 + 6 * 4, 5)
    assert codes.shape == (2, 3 * 9 + 6 * 4, 4)
    assert logits.detach().mean().item() == pytest.approx(-4.6, abs=1e-3)
    assert codes.detach().mean().item() == pytest.approx(0.0, abs=1e-3)


def test_layers_before_the_predictor_have_a_depth_within_bounds() -> None:
    head = own(max_depth=5, min_depth=5, num_layers_before_predictor=1)
    assert [layers[0].out_channels for layers in head.layers] == [5, 5]
    assert not any(len(layers) for layers in own(num_layers_before_predictor=1).layers)  # 0 of both: there are none


def test_anchors_of_a_cell_follow_each_other() -> None:
    head = own().eval()
    with torch.no_grad():
        head.get_parameter("box_predictor.0.predictor.bias").copy_(torch.arange(12.0))
        head.get_parameter("box_predictor.0.predictor.weight").zero_()
    _, codes = head(maps())
    assert torch.equal(codes[0, :3].detach(), torch.arange(12.0).view(3, 4))


def test_dropout_is_before_the_classes_alone() -> None:
    head = own(use_dropout=True, dropout_keep_probability=0.1).train()
    assert torch.equal(head(maps())[1], head(maps())[1])
    assert not torch.equal(head(maps())[0], head(maps())[0])


@pytest.mark.parametrize(
    "given", [{}, {"use_depthwise": True}, {"share_prediction_tower": True}, {"num_layers_before_predictor": 0}]
)
def test_shared_layers_predict_for_each_anchor_and_start_at_the_bias(given: dict[str, object]) -> None:
    logits, codes = shared(**given)(maps((6, 6)))
    assert logits.shape == (2, 2 * 9 + 2 * 4, 5)
    assert codes.shape == (2, 2 * 9 + 2 * 4, 4)
    assert logits.detach().mean().item() == pytest.approx(-4.6, abs=1e-3)


def test_norms_are_not_shared_between_maps() -> None:
    head = shared()
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in head.modules()) == 2 * 2 * 2
    assert sum(isinstance(layer, nn.Conv2d) for layer in head.modules()) == 2 * 2 + 2


def test_maps_of_other_channels_are_projected() -> None:
    logits, _ = shared((6, 4))(maps((6, 4)))
    assert logits.shape == (2, 26, 5)


def test_scores_and_codes_are_within_what_is_asked() -> None:
    head = shared(score_converter="sigmoid", box_encodings_clip_range=BoxEncodingsClipRange(0.5, 0.6))
    logits, codes = head(maps((6, 6)))
    assert 0 < logits.min() <= logits.max() < 0.02
    assert codes.unique().tolist() == [0.5]
