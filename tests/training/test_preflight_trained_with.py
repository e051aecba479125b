"""Scripts that resume with something else than their run was trained with."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.augmentations.turns import RandomShift
from lockstep.training.saving import snapshot, store_of

PATH = "checkpoints/step-00000002"


@pytest.fixture(autouse=True)
def _whole_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep")


def make(*, batch_size: int = 8, augment: Any = None, order: Any = "shuffled", **options: Any) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 1))
    given = {"optimizer": ls.optim.SGD(0.1, momentum=0.9), **options}
    fields = {"image": torch.randn(64, 1, 4, 4, generator=torch.Generator().manual_seed(1))}
    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=batch_size, augment=augment, order=order)
    return ls.TrainState(model, **given), loader


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["image"]).square().mean()}


def train(state: Any, loader: Any, steps: int, towers: Any = None, exchange: Any = None) -> None:
    ls.train(state, losses, loader, towers, exchange, until=ls.Steps(steps))


def trained(workdir: Path, *how: Any, **options: Any) -> None:
    state, loader = make(**options)
    train(state, loader, 2, *how)
    ls.save(state, loader, workdir)


SHIFT = RandomShift(1)
PARTS = {r"^1\.": ls.optim.SGD(0.1), r"^2\.": ls.optim.SGD(0.2)}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "optimizer.lr": ({}, {"optimizer": ls.optim.SGD(0.2, momentum=0.9)}, "saved 0.1, given 0.2"),
    r"optimizer['^2\\.'].lr": (
        {"optimizer": PARTS},
        {"optimizer": ls.optim.ByName({**PARTS, r"^2\.": ls.optim.SGD(0.3)})},
        "saved 0.2, given 0.3",
    ),
    "gradient_transforms.0.max_norm": (
        {"gradient_transforms": [ls.optim.ClipGlobalNorm(1.0)]},
        {"gradient_transforms": [ls.optim.ClipGlobalNorm(2.0)]},
        "saved 1.0, given 2.0",
    ),
    "regularization": ({}, {"regularization": [ls.losses.L2(0.1)]}, "saved [], given [L2("),
    "loader.batch_size": ({}, {"batch_size": 16}, "saved 8, given 16"),
    "loader.augment": ({}, {"augment": SHIFT}, "saved [], given [RandomShift(pixels=1, field='image')]"),
    "loader.augment.0.pixels": ({"augment": SHIFT}, {"augment": [RandomShift(2)]}, "saved 1, given 2"),
    "loader.order": ({}, {"order": "sequential"}, "saved Shuffled(), given Sequential()"),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_difference_is_refused_by_its_path_and_can_be_allowed(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, said = CHANGES[path]
    trained(tmp_path, **before)
    state, loader = make(**after)
    weights = state.model[1].weight.detach().clone()
    with pytest.raises(ls.InputError) as caught:
        ls.resume(state, loader, tmp_path)
    assert caught.value.what == f"{tmp_path / PATH} was trained with something else."
    assert str(caught.value.given).startswith(f"{path}: {said}")
    assert caught.value.hint == f'take the changes back, or go on with them: ls.resume(..., changed=("{path}",))'
    assert (state.step, loader.position) == (0, 0)
    assert torch.equal(state.model[1].weight, weights)
    assert ls.resume(state, loader, tmp_path, changed=(path,)) == 2
    assert f"changed since the checkpoint: {path}: {said}" in caplog.text
    state, loader = make(**after)
    assert ls.resume(state, loader, tmp_path, changed=[path.partition("[")[0].partition(".")[0]]) == 2


def test_what_is_the_same_resumes_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    how = {"augment": [SHIFT], "updates": [no_update], "frozen": r"^1\.", "average": ls.optim.MovingAverage(0.9)}
    trained(tmp_path, ls.Towers(2), **how)
    state, loader = make(**{**how, "frozen": [r"^1\."], "nonfinite": "skip", "loss_average": ls.LossAverage(0.5)})
    assert ls.resume(state, loader, tmp_path, changed=("optimizer.lr",)) == 2
    train(state, loader, 3, ls.Towers(2))
    assert "changed" not in caplog.text


@dataclass
class Counting:
    """An augmentation that counts its batches."""

    batches: int = 0

    def __call__(self, fields: dict[str, Any], draws: Any) -> dict[str, Any]:
        self.batches += 1
        return fields


def test_an_augmentation_that_counts_resumes(tmp_path: Path) -> None:
    counting = Counting()
    trained(tmp_path, augment=counting)
    assert counting.batches
    assert ls.resume(*make(augment=Counting()), tmp_path) == 2
    with pytest.raises(ls.InputError, match=r"loader\.augment\.0\.batches: saved 0, given 7"):
        ls.resume(*make(augment=Counting(7)), tmp_path)


def no_update(model: nn.Module, step: int) -> dict[str, Tensor]:
    return {}


def test_towers_and_exchange_are_refused_by_the_first_step(tmp_path: Path) -> None:
    trained(tmp_path, ls.Towers(2))
    state, loader = make()
    assert ls.resume(state, loader, tmp_path) == 2
    for _ in range(2):
        with pytest.raises(ls.InputError) as caught:
            train(state, loader, 3, ls.Towers(4, batch_norm="none"), ls.AllReduce(transport="gloo"))
        assert caught.value.given == (
            "towers.count: saved 2, given 4; towers.batch_norm: saved 'mean', given 'none'; "
            "exchange.transport: saved None, given 'gloo'"
        )
        assert caught.value.hint == (
            "take the changes back (ls.Towers(2); without it there is a tower for each worker), or go on with them: "
            'ls.resume(..., changed=("towers.count", "towers.batch_norm", "exchange.transport",))'
        )
    assert (state.step, loader.position) == (2, 16)
    ls.resume(state, loader, tmp_path, changed=("towers", "exchange.transport"))
    train(state, loader, 3, ls.Towers(4, batch_norm="none"), ls.AllReduce(transport="gloo"))


def test_what_was_resumed_is_still_said_by_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    trained(tmp_path, ls.Towers(2))
    state, loader = make()
    ls.resume(state, loader, tmp_path)
    ls.save(state, loader, tmp_path / "other")
    saved = [json.loads((path / PATH / "values.json").read_text()) for path in (tmp_path, tmp_path / "other")]
    assert saved[0] == saved[1]


def test_of_several_states_the_name_comes_first(tmp_path: Path) -> None:
    def named(lr: float) -> tuple[Any, Any]:
        (one, loader), (two, _) = make(name="one"), make(name="two", optimizer=ls.optim.SGD(lr))
        return {"one": one, "two": two}, loader

    states, loader = named(0.1)
    for state in states.values():
        train(state, loader, 1, ls.Towers(2))
    ls.save(states, loader, tmp_path)
    with pytest.raises(ls.InputError, match=r"given:    two\.optimizer\.lr: saved 0\.1, given 0\.2\n"):
        ls.resume(*named(0.2), tmp_path)
    states, loader = named(0.2)
    ls.resume(states, loader, tmp_path, changed=("two.optimizer",))
    with pytest.raises(ls.InputError, match=r"given:    one\.towers\.count: saved 2, given 1\n"):
        train(states["one"], loader, 2)


def test_a_checkpoint_of_an_older_version_resumes(tmp_path: Path) -> None:
    state, loader = make()
    train(state, loader, 2)
    step, tensors, values = snapshot(state, loader)
    del values["trained_with"]
    store_of(tmp_path).write(step, tensors, values)
    state, loader = make(batch_size=4, optimizer=ls.optim.SGD(0.7, momentum=0.1))
    assert ls.resume(state, loader, tmp_path) == 2
    train(state, loader, 5, ls.Towers(2))


def test_paths_are_a_tuple(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(ls.InputError, match=r"changed is of the wrong type[^/]*write changed=\(\"optimizer\.lr\",\)"):
        ls.resume(*make(), tmp_path, changed="optimizer.lr")


@pytest.mark.parametrize("path", ["optim.lr", "nonsense", "optimizer.lr.initial", "", "towers.counts", "optimizer."])
def test_a_path_of_nothing_is_refused(tmp_path: Path, path: str) -> None:
    trained(tmp_path)
    with pytest.raises(ls.InputError) as caught:
        ls.resume(*make(optimizer=ls.optim.SGD(0.2, momentum=0.9)), tmp_path, changed=("loader", path))
    assert caught.value.what == "changed names what the run is not trained with."
    assert caught.value.given == f'"{path}"'
    assert ", loader, name, optimizer, regularization, threads, tower" in str(caught.value.expected)
    assert caught.value.hint == 'name what differs: "optimizer.lr"'
    with pytest.raises(ls.InputError, match="leave it out: nothing differs that is known yet"):
        ls.resume(*make(), tmp_path, changed=(path,))


def test_a_path_that_the_checkpoint_or_the_script_alone_has_is_known(tmp_path: Path) -> None:
    trained(tmp_path, ls.Towers(1), average=ls.optim.MovingAverage(0.9))
    cosine = ls.optim.SGD(ls.optim.Cosine(0.1, 9), momentum=0.9)
    paths = ("optimizer.lr.steps", "average.decay", "optimizer.lr", "exchange.transport", "towers.count", "updates")
    with pytest.raises(ls.InputError, match=r"was trained with something else.*\n.*given: +average: saved MovingA"):
        ls.resume(*make(optimizer=cosine), tmp_path, changed=paths)


@dataclass
class Clipped:
    threads: int

    def __call__(self, gradients: Any, step: int) -> None:
        pass


def test_a_transform_may_hold_anything(tmp_path: Path) -> None:
    @dataclass
    class Holds:
        value: Any

        def __call__(self, gradients: Any, step: int) -> None:
            pass

    within = Holds(None)
    within.value = [within]
    transforms = [within, Holds(torch.ones(200).bfloat16()), Holds(nn.Parameter(torch.ones(200)))]
    transforms += [Holds(torch.eye(20).to_sparse()), Holds(torch.ones(200, device="meta"))]
    trained(tmp_path, gradient_transforms=transforms)
    assert ls.resume(*make(gradient_transforms=transforms), tmp_path) == 2


def test_threads_of_something_else_get_no_hint(tmp_path: Path) -> None:
    trained(tmp_path, gradient_transforms=[Clipped(1)])
    with pytest.raises(ls.InputError, match=r"gradient_transforms.0.threads: saved 1, given 2") as caught:
        ls.resume(*make(gradient_transforms=[Clipped(2)]), tmp_path)
    assert "set_num_threads" not in str(caught.value.hint)


# Threads --------------------------------------------------------------------------------------------------------------


def test_other_threads_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path)
    torch.set_num_threads(2)
    state, loader = make()
    ls.resume(state, loader, tmp_path)
    train(state, loader, 3)
    changed = [record.message for record in caplog.records if "changed" in record.message]
    assert changed == ["changed since the checkpoint: threads: saved 1, given 2"]


def test_an_exact_exchange_refuses_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, None, ls.AllReduce(exact=True))
    assert "exact" not in caplog.text
    torch.set_num_threads(2)
    state, loader = make()
    ls.resume(state, loader, tmp_path)
    with pytest.raises(ls.InputError) as caught:
        train(state, loader, 3, None, ls.AllReduce(exact=True))
    assert caught.value.given == "threads: saved 1, given 2"
    assert caught.value.hint == (
        "take the changes back (lockstep run --threads 1, or torch.set_num_threads(1) before the first step), "
        'or go on with them: ls.resume(..., changed=("threads",))'
    )
    torch.set_num_threads(1)
    train(state, loader, 3, None, ls.AllReduce(exact=True))


def test_an_exact_run_on_several_threads_says_that_its_bits_depend_on_them(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(2)
    train(*make(), 1, None, ls.AllReduce(exact=True))
    assert "exact: the bits depend on the 2 threads of each worker" in caplog.text


def on_different_threads() -> str:
    torch.set_num_threads(1 + ls.join().rank)
    state, loader = make()
    try:
        train(state, loader, 1, ls.Towers(2), ls.AllReduce(exact=True))
    except ls.WorkerError as error:
        return error.what
    return "trained"


@pytest.mark.process
def test_workers_on_different_threads_are_not_exact(run_workers: Callable[..., list[Any]]) -> None:
    said = run_workers(on_different_threads, 2)
    assert said == ["The workers do not agree on the number of threads: worker 1 differs."] * 2
