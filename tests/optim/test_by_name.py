from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.optim import SGD, ByName, ClipGlobalNorm, Constant, Cosine
from lockstep.optim.gradients import Gradients

SHAPES = {"stem.weight": (3, 2), "stem.bias": (3,), "head.weight": (2, 3), "head.bias": (2,)}
BOTH = ByName({"bias$": SGD(0.5), "weight$": SGD(0.1, momentum=0.9, weight_decay=0.01)})


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients_of(found: Mapping[str, Tensor | None], **options: Any) -> Gradients:
    return Gradients(list(found), [None if g is None else g.clone() for g in found.values()], **options)


def ending(found: Mapping[str, Tensor], end: str) -> dict[str, Tensor]:
    return {name: each for name, each in found.items() if name.endswith(end)}


def test_the_update_is_that_of_each_optimizer_alone() -> None:
    together, apart = drawn(0), drawn(0)
    bound = BOTH.bind(together)
    alone = {end: optimizer.bind(ending(apart, end[:-1])) for end, optimizer in BOTH.optimizers.items()}
    for step in range(3):
        found = drawn(step + 1)
        bound.update(gradients_of(found), step)
        for end, optimizer in alone.items():
            optimizer.update(gradients_of(ending(found, end[:-1])), step)
    for name, parameter in together.items():
        assert torch.equal(parameter, apart[name])
        assert not torch.equal(parameter, drawn(0)[name])


def test_a_clip_over_all_parameters_reaches_each_optimizer() -> None:
    parameters, found = drawn(0), drawn(1)
    gradients = gradients_of(found)
    norm = gradients.norm
    ClipGlobalNorm(0.1).bind(parameters)(gradients, 0)
    ByName({"bias$": SGD(0.5), "weight$": SGD(0.25)}).bind(parameters).update(gradients, 0)
    for name, parameter in parameters.items():
        lr = 0.5 if name.endswith("bias") else 0.25
        torch.testing.assert_close(parameter, drawn(0)[name] - lr * (0.1 / norm) * found[name])


def test_parameters_of_different_optimizers_may_have_one_gradient() -> None:
    parameters = {"a": torch.zeros(40), "b": torch.zeros(40)}
    one = torch.full((40,), 6.0)
    ByName({"a": SGD(1.0), "b": SGD(1.0)}).bind(parameters).update(Gradients(["a", "b"], [one, one], divisor=2.0), 0)
    assert parameters["a"].tolist() == parameters["b"].tolist() == [-3.0] * 40


def test_a_parameter_without_gradient_stays_untouched() -> None:
    parameters = drawn(0)
    bound = BOTH.bind(parameters)
    bound.update(gradients_of({**drawn(1), "head.weight": None, "head.bias": None}), 0)
    moved = [name for name, parameter in parameters.items() if not torch.equal(parameter, drawn(0)[name])]
    assert moved == ["stem.weight", "stem.bias"]
    assert not bound.slots()["momentum_buffer/head.weight"].any()


def test_rows_of_an_embedding_reach_the_optimizer_that_takes_them() -> None:
    parameters = {"weight": torch.ones(2), "table": torch.zeros(5, 2)}
    rows = {1: torch.tensor([3, 1])}
    found = Gradients(list(parameters), [torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])], rows=rows, divisor=2.0)
    ByName({"table": SGD(1.0), "weight": SGD(1.0, momentum=0.9)}).bind(parameters).update(found, 0)
    expected = torch.zeros(5, 2)
    expected[3], expected[1] = torch.tensor([-0.5, -1.0]), torch.tensor([-1.5, -2.0])
    assert torch.equal(parameters["table"], expected)
    assert parameters["weight"].tolist() == [0.5, 0.5]


def test_slots_are_saved_and_loaded_exactly() -> None:
    first, second = drawn(0), drawn(0)
    one, two = BOTH.bind(first), BOTH.bind(second)
    one.update(gradients_of(drawn(1)), 0)
    saved = {name: slot.clone() for name, slot in one.slots().items()}
    assert list(saved) == ["momentum_buffer/stem.weight", "momentum_buffer/head.weight"]
    expected = two.expects(saved)
    assert {n: (t.shape, t.dtype) for n, t in expected.items()} == {n: (t.shape, t.dtype) for n, t in saved.items()}
    for name, parameter in second.items():
        parameter.copy_(first[name])
    two.load(saved, one.values())
    for bound in (one, two):
        bound.update(gradients_of(drawn(2)), 1)
    for name in first:
        assert torch.equal(first[name], second[name])
    assert two.values() == one.values()


def test_learning_rates_are_told_by_pattern() -> None:
    bound = ByName({"bias$": SGD(0.5), "weight$": SGD(Cosine(1.0, 10))}).bind(drawn(0))
    assert bound.learning_rates(0) == {"bias$": 0.5, "weight$": 1.0}
    assert bound.learning_rates(10) == {"bias$": 0.5, "weight$": pytest.approx(0.0)}


def test_epochs_are_resolved_for_each_optimizer() -> None:
    both = ByName({"bias$": SGD(Constant(0.5)), "weight$": SGD(Cosine(1.0, ls.Epochs(2)))})
    bound = both.bind(drawn(0))
    lines = bound.resolve(epoch_size=100, batch_size=20)
    assert len(lines) == 1
    assert lines[0].startswith("weight$: ")
    assert bound.learning_rates(5)["weight$"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ByName({"stem": SGD(0.1), "head.bias": SGD(0.2)}),
            r"would have no optimizer.*\n.*patterns 'stem', 'head.bias'; not matched: head.weight\n.*one pattern",
        ),
        (lambda: ByName({}), r"would have no optimizer.*\n.*: stem.weight, stem.bias, head.weight, head.bias\n"),
        (lambda: ByName({".": SGD(0.1), "bias": SGD(0.2)}), "'stem.bias' is matched by two patterns of optimizer"),
        (lambda: ByName({".": SGD(0.1), "tail": SGD(0.2)}), "A pattern of optimizer matches no parameter"),
        (lambda: ByName([SGD(0.1)]), r"optimizers is of the wrong type.*\n.*list\n.*by pattern\n.*write ByName"),  # type: ignore[arg-type]
        (lambda: ByName({".": SGD}), r"The optimizer of '.' is of the wrong type.*\n.*class SGD\n.*a value"),  # type: ignore[dict-item]
        (lambda: ByName({".": 0.1}), r"The optimizer of '.' is of the wrong type.*\n.*float"),  # type: ignore[dict-item]
    ],
)
def test_each_parameter_has_exactly_one_optimizer(make: Callable[[], ByName], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make().bind(drawn(0))
