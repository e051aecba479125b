"""Learning rates: the reference's tables and torch's numbers, what epochs and batch sizes become, what is refused."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.optim.schedules import (
    Constant,
    Cosine,
    Exponential,
    OneCycle,
    PiecewiseConstant,
    Polynomial,
    Scaled,
    ScaledByBatch,
    Schedule,
    Warmup,
    describe_schedule,
    rate_at,
    resolve_schedule,
)
from lockstep.types import Epochs

IMAGENET = 1_281_167
"""Examples to train on."""
GOLDEN = Path(__file__).parent.parent / "golden" / "update_golden.json.gz"
TENSORFLOW = json.loads(gzip.decompress(GOLDEN.read_bytes()))["schedules"]


def rates(schedule: Schedule, steps: Sequence[int]) -> list[float]:
    return [schedule(step) for step in steps]


@pytest.mark.parametrize("rate", [0.002, 0.01])
def test_a_constant_never_changes(rate: float) -> None:
    assert rates(Constant(rate), [0, 1, 4_000_000]) == [rate] * 3


def of_tensorflow(kind: str, learning_rate: float, decay_steps: int, **other: Any) -> Schedule:
    if kind == "exponential_decay":
        return Exponential(learning_rate, decay_steps, other["decay_rate"], other["staircase"])
    if kind == "polynomial_decay":
        return Polynomial(learning_rate, decay_steps, other["end_learning_rate"], other["power"], other["cycle"])
    return Cosine(learning_rate, decay_steps, final=learning_rate * other["alpha"])


@pytest.mark.parametrize("name", [name for name in TENSORFLOW if not name.startswith("piecewise")])
def test_curves_have_tensorflows_numbers(name: str) -> None:
    recorded = TENSORFLOW[name]
    schedule = of_tensorflow(recorded["kind"], **recorded["kwargs"])
    ours = rates(schedule, range(len(recorded["float64"])))
    assert ours == pytest.approx(recorded["float64"], rel=1e-13, abs=1e-17)


def test_tensorflows_piecewise_constant_switches_a_step_after_its_boundaries() -> None:
    """Object Detection's manual steps switch at the boundary, and so do ours."""
    recorded = TENSORFLOW["piecewise_constant"]
    boundaries = tuple(boundary + 1 for boundary in recorded["kwargs"]["boundaries"])
    schedule = PiecewiseConstant(boundaries, tuple(recorded["kwargs"]["values"]))
    assert rates(schedule, range(len(recorded["float64"]))) == recorded["float64"]


# Exponential


def test_an_exponential_decay_is_counted_from_the_end_of_its_burn_in() -> None:
    schedule = Exponential(1.0, 3, 0.1, burn_in_steps=2, burn_in=0.5, final=0.05)
    assert rates(schedule, range(9)) == [0.5, 0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.05]


@pytest.mark.parametrize("burn_in", [None, 0.0])
def test_a_burn_in_without_a_rate_of_its_own_holds_the_initial_rate(burn_in: float | None) -> None:
    assert rates(Exponential(1.0, 2, 0.5, burn_in_steps=3, burn_in=burn_in), range(6)) == [1.0] * 5 + [0.5]


def test_the_floor_of_an_exponential_decay_lifts_its_burn_in_too() -> None:
    assert Exponential(1.0, 3, 0.1, burn_in_steps=2, burn_in=0.01, final=0.05)(0) == 0.05


def test_an_exponential_decay_goes_in_jumps_or_smoothly() -> None:
    assert rates(Exponential(0.002, 4_000_000, 0.95), [0, 3_999_999, 4_000_000]) == [0.002, 0.002, 0.002 * 0.95]
    smooth = rates(Exponential(1.0, 4, 0.5, staircase=False), [0, 1, 2, 4, 6])
    assert smooth == pytest.approx([1.0, 0.5**0.25, 0.5**0.5, 0.5, 0.5**1.5], rel=1e-15)


@pytest.mark.parametrize(("initial", "batch_size"), [(0.1, 32), (0.1, 256), (0.001, 32)])
def test_inceptions_rate_falls_every_thirty_epochs(initial: float, batch_size: int) -> None:
    schedule = resolve_schedule(Exponential(initial, Epochs(30), 0.16), IMAGENET, batch_size)
    period = int(IMAGENET / batch_size * 30)
    assert schedule == Exponential(initial, period, 0.16)
    falls = rates(schedule, [0, period - 1, period, 2 * period - 1, 2 * period])
    assert falls == pytest.approx([initial] * 2 + [initial * 0.16] * 2 + [initial * 0.16**2], rel=1e-15)


