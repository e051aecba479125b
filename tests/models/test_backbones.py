"""VGG16, MobileNets and ResNets as backbones: their maps, and where their first weights come from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Generator, nn

from lockstep.models.layers import IntermediateLayerGetter
from lockstep.models.mobilenet import mobilenet_v1_features, mobilenet_v2_features, mobilenet_v3_features
from lockstep.models.resnet import ResNet
from lockstep.models.vgg import vgg16_features

MADE: dict[str, Callable[..., nn.Module]] = {
    "mobilenet_v3_small": lambda **given: mobilenet_v3_features("small", **given),
    "mobilenet_v2": lambda **given: mobilenet_v2_features(width_mult=0.25, **given),
    "mobilenet_v1": lambda **given: mobilenet_v1_features(depth_multiplier=0.25, **given),
    "resnet50": lambda **given: ResNet(50, **given),
}


def strides(net: nn.Sequential, image: int = 64) -> dict[str, tuple[int, int]]:
    """The channels and the stride of each layer's output."""
    found, hidden = {}, torch.zeros(1, 3, image, image)
    with torch.no_grad():
        for name, layer in net.eval().named_children():
            hidden = layer(hidden)
            found[name] = (hidden.shape[1], image // hidden.shape[2])
    return found


def dilations(layer: nn.Module) -> list[int]:
    return [each.dilation[0] for each in layer.modules() if isinstance(each, nn.Conv2d) and each.kernel_size == (3, 3)]


@pytest.mark.parametrize("name", MADE)
def test_the_first_weights_depend_on_the_generator_alone(name: str) -> None:
    stream = torch.get_rng_state()
    first, second = (MADE[name](generator=Generator().manual_seed(7)).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.isfinite(value).all() for value in first.values())
    assert torch.equal(torch.get_rng_state(), stream)


def test_vgg_has_its_maps_at_strides_8_and_16() -> None:
    found = strides(vgg16_features())
    assert len(found) == 31
    assert found["22"] == (512, 8)
    assert found["29"] == (512, 16)
    assert found["30"] == (512, 32)


def test_the_large_mobilenet_reaches_stride_16_by_layer_7() -> None:
    found = strides(mobilenet_v3_features("large"))
    assert found["3"] == (24, 4)
    assert found["7"] == (80, 16)
    assert found["13"] == (160, 32)
    assert found["16"] == (960, 32)


def test_the_first_mobilenet_has_the_maps_of_slim() -> None:
    found = strides(mobilenet_v1_features(depth_multiplier=0.5, min_depth=24))
    assert len(found) == 27
    assert found["Conv2d_0"] == (24, 2)
    assert found["Conv2d_11_pointwise"] == (256, 16)
    assert found["Conv2d_13_pointwise"] == (512, 32)


def test_the_second_mobilenet_keeps_its_last_layer_wide_unless_told() -> None:
    assert strides(mobilenet_v2_features(width_mult=0.5))["18"] == (1280, 32)
    found = strides(mobilenet_v2_features(width_mult=0.5, wide_last=False, min_depth=16))
    assert found["18"] == (640, 32)
    assert found["1"] == (16, 2)
    assert found["13"] == (48, 16)


def test_a_reduced_tail_has_half_the_channels() -> None:
    found = strides(mobilenet_v3_features("large", reduced_tail=True))
    assert found["13"] == (80, 32)
    assert found["16"] == (480, 32)


@pytest.mark.parametrize(
    ("style", "output_stride", "expected"),
    [
        ("torchvision", 32, [4, 8, 16, 32]),
        ("torchvision", 16, [4, 8, 16, 16]),
        ("keras", 32, [4, 8, 16, 32]),
        ("slim", 32, [8, 16, 32, 32]),
        ("slim", 16, [8, 16, 16, 16]),
        ("slim", 8, [8, 8, 8, 8]),
    ],
)
def test_a_resnet_goes_to_its_output_stride(style: str, output_stride: int, expected: list[int]) -> None:
    found = strides(ResNet(50, style=style, output_stride=output_stride))  # type: ignore[arg-type]
    assert [found[f"layer{index}"] for index in range(1, 5)] == [
        (256 << index, stride) for index, stride in enumerate(expected)
    ]


@torch.no_grad()
def test_resnets_of_slim_and_of_keras_are_one_function_with_strides_at_two_places() -> None:
    slim, keras = ResNet(50, style="slim").eval(), ResNet(50, style="keras").eval()
    keras.load_state_dict(slim.state_dict())
    left, right = (
        IntermediateLayerGetter(net, {f"layer{index}": f"layer{index}" for index in range(1, 5)})(
            torch.rand(1, 3, 75, 91, generator=Generator().manual_seed(0))
        )
        for net in (slim, keras)
    )
    for name, step in {"layer1": 2, "layer2": 2, "layer3": 2, "layer4": 1}.items():
        torch.testing.assert_close(left[name], right[name][..., ::step, ::step], rtol=1e-4, atol=1e-4)


def test_what_comes_after_a_stride_that_is_left_out_is_dilated() -> None:
    torchvision, slim = ResNet(50, output_stride=16), ResNet(50, style="slim", output_stride=8)
    assert dilations(torchvision.layer3) == [1] * 6
    assert dilations(torchvision.layer4) == [1, 2, 2]
    assert dilations(slim.layer2) == [1] * 4
    assert dilations(slim.layer3) == [2] * 6
    assert dilations(slim.layer4) == [4] * 3
