"""Following the checkpoints of a run: on a clock of the test's own, which moves when the follower sleeps."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.store import Store
from lockstep.errors import CheckpointError, InputError
from lockstep.evaluation import follow as module
from lockstep.evaluation.follow import POLL_SECONDS, Clock, Polling, follow
from lockstep.workers.rank import join

Events = Mapping[float, Callable[[], Any]]


class Scripted(Clock):
    """A clock at which things happen: each at its second, while the follower sleeps past it."""

    def __init__(self, events: Events) -> None:
        self.seconds = 0.0
        self.sleeps = 0
        self._events = sorted(events.items())

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        assert self.sleeps < 1000, "it would wait for ever"
        self.work(seconds)

    def work(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds
        while self._events and self._events[0][0] <= self.seconds:
            self._events.pop(0)[1]()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def write(store: Store, *steps: int) -> None:
    for step in steps:
        store.write(step, {"parameters": {"w": torch.full((2,), float(step))}}, {"step": step})


def damage(store: Store, step: int) -> None:
    (store.path(step) / "values.json").write_bytes(b"")


def followed(
    store: Store, events: Events, patience: Polling, *, scoring_seconds: float = 0.0, **options: Any
) -> list[tuple[float, int]]:
    """The second at which each checkpoint came, and its step; scoring one takes so long."""
    clock = Scripted(events)
    found = []
    for checkpoint in follow(store, patience, clock=clock, **options):
        assert checkpoint.tensors["parameters"]["w"][0] == checkpoint.step
        found.append((clock.seconds, checkpoint.step))
        clock.work(scoring_seconds)
    return found


AT_ONCE = Polling(interval_seconds=0, timeout_seconds=0)


def test_a_time_of_none_looks_once(store: Store) -> None:
    assert followed(store, {}, AT_ONCE) == []
    write(store, 1, 2)
    assert followed(store, {}, AT_ONCE) == [(0, 2)]


def test_each_comes_once_and_the_newest_first(store: Store) -> None:
    write(store, 1, 2)
    events = {5.0: lambda: write(store, 3, 4), 9.0: lambda: write(store, 5)}
    assert followed(store, events, Polling(0, 10)) == [(0, 2), (5, 4), (9, 5)]


def test_between_two_starts_lies_the_interval(store: Store) -> None:
    write(store, 1)
    events = {10.0: lambda: write(store, 2), 20.0: lambda: write(store, 3), 61.0: lambda: write(store, 4)}
    assert followed(store, events, Polling(60, 100), scoring_seconds=15) == [(0, 1), (60, 3), (120, 4)]


def test_a_scoring_longer_than_the_interval_is_followed_at_once(store: Store) -> None:
    write(store, 1)
    assert followed(store, {10.0: lambda: write(store, 2)}, Polling(60, 1), scoring_seconds=90) == [(0, 1), (90, 2)]


def test_the_timeout_counts_from_the_end_of_the_last_scoring(store: Store) -> None:
    write(store, 1)
    events = {29.0: lambda: write(store, 2), 70.0: lambda: write(store, 3)}
    assert followed(store, events, Polling(0, 20), scoring_seconds=10) == [(0, 1), (29, 2)]


def test_a_new_one_outlasts_the_timeout(store: Store) -> None:
    """It is there, and waits for the interval alone."""
    write(store, 1)
    assert followed(store, {5.0: lambda: write(store, 2)}, Polling(60, 10)) == [(0, 1), (60, 2)]


def test_the_last_one_of_a_run_is_scored_before_the_end(store: Store) -> None:
    over: list[bool] = []
    write(store, 1)
    events = {30.0: lambda: (write(store, 9), over.append(True))}
    assert followed(store, events, Polling(60), is_over=lambda: bool(over)) == [(0, 1), (60, 9)]


def test_one_that_is_written_while_the_run_ends_is_not_lost(store: Store) -> None:
    """The question whether the run is over comes before the look at the folder."""

    def end_at_the_question() -> bool:
        write(store, 7)
        return True

    assert followed(store, {}, Polling(), is_over=end_at_the_question) == [(0, 7)]


def test_a_run_is_followed_until_it_is_over(store: Store) -> None:
    answers = [False, False, False, True]
    clock = Scripted({})
    assert list(follow(store, is_over=lambda: answers.pop(0), clock=clock)) == []
    assert (answers, clock.sleeps) == ([], 3)


def test_a_wish_to_stop_ends_it(store: Store) -> None:
    wishes: list[str] = []
    write(store, 1)
    events = {3.0: lambda: (wishes.append("SIGTERM"), write(store, 2))}
    assert followed(store, events, Polling(0), stop=lambda: bool(wishes)) == [(0, 1)]


def test_waiting_is_said_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    followed(store, {2.0: lambda: write(store, 1)}, Polling(0, 5))
    assert caplog.messages == [
        f"waiting for the first checkpoint in {store.folder}",
        f"no new checkpoint in {store.folder} for 5 s",
    ]


def test_a_damaged_one_is_said_once_and_the_next_older_is_taken(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    write(store, 1, 2, 3)
    damage(store, 3)
    assert followed(store, {}, Polling(0, 5)) == [(POLL_SECONDS, 2)]
    said = [message for message in caplog.messages if "damaged" in message]
    assert len(said) == 1
    assert "step-00000003/values.json is damaged. Given: step 3: 0 bytes, not " in said[0]
    assert said[0].endswith("It is not scored.")


def test_behind_a_damaged_one_nothing_is_scored_twice(store: Store) -> None:
    write(store, 1, 2)
    events = {5.0: lambda: (write(store, 3), damage(store, 3)), 8.0: lambda: write(store, 4)}
    assert followed(store, events, Polling(0, 9)) == [(0, 2), (8, 4)]


def test_one_that_is_deleted_before_it_is_read_is_no_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, 1, 2)
    real = store.read

    def read(step: int) -> Any:
        if step == 2:
            shutil.rmtree(store.path(2))
            write(store, 3)
        return real(step)

    monkeypatch.setattr(store, "read", read)
    assert followed(store, {}, Polling(0, 0)) == [(POLL_SECONDS, 3)]


def test_a_checkpoint_deleted_and_written_again_is_new(store: Store) -> None:
    """It fell back, and has skipped a batch: the weights are others."""
    write(store, 1, 9)
    events = {
        2.0: lambda: (shutil.rmtree(store.path(9)), write(store, 5)),
        4.0: lambda: write(store, 9),
    }
    assert followed(store, events, Polling(0, 5)) == [(0, 9), (2, 5), (4, 9)]


def test_one_that_takes_the_place_of_another_is_new(store: Store) -> None:
    """It fell back to step 1, and comes to the steps of the first time again."""
    write(store, 1, 5, 9)
    again = {"parameters": {"w": torch.full((2,), 5.0), "other": torch.zeros(1)}}
    events = {3.0: lambda: store.write(5, again, {}), 6.0: lambda: store.write(5, again, {}, {"top1": 0.5})}
    assert followed(store, events, Polling(0, 8)) == [(0, 9), (3, 5)], "a score alone makes none new"


def test_checkpoints_that_vanish_are_logged(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(store, 1)
    caplog.set_level(logging.INFO, "lockstep")
    events = {
        2.0: lambda: store.folder.rename(tmp_path / "aside"),
        4.0: lambda: shutil.copytree(tmp_path / "aside", store.folder, copy_function=shutil.copyfile),
        6.0: lambda: write(store, 2),
    }
    assert followed(store, events, Polling(0, 8)) == [(0, 1), (6, 2)], "the same ones are no new ones"
    assert caplog.messages[0] == f"the checkpoints in {store.folder} are gone: waiting for others"
    assert caplog.messages[1].startswith("no new checkpoint in ")


def test_an_unknown_format_is_an_error(store: Store) -> None:
    write(store, 1)
    path = store.path(1) / "manifest.json"
    manifest = {**json.loads(path.read_text()), "format": 2}
    del manifest["sha256"]
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**manifest, "sha256": hashlib.sha256(compact.encode()).hexdigest()}))
    with pytest.raises(CheckpointError, match="format"):
        followed(store, {}, AT_ONCE)


@pytest.mark.parametrize("name", ["interval_seconds", "timeout_seconds"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_times_that_are_none(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"{name} is out of range") as raised:
        Polling(**{name: value})
    assert raised.value.given == f"{name}={value}"


def test_real_time_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    before = Clock().now()
    Clock().sleep(0.5)
    assert slept == [0.5]
    assert Clock().now() >= before


class Meanwhile(Clock):
    """One event each time that this worker sleeps, and then none."""

    def __init__(self, events: Iterator[Callable[[], Any]]) -> None:
        self._events = events
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        next(self._events, lambda: None)()


def steps_followed(folder: str, stopping_rank: int | None) -> list[int]:
    here, store = join("cpu"), Store(Path(folder), Retention(newest=1))
    if here.is_chief:
        write(store, 1)
    here.group.barrier("written")
    wishes: list[bool] = []
    events = [
        lambda: write(store, 2) if here.is_chief else None,
        lambda: (write(store, 3), damage(store, 3)) if here.is_chief else None,
        lambda: write(store, 4) if here.is_chief else None,
        lambda: wishes.append(here.rank == stopping_rank),
        lambda: write(store, 5) if here.is_chief else None,
    ]
    patience = Polling(0, 20)
    found = follow(store, patience, clock=Meanwhile(iter(events)), stop=lambda: any(wishes))
    return [checkpoint.step for checkpoint in found]


@pytest.mark.process
@pytest.mark.parametrize(("stopping_rank", "expected"), [(None, [1, 2, 4, 5]), (1, [1, 2, 4])])
def test_all_workers_follow_together(
    run_workers: Callable[..., list[Any]], tmp_path: Path, stopping_rank: int | None, expected: list[int]
) -> None:
    assert run_workers(steps_followed, 2, str(tmp_path / "checkpoints"), stopping_rank) == [expected, expected]


def unreadable_for_one(folder: str) -> list[int]:
    here, store = join("cpu"), Store(Path(folder))
    if here.is_chief:
        write(store, 1, 2)
    here.group.barrier("written")
    if not here.is_chief:
        store.path = lambda step: Path(folder) / ("gone" if step == 2 else f"step-{step:08d}")  # type: ignore[method-assign]
    events = iter([lambda: shutil.rmtree(Path(folder) / "step-00000002") if here.is_chief else None])
    return [checkpoint.step for checkpoint in follow(store, Polling(0, 3), clock=Meanwhile(events))]


@pytest.mark.process
def test_a_checkpoint_gone_for_one_worker_is_skipped_by_all(
    run_workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert run_workers(unreadable_for_one, 2, str(tmp_path / "checkpoints")) == [[1], [1]]
