"""Measure training steps of a recipe with other settings, each in turn with the recipe's own, one change at a time.

It is measured and told, and no run takes another setting by itself: each changes how numbers are rounded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lockstep.cli.input_benchmark import copy_of_loader
from lockstep.errors import LockstepError
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import with_settings
from lockstep.runs.build import Parts
from lockstep.screen import log
from lockstep.tensors import reading_waits
from lockstep.training.memory import is_lack_of_memory
from lockstep.types import Batch
from lockstep.workers.devices import describe_machine

_TURN_SECONDS, _LEAST_ROUNDS = 0.2, 3
_CLEARLY_FASTER = 0.97
"""Three quarters of the rounds have to be below it."""
_RESTLESS = 1.2
"""Between the quarters of a machine on which nothing else computes lies less than this factor."""

Built = tuple[Parts, Callable[[Batch], object]]
"""The parts of a recipe, and its training step, for this worker alone."""


@dataclass(frozen=True)
class MeasuredChange:
    """Steps with some settings beside the recipe's own, in turn."""

    settings: tuple[str, ...]
    """As `--set` takes them."""
    seconds: float
    """Time of a step, the median of the rounds."""
    ratios: tuple[float, ...]
    """Time of a step over that of the recipe's in the same round, rising; none where it could not be measured."""
    failed: str = ""
    """Why not, in a sentence."""

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios)

    @property
    def quarters(self) -> tuple[float, float]:
        """Within which half of the rounds lie."""
        last = len(self.ratios) - 1
        return self.ratios[last // 4], self.ratios[math.ceil(0.75 * last)]

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than the recipe beyond the spread of the rounds."""
        return bool(self.ratios) and self.quarters[1] < _CLEARLY_FASTER


@dataclass(frozen=True)
class MeasuredSettings:
    """What was measured of a recipe: each change alone, then all those together that are faster."""

    model: str
    machine: str
    seconds: float
    """Time of a step of the recipe as it is."""
    changes: tuple[MeasuredChange, ...]

    @property
    def best(self) -> MeasuredChange | None:
        """The fastest; None where none is faster beyond the spread."""
        return min(filter(lambda each: each.is_faster, self.changes), key=lambda each: each.ratio, default=None)

    @property
    def verdict(self) -> str:
        """What is faster, in a sentence or two."""
        spread = max((high / low for low, high in (each.quarters for each in self.changes if each.ratios)), default=1.0)
        busy = " The rounds differ much: other processes compute here, too." if spread > _RESTLESS else ""
        if self.best is None:
            return f"No change is faster beyond the spread of the rounds.{busy}"
        return f"With {' and '.join(self.best.settings)} a step takes {self.best.ratio:.2f} of its time.{busy}"

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON."""
        best = list(self.best.settings) if self.best else []
        return {**asdict(self), "verdict": self.verdict, "best": best}


def usual_changes(parts: Parts, device: torch.device, *, num_threads: int) -> Iterator[str]:
    """The settings that change how fast a step of this model is on this device, but for those that it has."""
    towers = parts.towers
    if any(parameter.dim() == 4 for parameter in parts.state.model.parameters()):
        yield f"towers.channels_last={str(not towers.channels_last).lower()}"
    yield f"towers.precision={'bf16' if towers.precision == 'fp32' else 'fp32'}"
    if device.type == "cpu":
        if num_threads > 1:
            yield "num_threads=1"
    else:
        flags = ("conv_tf32", "matmul_tf32", "cudnn_benchmark")
        yield from (f"towers.{name}=true" for name in flags if not getattr(towers, name))
    if not towers.compile:
        yield "towers.compile=true"


def compare_settings(
    recipe: Recipe, build: Callable[[Recipe], Built], device: torch.device, settings: Sequence[str], seconds: float
) -> MeasuredSettings:
    """Measure steps of a recipe on this worker, beside the same with each of the settings, for about some seconds.

    Args:
        recipe: with all its towers.
        build: builds a recipe, and sets torch's threads as a run of it does.
        device: of this worker.
        settings: each is measured alone, as `--set` takes it; none: those that usually matter.
        seconds: of all steps; that torch compiles the model comes on top.

    Raises:
        InputError: the recipe has no such field, or the field no such value.
    """
    wanted = {setting: with_settings(recipe, [setting]) for setting in settings}  # refused before the first step
    as_is = _Contender(build(recipe), device)
    wanted = wanted or dict.fromkeys(usual_changes(as_is.parts, device, num_threads=as_is.threads), recipe)
    share = seconds / (len(wanted) + 1)
    changes = [_compared(as_is, recipe, (setting,), build, share) for setting in wanted]
    faster: dict[str, MeasuredChange] = {}  # the fastest of each field, of which a recipe has one value
    for each in (change for change in changes if change.is_faster):
        field = each.settings[0].partition("=")[0]
        faster[field] = min(faster.get(field, each), each, key=lambda change: change.ratio)
    if len(faster) > 1:
        together = tuple(each.settings[0] for each in faster.values())
        changes.append(_compared(as_is, recipe, together, build, share))
    towers = as_is.parts.towers
    return MeasuredSettings(
        model=f"{type(as_is.parts.state.model).__name__}, batches of {recipe.batch_size} in {towers.num_towers} "
        f"tower{'' if towers.num_towers == 1 else 's'}",
        machine=f"one worker on {device.type} with {as_is.threads} threads, {describe_machine()}",
        seconds=statistics.median(as_is.turns or [as_is.once]),
        changes=tuple(changes),
    )


class _Contender:
    """A recipe that takes turns: it makes steps with one batch, again and again."""

    def __init__(self, built: Built, device: torch.device) -> None:
        self.parts, self._step = built
        self.device, self.threads, self.turns = device, torch.get_num_threads(), list[float]()
        loader, towers = self.parts.loader, range(self.parts.towers.num_towers)
        with closing(copy_of_loader(loader, loader.order).batches(towers, len(towers), device)) as batches:
            self._batch = next(batches)
        self._take(2)  # the first brings into being what stays
        self.once = self._take(1)

    def turn(self, num_steps: int) -> float:
        """Make some steps; returns the seconds of each."""
        self.turns.append(self._take(num_steps))
        return self.turns[-1]

    def _take(self, num_steps: int) -> float:
        torch.set_num_threads(self.threads)
        began = time.perf_counter()
        for _ in range(num_steps):
            self._step(replace(self._batch, fields=dict(self._batch)))  # a step lays its images out in the batch
        if reading_waits(self.device):
            torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - began) / num_steps