@pytest.mark.parametrize("replicas", [1, 3, 50])
def test_the_batch_over_all_replicas_shortens_the_decay(replicas: int) -> None:
    """The reference divided decay_steps by replicas_to_aggregate; here the batch is the one of all of them."""
    schedule = resolve_schedule(Exponential(0.045, Epochs(2.0), 0.94), IMAGENET, 32 * replicas)
    assert schedule == Exponential(0.045, int(IMAGENET / 32 * 2.0 / replicas), 0.94)


@pytest.mark.parametrize("clones", [1, 4])
def test_slims_epochs_of_one_clone_are_written_as_epochs_times_clones(clones: int) -> None:
    """TF-Slim counted decay_steps in batches of one clone, and so decayed every 2 * clones epochs."""
    schedule = resolve_schedule(Exponential(0.01, Epochs(2.0 * clones), 0.94), IMAGENET, 32 * clones)
    assert schedule == Exponential(0.01, int(IMAGENET / 32 * 2.0), 0.94)


# Polynomial


def test_slims_polynomial_is_a_straight_line_to_its_final_rate() -> None:
    schedule = Polynomial(0.01, 100)
    assert rates(schedule, [0, 25, 50]) == pytest.approx([0.01, 0.007525, 0.00505], rel=1e-12)
    assert rates(schedule, [100, 101, 10**9]) == [1e-4] * 3


def test_a_polynomial_of_a_power() -> None:
    schedule = Polynomial(0.1, 10_000, final=0.01, power=0.5)
    expected = [0.01 + 0.09 * math.sqrt(1 - done) for done in (0.0, 0.19, 0.75, 1.0)]
    assert rates(schedule, [0, 1_900, 7_500, 10_000]) == pytest.approx(expected, rel=1e-12)


def test_a_polynomial_cycle_stretches_to_the_next_multiple() -> None:
    schedule = Polynomial(1.0, 4, final=0.0, cycle=True)
    expected = [1.0, 3 / 4, 2 / 4, 1 / 4, 0.0, 3 / 8, 2 / 8, 1 / 8, 0.0, 3 / 12, 2 / 12, 1 / 12, 0.0, 3 / 16]
    assert rates(schedule, range(14)) == pytest.approx(expected, abs=1e-15)


# Cosine


def test_a_cosine_after_a_warm_up() -> None:
    schedule = Cosine(1.0, 100, warmup_steps=9, warmup_initial=0.1)
    assert rates(schedule, [0, 4, 8, 9]) == pytest.approx([0.1, 0.5, 0.9, 1.0], rel=1e-15)
    assert rates(schedule, [100, 101, 10**6]) == [0.0] * 3


def test_a_cosine_after_a_warm_up_and_a_hold() -> None:
    schedule = Cosine(1.0, 120, warmup_steps=9, warmup_initial=0.1, hold_steps=20)
    steps = [0, 4, 8, 9, 10, 29, 30, 50, 70, 120]
    expected = [0.1, 0.5, 0.9, 1.0, 1.0, 1.0, 0.999702, 0.874255, 0.577365, 0.0]
    assert rates(schedule, steps) == pytest.approx(expected, abs=5e-7)
    assert rates(schedule, [9, 29, 120, 121]) == [1.0, 1.0, 0.0, 0.0]


def test_a_cosine_stays_at_its_final_rate() -> None:
    schedule = Cosine(0.5, 10, final=0.1)
    assert rates(schedule, [0, 10, 11]) == [0.5, 0.1, 0.1]
    assert schedule(5) == pytest.approx(0.3, rel=1e-15)


def test_a_cosine_held_until_its_end_drops_after_it() -> None:
    assert rates(Cosine(0.002, 20, warmup_steps=10, warmup_initial=1e-4, hold_steps=20), [10, 20, 21]) == [
        0.002,
        0.002,
        0.0,
    ]
    assert rates(Cosine(0.1, 4, warmup_steps=4), [2, 4, 5]) == [0.05, 0.1, 0.0]


def test_an_initial_rate_below_that_of_a_warm_up_is_fine_where_there_is_none() -> None:
    assert Cosine(0.1, 10, warmup_initial=0.2)(0) == 0.1


def test_a_cosine_resolves_all_its_lengths() -> None:
    schedule = Cosine(0.1, Epochs(90), warmup_steps=Epochs(5), hold_steps=Epochs(0.5))
    in_steps = Cosine(0.1, 9_000, warmup_steps=500, hold_steps=50)
    assert resolve_schedule(schedule, 1_000, 10) == in_steps


# Piecewise


def test_manual_steps_switch_at_the_boundary() -> None:
    schedule = PiecewiseConstant((2, 3, 7), (1.0, 2.0, 3.0, 4.0))
    assert rates(schedule, range(10)) == [1, 1, 2, 3, 3, 3, 3, 4, 4, 4]


