"""The law of the rollback: to go back and skip a batch equals a run told from the start to skip it, byte for byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.reporting.jsonl import MetricsFile
from lockstep.training.rollback import rollback

pytestmark = pytest.mark.usefixtures("each_device")

BATCH_SIZE, STEPS, SAVE_EVERY = 4, 12, 3
BAD = [8, 12, 40]


class Decoded:
    """Examples that loader processes read."""

    cost = "decode"

    def __init__(self, cost: str = "decode") -> None:
        self.cost = cost

    def __len__(self) -> int:
        return 30

    def read_batch(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
        numbers = torch.from_numpy(indices).float()
        return {"x": torch.stack([numbers.sin(), (numbers * 7).cos()], 1), "name": [f"n{index}" for index in indices]}

    def example_id(self, index: int) -> str:
        return f"n{index}"


def make_loader(**options: Any) -> Loader:
    return Loader(Decoded(options.pop("cost", "memory")), **{"batch_size": BATCH_SIZE, "seed": 3, **options})


def make_state(**options: Any) -> ls.TrainState:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    return ls.TrainState(
        model,
        ls.optim.SGD(ls.optim.Cosine(0.1, STEPS), momentum=0.9),
        average=ls.optim.MovingAverage(0.9),
        nonfinite="rollback",
        **options,
    )


def spoiled(bad: Sequence[int]) -> Any:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        is_bad = batch.position in bad and batch.towers.stop == 2  # the last tower's alone
        return {"square": model(batch["x"]).square().mean() * (float("nan") if is_bad else 1.0)}

    return losses


class KilledError(Exception):
    """The end of a start that was killed."""


def run(
    workdir: Path, bad: Sequence[int], *, told: bool = False, kill_at: tuple[int, int] = (-1, 0), **options: Any
) -> None:
    """A start of a run, in a loop of one's own; it dies at a position after some rollbacks, or reaches its end."""
    state, loader = make_state(), make_loader(**options)
    for position in bad if told else ():
        loader.skip(position)
    if ls.resume(state, loader, workdir) is None:
        ls.save(state, loader, workdir)
    while True:
        try:
            stretch(workdir, state, loader, spoiled([] if told else bad), kill_at)
            return
        except ls.NonFiniteError as error:
            rollback(state, loader, workdir, error)


def stretch(workdir: Path, state: ls.TrainState, loader: Loader, losses: Any, kill_at: tuple[int, int]) -> None:
    """Steps with a log and checkpoints, to the end or to an error."""
    with ExitStack() as stack:
        if ls.join().is_chief:
            metrics = MetricsFile(workdir / "metrics.jsonl", from_position=loader.position)
            stack.callback(metrics.close)
        for report in ls.train_steps(state, losses, loader, ls.Towers(2), until=ls.Steps(STEPS)):
            if ls.join().is_chief:
                metrics.write(report)
            if report.step % SAVE_EVERY == 0:
                ls.save(state, loader, workdir)
            if (report.progress.position, len(loader.skipped)) == kill_at:
                raise KilledError


