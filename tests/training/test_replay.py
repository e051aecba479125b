"""Faults are put into devices, copies, operators and data: which it was is told by making the attempt again."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_calls import accelerator
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.readers.reader import Arrays
from lockstep.training import step
from lockstep.types import FaultError, ReplayVerdict
from lockstep.workers.rank import join
from tests.worker_processes import run_workers

NUM_WORKERS, STEPS, BATCH_SIZE = 3, 4, 6
KINDS = ("once", "always", "weights", "operator", "data", "infinite once", "infinite always")
Fault = Callable[[int, Tensor], Tensor | None]
"""What becomes of a gradient in the n-th backward pass of a worker, counted from 0."""


def flipped(tensor: Tensor, place: int, bit: int) -> Tensor:
    """The tensor with one bit of one element flipped."""
    integers = tensor.detach().clone().view(torch.int32)
    integers.view(-1)[place % integers.numel()] ^= -(2**31) if bit == 31 else 1 << bit
    return integers.view(torch.float32)


def make_fault(kind: str, chance: random.Random, bad: int) -> Fault | None:
    """The fault of this worker's device; `chance` is the same on all workers."""
    place, bit = chance.randrange(10**6), chance.randrange(32)
    # The first step is one pass; each later one is two, the tower that is looked at and its own.
    own = next(step for step in (1, 2, 3) if step % NUM_WORKERS == bad % NUM_WORKERS)
    when = chance.randrange(STEPS) if kind == "infinite once" else chance.choice([2 * own, 2 * own, 1, 3, 5])
    if kind == "operator":
        return lambda n, gradient: gradient + random.SystemRandom().random() * 1e-3
    if join().rank != bad or kind in ("weights", "data"):
        return None
    if kind.startswith("infinite"):
        spoil = torch.full((), math.inf)
        return lambda n, gradient: gradient + spoil if n == when or kind == "infinite always" else None
    return lambda n, gradient: flipped(gradient, place, bit) if n == when or kind == "always" else None


def make_state(fault: Fault | None, chance: random.Random) -> ls.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 1))
    parameter = chance.choice([*model.parameters()])
    passes = Counter[str]()

    def spoil(gradient: Tensor) -> Tensor | None:
        passes["here"] += 1
        return fault(passes["here"] - 1, gradient) if fault else None

    parameter.register_hook(spoil)
    return ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9))


def make_loader(nan_at: int | None = None) -> Loader:
    x = torch.randn(BATCH_SIZE * STEPS, 5, generator=torch.Generator().manual_seed(1))
    if nan_at is not None:
        x[nan_at % len(x), 0] = math.nan
    return Loader(Arrays({"x": x, "y": torch.arange(len(x))}), batch_size=BATCH_SIZE)