def test_manual_steps_with_a_warm_up() -> None:
    schedule = PiecewiseConstant((4, 6, 8), (0.02, 0.1, 0.01, 0.001), warmup=True)
    expected = [0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.01, 0.01, 0.001]
    assert rates(schedule, range(9)) == pytest.approx(expected, rel=1e-15)


def test_no_boundary_and_one_value_are_a_constant() -> None:
    assert rates(PiecewiseConstant((), (0.01,)), [0, 1, 10**9]) == [0.01] * 3


def test_lists_are_taken_for_tuples() -> None:
    listed = PiecewiseConstant([2, Epochs(3)], [1.0, 2.0, 3.0])  # type: ignore[arg-type]
    assert listed == PiecewiseConstant((2, Epochs(3)), (1.0, 2.0, 3.0))
    assert hash(listed)


def test_boundaries_in_epochs() -> None:
    schedule = PiecewiseConstant((500, Epochs(30), Epochs(60)), (0.05, 0.1, 0.01, 0.001))
    assert resolve_schedule(schedule, 640, 10) == PiecewiseConstant((500, 1_920, 3_840), (0.05, 0.1, 0.01, 0.001))


# One cycle


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
@pytest.mark.parametrize(
    ("steps", "warmup_share", "div_factor", "final_div_factor"),
    [(1, 0.3, 25.0, 1e4), (2, 0.3, 25.0, 1e4), (10, 0.3, 25.0, 1e4), (33, 0.0, 10.0, 1.0), (40, 0.99, 1.0, 100.0)],
)
def test_one_cycle_has_torchs_numbers(
    anneal: Literal["cosine", "linear"], steps: int, warmup_share: float, div_factor: float, final_div_factor: float
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        0.4,
        total_steps=steps,
        pct_start=warmup_share,
        anneal_strategy="cos" if anneal == "cosine" else "linear",
        cycle_momentum=False,
        div_factor=div_factor,
        final_div_factor=final_div_factor,
    )
    expected = [theirs.get_last_lr()[0]]
    for _ in range(steps - 1):
        optimizer.step()
        theirs.step()
        expected.append(theirs.get_last_lr()[0])
    ours = OneCycle(0.4, steps, warmup_share, div_factor, final_div_factor, anneal)
    assert rates(ours, range(steps)) == pytest.approx(expected, rel=1e-12)


def test_one_cycle_has_torchs_defaults_and_stays_at_its_last_rate() -> None:
    schedule = OneCycle(1.0, 11)
    assert schedule(0) == pytest.approx(1 / 25, rel=1e-12)
    assert rates(schedule, [10, 11, 10**9]) == pytest.approx([1 / 25 / 1e4] * 3, rel=1e-15)
    assert OneCycle(1.0, 10)(2) == 1.0


# Around others


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(0.4),
        Exponential(0.4, 3, 0.5),
        Polynomial(0.4, 20),
        Cosine(0.4, 20),
        PiecewiseConstant((2, 6), (0.1, 0.4, 0.2)),
        OneCycle(0.4, 20),
        lambda step: 0.4 / (1 + step),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_warm_up_leads_to_what_the_schedule_has_come_to(schedule: Schedule) -> None:
    warm = Warmup(schedule, 4, initial=0.1)
    reached = schedule(4)
    expected = [0.1 + (reached - 0.1) * step / 4 for step in range(4)]
    assert rates(warm, range(4)) == pytest.approx(expected, rel=1e-12)
    assert rates(warm, range(4, 25)) == rates(schedule, range(4, 25))


def test_a_warm_up_starts_at_zero_and_takes_a_number() -> None:
    assert rates(Warmup(0.4, 4), range(6)) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4], rel=1e-15)


@pytest.mark.parametrize("schedule", [Constant(0.1), 0.1, lambda step: 0.1])
def test_a_rate_follows_the_batch_size(schedule: float | Schedule) -> None:
    scaled = resolve_schedule(ScaledByBatch(schedule, 256), IMAGENET, 512)
    assert scaled == Scaled(schedule, 2.0)
    assert scaled(7) == 0.2
    assert resolve_schedule(ScaledByBatch(schedule, 256), IMAGENET, 64)(7) == 0.025


def test_the_warm_up_of_large_batches() -> None:
    """Goyal et al.: from the rate of the small batch to that of the large one over five epochs."""
    schedule = Warmup(ScaledByBatch(PiecewiseConstant((Epochs(30),), (0.1, 0.01)), 256), Epochs(5), initial=0.1)
    steps = resolve_schedule(schedule, 8_192 * 10, 8_192)
    assert rates(steps, [0, 25, 50, 299, 300]) == pytest.approx([0.1, 1.65, 3.2, 3.2, 0.32], rel=1e-12)


