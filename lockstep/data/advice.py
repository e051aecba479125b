"""Find the bottleneck of a run from the measured throughput, and advise what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.data.input_benchmark import Measured
from lockstep.tracing import INPUT_STAGES

Limit = Literal["step", "both", "handing over", "read", "decode", "augment", "collate"]

_EVEN = 1.1
"""Rates are about even up to this ratio; a loader should be faster than the step by as much."""
_FULL = 0.5
"""From this mean queue fill on, prefetched batches wait for the trainer's process."""
_POOR = 0.6
"""Readers that together give less than this share of what they would give alone hinder each other."""
_FROM_STORAGE = 0.8
"""Storage matters where the loader gives less than this share of what it gives from memory."""

_HINTS: Mapping[Limit, tuple[str, ...]] = {
    "read": (
        "Files of records, or tar shards, read faster than a file for each example: lockstep convert.",
        "A local disk reads faster than one over a network.",
    ),
    "decode": ("Images that were made smaller once and for all decode faster: lockstep convert prepare.",),
    "augment": ("Smaller images, or fewer augmentations; what changes colours can run on the step's device.",),
    "collate": ("Smaller images make smaller batches to copy.",),
    "handing over": ("Smaller images make smaller batches to take over and to copy to the device.",),
}


@dataclass(frozen=True)
class Advice:
    """The bottleneck of a run, and what to change."""

    limit: Limit
    """The training step, or the slowest stage of the input; "both" where step and input are about even."""
    verdict: str
    """The bottleneck in a sentence or two, with the numbers."""
    changes: tuple[str, ...]
    """Sentences: what would make the run faster, the most effective first, and what else is worth knowing."""


def advise(measured: Measured) -> Advice:
    """Find the bottleneck of this input, and of this step if there is one."""
    limit = _limit(measured)
    changes = _for_the_step(measured) if limit == "step" else _for_the_input(measured, _slowest(measured))
    notes = [*_from_storage(measured), *_on_the_same_cores(measured)]
    return Advice(limit, _verdict(measured, limit), (*changes, *notes))


def _limit(measured: Measured) -> Limit:
    if measured.step is None:
        return _slowest(measured)
    ratio = measured.loader.examples_per_second / measured.step.examples_per_second
    if ratio >= _EVEN:
        return "step"
    return "both" if ratio > 1 / _EVEN else _slowest(measured)


def _slowest(measured: Measured) -> Limit:
    """Find the slowest stage of the input."""
    loader = measured.loader
    if loader.queue_fill is not None and loader.queue_fill >= _FULL:
        return "handing over"
    return max(INPUT_STAGES, key=loader.share)


def _verdict(measured: Measured, limit: Limit) -> str:
    loader = measured.loader.examples_per_second
    if measured.step is None:
        return f"The input gives {_rate(loader)} examples/s: {_of_the_input(measured, _slowest(measured))}."
    given = f"The input gives {_rate(loader)} examples/s, the step takes {_rate(measured.step.examples_per_second)}"
    if limit == "step":
        return f"{given}: the step is the limit."
    if limit == "both":
        return f"{given}: they are about even. Of the input, {_of_the_input(measured, _slowest(measured))}."
    return f"{given}: the input is the limit, and of it {_of_the_input(measured, limit)}."


def _of_the_input(measured: Measured, slowest: Limit) -> str:
    if slowest == "handing over":
        fill = measured.loader.queue_fill or 0.0
        return f"handing over is the limit (what is read ahead is there, {_percent(fill)} of it, and has to wait)"
    whose = "the loader's time" if measured.num_readers else "the time to make a batch"
    return f"{slowest} is the limit ({_percent(measured.loader.share(slowest))} of {whose})"


def _for_the_step(measured: Measured) -> Iterator[str]:
    enough = _readers_for_the_step(measured)
    if enough < measured.num_readers:
        yield f"{_readers(measured, enough)} {'is' if enough == 1 else 'are'} enough: {_flag(measured, enough)}."
    yield "A faster step, or more devices, makes the run faster; a faster input does not."


def _for_the_input(measured: Measured, slowest: Limit) -> Iterator[str]:
    if measured.in_memory:
        yield "The examples lie in memory, and the training process reads them itself: large batches cost it least."
        yield from _HINTS[slowest] if slowest != "read" else ()
        return
    if slowest != "handing over":
        yield _more_readers(measured)
        yield from _hindered(measured)
    yield from _HINTS[slowest]
    if slowest in ("collate", "handing over") and measured.num_readers and not measured.threads:
        yield f"Threads hand over batches without a copy: --threads {measured.num_readers}."


def _more_readers(measured: Measured) -> str:
    """Say whether more readers would help."""
    # The training process keeps one core busy.
    idle = measured.num_cores - 1 - measured.num_readers
    if idle <= 0:
        return f"No core is idle ({measured.num_cores} in all): more {_kind(measured, 2)} would not help."
    number = measured.num_readers + idle
    if measured.step:
        number = min(number, max(measured.num_readers + 1, _readers_for_the_step(measured)))
    cores = "core is" if idle == 1 else "cores are"
    return f"More {_kind(measured, 2)}, for {idle} {cores} idle: {_flag(measured, number)}."


def _hindered(measured: Measured) -> Iterator[str]:
    times = measured.loader.examples_per_second / measured.alone.examples_per_second
    if measured.num_readers > 1 and times < _POOR * measured.num_readers:
        yield (
            f"{_readers(measured, measured.num_readers)} give {times:.1f} times what one process gives alone: "
            "something keeps the cores busy, or they are fewer than they seem."
        )


def _from_storage(measured: Measured) -> Iterator[str]:
    """Say what the loader gives while its files are not in memory, if that is less than is needed."""
    first, again = measured.first_read, measured.read
    longer = max(0.0, 1 / first.examples_per_second - 1 / again.examples_per_second)
    loader = measured.loader.examples_per_second
    from_storage = 1 / (1 / loader + longer / max(1, measured.num_readers))
    needed = loader if measured.step is None else min(loader, measured.step.examples_per_second)
    if from_storage < _FROM_STORAGE * needed:
        yield (
            f"Read for the first time, examples came at {_rate(first.examples_per_second)} a second, and at "
            f"{_rate(again.examples_per_second)} again: until they lie in memory, the input gives about "
            f"{_rate(from_storage)}, and storage is the limit. If they never fit in, a local disk helps, or an order "
            "in blocks (BlockShuffled)."
        )


def _on_the_same_cores(measured: Measured) -> Iterator[str]:
    if measured.step and measured.step_on_cpu and measured.num_readers:
        yield "The step was measured alone, and computes on the cores that the loader needs: together both are slower."


def _readers_for_the_step(measured: Measured) -> int:
    """Compute how many readers the step needs, if each gives what it gives now."""
    if measured.step is None:
        return measured.num_readers
    each = measured.loader.examples_per_second / max(1, measured.num_readers)
    return math.ceil(_EVEN * measured.step.examples_per_second / each)


def _kind(measured: Measured, number: int) -> str:
    if measured.threads:
        return "loader thread" if number == 1 else "loader threads"
    return "loader process" if number == 1 else "loader processes"


def _readers(measured: Measured, number: int) -> str:
    return f"{number} {_kind(measured, number)}"


def _flag(measured: Measured, number: int) -> str:
    name = "threads" if measured.threads else "processes"
    return f"--{name} {number}, in a recipe feed.num_{name}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
