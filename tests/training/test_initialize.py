"""First values of a model's parameters, by name."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.training.initialize import initialize
from lockstep.weights.initializers import Constant, TruncatedNormal, Xavier, Zeros

ALL = {r"weight$": Xavier(), r"bias$": Constant(0.1)}


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
