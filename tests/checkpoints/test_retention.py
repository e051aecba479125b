from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoints import Retention
from lockstep.errors import InputError

HOUR = 3600.0


def every(hours: float, steps: range) -> dict[int, float]:
    return {step: hours * HOUR * i for i, step in enumerate(steps)}


@pytest.mark.parametrize(
    ("retention", "saved", "surplus"),
    [
        (Retention(), {}, []),
        (Retention(), every(1, range(5)), []),
        (Retention(), every(1, range(7)), [0, 1]),
        (Retention(newest=1), every(1, range(3)), [0, 1]),
        (Retention(newest=1, every_hours=1.0), every(1, range(4)), []),
        (Retention(newest=1, every_hours=2.0), every(1, range(6)), [1, 3]),
        (Retention(newest=2, every_hours=2.0), every(1, range(6)), [1, 3]),
        (Retention(newest=2, every_hours=0.5), every(0.2, range(8)), [1, 2, 4, 5]),
        (Retention(newest=2, every_hours=100.0), every(1, range(5)), [1, 2]),
    ],
)
def test_surplus_checkpoints_are_those_that_retention_drops(
    retention: Retention, saved: dict[int, float], surplus: list[int]
) -> None:
    assert retention.surplus(saved) == surplus


def test_a_clock_that_was_set_back_costs_no_later_checkpoint() -> None:
    """Times of next year must not make all of this year's too early to be kept."""
    saved = {0: 1e12, 10: 1e12 + 60, 20: 1 * HOUR, 30: 2 * HOUR, 40: 3 * HOUR, 50: 3 * HOUR}
    assert Retention(newest=1, every_hours=2.0).surplus(saved) == [10, 30]


@settings(max_examples=50)
@given(
    st.integers(1, 4),
    st.none() | st.floats(0.1, 50),
    st.dictionaries(st.integers(0, 1000), st.floats(0, 100 * HOUR), max_size=15),
)
def test_the_newest_stay_and_a_second_look_finds_nothing(newest, every_hours, saved) -> None:
    retention = Retention(newest, every_hours)
    surplus = retention.surplus(saved)
    assert not set(surplus) & set(sorted(saved)[-newest:])
    assert surplus == sorted(surplus)
    left = {step: seconds for step, seconds in saved.items() if step not in surplus}
    assert retention.surplus(left) == []


@pytest.mark.parametrize("newest", [0, -1])
def test_a_retention_of_no_checkpoint_is_refused(newest: int) -> None:
    with pytest.raises(InputError) as raised:
        Retention(newest=newest)
    assert str(raised.value) == (
        "newest is out of range.\n"
        f"  given:    newest={newest}\n"
        "  expected: 1 or more\n"
        "  hint:     keep at least one: a run without checkpoints cannot be resumed"
    )


@pytest.mark.parametrize("hours", [0.0, -1.0, math.nan])
def test_hours_that_are_none(hours: float) -> None:
    with pytest.raises(InputError) as raised:
        Retention(every_hours=hours)
    assert str(raised.value) == (
        "every_hours is out of range.\n"
        f"  given:    every_hours={hours}\n"
        "  expected: above 0\n"
        "  hint:     give the hours between two of them, or None to keep the newest alone"
    )


# The best -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retention", "score", "scores", "expected"),
    [
        (Retention(best="a"), 0.1, {}, True),
        (Retention(best="a"), 0.6, {1: 0.5}, True),
        (Retention(best="a"), 0.5, {1: 0.5}, False),
        (Retention(best="a"), 0.4, {1: 0.5}, False),
        (Retention(best="a", better="lower"), 0.4, {1: 0.5}, True),
        (Retention(best="a", better="lower"), 0.5, {1: 0.5}, False),
        (Retention(best="a", better="lower"), 0.6, {1: 0.5}, False),
        (Retention(best="a", min_improvement=0.25), 0.75, {1: 0.5}, False),
        (Retention(best="a", min_improvement=0.25), 0.76, {1: 0.5}, True),
        (Retention(best="a", min_improvement=0.25, better="lower"), 0.25, {1: 0.5}, False),
        (Retention(best="a", min_improvement=0.25, better="lower"), 0.24, {1: 0.5}, True),
        (Retention(best="a", keep_best=3), 0.1, {1: 0.5, 2: 0.6}, True),
        (Retention(best="a", keep_best=2), 0.55, {1: 0.5, 2: 0.6}, True),
        (Retention(best="a", keep_best=2), 0.45, {1: 0.4, 2: 0.5, 3: 0.6}, False),
        (Retention(best="a"), math.nan, {}, False),
        (Retention(best="a"), math.inf, {1: 0.5}, False),
        (Retention(best="a", better="lower"), -math.inf, {}, False),
    ],
)
def test_who_is_among_the_best(retention: Retention, score: float, scores: dict[int, float], expected: bool) -> None:
    assert retention.is_among_best(score, scores) is expected


