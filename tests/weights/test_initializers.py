"""First values of parameters: what they depend on, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from lockstep.errors import InputError
from lockstep.weights.initializers import (
    Constant,
    Initializer,
    TruncatedNormal,
    VarianceScaling,
    Xavier,
    Zeros,
    fans,
    fill,
)

RANDOM: dict[str, Initializer] = {
    "truncated_normal": TruncatedNormal(0.1),
    "variance_scaling": VarianceScaling(2.0, "fan_out", "untruncated_normal"),
    "xavier": Xavier(),
    "xavier_normal": Xavier(uniform=False),
}


def filled(initializer: Initializer, shape: tuple[int, ...] = (4, 3), *, name: str = "w", seed: int = 0) -> Tensor:
    tensor = torch.full(shape, torch.nan)
    fill(initializer, name, tensor, seed)
    return tensor


@pytest.mark.parametrize("initializer", RANDOM.values(), ids=RANDOM)
def test_the_seed_and_the_name_decide_and_nothing_else(initializer: Initializer) -> None:
    first = filled(initializer, seed=3)
    torch.rand(5)
    assert torch.equal(filled(initializer, seed=3), first)
    assert not torch.equal(filled(initializer, seed=4), first)
    assert not torch.equal(filled(initializer, name="v", seed=3), first)
    assert first.isfinite().all()


@pytest.mark.parametrize("initializer", RANDOM.values(), ids=RANDOM)
def test_no_random_stream_is_touched(initializer: Initializer) -> None:
    before = torch.get_rng_state()
    filled(initializer)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_memory_format_does_not_show() -> None:
    laid_out = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    fill(Xavier(), "w", laid_out, 0)
    assert laid_out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(laid_out, filled(Xavier(), (4, 3, 2, 2)))


def test_narrow_kinds_are_rounded_from_32_bits() -> None:
    narrow = torch.empty(4, 3, dtype=torch.bfloat16)
    fill(Xavier(), "w", narrow, 0)
    assert torch.equal(narrow, filled(Xavier()).bfloat16())


def test_64_bits_are_drawn_as_such() -> None:
    wide = torch.empty(4, 3, dtype=torch.float64)
    fill(Xavier(), "w", wide, 0)
    assert not torch.equal(wide, wide.float().double())


def test_a_parameter_that_learns_is_filled_and_still_learns() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    fill(Xavier(), "w", parameter, 0)
    assert torch.equal(parameter.detach(), filled(Xavier()))
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_constants() -> None:
    assert filled(Constant(1.5), (2,)).tolist() == [1.5, 1.5]
    assert filled(Zeros(), (2,)).tolist() == [0, 0]
    assert filled(TruncatedNormal(0, mean=2), (2,)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((7,), (7, 7)), ((5, 3), (3, 5)), ((5, 3, 2), (6, 10)), ((8, 4, 3, 2), (24, 48)), ((0, 3), (3, 0))],
)
def test_inputs_and_outputs_of_a_unit(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert fans(shape) == expected


@pytest.mark.parametrize("initializer", RANDOM.values(), ids=RANDOM)
@pytest.mark.parametrize("shape", [(), (0,), (0, 0, 3, 3)])
def test_scalars_and_empty_tensors(initializer: Initializer, shape: tuple[int, ...]) -> None:
    assert filled(initializer, shape).isfinite().all()


def test_nothing_lies_beyond_the_bounds() -> None:
    assert filled(Xavier(), (100, 50)).abs().max() <= math.sqrt(6 / 150)
    assert filled(TruncatedNormal(0.5), (100, 50)).abs().max() <= 1


def test_a_function_of_the_users_own() -> None:
    def in_place(name: str, tensor: Tensor, generator: Generator) -> None:
        tensor.uniform_(generator=generator)

    def returning(name: str, tensor: Tensor, generator: Generator) -> Tensor:
        assert name == "w"
        return torch.rand(tensor.shape, generator=generator)

    assert torch.equal(filled(in_place), filled(returning))


def test_a_function_sees_the_values_as_they_are() -> None:
    tensor = torch.tensor([1.0, 2.0])
    fill(lambda name, values, generator: values * 2, "w", tensor, 0)
    assert tensor.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("returned", "what", "given"),
    [
        (torch.zeros(3), r"The initializer of 'w' returns a tensor that does not fit\.", r"shape \(3,\)"),
        (0.1, r"What the initializer of 'w' returns is of the wrong type\.", "is float"),
    ],
    ids=["shape", "type"],
)
def test_what_a_function_must_not_return(returned: Any, what: str, given: str) -> None:
    tensor = torch.ones(2)
    with pytest.raises(InputError, match=rf"(?s){what}.*{given}.*fill the tensor in place"):
        fill(lambda name, values, generator: returned, "w", tensor, 0)
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("tensor", "given"),
    [
        (torch.empty(2, device="meta"), r"torch\.float32, on meta"),
        (torch.zeros(2, dtype=torch.int64), r"torch\.int64, on cpu"),
        (torch.zeros(2, dtype=torch.complex64), r"torch\.complex64, on cpu"),
    ],
    ids=["meta", "int64", "complex64"],
)
def test_tensors_that_cannot_be_filled(tensor: Tensor, given: str) -> None:
    with pytest.raises(InputError, match=rf"(?s)'w' cannot be initialised.*{given}"):
        fill(Zeros(), "w", tensor, 0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Constant(math.inf), "value is out of range"),
        (lambda: Constant("0"), "value is of the wrong type"),  # type: ignore[arg-type]
        (lambda: TruncatedNormal(-0.1), "stddev is out of range"),
        (lambda: TruncatedNormal(0.1, math.nan), "mean is out of range"),
        (lambda: VarianceScaling(0), "scale is out of range"),
        (lambda: VarianceScaling(math.inf), "scale is out of range"),
        (lambda: VarianceScaling(mode="in"), "mode cannot be 'in'"),  # type: ignore[arg-type]
        (lambda: VarianceScaling(distribution="normal"), "distribution cannot be 'normal'"),  # type: ignore[arg-type]
        (lambda: Xavier(1), "uniform is of the wrong type"),  # type: ignore[arg-type]
    ],
)
def test_values_that_cannot_be(make: Callable[[], object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        make()