def _compared(
    as_is: _Contender, recipe: Recipe, settings: tuple[str, ...], build: Callable[[Recipe], Built], seconds: float
) -> MeasuredChange:
    compiles = any(setting.startswith("towers.compile") for setting in settings)
    log.info("measuring %s%s", " and ".join(settings), ": torch compiles for some minutes" if compiles else "")
    ratios: list[float] = []
    try:
        other = _Contender(build(with_settings(recipe, settings)), as_is.device)
        num_steps = max(1, math.ceil(_TURN_SECONDS / max(as_is.once, other.once)))
        began = time.perf_counter()
        while len(ratios) < _LEAST_ROUNDS or time.perf_counter() - began < seconds:
            first, second = (as_is, other) if len(ratios) % 2 else (other, as_is)
            took = {first: first.turn(num_steps), second: second.turn(num_steps)}
            ratios.append(took[other] / took[as_is])
    except LockstepError as error:
        return MeasuredChange(settings, 0.0, (), error.what)
    except (RuntimeError, MemoryError) as error:  # an allocator's, or of a compiler that is not there
        why = "The memory is not enough" if is_lack_of_memory(error) else str(error).partition("\n")[0]
        return MeasuredChange(settings, 0.0, (), why)
    return MeasuredChange(settings, statistics.median(other.turns), tuple(sorted(ratios)))