def contents(workdir: Path) -> dict[str, bytes]:
    files = [path for path in (workdir / f"checkpoints/step-{STEPS:08d}").iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves that was told from the start."""
    workdir = tmp_path_factory.mktemp("told")
    torch.set_num_threads(1)
    run(workdir, BAD, told=True)
    found = contents(workdir)
    positions = [json.loads(line)["position"] - BATCH_SIZE for line in found["metrics.jsonl"].splitlines()]
    assert positions == [p for p in range(0, 60, BATCH_SIZE) if p not in BAD]
    assert json.loads(found["values.json"])["loader"]["skipped"] == BAD
    return found


def test_rolled_back_equals_told_from_the_start(told: dict[str, bytes], tmp_path: Path) -> None:
    run(tmp_path, BAD)
    assert contents(tmp_path) == told


@pytest.mark.process
def test_on_two_workers_with_loader_processes(
    told: dict[str, bytes], tmp_path: Path, run_workers: Callable[..., list[Any]]
) -> None:
    run_workers(run_decoded, 2, tmp_path)
    assert contents(tmp_path) == told


def test_two_bad_batches_after_a_checkpoint_are_skipped_as_told(
    told: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SAVE_EVERY", 1)
    run(tmp_path, BAD)
    assert contents(tmp_path) == told


def run_decoded(workdir: Path) -> None:
    run(workdir, BAD, cost="decode", num_processes=1)


@pytest.mark.parametrize("kill_at", [(8, 0), (8, 1), (36, 3), (52, 3)])
def test_killed_and_resumed(told: dict[str, bytes], tmp_path: Path, kill_at: tuple[int, int]) -> None:
    with pytest.raises(KilledError):
        run(tmp_path, BAD, kill_at=kill_at)
    run(tmp_path, BAD)
    assert contents(tmp_path) == told


# What rollback refuses ------------------------------------------------------------------------------------------------


def failure(state: ls.TrainState, loader: Loader, bad: Sequence[int]) -> ls.NonFiniteError:
    with pytest.raises(ls.NonFiniteError) as caught:
        for _ in ls.train_steps(state, spoiled(bad), loader, ls.Towers(2)):
            pass
    return caught.value


def test_a_rollback_logs_its_target_and_reason_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, loader = make_state(), make_loader(order="sequential")
    next(ls.train_steps(state, spoiled([]), loader, ls.Towers(2)))
    ls.save(state, loader, tmp_path)
    caplog.clear()
    assert rollback(state, loader, tmp_path, failure(state, loader, [12])) == 1
    assert (state.step, loader.position, loader.skipped) == (1, 4, [12])
    assert [record.message.partition(" (positions")[0] for record in caplog.records] == [
        "The update after step 3 is not finite; nothing was changed. Going back to step 1, position 4, and on without "
        "the batch at position 12 (1 of at most 10): loss 'square' is nan and 6 more; from tower 1 on worker 0"
    ]


def test_the_budget_is_the_number_of_batches_that_are_skipped(tmp_path: Path) -> None:
    state, loader = make_state(nonfinite_budget=2), make_loader()
    ls.save(state, loader, tmp_path)
    for position in (8, 16):
        assert rollback(state, loader, tmp_path, failure(state, loader, [8, 16, 24])) == 0
        assert loader.skipped[-1] == position
    error = failure(state, loader, [8, 16, 24])
    with pytest.raises(ls.NonFiniteError) as caught:
        rollback(state, loader, tmp_path, error)
    assert str(caught.value) == (
        "Another batch is not finite, and no more than 2 may be skipped.\n"
        f"  given:    {error.given}\n"
        "  expected: no more batches that are not finite than the nonfinite_budget\n"
        "  hint:     lower the learning rate, clip the gradients, look at these examples, or raise nonfinite_budget"
    )
    assert caught.value.nonfinite is error.nonfinite
    assert state.step == 4, "nothing has changed"


def test_weights_with_which_no_batch_is_finite_are_to_blame_and_not_the_batches(tmp_path: Path) -> None:
    torch.manual_seed(2)
    rate = ls.optim.SGD(lambda step: 1e38 if step == 3 else 0.01)
    state, loader = ls.TrainState(nn.Linear(2, 1), rate, nonfinite="rollback"), make_loader()
    backs: list[int] = []

    def train() -> None:
        for report in ls.train_steps(state, spoiled([]), loader, ls.Towers(2), until=ls.Steps(8)):
            ls.save(state, loader, tmp_path)
            assert report.step <= 4

    ls.save(state, loader, tmp_path)
    for _ in range(2):
        with pytest.raises(ls.NonFiniteError) as caught:
            train()
        backs.append(rollback(state, loader, tmp_path, caught.value))
    assert backs == [4, 3]
    with pytest.raises(ls.NonFiniteError) as caught:
        train()
    with pytest.raises(ls.NonFiniteError) as blamed:
        rollback(state, loader, tmp_path, caught.value)
    assert blamed.value.what == (
        "The weights after step 4 are to blame, and their checkpoint: no batch is finite with them."
    )
    largest = state.model.weight.abs().max().item()
    assert 1e30 < largest < float("inf")
    assert blamed.value.given == (
        "the batches at positions 16, 20, 24, one after the other; "
        f"the largest weight is {max(largest, state.model.bias.abs().max().item()):.3g}, in 'bias'"
    )
    assert blamed.value.hint.startswith(
        "delete the checkpoint of step 4 and go on from the one before it, with a lower"
    )
    assert loader.skipped == []


def test_without_a_checkpoint_there_is_nowhere_to_go(tmp_path: Path) -> None:
    state, loader = make_state(), make_loader()
    with pytest.raises(ls.CheckpointError) as caught:
        rollback(state, loader, tmp_path, failure(state, loader, [8]))
    assert str(caught.value) == (
        "There is no checkpoint to go back to.\n"
        f"  given:    a batch at position 8 that is not finite, and {tmp_path} without checkpoints\n"
        "  expected: a checkpoint saved before it\n"
        "  hint:     save before the first step: save(state, loader, workdir)"
    )


def test_an_error_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ls.InputError, match=r"does not say which batch.*\n.*NonFiniteError without a refusal"):
        rollback(make_state(), make_loader(), tmp_path, ls.NonFiniteError("x", given=1, expected=2, hint="y"))


def test_a_batch_of_the_old_stream_is_refused(tmp_path: Path) -> None:
    state, loader = make_state(), make_loader()
    ls.save(state, loader, tmp_path)
    error = failure(state, loader, [8])
    rollback(state, loader, tmp_path, error)
    with pytest.raises(ls.InputError, match=r"batch has come that was to be skipped.*\n.*position 8, skipped: 8\n"):
        rollback(state, loader, tmp_path, error)


def test_several_states_go_back_together(tmp_path: Path) -> None:
    states = {"one": make_state(name="one", nonfinite_budget=1), "two": make_state(name="two")}
    loader = make_loader()
    for batch in islice(ls.batches(loader, ls.Towers(2)), 2):
        for state in states.values():
            ls.train_step(state, spoiled([]), batch, ls.Towers(2))
        if batch.position == 0:
            ls.save(states, loader, tmp_path)
    error = failure(states["two"], loader, [8])
    assert rollback(states, loader, tmp_path, error) == 1
    assert [state.step for state in states.values()] == [1, 1]


# Skipping -------------------------------------------------------------------------------------------------------------


def stream(loader: Loader, dealing: Sequence[range] = (range(2),), count: int = 8) -> list[tuple[int, list[str]]]:
    """Position and examples of the first batches, put together from workers with these towers."""
    parts = []
    for towers in dealing:
        batches = loader.batches(towers, 2)
        parts.append([(batch.position, batch["name"]) for batch in islice(batches, count)])
        batches.close()
    assert len({tuple(position for position, _ in part) for part in parts}) == 1
    return [(step[0][0], [name for _, names in step for name in names]) for step in zip(*parts, strict=True)]


@settings(max_examples=25, deadline=None)
@given(
    skipped=st.sets(st.sampled_from(range(0, 60, 4)), max_size=10),
    start=st.sampled_from([0, 8, 40]),
    dealing=st.sampled_from([[range(2)], [range(1), range(1, 2)]]),
)
def test_the_rest_of_the_stream_stays_as_it_is(skipped: set[int], start: int, dealing: list[range]) -> None:
    whole, loader = make_loader(), make_loader()
    whole.position = start
    for position in skipped:
        loader.skip(position)
    loader.position = start
    expected = [each for each in stream(whole, count=18) if each[0] not in skipped]
    assert stream(loader, dealing) == expected[:8]


@pytest.mark.process
def test_processes_that_read_ahead_skip_too() -> None:
    plain, ahead = make_loader(), make_loader(cost="decode", num_processes=2, prefetch=3)
    for position in BAD:
        plain.skip(position)
        ahead.skip(position)
    assert stream(ahead) == stream(plain)


def test_the_position_moves_past_what_is_skipped_with_the_next_attempt() -> None:
    loader = make_loader()
    loader.skip(4)
    batches = loader.batches(range(2), 2, stop=lambda position: position >= 12)
    positions = []
    for batch in batches:
        loader.commit(batch)
        positions.append(loader.position)
    assert positions == [4, 12]


@pytest.mark.parametrize("until", [ls.Steps(2), ls.Steps(5)])
def test_a_position_that_is_loaded_in_the_loop_body_stays(until: ls.Steps) -> None:
    loader = make_loader()
    start = loader.state()
    with ExitStack() as stack:
        if until.count > 2:
            stack.enter_context(pytest.raises(ls.InputError, match="set to another place"))
        for batch in ls.batches(loader, ls.Towers(2), until=until):
            loader.commit(batch)
            if loader.position == 2 * BATCH_SIZE:
                loader.load_state(start)
    assert loader.position == 0


def test_what_is_skipped_is_part_of_the_state() -> None:
    loader, again = make_loader(), make_loader()
    for position in (40, 8, 40):
        loader.skip(position)
    state = json.loads(json.dumps(loader.state()))
    assert state["skipped"] == [8, 40]
    again.skip(16)
    again.load_state(state)
    assert again.skipped == [8, 16, 40], "what it was told before, it still skips"
    assert stream(again)[:4] == [each for each in stream(make_loader()) if each[0] in (0, 4, 12, 20)]


def test_a_state_that_knows_of_no_skipping_is_loaded() -> None:
    loader = make_loader()
    loader.load_state({"seed": 3, "position": 8, "epoch_size": 30})
    assert (loader.position, loader.skipped) == (8, [])
    state = {"seed": 3, "position": 8, "num_examples": 30, "epoch_size": 30, "data": loader.fingerprint}
    assert loader.state() == state


def test_with_another_batch_size_a_place_where_no_batch_starts_is_nothing() -> None:
    loader, other = make_loader(), make_loader(batch_size=6)
    for position in (4, 12):
        loader.skip(position)
    other.load_state(loader.state())
    assert [position for position, _ in stream(other, count=3)] == [0, 6, 18]


@pytest.mark.parametrize(("position", "start"), [(3, 0), (9, 4), (-4, 0)])
def test_a_place_where_no_batch_starts_is_refused(position: int, start: int) -> None:
    loader = make_loader()
    loader.position = start
    with pytest.raises(ls.InputError) as caught:
        loader.skip(position)
    assert str(caught.value) == (
        f"No batch starts at position {position}.\n"
        f"  given:    position {position}, batches of 4, one of them from {start} on\n"
        "  expected: the place of a batch's first example, from 0 on\n"
        "  hint:     give the position of the batch as its report names it"
    )
    assert loader.skipped == []


def test_a_place_that_is_no_number_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"position is of the wrong type.*\n.*position is str"):
        make_loader().skip("8")  # type: ignore[arg-type]
