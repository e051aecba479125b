from __future__ import annotations

import math

import pytest
import torch

from lockstep.errors import InputError
from lockstep.models import Mnist, MnistNet
from lockstep.models.mnist import local_response_norm

# name: (shape of the weights, standard deviation before the cut, bias)
LAYERS = {
    "conv1": ((32, 1, 5, 5), 0.05, 0.0),
    "conv2": ((64, 32, 5, 5), 0.05, 0.1),
    "local3": ((1024, 3136), 0.04, 0.1),
    "local4": ((10, 1024), 0.04, 0.1),
    "softmax_linear": ((10, 10), 1 / 192, 0.0),
}
STD_OF_CUT_NORMAL = 0.8796


def images(batch: int = 3) -> torch.Tensor:
    return torch.rand(batch, 1, 28, 28, generator=torch.Generator().manual_seed(1)) - 0.5


def test_layers_and_initial_weights_are_the_references() -> None:
    net = Mnist().build(seed=0)
    assert sum(p.numel() for p in net.parameters()) == 3_274_744
    assert list(net.state_dict()) == [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
    for name, (shape, std, bias) in LAYERS.items():
        layer = net.get_submodule(name)
        assert layer.weight.shape == shape
        assert layer.weight.abs().max() <= 2 * std * (1 + 1e-6)
        error_of_std = 1 / math.sqrt(2 * layer.weight.numel())
        assert layer.weight.std().item() == pytest.approx(STD_OF_CUT_NORMAL * std, rel=4 * error_of_std)
        assert layer.weight.mean().abs().item() <= 4 * std / math.sqrt(layer.weight.numel())
        assert (layer.bias == bias).all()


def test_the_seed_alone_decides_the_weights_and_no_random_stream_moves() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = Mnist().build(seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = Mnist().build(seed=3), Mnist().build(seed=4)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


def test_without_a_generator_the_default_one_draws() -> None:
    torch.manual_seed(7)
    first, second = MnistNet(), MnistNet()
    torch.manual_seed(7)
    again = MnistNet()
    assert torch.equal(first.local3.weight, again.local3.weight)
    assert not torch.equal(first.local3.weight, second.local3.weight)


def test_weights_can_be_drawn_anew() -> None:
    net = Mnist().build(seed=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(math.nan)
    net.reset_parameters(torch.Generator().manual_seed(1))
    expected = Mnist().build(seed=1).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())


def test_forward_is_the_chain_of_the_references_layers() -> None:
    net = Mnist().build(seed=0).double()
    given = images().double()
    hidden = torch.nn.functional.conv2d(given, net.conv1.weight, net.conv1.bias, padding="same").clamp(min=0)
    hidden = torch.nn.functional.max_pool2d(hidden, 2)
    hidden = torch.nn.functional.conv2d(hidden, net.conv2.weight, net.conv2.bias, padding="same").clamp(min=0)
    hidden = torch.nn.functional.max_pool2d(hidden, 2).reshape(-1, 3136)
    hidden = (hidden @ net.local3.weight.T + net.local3.bias).clamp(min=0)
    hidden = (hidden @ net.local4.weight.T + net.local4.bias).clamp(min=0)
    expected = hidden @ net.softmax_linear.weight.T + net.softmax_linear.bias
    scores = net(given)
    assert scores.shape == (3, 10)
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-14)


def test_channels_last_and_bfloat16_give_the_same_scores_within_rounding() -> None:
    net = Mnist().build(seed=0)
    expected = net(images())
    net = net.to(memory_format=torch.channels_last)
    given = images().to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(given), expected, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(net(given).float(), expected, rtol=0.05, atol=2e-3)


def test_local_response_norm_is_the_published_formula() -> None:
    values = torch.randn(2, 12, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 60
    normalised = local_response_norm(values)
    for channel in range(12):
        window = values[:, max(0, channel - 4) : channel + 5]
        divisor = (1 + 0.001 / 9 * window.square().sum(1)) ** 0.75
        torch.testing.assert_close(normalised[:, channel], values[:, channel] / divisor)


def test_local_response_norm_is_an_option_without_parameters() -> None:
    plain, with_lrn = Mnist().build(seed=0), Mnist(lrn=True).build(seed=0)
    assert list(plain.state_dict()) == list(with_lrn.state_dict())
    assert not torch.equal(plain(images()), with_lrn(images()))
    assert Mnist(lrn=True) != Mnist()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (torch.zeros(4, 28, 28), r"shape \(4, 28, 28\), torch.float32"),
        (torch.zeros(4, 28, 28, 1), r"shape \(4, 28, 28, 1\), torch.float32"),
        (torch.zeros(4, 1, 32, 32), r"shape \(4, 1, 32, 32\), torch.float32"),
        (torch.zeros(4, 1, 28, 28, dtype=torch.uint8), r"shape \(4, 1, 28, 28\), torch.uint8"),
    ],
)
def test_other_images_are_refused(given: torch.Tensor, shown: str) -> None:
    message = (
        rf"The MNIST net cannot use these images.\n  given:    {shown}\n"
        r"  expected: shape \(batch, 1, 28, 28\), floating point, values from -0.5 to 0.5\n"
        r"  hint:     give grey images with a channel axis, as image / 255 - 0.5"
    )
    with pytest.raises(InputError, match=message):
        Mnist().build(seed=0)(given)
