"""The best and the pinned in a store: scores lie with their checkpoint, and it tells them after every kill."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_helpers import Child, assert_consistent, count_or_kill, sections_of

from lockstep.checkpoints import Retention, Store
from lockstep.checkpoints.manifest import DamagedError, Manifest

TOP1 = "validation/top1"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, Retention(newest=1, best=TOP1))


def save(store: Store, step: int, score: float | None = None, **more: float) -> Path:
    scores = {TOP1: score, **more} if score is not None else None
    return store.write(step, sections_of(step), {"step": step}, scores)


def test_the_best_stays_and_is_told_after_a_resume(store: Store) -> None:
    for step, score in [(0, 0.1), (10, 0.7), (20, 0.9), (30, 0.8), (40, 0.9), (50, None), (60, 0.2)]:
        save(store, step, score)
    assert store.steps() == [20, 60]
    again = Store(store.folder, store.retention)
    assert again.best() == 20
    assert assert_consistent(again.read(again.best())) == 20
    save(again, 70, 0.95)
    assert (again.best(), again.steps()) == (70, [70])


def test_scores_and_by_which_it_was_the_best_are_in_the_manifest(store: Store) -> None:
    body = json.loads((save(store, 10, 0.5, loss=2) / "manifest.json").read_text())
    assert (body["scores"], body["best_by"]) == ({TOP1: 0.5, "loss": 2.0}, TOP1)
    body = json.loads((save(store, 20, 0.25) / "manifest.json").read_text())
    assert (body["scores"], body["best_by"]) == ({TOP1: 0.25}, None)


def test_a_score_may_come_after_the_checkpoint(store: Store) -> None:
    save(store, 10, 0.5)
    path = save(store, 20)
    saved = Manifest.read(path)
    assert store.best() == 10
    save(store, 20, 0.6)
    rated = Manifest.read(path)
    assert (rated.saved_unix_seconds, rated.files) == (saved.saved_unix_seconds, saved.files)
    assert (rated.scores, store.best(), store.steps()) == ({TOP1: 0.6}, 20, [20])
    save(store, 20)
    assert Manifest.read(path) == rated, "who knows no scores takes none away"
    assert assert_consistent(store.read()) == 20


def test_the_older_of_equal_ones_and_a_little_better_one_does_not_matter(tmp_path: Path) -> None:
    store = Store(tmp_path, Retention(newest=1, best=TOP1, min_improvement=0.1))
    for step, score in [(1, 0.5), (2, 0.5), (3, 0.59), (4, 0.58), (5, 0.1)]:
        save(store, step, score)
    assert store.steps() == [1, 5]
    save(store, 6, 0.61)
    assert (store.best(), store.steps()) == (6, [6])


@pytest.mark.slow
@pytest.mark.process
def test_killed_at_any_moment_of_a_rating_the_checkpoint_is_whole(tmp_path: Path) -> None:
    def prepare(name: str) -> tuple[Store, Callable[[], None]]:
        store = Store(tmp_path / name, Retention(newest=1, best=TOP1))
        save(store, 10, 0.5)
        save(store, 20)
        return store, lambda: store.write(20, sections_of(20), {"step": 20}, {TOP1: 0.75})

    ((calls,),) = [Child(count_or_kill, None, prepare("whole")[1]).said()]
    assert calls > 15
    for call in range(1, calls + 1):
        store, set_scores = prepare(str(call))
        child = Child(count_or_kill, call, set_scores)
        assert child.said() == []
        assert child.process.exitcode == -9
        assert assert_consistent(store.read()) == 20
        assert store.best() in (10, 20)
        set_scores()
        assert (store.best(), store.steps()) == (20, [20])


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_none(store: Store, score: float) -> None:
    path = save(store, 10, score, loss=1.0)
    assert store.best() is None
    assert Manifest.read(path).scores == {"loss": 1.0}


def test_later_steps_that_the_run_fell_back_from_do_not_count(store: Store) -> None:
    save(store, 10, 0.5)
    save(store, 40, 0.9)
    store.write(10, sections_of(10), {"step": 10}, {TOP1: 0.5})
    assert store.is_among_best(20, {TOP1: 0.6})
    assert not store.is_among_best(50, {TOP1: 0.6})
    assert not store.is_among_best(20, {"loss": 0.6})


def test_ratings_begin_anew_by_another_score(store: Store) -> None:
    save(store, 10, 0.9, loss=5.0)
    other = Store(store.folder, Retention(newest=1, best="loss", better="lower"))
    assert other.best() is None
    save(other, 20, 0.1, loss=7.0)
    assert (other.best(), other.steps()) == (20, [20])


def test_without_a_score_that_counts_none_is_the_best(tmp_path: Path) -> None:
    store = Store(tmp_path, Retention(newest=1))
    save(store, 10, 0.9)
    save(store, 20, 0.1)
    assert (store.best(), store.steps()) == (None, [20])


def test_a_damaged_best_one_is_not_known_to_be_so(store: Store) -> None:
    path = save(store, 10, 0.9)
    (path / "manifest.json").write_text("{}")
    assert store.best() is None
    save(store, 20, 0.1)
    assert store.best() == 20


def test_what_is_pinned_stays_as_long_as_it_is(store: Store) -> None:
    pin = save(store, 10) / "pinned"
    pin.touch()
    for step in (20, 30):
        save(store, step)
    assert store.steps() == [10, 30]
    pin.unlink()
    save(store, 40)
    assert store.steps() == [40]


def test_a_pin_stays_where_a_damaged_checkpoint_is_replaced(store: Store) -> None:
    path = save(store, 10)
    (path / "pinned").touch()
    (path / "values.json").write_bytes(b"")
    save(store, 10)
    save(store, 20)
    assert store.steps() == [10, 20]


@pytest.mark.parametrize(
    ("scores", "best_by"), [([], None), ({"a": "much"}, None), ({"a": None}, None), ({"a": 1.0}, "b"), ({}, ["a"])]
)
def test_scores_that_no_manifest_has(tmp_path: Path, scores: object, best_by: object) -> None:
    path = save(Store(tmp_path), 10)
    manifest = Manifest.read(path)
    changed = Manifest(10, 0, manifest.files, scores, best_by)  # type: ignore[arg-type]
    (path / "manifest.json").write_bytes(changed.encode())
    with pytest.raises(DamagedError):
        Manifest.read(path)


def test_a_manifest_without_scores_is_read(tmp_path: Path) -> None:
    path = save(Store(tmp_path), 10)
    body = json.loads((path / "manifest.json").read_text())
    for name in ("scores", "best_by", "sha256"):
        del body[name]
    compact = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (path / "manifest.json").write_text(json.dumps(body | {"sha256": hashlib.sha256(compact.encode()).hexdigest()}))
    assert (Manifest.read(path).scores, Manifest.read(path).best_by) == ({}, None)
