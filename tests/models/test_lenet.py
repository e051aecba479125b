from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.models.lenet import LeNet, LeNetNet

# name: shape of the weights
LAYERS = {"conv1": (32, 1, 5, 5), "conv2": (64, 32, 5, 5), "fc3": (1024, 3136), "fc4": (10, 1024)}


def images(batch: int = 3, channels: int = 1) -> Tensor:
    return torch.rand(batch, channels, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.fixture(scope="module")
def net() -> LeNetNet:
    return LeNet().build(seed=0).eval()


def test_layers_and_initial_weights_are_tf_slims(net: LeNetNet) -> None:
    assert list(net.state_dict()) == [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
    for name, shape in LAYERS.items():
        layer = net.get_submodule(name)
        assert layer.weight.shape == shape
        assert layer.weight.abs().max() <= 0.2 * (1 + 1e-6)
        error_of_std = 1 / math.sqrt(2 * layer.weight.numel())
        assert layer.weight.std().item() == pytest.approx(0.8796 * 0.1, rel=4 * error_of_std)
        assert not layer.bias.any()


def test_forward_is_the_chain_of_the_layers(net: LeNetNet) -> None:
    hidden = torch.nn.functional.conv2d(images(), net.conv1.weight, padding="same").clamp(min=0)
    hidden = torch.nn.functional.max_pool2d(hidden, 2)
    hidden = torch.nn.functional.conv2d(hidden, net.conv2.weight, padding="same").clamp(min=0)
    hidden = torch.nn.functional.max_pool2d(hidden, 2).reshape(-1, 3136)
    expected = (hidden @ net.fc3.weight.T).clamp(min=0) @ net.fc4.weight.T
    scores = net(images())
    assert scores.shape == (3, 10)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_half_of_the_last_hidden_layer_is_dropped_in_training() -> None:
    net = LeNet().build(seed=0)
    dropped: list[Tensor] = []
    net.dropout.register_forward_hook(lambda _m, inputs, output: dropped.append(output[inputs[0] > 0] == 0))
    net(images())
    assert dropped[0].float().mean().item() == pytest.approx(0.5, abs=0.06)


def test_the_seed_alone_decides_the_weights_and_no_random_stream_moves(net: LeNetNet) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again, other = LeNet().build(seed=0), LeNet().build(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
    assert not torch.equal(net.fc4.weight, other.fc4.weight)


def test_classes_and_channels_are_chosen() -> None:
    assert LeNet(num_classes=7, channels=3).build(seed=0)(images(2, 3)).shape == (2, 7)


@pytest.mark.parametrize(
    ("given", "shown", "hint"),
    [
        (torch.zeros(4, 28, 28, 1), r"shape \(4, 28, 28, 1\), torch.float32", "put the channels second"),
        (torch.zeros(4, 1, 32, 32), r"shape \(4, 1, 32, 32\), torch.float32", "resize or crop .* image_size=28"),
        (torch.zeros(4, 1, 27, 28), r"shape \(4, 1, 27, 28\), torch.float32", "resize or crop .* image_size=28"),
        (torch.zeros(4, 1, 28, 28, dtype=torch.uint8), r"shape \(4, 1, 28, 28\), torch.uint8", "scale the pixels"),
    ],
    ids=["channels-behind", "large", "small", "bytes"],
)
def test_other_images_are_refused(net: LeNetNet, given: Tensor, shown: str, hint: str) -> None:
    message = (
        rf"LeNet cannot use these images.\n  given:    {shown}\n"
        rf"  expected: shape \(batch, 1, 28, 28\), floating point\n  hint:     {hint}"
    )
    with pytest.raises(InputError, match=message):
        net(given)


@pytest.mark.parametrize("field", ["num_classes", "channels", "dropout"])
def test_other_fields_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is out of range.*\n.*{field}=-1"):
        LeNet(**{field: -1})


def test_sizes_are_those_of_the_value() -> None:
    assert (LeNet.image_size, LeNet.smallest_image) == (28, 28)