def squares(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": (model(batch["x"]).squeeze(1) - batch["y"] / 24).square().mean()}


def told(kind: str, seed: int, transport: Any = None, replay_steps: int = 1) -> tuple[ReplayVerdict | None, int]:
    """What is told of a fault, and the worker that has it."""
    chance = random.Random(seed)
    bad = chance.randrange(join().num_workers)
    state = make_state(make_fault(kind, chance, bad), chance)
    state.replay_steps = 0 if kind.startswith("infinite") else replay_steps
    loader = make_loader(chance.randrange(100) if kind == "data" else None)
    step, parameter = chance.randrange(1, STEPS), chance.choice([*state.model.parameters()])
    place, bit = chance.randrange(10**6), chance.randrange(32)
    verdict = None
    try:
        exchange = ls.AllReduce(transport)
        for report in ls.train_steps(state, squares, loader, exchange=exchange, until=ls.Steps(STEPS)):
            verdict = verdict or report.verdict
            if kind == "weights" and report.step == step and join().rank == bad:
                parameter.data.copy_(flipped(parameter, place, bit))
    except FaultError as error:
        verdict = error.verdict
    except ls.NonFiniteError as error:
        verdict = error.nonfinite and error.nonfinite.verdict
    return verdict, bad


def all_told(cases: list[tuple[str, int]]) -> list[tuple[ReplayVerdict | None, int]]:
    return [told(*case) for case in cases]


def is_right(kind: str, verdict: ReplayVerdict | None, bad: int) -> bool:
    causes = {"weights": "weights", "operator": "nondeterministic", "data": "data"}
    suspects = () if kind in ("operator", "data") else (f"worker {bad}",)
    return verdict is not None and verdict[0] == causes.get(kind, "device") and verdict.suspects == suspects


@pytest.mark.process
def test_each_kind_of_fault_is_told() -> None:
    cases = [(kind, seed) for seed, kind in enumerate(KINDS)]
    found, *others = run_workers(all_told, NUM_WORKERS, cases)
    assert others == [found] * (NUM_WORKERS - 1)
    for (kind, _), (verdict, bad) in zip(cases, found, strict=True):
        assert is_right(kind, verdict, bad), (kind, bad, verdict)


@pytest.mark.slow
@pytest.mark.process
def test_of_two_hundred_faults_at_random_places_all_but_ten_are_told() -> None:
    cases = [(KINDS[seed % len(KINDS)], seed) for seed in range(200)]
    found = run_workers(all_told, NUM_WORKERS, cases)[0]
    wrong = [(case, *told) for case, told in zip(cases, found, strict=True) if not is_right(case[0], *told)]
    assert len(wrong) <= 10, wrong


def told_by_two() -> list[Any]:
    """What two workers tell of a device that always errs, and of weights that differ where no attempt is looked at."""
    found: list[Any] = [told("always", 0, "gloo")[0]]
    state = make_state(None, random.Random(0))
    state.compare_steps = 2
    try:
        for report in ls.train_steps(state, squares, make_loader(), until=ls.Steps(STEPS)):
            if report.step == 1 and join().rank == 1:
                state.model[0].weight.data[1, 2] *= 2
    except FaultError as error:
        found += [error.verdict, str(error)]
    return found


@pytest.mark.process
def test_what_two_workers_cannot_tell_names_both_and_the_element() -> None:
    one, other = run_workers(told_by_two, 2)
    assert one == other
    device, weights, text = one
    assert device[0] == "device"
    assert device.suspects == ("worker 0", "worker 1")
    assert "a third would tell which" in device.said
    assert weights[0] == "weights"
    assert weights.suspects == ("worker 0", "worker 1")
    assert ", in element 7 alone of the 35 of parameter '0.weight': " in weights.said
    assert weights.said.endswith("; with the weights of worker 0, made again, it gives the same on all")
    assert text.splitlines()[-1].startswith(f"  hint:     {weights.said}; look for what changes the model on some")


def untold() -> list[Any]:
    """Where no attempt can be made again: synchronised batch norm, fields that are not sent, a loss that changes it."""
    spectrum = torch.ones(BATCH_SIZE // 2, dtype=torch.complex64)
    fields = {"objects": object(), "spectrum": spectrum, "too long for JSON": 10**5000}

    def spoiled(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"square": squares(model, batch)["square"] * math.nan}

    def in_place(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        batch["x"].mul_(0.5)
        return spoiled(model, batch)

    found = []
    cases = [(spoiled, "sync", "x"), (in_place, "mean", "x"), *((spoiled, "mean", field) for field in fields)]
    for losses, policy, field in cases:
        state, towers = make_state(None, random.Random(0)), ls.Towers(2, batch_norm=policy)  # type: ignore[arg-type]
        state.nonfinite = "skip"
        batch = next(iter(ls.batches(make_loader(), towers)))
        batch.setdefault(field, fields.get(field))
        report = ls.train_step(state, losses, batch, towers)
        assert report.nonfinite is not None
        found.append([len(report.nonfinite.culprits), report.nonfinite.verdict])
    return found


@pytest.mark.process
def test_where_no_attempt_can_be_made_again_none_is_judged() -> None:
    found = run_workers(untold, 2)
    assert found == [[[2, None]] * 5] * 2


def without_memory(kind: str = "data", lacking: int = 0, worker: int = 0) -> list[ReplayVerdict | None]:
    """The verdicts where a worker lacks memory in one of its passes: the first is its own, then come two a step."""
    passes: list[int] = []

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        passes.append(1)
        if len(passes) - 1 == lacking and join().rank == worker:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 154.00 MiB")
        return squares(model, batch)

    chance = random.Random(0)
    state = make_state(make_fault(kind, chance, 0), chance)
    state.replay_steps = 1
    return [report.verdict for report in ls.train_steps(state, losses, make_loader(), until=ls.Steps(STEPS))]


def test_an_attempt_that_there_is_no_memory_to_make_again_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert without_memory(lacking=1) == [None] * STEPS
    assert [record.message for record in caplog.records if "no memory" in record.message] == [
        "no attempt is made again to tell a bad device from bad data: worker 0 has no memory for one more copy of a "
        "tower's part of a batch"
    ]
    assert without_memory("once", lacking=7) == [None] * STEPS, "in the last of several times"


@pytest.mark.process
def test_one_of_several_workers_without_memory_is_not_blamed() -> None:
    assert run_workers(without_memory, 2, "data", 3, 1) == [[None] * STEPS] * 2


def test_workers_that_time_their_kernels_are_not_compared_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told("once", 0)[0]
    monkeypatch.setattr(step, "chosen_by_timing", lambda *_, **__: ["cudnn_benchmark"])
    assert told("once", 0)[0] is None
    nonfinite = told("data", 0)[0]
    assert nonfinite is not None, "which needs no bits"
    assert nonfinite.cause == "data"


def test_a_fault_that_has_passed_when_a_device_is_read_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with accelerator():
        spoil = torch.full((), math.inf)
        state = make_state(lambda n, gradient: gradient + spoil if n == 2 else None, random.Random(0))
        reports = [*ls.train_steps(state, squares, make_loader(), until=ls.Steps(STEPS))]
    [found] = [report for report in reports if report.verdict]
    assert found.step == 3
    assert found.verdict is not None
    assert found.verdict[0] == "unclear"
    assert "step 2: it was not finite at first, and is when made again" in caplog.text
    assert not any(report.skipped for report in reports)
    assert state.step == STEPS


def test_one_worker_alone_says_what_it_can_tell() -> None:
    causes = {kind: (verdict := told(kind, 0)[0]) and verdict[0] for kind in ("once", "always", "operator", "data")}
    assert causes == {"once": "device", "always": None, "operator": "unclear", "data": "data"}
