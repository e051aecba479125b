"""The feature maps of the Object Detection API's SSDs; their numbers are compared with TensorFlow's in tests/golden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Generator, nn

from lockstep.detection.tf_configs import (
    BatchNorm,
    FeaturePyramidNetworks,
    Hyperparams,
    L2Regularizer,
    SsdFeatureExtractor,
    TruncatedNormalInitializer,
)
from lockstep.detection.tf_feature_maps import SsdFeatures, feature_maps

SMALL = SsdFeatureExtractor("ssd_mobilenet_v1", depth_multiplier=0.1, min_depth=8)
PYRAMID = replace(SMALL, type="ssd_mobilenet_v2_fpn", fpn=FeaturePyramidNetworks(3, 6, 200), use_depthwise=True)


def made(config: SsdFeatureExtractor, seed: int = 0, **given: bool) -> SsdFeatures:
    return feature_maps(config, generator=Generator().manual_seed(seed), **given)


def sizes(maps: SsdFeatures, height: int, width: int) -> list[tuple[int, ...]]:
    return [tuple(each.shape[1:]) for each in maps.eval()(torch.zeros(1, 3, height, width))]


def test_maps_halve_and_have_the_channels_that_they_tell() -> None:
    maps = made(SMALL)
    found = sizes(maps, 300, 140)
    assert [size[1:] for size in found] == [(19, 9), (10, 5), (5, 3), (3, 2), (2, 1), (1, 1)]
    assert [size[0] for size in found] == maps.out_channels == [51, 102, 51, 25, 25, 12]


def test_there_are_as_many_maps_as_layers_are_asked_for() -> None:
    assert made(replace(SMALL, num_layers=3)).out_channels == [51, 102, 51]
    assert made(replace(SMALL, num_layers=1)).out_channels == [51]


def test_images_are_padded_to_a_multiple() -> None:
    assert [size[1:] for size in sizes(made(replace(SMALL, pad_to_multiple=64)), 70, 64)][:2] == [(8, 4), (4, 2)]


def test_a_pyramid_has_one_depth_and_halves_beyond_the_backbone() -> None:
    maps = made(PYRAMID)
    assert maps.out_channels == [20] * 4
    assert sizes(maps, 72, 90) == [(20, 9, 12), (20, 5, 6), (20, 3, 3), (20, 2, 2)]


@pytest.mark.parametrize("config", [SMALL, PYRAMID])
def test_the_first_weights_depend_on_the_generator_alone(config: SsdFeatureExtractor) -> None:
    stream = torch.get_rng_state()
    first, second = made(config).state_dict(), made(config).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), stream)


def test_the_backbone_takes_the_hyperparams_only_if_they_override() -> None:
    given = Hyperparams(initializer=TruncatedNormalInitializer(stddev=3.0), batch_norm=BatchNorm(epsilon=0.5))
    config = replace(SMALL, conv_hyperparams=given)
    slim, own = made(config), made(replace(config, override_base_feature_extractor_hyperparams=True))
    for maps, epsilon, stddev in ((slim, 0.001, 0.09), (own, 0.5, 3.0)):
        norms = {layer.eps for layer in maps.features.modules() if isinstance(layer, nn.BatchNorm2d)}
        assert norms == {epsilon}
        kernel = maps.features["Conv2d_13_pointwise"].get_parameter("0.weight")
        assert kernel.std().item() == pytest.approx(stddev * 0.88, rel=0.05)
        assert {layer.eps for layer in maps.extra.modules() if isinstance(layer, nn.BatchNorm2d)} == {0.5}


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    maps = made(replace(SMALL, conv_hyperparams=Hyperparams(batch_norm=BatchNorm())), freeze_batchnorm=True).train()
    maps(torch.rand(2, 3, 64, 64))
    assert not any(buffer.any() for name, buffer in maps.named_buffers() if name.endswith("running_mean"))


def test_a_pyramid_of_depthwise_layers_has_a_narrow_last_layer_but_for_the_mobilenet_v2_of_keras() -> None:
    pyramid = replace(PYRAMID, depth_multiplier=1.0, fpn=FeaturePyramidNetworks(3, 5, 16))
    channels = {
        name: made(replace(pyramid, type=name)).extra.get_submodule("projection.2.0").in_channels
        for name in ("ssd_mobilenet_v2_fpn", "ssd_mobilenet_v2_fpn_keras", "ssd_mobilenet_v1_fpn_keras")
    }
    assert [*channels.values()] == [256, 1280, 256]


def test_the_defaults_of_a_resnet_are_those_of_slim_or_of_keras() -> None:
    given = Hyperparams(activation="relu_6", batch_norm=BatchNorm(epsilon=0.5))
    config = SsdFeatureExtractor("ssd_resnet50_v1_fpn", conv_hyperparams=given, fpn=FeaturePyramidNetworks(3, 7, 16))
    slim, keras = made(config), made(replace(config, type="ssd_resnet50_v1_fpn_keras"))
    assert [each.of_backbone.regularizer for each in (slim, keras)] == [L2Regularizer(1e-4), L2Regularizer(2e-4)]
    assert slim.out_channels == [16] * 5
    # TF-Slim keeps its own norms and the ReLU after each sum where a configuration overrides the rest.
    overridden = replace(config, override_base_feature_extractor_hyperparams=True)
    found = {}
    for name in ("ssd_resnet50_v1_fpn", "ssd_resnet50_v1_fpn_keras"):
        block = made(replace(overridden, type=name)).features["layer1"][0]  # type: ignore[index]
        found[name] = (block.bn1.eps, type(block.activation), type(block.relu))  # type: ignore[union-attr]
    assert found == {
        "ssd_resnet50_v1_fpn": (1e-5, nn.ReLU6, nn.ReLU),
        "ssd_resnet50_v1_fpn_keras": (0.5, nn.ReLU6, nn.ReLU6),
    }
