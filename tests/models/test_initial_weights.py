from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.models.initial_weights import (
    clear_statistics,
    give_memory,
    scaled_normal,
    truncated_normal,
    without_memory,
)

# The standard deviation of a standard normal distribution that is cut at two standard deviations.
STDDEV_OF_CUT = 0.87962566103423978


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_normal_distribution_is_cut_and_not_heaped_up_at_the_cut() -> None:
    values = torch.empty(200_000)
    truncated_normal(values, 0.5, generator())
    assert values.abs().max() <= 1.0
    assert values.mean().abs() < 0.005
    assert values.std().item() == pytest.approx(STDDEV_OF_CUT * 0.5, rel=0.01)
    # Shares of a standard normal distribution below 1 and below 1.9, each over the share below 2.
    for at, share in ((1.0, 0.682689 / 0.954500), (1.9, 0.942567 / 0.954500)):
        assert (values.abs() < at * 0.5).float().mean().item() == pytest.approx(share, abs=0.005)


def test_a_tensor_of_any_shape_is_filled_in_place_from_the_generator() -> None:
    first, second = nn.Parameter(torch.full((3, 2, 5), math.nan)), torch.full((3, 2, 5), math.nan)
    truncated_normal(first, 0.1, generator(3))
    truncated_normal(second, 0.1, generator(3))
    assert torch.equal(first, second)
    assert first.requires_grad
    truncated_normal(second, 0.0, generator(3))
    assert not second.any()


def test_without_a_generator_the_default_one_draws() -> None:
    torch.manual_seed(1)
    first, second = torch.empty(50), torch.empty(50)
    truncated_normal(first, 1.0)
    truncated_normal(second, 1.0)
    torch.manual_seed(1)
    again = torch.empty(50)
    truncated_normal(again, 1.0)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_scaled_weights_have_nearly_two_over_their_inputs_as_variance() -> None:
    weights = torch.empty(400, 50, 2, 5)
    scaled_normal(weights, generator())
    assert weights.var().item() == pytest.approx(2.6 * STDDEV_OF_CUT**2 / 500, rel=0.02)


def test_modules_without_memory_leave_the_random_stream_alone() -> None:
    before = torch.random.get_rng_state()
    with without_memory():
        layer = nn.Conv2d(3, 4, 3)
    assert layer.weight.is_meta
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_begin_anew(affine: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(2, affine=affine))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(5)
    clear_statistics(model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_memory_is_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        module = give_memory(nn.BatchNorm2d(3))
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.num_batches_tracked is not None
    assert module.num_batches_tracked.dtype == torch.int64