# Resolution


def test_epochs_are_truncated_to_whole_batches() -> None:
    assert resolve_schedule(Cosine(0.1, Epochs(30)), 55_000, 640) == Cosine(0.1, 2_578)
    assert resolve_schedule(Cosine(0.1, Epochs(0.5)), 1_000, 64) == Cosine(0.1, 7)


def test_every_length_is_resolved_at_any_depth() -> None:
    inside = Exponential(0.1, Epochs(2), 0.9, burn_in_steps=Epochs(1))
    schedule = Warmup(ScaledByBatch(Warmup(inside, Epochs(3)), 10), Epochs(4))
    in_steps = Warmup(Scaled(Warmup(Exponential(0.1, 20, 0.9, burn_in_steps=10), 30), 1.0), 40)
    assert resolve_schedule(schedule, 100, 10) == in_steps
    assert resolve_schedule(Polynomial(0.1, Epochs(2)), 100, 10) == Polynomial(0.1, 20)
    assert resolve_schedule(OneCycle(0.1, Epochs(2)), 100, 10) == OneCycle(0.1, 20)


def test_other_callables_stay_as_they_are() -> None:
    def mine(step: int) -> float:
        return 0.1

    assert resolve_schedule(mine, 100, 10) is mine
    assert resolve_schedule(Warmup(mine, Epochs(1)), 100, 10) == Warmup(mine, 10)
    assert describe_schedule(mine, 100, 10) == []


def test_a_number_becomes_a_constant() -> None:
    assert resolve_schedule(0.1, 100, 10) == Constant(0.1)
    assert describe_schedule(0.1, 100, 10) == []


@dataclass(frozen=True)
class Mine:
    period: int | Epochs
    marks: tuple[int, ...] = (1, 2)

    def __call__(self, step: int) -> float:
        return 1.0 / (1 + step % int(str(self.period)))


def test_a_dataclass_of_ones_own_is_resolved_likewise() -> None:
    schedule = resolve_schedule(Mine(Epochs(0.5)), 100, 10)
    assert schedule == Mine(5)
    assert schedule(6) == 0.5
    assert resolve_schedule(schedule, 100, 10) is schedule


def test_a_stream_without_epochs_is_fine_for_lengths_in_steps() -> None:
    assert resolve_schedule(Warmup(Cosine(0.1, 10), 2), 0, 10) == Warmup(Cosine(0.1, 10), 2)


@pytest.mark.parametrize(
    ("schedule", "lines"),
    [
        (Exponential(0.1, Epochs(30), 0.16), ["30 epochs are 2578 steps (55000 examples, batches of 640)"]),
        (Polynomial(0.1, Epochs(1)), ["1 epoch is 85 steps (55000 examples, batches of 640)"]),
        (Polynomial(0.1, Epochs(0.012)), ["0.012 epochs are 1 step (55000 examples, batches of 640)"]),
        (
            PiecewiseConstant((Epochs(30), 100_000), (0.1, 0.01, 0.001)),
            ["30 epochs are 2578 steps (55000 examples, batches of 640)"],
        ),
        (ScaledByBatch(0.1, 256), ["the learning rate 0.1 for batches of 256 is 0.25 for batches of 640"]),
        (
            Warmup(ScaledByBatch(Cosine(0.1, Epochs(30), hold_steps=Epochs(30)), 320), Epochs(5)),
            [
                "the learning rates for batches of 320 are multiplied by 2 for batches of 640",
                "30 epochs are 2578 steps (55000 examples, batches of 640)",
                "5 epochs are 429 steps (55000 examples, batches of 640)",
            ],
        ),
        (Cosine(0.1, 1000, warmup_steps=10), []),
    ],
)
def test_resolving_epochs_of_a_schedule_is_described(schedule: Schedule, lines: list[str]) -> None:
    assert describe_schedule(schedule, 55_000, 640) == lines
    assert describe_schedule(resolve_schedule(schedule, 55_000, 640), 55_000, 640) == []


# What a schedule of the user's own gives


@pytest.mark.parametrize("rate", [0, 0.0, 0.1, 3, float(np.float64(0.1)), np.float64(0.1)])
def test_any_number_of_0_or_more_is_a_rate(rate: float) -> None:
    assert rate_at(lambda step: rate, 5) == rate


@pytest.mark.parametrize("rate", [np.float32(0.1), np.float64(0.1), np.array(3), torch.tensor(0.1), torch.tensor(3)])
def test_a_number_of_numpys_or_torchs_is_a_rate_as_pythons_own(rate: Any) -> None:
    for found in (rate_at(lambda step: rate, 5), rate_at(Scaled(lambda step: rate, 1.0), 5)):
        assert type(found) in (float, int)
        assert found == rate.item()


