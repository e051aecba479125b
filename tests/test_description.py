from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.data.order import Weighted
from lockstep.description import changes, described, paths


def a_function(step: int, rate: Any = None) -> float:
    return 1 / (step + 1)


class Own:
    def __init__(self) -> None:
        self.cache = object()


@dataclass(frozen=True)
class Value:
    lr: Any
    inner: Any = None
    names: tuple[str, ...] = ("a", "b")
    kept: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (0.1, 0.1),
        (float("inf"), "inf"),
        (np.float32(0.5), 0.5),
        (torch.tensor(3), 3),
        ((1, [2.0]), [1, [2.0]]),
        (a_function, "a_function"),
        (
            partial(a_function, 3, rate=[0.5]),
            {"class": "partial", "func": "a_function", "args": [3], "keywords": {"'rate'": [0.5]}},
        ),
        (np.float32, "float32"),
        (1 + 2j, "(1+2j)"),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
        (nn.Parameter(torch.ones(2)), [1.0, 1.0]),
        (torch.ones(2, 3).to_sparse(), "Tensor, float32 of shape (2, 3)"),
        (torch.ones(200, device="meta"), "Tensor, float32 of shape (200,)"),
        (nn.parameter.UninitializedParameter(), "UninitializedParameter, of unknown shape"),
        ({"class": 1, 2: 3}, {"'class'": 1, "2": 3}),
        (nn.Linear, "Linear"),
        (nn.Linear(2, 2), {"class": "Linear"}),
        (Own(), {"class": "Own"}),
        (ls.optim.ClipGlobalNorm(2.0), {"class": "ClipGlobalNorm", "max_norm": 2.0}),
        (Value(a_function), {"class": "Value", "lr": "a_function", "inner": None, "names": ["a", "b"], "kept": []}),
    ],
)
def test_a_value_is_described_as_json(value: Any, expected: Any) -> None:
    found = described(value)
    assert found == expected
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_many_numbers_are_described_by_their_hash(kind: Any) -> None:
    one, same, other = (described(kind([first, *range(1000)])) for first in (1, 1, 2))
    assert one == same != other
    assert len(one) < 80
    assert "sha256" in one


@pytest.mark.parametrize(
    "make",
    [
        lambda value: torch.full((1000,), value, dtype=torch.bfloat16),
        lambda value: nn.Parameter(torch.full((1000,), float(value))),
        lambda value: torch.full((1000,), value * 1j).conj(),
        lambda value: np.array([{"value": value, "index": index} for index in range(1000)]),
        lambda value: np.array([({"value": value}, 1)] * 1000, dtype=[("a", "O"), ("b", "i4")]),
    ],
    ids=["bfloat16", "Parameter", "conjugate", "objects", "records of objects"],
)
def test_tensors_and_objects_are_told_apart_by_their_values(make: Any) -> None:
    assert described(make(1)) == described(make(1)) != described(make(2))


def test_a_value_within_itself_is_described_by_its_class() -> None:
    value = Value(0.1)
    value.kept.append(value)  # type: ignore[arg-type]
    assert described(value)["kept"] == [{"class": "Value"}]
    array = np.array([None], dtype=object)
    array[0] = array
    assert described(array) == [{"class": "ndarray"}]


def test_one_value_in_two_places_is_described_in_both() -> None:
    rate = ls.optim.Cosine(0.1, 100)
    assert described([rate, rate]) == [described(rate)] * 2


def test_values_without_fields_say_what_they_hold() -> None:
    assert described(Weighted([1.0, 2.0])) == described(Weighted([1.0, 2.0])) != described(Weighted([2.0, 1.0]))


def test_what_is_computed_once_does_not_count() -> None:
    class Lazy:
        @cached_property
        def size(self) -> int:
            return 3

    Lazy.__module__ = "lockstep.somewhere"
    used = Lazy()
    assert used.size == 3
    assert described(used) == described(Lazy())


SGD = ls.optim.SGD(0.1, momentum=0.9)
COSINE = ls.optim.SGD(ls.optim.Cosine(0.1, 100), momentum=0.9)


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        (SGD, SGD, []),
        (SGD, replace(SGD, lr=0.2), ["x.lr: saved 0.1, given 0.2"]),
        (SGD, replace(SGD, lr=0.2, momentum=0.0), ["x.lr: saved 0.1, given 0.2", "x.momentum: saved 0.9, given 0.0"]),
        (COSINE, replace(COSINE, lr=ls.optim.Cosine(0.1, 90)), ["x.lr.steps: saved 100, given 90"]),
        ({"^head": SGD, "b": SGD}, {"^head": SGD, "b": replace(SGD, lr=1)}, ["x['b'].lr: saved 0.1, given 1"]),
        ({"class": SGD}, {"class": replace(SGD, lr=1)}, ["x['class'].lr: saved 0.1, given 1"]),
        ({"class": 1, "a": 1}, {"class": 1, "b": 1}, ["x: saved {'class': 1, 'a': 1}, given {'class': 1, 'b': 1}"]),
        (partial(a_function, 1), partial(a_function, 2), ["x.args.0: saved 1, given 2"]),
        ([SGD, SGD], [SGD, replace(SGD, lr=1)], ["x.1.lr: saved 0.1, given 1"]),
        ([1, 2], [1], ["x: saved [1, 2], given [1]"]),
        ({"a": 1}, {"b": 1}, ["x: saved {'a': 1}, given {'b': 1}"]),
        (
            None,
            ls.optim.MovingAverage(0.9),
            ["x: saved None, given MovingAverage(decay=0.9, dynamic=True, statistics=False, half_life_steps=None)"],
        ),
        (Value(1), {"lr": 1}, ["x: saved Value(lr=1, inner=None, names=['a', 'b'], kept=[]), given {'lr': 1}"]),
    ],
)
def test_differences_have_a_path(saved: Any, given: Any, expected: list[str]) -> None:
    read_back = json.loads(json.dumps(described(saved)))
    assert sorted(map(str, changes("x", read_back, described(given)))) == expected


def test_a_field_of_another_version_does_not_count() -> None:
    assert not list(changes("x", {"class": "A", "old": 1, "both": 2}, {"class": "A", "new": 1, "both": 2}))


def test_a_path_stands_for_all_below_it() -> None:
    (change,) = changes("optimizer", {"'^head'": {"class": "A", "lr": 1}}, {"'^head'": {"class": "A", "lr": 2}})
    assert change.path == "optimizer['^head'].lr"
    assert all(change.is_allowed([path]) for path in ("optimizer", "optimizer['^head']", change.path))
    assert not any(change.is_allowed([path]) for path in ("", "opt", "optimizer.lr", "optimizer['^he"))


def test_every_part_has_its_path() -> None:
    value = described({"^head": Value(partial(a_function, 1)), "class": [0.1]})
    assert [*paths("x", value)] == [
        "x",
        "x['^head']",
        *(f"x['^head'].{part}" for part in ("lr", "lr.func", "lr.args", "lr.args.0", "lr.keywords", "inner")),
        *(f"x['^head'].{part}" for part in ("names", "names.0", "names.1", "kept")),
        "x['class']",
        "x['class'].0",
    ]