def test_equal_scores_keep_the_older_checkpoint() -> None:
    scores = {3: 0.5, 1: 0.5, 2: 0.7, 4: 0.3}
    assert Retention(best="a").ranked(scores) == [2, 1, 3, 4]
    assert Retention(best="a", better="lower").ranked(scores) == [4, 1, 3, 2]


@pytest.mark.parametrize(
    ("retention", "scores", "pinned", "surplus"),
    [
        (Retention(newest=1, best="a"), {0: 0.1, 1: 0.3, 2: 0.2}, [], [0, 2, 3]),
        (Retention(newest=1, best="a", keep_best=2), {0: 0.1, 1: 0.3, 2: 0.2}, [], [0, 3]),
        (Retention(newest=1, best="a", better="lower"), {0: 0.1, 1: 0.3, 2: 0.2}, [], [1, 2, 3]),
        (Retention(newest=1, best="a"), {4: 0.1}, [2, 7], [0, 1, 3]),
        (Retention(newest=1), {}, [0, 3], [1, 2]),
        (Retention(newest=1, every_hours=2.0, best="a"), {1: 0.1}, [], [3]),
    ],
)
def test_what_is_best_or_pinned_stays(
    retention: Retention, scores: dict[int, float], pinned: list[int], surplus: list[int]
) -> None:
    assert retention.surplus(every(1, range(5)), scores, pinned) == surplus


@settings(max_examples=50)
@given(
    st.builds(
        Retention,
        newest=st.integers(1, 3),
        every_hours=st.none() | st.floats(1, 50),
        best=st.just("a"),
        better=st.sampled_from(["higher", "lower"]),
        keep_best=st.integers(1, 3),
        min_improvement=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    ),
    st.lists(st.none() | st.integers(0, 9).map(float), max_size=25),
    st.sets(st.integers(0, 25)),
)
def test_a_run_keeps_the_best_of_all_that_it_has_had(
    retention: Retention, history: list[float | None], pinned: set[int]
) -> None:
    """What is deleted on the way is not missed: the best are those of one who remembers everything."""
    sign = 1.0 if retention.better == "higher" else -1.0
    remembered: list[tuple[float, int]] = []
    there: dict[int, float] = {}
    scores: dict[int, float] = {}
    for step, score in enumerate(history):
        there[step] = step * HOUR
        if score is not None:
            worth = sign * score
            if len(remembered) < retention.keep_best:
                remembered.append((worth, -step))
            elif worth > min(remembered)[0] + retention.min_improvement:
                remembered[remembered.index(min(remembered))] = worth, -step
            if retention.is_among_best(score, scores):
                scores[step] = score
        for gone in retention.surplus(there, scores, pinned):
            del there[gone]
            scores.pop(gone, None)
        assert retention.surplus(there, scores, pinned) == []
        best = {-negative for _, negative in remembered}
        assert set(retention.ranked(scores)[: retention.keep_best]) == best
        assert best | ({*range(step + 1)} & pinned) | {*range(max(0, step + 1 - retention.newest), step + 1)} <= {
            *there
        }
    if retention.min_improvement == 0:
        scored = sorted((-sign * score, step) for step, score in enumerate(history) if score is not None)
        assert {-negative for _, negative in remembered} == {step for _, step in scored[: retention.keep_best]}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("better", "larger", "better cannot be 'larger'"),
        ("keep_best", 0, "keep_best is out of range"),
        ("keep_best", 1.5, "keep_best is of the wrong type"),
        ("min_improvement", -0.1, "min_improvement is out of range"),
        ("min_improvement", math.nan, "min_improvement is out of range"),
        ("min_improvement", math.inf, "min_improvement is out of range"),
    ],
)
def test_what_cannot_be_kept_by(field: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Retention(best="a", **{field: value})  # type: ignore[arg-type]