@pytest.mark.parametrize(
    "wrong",
    [math.nan, math.inf, -0.1, None, "0.1", True, torch.tensor(True), torch.tensor([0.1]), np.float32(-0.1), [0.1]],
    ids=repr,
)
@pytest.mark.parametrize("around", [lambda own: own, lambda own: Warmup(Scaled(own, 1.0), 2)], ids=["alone", "nested"])
def test_what_is_no_rate_is_refused_with_its_step(wrong: Any, around: Callable[[Any], Any]) -> None:
    def sawtooth(step: int) -> Any:
        return wrong if step == 5 else 0.1

    schedule = around(sawtooth)
    assert rate_at(schedule, 4) == 0.1
    with pytest.raises(InputError) as caught:
        rate_at(schedule, 5)
    error = caught.value
    assert error.what == "The learning rate after 5 updates cannot be used."
    assert "sawtooth" in str(error.given)
    assert error.expected == "a finite number, 0 or more"
    assert error.hint == "correct what the schedule returns for step 5: a float or an int"


def test_what_a_schedule_raises_is_said_with_its_step() -> None:
    def faulty(step: int) -> float:
        return [0.1, 0.01][step]

    with pytest.raises(InputError) as caught:
        rate_at(faulty, 2)
    assert caught.value.what == "The learning rate after 2 updates cannot be used."
    assert str(caught.value.given).startswith("IndexError: list index out of range, from ")
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_schedule_that_has_no_steps_yet_says_so_itself() -> None:
    with pytest.raises(InputError, match="This schedule counts in epochs"):
        rate_at(Cosine(0.1, Epochs(4)), 0)


# Refusals

