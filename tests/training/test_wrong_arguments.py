"""What people pass by mistake: each is told at once, in three parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.readers.reader import Arrays


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(2**31))


def make_loader() -> Loader:
    return Loader(Arrays({"x": torch.ones(16, 3)}), batch_size=4)


def make_state() -> ls.TrainState:
    return ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"mean": model(batch["x"]).mean()}


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"one": torch.ones(len(batch["x"]))}


SGD, CLIP = ls.optim.SGD(0.1), ls.optim.ClipGlobalNorm(1.0)

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "torch optimizer": (
        lambda: ls.TrainState(nn.Linear(3, 1), torch.optim.SGD([torch.ones(1)], lr=0.1)),  # type: ignore[arg-type]
        r"optimizer is of the wrong type.*\n.*optimizer is SGD\n.*lockstep.optim",
    ),
    "optimizer class": (
        lambda: ls.TrainState(nn.Linear(3, 1), torch.optim.SGD),  # type: ignore[arg-type]
        "optimizer is the class SGD",
    ),
    "no module": (lambda: ls.TrainState([1], ls.optim.SGD(0.1)), "model is list"),  # type: ignore[arg-type]
    "nonfinite": (
        lambda: ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1), nonfinite="ignore"),  # type: ignore[arg-type]
        r"nonfinite cannot be 'ignore'.*\n.*\n.*'stop' or 'skip'",
    ),
    "module for state": (
        lambda: next(ls.train_steps(nn.Linear(3, 1), losses, make_loader())),  # type: ignore[arg-type]
        "state is Linear",
    ),
    "number of towers": (
        lambda: next(ls.train_steps(make_state(), losses, make_loader(), 2)),  # type: ignore[arg-type]
        r"towers is int\n.*ls.Towers",
    ),
    "number as end": (
        lambda: next(ls.train_steps(make_state(), losses, make_loader(), until=5)),  # type: ignore[arg-type]
        r"until is int\n.*\n.*ls.Steps\(500\)",
    ),
    "torch loader": (
        lambda: next(ls.train_steps(make_state(), losses, torch.utils.data.DataLoader([1]))),  # type: ignore[arg-type]
        "loader is DataLoader",
    ),
    "average": (lambda: ls.TrainState(nn.Linear(2, 1), SGD, average=0.99), "average is float"),  # type: ignore[arg-type]
    "class of an average": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, average=ls.optim.MovingAverage),  # type: ignore[arg-type]
        "average is the class MovingAverage",
    ),
    "loss average": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, loss_average=0.9),  # type: ignore[arg-type]
        "loss_average is float",
    ),
    "penalty without a list": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, regularization=ls.losses.L2(1e-4)),  # type: ignore[arg-type]
        r"regularization is L2\n.*a list\n.*regularization=\[",
    ),
    "number for a penalty": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, regularization=[1e-4]),  # type: ignore[list-item]
        r"regularization\[0\] is float",
    ),
    "transform without a list": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, gradient_transforms=CLIP),  # type: ignore[arg-type]
        "gradient_transforms is ClipGlobalNorm",
    ),
    "class of a transform": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, tower_gradient_transforms=[type(CLIP)]),  # type: ignore[list-item]
        r"tower_gradient_transforms\[0\] is the class ClipGlobalNorm",
    ),
    "update without a list": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, updates=lambda m, s: {}),  # type: ignore[arg-type]
        "updates is function",
    ),
    "number for an update": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, updates=[3]),  # type: ignore[list-item]
        r"updates\[0\] is int",
    ),
    "text for a budget": (
        lambda: ls.TrainState(nn.Linear(2, 1), SGD, nonfinite_budget="x"),  # type: ignore[arg-type]
        "nonfinite_budget is str",
    ),
    "text for towers": (lambda: ls.Towers("2"), "count is str"),  # type: ignore[arg-type]
    "part of a tower": (lambda: ls.Towers(2.5), "count is float"),  # type: ignore[arg-type]
    "yes for towers": (lambda: ls.Towers(True), "count is bool"),
    "batch norm": (
        lambda: ls.Towers(2, batch_norm="avg"),  # type: ignore[arg-type]
        "batch_norm cannot be 'avg'",
    ),
    "precision": (lambda: ls.Towers(2, precision="fp8"), "precision cannot be 'fp8'"),  # type: ignore[arg-type]
    "tensors for reader": (
        lambda: Loader(torch.ones(4), batch_size=2),  # type: ignore[arg-type]
        r'reader is Tensor\n.*\n.*give tensors by name, {"image": images}',
    ),
    "list in a dict for reader": (
        lambda: Loader({"x": [1, 2]}, batch_size=2),  # type: ignore[dict-item]
        "Field 'x' has no rows.",
    ),
    "class for reader": (lambda: Loader(TensorDataset, batch_size=2), "reader is the class TensorDataset"),  # type: ignore[arg-type]
    "iterable dataset for reader": (
        lambda: Loader(Endless(), batch_size=2),
        r"Endless has no examples by index.\n.*\n.*\n.*ls.data.IterableLoader",
    ),
    "weights": (
        lambda: ls.evaluate(make_state(), score, make_loader(), weights="ema"),  # type: ignore[arg-type]
        "weights cannot be 'ema'",
    ),
    "no score": (lambda: ls.evaluate(make_state(), lambda m, b: {}, make_loader()), "no named scores"),
    "score tensor": (
        lambda: ls.evaluate(make_state(), lambda m, b: b["x"], make_loader()),  # type: ignore[arg-type,return-value]
        "no named scores",
    ),
    "name of a score": (
        lambda: ls.evaluate(make_state(), lambda m, b: {**score(m, b), "two": b["x"][:, 0]}, make_loader())["top1"],
        r"score cannot be 'top1'.*\n.*\n.*'one' or 'two'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(ls.InputError, match=message):
        make()


def test_towers_without_choice_read_well() -> None:
    with pytest.raises(ls.InputError, match=r"given:    score='two'\n  expected: 'one'\n"):
        ls.evaluate(make_state(), score, make_loader())["two"]
