"""Measure training steps with larger and larger batches, until the memory is not enough for the next one.

It is measured and told, and no run takes another batch size by itself: the batch is a property of the experiment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lockstep.cli.input_benchmark import copy_of_loader, time_step
from lockstep.errors import InputError
from lockstep.recipes.data import DetectionData
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts
from lockstep.runs.objects import BATCHES_AT_ONCE, check_objects, copied_to, largest, largest_batch
from lockstep.screen import log
from lockstep.training.memory import forget_peak, is_lack_of_memory, peak_bytes, usable_bytes
from lockstep.training.step import bind
from lockstep.types import Batch
from lockstep.workers.devices import describe_machine

_SAFE = 0.9
"""Share of a CPU's memory that a batch may be expected to need: beyond it the system would end the process."""
_STEP_SECONDS, _STEP_SHARE = 1.0, 1 / 30
"""How long the steps of one size are measured, and as a share of all the time at most."""
_ABOUT_AS_FAST = 0.95
_FINEST = 8
"""Between a batch that fits and one that does not others are tried, while they differ by more than this part of it."""


@dataclass(frozen=True)
class Measurement:
    """Steps with batches of one size."""

    batch_size: int
    seconds: float
    peak_bytes: int
    """The most memory in use in these steps: of an accelerator what tensors took, on a CPU what the process held."""

    @property
    def rate(self) -> float:
        """Examples a second."""
        return self.batch_size / self.seconds