REFUSED: list[tuple[Callable[[], Any], str, str, str]] = [
    (lambda: Constant(-0.1), "value is out of range.", "value=-0.1", "0 or more, finite"),
    (lambda: Constant(math.nan), "value is out of range.", "value=nan", "0 or more, finite"),
    (lambda: Constant("0.1"), "value is of the wrong type.", "value is str", "a number"),  # type: ignore[arg-type]
    (lambda: Constant(True), "value is of the wrong type.", "value is bool", "a number"),
    (lambda: Exponential(-1.0, 3, 0.1), "initial is out of range.", "initial=-1.0", "0 or more, finite"),
    (lambda: Exponential(1.0, 0, 0.1), "decay_steps is out of range.", "decay_steps=0", "1 or more"),
    (
        lambda: Exponential(1.0, 2.5, 0.1),  # type: ignore[arg-type]
        "decay_steps is not a length.",
        "decay_steps=2.5",
        "a whole number of steps, or epochs",
    ),
    (lambda: Exponential(1.0, 3, 0.0), "factor is out of range.", "factor=0.0", "above 0, at most 1"),
    (lambda: Exponential(1.0, 3, 1.5), "factor is out of range.", "factor=1.5", "above 0, at most 1"),
    (
        lambda: Exponential(1.0, 3, 0.1, staircase=2),  # type: ignore[arg-type]
        "staircase is of the wrong type.",
        "staircase is int",
        "True or False",
    ),
    (
        lambda: Exponential(1.0, 3, 0.1, burn_in_steps=-1),
        "burn_in_steps is out of range.",
        "burn_in_steps=-1",
        "0 or more",
    ),
    (lambda: Exponential(1.0, 3, 0.1, burn_in=-1.0), "burn_in is out of range.", "burn_in=-1.0", "0 or more, finite"),
    (
        lambda: Exponential(1.0, 3, 0.1, final=2.0),
        "The rate would start below its floor.",
        "initial=1.0, final=2.0",
        "final <= initial",
    ),
    (lambda: Polynomial(math.inf, 3), "initial is out of range.", "initial=inf", "0 or more, finite"),
    (lambda: Polynomial(0.1, -3), "steps is out of range.", "steps=-3", "1 or more"),
    (lambda: Polynomial(0.1, Epochs(math.inf)), "steps is out of range.", "steps=inf", "finite"),
    (lambda: Polynomial(0.1, 3, final=-1e-4), "final is out of range.", "final=-0.0001", "0 or more, finite"),
    (
        lambda: Polynomial(0.1, 3, power=0.0),
        "power is out of range.",
        "power=0.0",
        "above 0, finite",
    ),
    (
        lambda: Polynomial(0.1, 3, cycle="yes"),  # type: ignore[arg-type]
        "cycle is of the wrong type.",
        "cycle is str",
        "True or False",
    ),
    (lambda: Cosine(0.1, 0), "steps is out of range.", "steps=0", "1 or more"),
    (lambda: Cosine(0.1, True), "steps is not a length.", "steps=True", "a whole number of steps, or epochs"),
    (lambda: Cosine(0.1, 9, hold_steps=-1), "hold_steps is out of range.", "hold_steps=-1", "0 or more"),
    (
        lambda: Cosine(0.1, 10, warmup_steps=11),
        "The warm-up is longer than the whole schedule.",
        "steps=10, warmup_steps=11",
        "warmup_steps <= steps",
    ),
    (
        lambda: Cosine(0.1, Epochs(3), warmup_steps=Epochs(5)),
        "The warm-up is longer than the whole schedule.",
        "steps=3 epochs, warmup_steps=5 epochs",
        "warmup_steps <= steps",
    ),
    (
        lambda: Cosine(0.1, 10, warmup_steps=2, warmup_initial=0.2),
        "The warm-up would fall instead of rise.",
        "initial=0.1, warmup_initial=0.2",
        "warmup_initial <= initial",
    ),
    (
        lambda: PiecewiseConstant((), ()),
        "There is one value before the first boundary, and one after each.",
        "0 boundaries, 0 values",
        "1 values",
    ),
    (
        lambda: PiecewiseConstant((2, 3), (0.1, 0.2)),
        "There is one value before the first boundary, and one after each.",
        "2 boundaries, 2 values",
        "3 values",
    ),
    (
        lambda: PiecewiseConstant(5, (0.1,)),  # type: ignore[arg-type]
        "boundaries is of the wrong type.",
        "boundaries is int",
        "a list",
    ),
    (
        lambda: PiecewiseConstant((0,), (0.1, 0.2)),
        "boundaries[0] is out of range.",
        "boundaries[0]=0",
        "1 or more",
    ),
    (
        lambda: PiecewiseConstant((2, -3), (0.1, 0.2, 0.3)),
        "boundaries[1] is out of range.",
        "boundaries[1]=-3",
        "1 or more",
    ),
    (
        lambda: PiecewiseConstant((2.0,), (0.1, 0.2)),  # type: ignore[arg-type]
        "boundaries[0] is not a length.",
        "boundaries[0]=2.0",
        "a whole number of steps, or epochs",
    ),
    (
        lambda: PiecewiseConstant((4, 2), (0.1, 0.2, 0.3)),
        "The boundaries do not rise.",
        "boundaries=4, 2",
        "each later than the one before",
    ),
    (
        lambda: PiecewiseConstant((Epochs(3), Epochs(3)), (0.1, 0.2, 0.3)),
        "The boundaries do not rise.",
        "boundaries=3 epochs, 3 epochs",
        "each later than the one before",
    ),
    (
        lambda: PiecewiseConstant((2,), (0.1, "0.2")),  # type: ignore[arg-type]
        "values[1] is of the wrong type.",
        "values[1] is str",
        "a number",
    ),
    (
        lambda: PiecewiseConstant((2,), (0.1, 0.2), warmup=500),  # type: ignore[arg-type]
        "warmup is of the wrong type.",
        "warmup is int",
        "True or False",
    ),
    (
        lambda: PiecewiseConstant((), (0.1,), warmup=True),
        "A warm-up leads up to the first boundary, and there is none.",
        "warmup=True, no boundaries",
        "a boundary",
    ),
    (lambda: OneCycle(-0.1, 10), "peak is out of range.", "peak=-0.1", "0 or more, finite"),
    (lambda: OneCycle(0.1, 0), "steps is out of range.", "steps=0", "1 or more"),
    (lambda: OneCycle(0.1, 10, 1.0), "warmup_share is out of range.", "warmup_share=1.0", "0 or more, below 1"),
    (
        lambda: OneCycle(0.1, 10, div_factor=0.5),
        "div_factor is out of range.",
        "div_factor=0.5",
        "1 or more, finite",
    ),
    (
        lambda: OneCycle(0.1, 10, final_div_factor=0.0),
        "final_div_factor is out of range.",
        "final_div_factor=0.0",
        "1 or more, finite",
    ),
    (
        lambda: OneCycle(0.1, 10, anneal="cos"),  # type: ignore[arg-type]
        "anneal cannot be 'cos'.",
        "anneal='cos'",
        "'cosine' or 'linear'",
    ),
    (lambda: Warmup(0.1, 0), "steps is out of range.", "steps=0", "1 or more"),
    (lambda: Warmup(0.1, 5, initial=-1), "initial is out of range.", "initial=-1", "0 or more, finite"),
    (lambda: Warmup(-0.1, 5), "schedule is out of range.", "schedule=-0.1", "0 or more, finite"),
    (
        lambda: Warmup("cosine", 5),  # type: ignore[arg-type]
        "schedule is of the wrong type.",
        "schedule is str",
        "a number or a schedule",
    ),
    (
        lambda: ScaledByBatch(Constant, 256),  # type: ignore[arg-type]
        "schedule is of the wrong type.",
        "schedule is the class Constant",
        "a number or a schedule",
    ),
    (
        lambda: ScaledByBatch(0.1, 0),
        "base_batch_size is out of range.",
        "base_batch_size=0",
        "1 or more",
    ),
    (
        lambda: ScaledByBatch(0.1, 25.6),  # type: ignore[arg-type]
        "base_batch_size is of the wrong type.",
        "base_batch_size is float",
        "a whole number",
    ),
    (
        lambda: ScaledByBatch(0.1, True),
        "base_batch_size is of the wrong type.",
        "base_batch_size is bool",
        "a whole number",
    ),
    (lambda: Scaled(0.1, -2.0), "factor is out of range.", "factor=-2.0", "0 or more, finite"),
    (lambda: resolve_schedule(0.1, -1, 10), "epoch_size is out of range.", "epoch_size=-1", "0 or more"),
    (lambda: resolve_schedule(0.1, 100, 0), "batch_size is out of range.", "batch_size=0", "1 or more"),
    (lambda: describe_schedule(0.1, 100, 0), "batch_size is out of range.", "batch_size=0", "1 or more"),
    (
        lambda: resolve_schedule(Warmup(0.1, Epochs(0.5)), 100, 64),
        "steps is shorter than one step.",
        "steps=0.5 epochs (100 examples, batches of 64)",
        "at least one whole batch",
    ),
    (
        lambda: describe_schedule(Cosine(0.1, Epochs(3)), 0, 64),
        "steps is shorter than one step.",
        "steps=3 epochs (0 examples, batches of 64)",
        "at least one whole batch",
    ),
    (
        lambda: resolve_schedule(Cosine(0.1, Epochs(3), warmup_steps=31), 100, 10),
        "The warm-up is longer than the whole schedule.",
        "steps=30, warmup_steps=31 (100 examples, batches of 10)",
        "warmup_steps <= steps",
    ),
    (
        lambda: resolve_schedule(Warmup(PiecewiseConstant((Epochs(3), 20), (1, 2, 3)), 5), 100, 10),
        "The boundaries do not rise.",
        "boundaries=30, 20 (100 examples, batches of 10)",
        "each later than the one before",
    ),
    (
        lambda: Cosine(0.1, Epochs(4))(0),
        "This schedule counts in epochs, and was asked for the rate at a step.",
        "steps=4 epochs",
        "a number of steps",
    ),
    (
        lambda: PiecewiseConstant((Epochs(4),), (1, 2))(0),
        "This schedule counts in epochs, and was asked for the rate at a step.",
        "boundaries=4 epochs",
        "a number of steps",
    ),
    (
        lambda: ScaledByBatch(0.1, 256)(0),
        "This schedule is scaled by the batch size, and was asked for the rate without one.",
        "base_batch_size=256",
        "a resolved schedule",
    ),
]


