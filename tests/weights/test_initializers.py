"""First values of parameters: what they depend on, and what is refused."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.weights.initializers import (
    Full,
    Initializer,
    TruncatedNormal,
    VarianceScaling,
    Xavier,
    Zeros,
    fans,
    fill,
    initialize,
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
    assert filled(Full(1.5), (2,)).tolist() == [1.5, 1.5]
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


def test_a_function_of_the_users_own_fills_a_tensor() -> None:
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
        (lambda: Full(math.inf), "value is out of range"),
        (lambda: Full("0"), "value is of the wrong type"),  # type: ignore[arg-type]
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


ALL = {r"weight$": Xavier(), r"bias$": Full(0.1)}


def net(*names: str) -> nn.Sequential:
    return nn.Sequential(OrderedDict({name: nn.Linear(3, 3) for name in names}))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def test_each_pattern_fills_what_it_matches_and_the_rest_stays() -> None:
    model = net("body", "head")
    before = values(model)
    found = initialize(model, {r"bias$": Zeros(), "head.weight": TruncatedNormal(0.1)}, seed=1)
    assert found == {"body.bias": Zeros(), "head.weight": TruncatedNormal(0.1), "head.bias": Zeros()}
    after = values(model)
    assert not after["body.bias"].any()
    assert not after["head.bias"].any()
    assert torch.equal(after["body.weight"], before["body.weight"])
    assert 0 < after["head.weight"].abs().max() <= 0.2


def test_the_order_of_the_modules_and_other_modules_do_not_show() -> None:
    models = [net("a", "b"), net("b", "a"), net("b", "c", "a")]
    for model in models:
        initialize(model, ALL, seed=5)
    first, *others = [values(model) for model in models]
    assert not torch.equal(first["a.weight"], first["b.weight"])
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_the_seed_shows() -> None:
    models = [net("a"), net("a")]
    for seed, model in enumerate(models):
        initialize(model, ALL, seed)
    assert not torch.equal(models[0].a.weight, models[1].a.weight)


def first_weights() -> list[float]:
    """In a process of several: all of them draw the same."""
    torch.manual_seed(ls.join().rank)
    model = net("a")
    initialize(model, ALL, seed=5)
    found: list[float] = model.a.weight.flatten().tolist()
    return found


@pytest.mark.process
def test_all_workers_draw_the_same(run_workers: Callable[..., list[Any]]) -> None:
    model = net("a")
    initialize(model, ALL, seed=5)
    assert run_workers(first_weights, 2) == [model.a.weight.flatten().tolist()] * 2


def test_a_function_of_the_users_own() -> None:
    def identity(name: str, tensor: Tensor, generator: Generator) -> None:
        nn.init.eye_(tensor)

    model = net("a", "b")
    initialize(model, {r"weight$": identity})
    assert torch.equal(model.a.weight, torch.eye(3))
    assert torch.equal(model.b.weight, torch.eye(3))


@pytest.mark.parametrize(
    ("initializers", "what"),
    [
        ({"absent$": Zeros()}, "A pattern of initializers matches no parameter."),
        ({"weight": Zeros(), "head": Zeros()}, "'head.weight' is matched by two patterns of initializers."),
        ({"weight": Zeros}, "The initializer of 'weight' is of the wrong type."),
        ({"weight": 0.1}, "The initializer of 'weight' is of the wrong type."),
        ([Zeros()], "initializers is of the wrong type."),
    ],
    ids=["nothing", "two", "class", "number", "list"],
)
def test_what_is_refused_before_anything_changes(initializers: Any, what: str) -> None:
    model = net("body", "head")
    before = values(model)
    with pytest.raises(InputError, match=re.escape(what)):
        initialize(model, initializers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in values(model).items())


@pytest.mark.parametrize(("model", "seed"), [(None, 0), (nn.Linear(1, 1), -1), (nn.Linear(1, 1), 0.5)])
def test_wrong_models_and_seeds(model: Any, seed: Any) -> None:
    with pytest.raises(InputError):
        initialize(model, ALL, seed)