@dataclass(frozen=True)
class Sweep:
    """What was measured of a recipe, from the smallest batch on."""

    model: str
    machine: str
    batch_size: int
    """The one that the recipe has."""
    num_towers: int
    usable_bytes: int
    """The memory that there is."""
    sizes: tuple[Measurement, ...]
    ended: str
    """Why no larger batch was measured, in a sentence."""

    @property
    def verdict(self) -> str:
        """The largest batch, and the smallest that is about as fast as the fastest, in two sentences."""
        last, best = self.sizes[-1], max(self.sizes, key=lambda each: each.rate)
        enough = next(each for each in self.sizes if each.rate >= _ABOUT_AS_FAST * best.rate)
        towers = f"{self.num_towers} towers of {last.batch_size // self.num_towers}"
        of_towers = f", {towers}" if self.num_towers > 1 else ""
        return (
            f"The largest batch measured: {last.batch_size} examples{of_towers}. {enough.batch_size} examples are "
            f"within {100 * (1 - _ABOUT_AS_FAST):.0f} % of the best speed."
        )

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON."""
        sizes = [{**asdict(each), "examples_per_second": each.rate} for each in self.sizes]
        return {**asdict(self), "sizes": sizes, "largest": self.sizes[-1].batch_size, "verdict": self.verdict}


def with_largest_images(recipe: Recipe) -> Recipe:
    """Return a recipe of stages without them, and with the images of the stage that has the largest."""
    sizes = [stage.image_size for stage in recipe.stages if stage.image_size is not None]
    largest_size = max([recipe.data.image_size, *sizes]) if sizes else None
    data = recipe.data.resized(largest_size, "image_size") if largest_size else recipe.data
    return replace(recipe, data=data, stages=())


def measure_batch_sizes(
    recipe: Recipe, parts: Parts, step: Callable[[Batch], object], device: torch.device, seconds: float
) -> Sweep:
    """Measure steps of a recipe, on this worker alone with all its towers, for about some seconds.

    The batches of a detector have images as large as they can be, with the most objects; others are read.

    Raises:
        InputError: the memory is not enough for one example a tower.
    """
    num_towers, memory = parts.towers.num_towers, usable_bytes(device)
    batch_of, bound = _batches_of(recipe, parts, device), bind(parts.state, parts.towers, recipe.exchange)
    parts.state.resolve(parts.loader.epoch_size, recipe.batch_size)

    def measured(batch_size: int) -> Measurement:
        batches = batch_of(batch_size)
        bound.resolved_for = (batches[0].epoch_size, batch_size)  # lengths in epochs stay those of the recipe
        forget_peak(device)
        timing = time_step(step, batches[0], min(_STEP_SECONDS, _STEP_SHARE * seconds))
        return Measurement(batch_size, timing.seconds * batch_size / timing.num_examples, peak_bytes(device))

    forget_peak(device)
    sizes, ended = measure_while_it_fits(
        measured,
        least=num_towers,
        most=parts.loader.epoch_size,
        memory=memory if device.type == "cpu" else None,
        before=peak_bytes(device),
        seconds=seconds,
    )
    towers = f"{num_towers} tower{'' if num_towers == 1 else 's'}"
    return Sweep(
        model=f"{type(parts.state.model).__name__}, {towers}, {parts.towers.precision}",
        machine=f"one worker on {device.type} with {torch.get_num_threads()} threads, {describe_machine()}",
        batch_size=recipe.batch_size,
        num_towers=num_towers,
        usable_bytes=memory,
        sizes=tuple(sizes),
        ended=ended,
    )


def _batches_of(recipe: Recipe, parts: Parts, device: torch.device) -> Callable[[int], list[Batch]]:
    """Return what makes a batch of so many examples, and on an accelerator those that a run has beside it."""
    towers, data = range(parts.towers.num_towers), recipe.data
    known = check_objects(recipe, parts)

    def make(batch_size: int) -> list[Batch]:
        if known and isinstance(data, DetectionData):
            fields: Mapping[str, Any] = largest_batch(data, largest(data, known), batch_size, recipe.num_classes)
        else:
            loader = copy_of_loader(parts.loader, parts.loader.order, batch_size=batch_size)
            with closing(loader.batches(towers, len(towers))) as batches:
                fields = next(batches)
        return [
            Batch(copied_to(fields, device), position=0, batch_size=batch_size, towers=towers)
            for _ in range(1 if device.type == "cpu" else BATCHES_AT_ONCE)
        ]

    return make


def measure_while_it_fits(
    measured: Callable[[int], Measurement],
    *,
    least: int,
    most: int,
    memory: int | None,
    seconds: float,
    before: int = 0,
) -> tuple[list[Measurement], str]:
    """Measure batches of twice `least` examples, four, eight times as many, while they fit; then some between.

    Args:
        measured: measures one size; it raises the allocator's error where the memory is not enough.
        least: examples of the smallest batch, measured where no larger fits, and what all sizes are multiples of.
        most: no batch is larger.
        memory: the bytes that there are, where the system ends a process that takes more; None: the allocator refuses.
        seconds: what is expected to end later is not begun.
        before: the bytes in use before the first batch.

    Returns:
        What was measured, in rising order, and in a sentence why it ended.

    Raises:
        InputError: the memory is not enough for the smallest.
    """
    found: list[Measurement] = []
    most = max(least, most // least * least)
    # Two examples a tower at first: batch norm behind a pool has no variance of one.
    began, size, too_large, why = time.perf_counter(), min(2 * least, most), 0, ""
    while True:
        begun = time.perf_counter()
        if reason := _lacks_memory(measured, size, found, memory, before):
            too_large, why = size, reason
        took = time.perf_counter() - begun
        if not found and size > least:
            size = least
            continue
        if not found:
            raise InputError(
                "The memory is not enough for the smallest batch.",
                given=f"{size} example{'' if size == 1 else 's'}: {why}",
                expected="memory for one example a tower",
                hint="take fewer towers (num_towers), smaller images, or towers.activation_checkpointing",
            )
        best = found[-1].batch_size
        if too_large and too_large - best <= max(least, best // _FINEST):
            return found, f"The memory is not enough for {too_large} examples: {why}."
        if best == most:
            return found, f"There are no more than {most} examples in an epoch."
        size = best + (too_large - best) // 2 // least * least if too_large else min(2 * best, most)
        if time.perf_counter() - began + took * max(1.0, size / best) > seconds:
            return found, f"{size} examples would take longer than what is left of {seconds:g} s; --seconds gives more."


def _lacks_memory(
    measured: Callable[[int], Measurement], size: int, found: list[Measurement], memory: int | None, before: int
) -> str:
    """Measure one size more; returns why it cannot be, or nothing."""
    needed = _expected_bytes(found, size, before)
    if memory is not None and needed > _SAFE * memory:
        return f"about {needed / 1e9:.1f} GB would be needed, of {memory / 1e9:.1f} GB that there are"
    log.info("measuring batches of %d", size)
    try:
        found.append(measured(size))
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        return str(error).partition("\n")[0].rstrip(".")
    return ""


def _expected_bytes(found: Sequence[Measurement], size: int, before: int) -> float:
    """The memory of a batch, if each example takes as much as in the last one, or as between the last two."""
    if not found:
        return 0.0
    last = found[-1]
    each = (last.peak_bytes - before) / last.batch_size
    if len(found) > 1:
        smaller = found[-2]
        each = max(each, (last.peak_bytes - smaller.peak_bytes) / (last.batch_size - smaller.batch_size))
    return last.peak_bytes + each * (size - last.batch_size)