HINTS = {
    "value is of the wrong type.": "give value as a number",
    "values[1] is of the wrong type.": "give values[1] as a number",
    "decay_steps is not a length.": "write it as decay_steps=1000, or as decay_steps=ls.Epochs(30)",
    "steps is not a length.": "write it as steps=1000, or as steps=ls.Epochs(30)",
    "boundaries[0] is not a length.": "write it as boundaries[0]=1000, or as boundaries[0]=ls.Epochs(30)",
    "staircase is of the wrong type.": "write staircase=True, or leave it out",
    "cycle is of the wrong type.": "write cycle=True, or leave it out",
    "warmup is of the wrong type.": "write warmup=True, or leave it out",
    "boundaries is of the wrong type.": "write boundaries=(5,)",
    "schedule is of the wrong type.": "write schedule=0.1, or schedule=ls.optim.Cosine(0.1, 1000)",
    "base_batch_size is of the wrong type.": "give base_batch_size as a whole number",
    "anneal cannot be 'cos'.": "give one of these",
    "factor=0.0": "give what the rate is multiplied by, such as 0.94",
    "factor=1.5": "give what the rate is multiplied by, such as 0.94",
    "The rate would start below its floor.": "lower final, or leave it out",
    "power=0.0": "give power=1.0 for a straight line, or a number as the rate",
    "The warm-up is longer than the whole schedule.": "raise steps or lower warmup_steps",
    "The warm-up would fall instead of rise.": "lower warmup_initial, or leave the warm-up out",
    "There is one value before the first boundary, and one after each.": (
        "add the values that are missing, or take away those that are too many"
    ),
    "The boundaries do not rise.": "sort them, with their values, and leave out those that stand twice",
    "A warm-up leads up to the first boundary, and there is none.": (
        "give a boundary and two values, or leave warmup out"
    ),
    "steps is shorter than one step.": "raise steps, or give it as a number of steps",
    "This schedule is scaled by the batch size, and was asked for the rate without one.": (
        "call resolve_schedule(schedule, epoch_size, batch_size) first"
    ),
}
RANGE, LENGTH = " is out of range.", "This schedule counts in epochs, and was asked for the rate at a step."


