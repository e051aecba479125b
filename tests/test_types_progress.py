from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep as ls


def at(step: int = 0, position: int = 0, seconds: float = 0.0) -> ls.Progress:
    return ls.Progress(step, position, 100, seconds)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("20 steps", ls.Interval(20)),
        ("1 step", ls.Interval(1)),
        ("600 s", ls.Interval(600, "seconds")),
        ("0.5 epochs", ls.Interval(0.5, "epochs")),
        ("0", ls.Interval(0)),
    ],
)
def test_intervals_are_read(text: str, interval: ls.Interval) -> None:
    assert ls.Interval.parse(text) == interval


@given(st.floats(0, 1e6).map(lambda x: round(x, 3)), st.sampled_from(["steps", "seconds", "epochs"]))
def test_an_interval_reads_its_own_text(amount: float, unit: str) -> None:
    interval = ls.Interval(amount, unit)  # type: ignore[arg-type]
    assert ls.Interval.parse(str(interval)) == interval


@pytest.mark.parametrize("text", ["", "steps", "-1 steps", "10 minutes", "1e3 steps"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ls.InputError, match="is not an interval"):
        ls.Interval.parse(text)


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_an_interval_is_finite_and_not_negative(amount: float) -> None:
    with pytest.raises(ls.InputError, match="finite number, 0 or more"):
        ls.Interval(amount)


def test_an_interval_passes_at_its_multiples() -> None:
    due = [step for step in range(1, 12) if ls.Interval(5).passed(at(step - 1), at(step))]
    assert due == [5, 10]
    assert ls.Interval(2, "seconds").passed(at(seconds=1.9), at(seconds=4.1))
    assert not ls.Interval(2, "seconds").passed(at(seconds=2.1), at(seconds=3.9))
    assert ls.Interval(1, "epochs").passed(at(position=96), at(position=104))
    assert not ls.Interval(0).passed(at(), at(1000))


@pytest.mark.parametrize("end", [ls.Steps, ls.Epochs, ls.Hours])
@pytest.mark.parametrize("count", [0, -3, math.nan])
def test_an_end_of_nothing_is_refused(end: type, count: float) -> None:
    with pytest.raises(ls.InputError, match=r"has no step to do.*\n.*(steps|epochs|hours)"):
        end(count)


def test_ends() -> None:
    assert not ls.Steps(5).reached(at(4), 8)
    assert ls.Steps(5).reached(at(5), 8)
    assert not ls.Epochs(1).reached(at(position=92), 8)
    assert ls.Epochs(1).reached(at(position=96), 8), "a further batch of 8 would pass the 100 examples"
    assert not ls.Hours(1).reached(at(seconds=3599), 8)
    assert ls.Hours(1).reached(at(seconds=3600), 8)
    assert ls.Epochs(30).steps(epoch_size=1000, batch_size=128) == 234


def test_the_rest_of_the_last_epoch_may_be_kept() -> None:
    kept = ls.Epochs(1, keep_last=True)
    assert not kept.reached(at(position=96), 8), "four of the 100 examples are left"
    assert kept.reached(at(position=104), 8)
    assert not kept.reached(at(position=92), 8)
    assert ls.Epochs(1, keep_last=True).reached(at(position=100), 10)
    assert ls.Epochs(1, keep_last=True).steps(epoch_size=100, batch_size=8) == 13
    assert ls.Epochs(2, keep_last=True).steps(epoch_size=100, batch_size=8) == 25