def hint_of(what: str, given_value: str) -> str:
    if given_value in HINTS:
        return HINTS[given_value]
    if what.endswith(RANGE):
        return f"give {what.removesuffix(RANGE)} a value in this range"
    if what == LENGTH:
        name = given_value.split("=")[0]
        return f"call resolve_schedule(schedule, epoch_size, batch_size) first, or give {name} as a number of steps"
    return HINTS[what]


@pytest.mark.parametrize(("make", "what", "given_value", "expected"), REFUSED)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], what: str, given_value: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    error = caught.value
    assert (error.what, error.given, error.expected) == (what, given_value, expected)
    assert error.hint == hint_of(what, given_value)


# For all of them

some_rates = st.floats(0.0, 1e6)
lengths = st.integers(1, 10_000) | st.builds(Epochs, st.floats(0.01, 300.0))
short = st.integers(0, 10) | st.builds(Epochs, st.floats(0.001, 0.01))
warmup_and_length = st.tuples(st.integers(0, 10), st.integers(10, 10_000)) | st.tuples(
    st.builds(Epochs, st.floats(0.001, 0.01)), st.builds(Epochs, st.floats(0.01, 300.0))
)
EPOCH_SIZE = 100_000


@st.composite
def exponentials(draw: st.DrawFn) -> Exponential:
    final, initial = sorted([draw(some_rates), draw(some_rates)])
    return Exponential(
        initial,
        draw(lengths),
        draw(st.floats(0.0, 1.0, exclude_min=True)),
        draw(st.booleans()),
        draw(short),
        draw(st.none() | some_rates),
        final,
    )


@st.composite
def cosines(draw: st.DrawFn) -> Cosine:
    warmup_initial, initial = sorted([draw(some_rates), draw(some_rates)])
    warmup_steps, steps = draw(warmup_and_length)
    return Cosine(initial, steps, warmup_steps, draw(some_rates), warmup_initial, draw(short | lengths))


@st.composite
def piecewise(draw: st.DrawFn) -> PiecewiseConstant:
    boundaries = sorted(draw(st.sets(st.integers(1, 10_000), max_size=4)))
    values = draw(st.lists(some_rates, min_size=len(boundaries) + 1, max_size=len(boundaries) + 1))
    in_epochs: list[int | Epochs] = [Epochs(boundary / 100) for boundary in boundaries]
    return PiecewiseConstant(
        tuple(draw(st.sampled_from([boundaries, in_epochs]))),
        tuple(values),
        warmup=bool(boundaries) and draw(st.booleans()),
    )


simple = st.one_of(
    st.builds(Constant, some_rates),
    exponentials(),
    st.builds(Polynomial, some_rates, lengths, some_rates, st.floats(0.01, 10.0), st.booleans()),
    cosines(),
    piecewise(),
    st.builds(
        OneCycle,
        some_rates,
        lengths,
        st.floats(0.0, 1.0, exclude_max=True),
        st.floats(1.0, 1e6),
        st.floats(1.0, 1e6),
        st.sampled_from(["cosine", "linear"]),
    ),
)
any_schedule = st.recursive(
    simple,
    lambda inner: (
        st.builds(Warmup, inner | some_rates, lengths, some_rates)
        | st.builds(ScaledByBatch, inner | some_rates, st.integers(1, 10_000))
    ),
    max_leaves=3,
)


@settings(max_examples=50, deadline=None)
@given(schedule=any_schedule, batch_size=st.integers(1, 100), step=st.integers(0, 20_000) | st.integers(0, 10**15))
def test_every_rate_is_finite_and_not_negative(schedule: Schedule, batch_size: int, step: int) -> None:
    in_steps = resolve_schedule(schedule, EPOCH_SIZE, batch_size)
    for at in (0, 1, step):
        assert 0.0 <= in_steps(at) < math.inf


@settings(max_examples=50, deadline=None)
@given(schedule=any_schedule, batch_size=st.integers(1, 100), other=st.integers(1, 100))
def test_a_resolved_schedule_stays_as_it_is(schedule: Schedule, batch_size: int, other: int) -> None:
    once = resolve_schedule(schedule, EPOCH_SIZE, batch_size)
    assert resolve_schedule(once, EPOCH_SIZE, batch_size) is once
    assert resolve_schedule(once, EPOCH_SIZE, other) is once
    assert describe_schedule(once, EPOCH_SIZE, batch_size) == []
