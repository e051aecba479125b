"""What limits a run on this machine, by a short measurement and the model of `lockstep plan`, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from lockstep.cli.shared import INTERRUPTED
from lockstep.doctor.check_result import CheckResult, judged
from lockstep.errors import InputError
from lockstep.listing import format_size
from lockstep.planning.model import Prediction, RunCosts, predict_step
from lockstep.planning.start import ProbeRequest, probe_on_workers
from lockstep.recipes.recipe import Recipe
from lockstep.reporting.console import format_duration, format_rate
from lockstep.training.memory import usable_bytes

_MUCH, _MUCH_OF_SAVES = 0.2, 0.05
"""Shares worth a warning: of an exchange in a step, and of what a save holds up in the time between two."""
_SAFE = 0.9
"""Share of the memory that a run may be expected to need."""
_SHORT_SECONDS = 0.01
"""A pass of a tower on a GPU that takes less mostly launches kernels, which takes the same for more examples."""

_MENDS = {
    "input": "lockstep benchmark input {recipe} says which part of it: most often more --set feed.num_processes=N",
    "update": "a larger batch_size makes fewer updates",
    "exchange": "a larger batch_size; a faster network; or fewer workers: lockstep plan {recipe}",
    "cores": "fewer loader processes, smaller images, or more cores: steps and loaders share them",
}


def measured_limits(name: str, recipe: Recipe, workers: int, seconds: float) -> Iterator[CheckResult]:
    """Measure a recipe on workers of this machine, and tell what limits it there; `name` is what the user calls it."""
    try:
        costs = probe_on_workers(ProbeRequest(recipe, (workers,), workers, seconds))
        if isinstance(costs, int):
            if costs == INTERRUPTED:
                raise KeyboardInterrupt
            found = f"ended with exit code {costs}: what was wrong is said above"
            yield CheckResult("measurement", found, "fails", "mend that, or leave it out: --seconds 0")
            return
        prediction = predict_step(costs, recipe, workers)
    except InputError as error:
        found = f"this recipe cannot be measured: {error.what} {error.given}"
        yield CheckResult("measurement", found, "warn", error.hint)
        return
    device = None if costs.is_cpu else torch.accelerator.current_accelerator()
    usable = usable_bytes(device or torch.device("cpu"))
    yield from limits_of(name, recipe, costs, prediction, usable)


def limits_of(name: str, recipe: Recipe, costs: RunCosts, prediction: Prediction, usable: int) -> Iterator[CheckResult]:
    """Tell what of a step takes how long, whether saves and memory are in its way, and when the run ends.

    `name` is that of the recipe in commands; `usable` bytes of memory are those of the host where workers compute on
    its cores, else of each device.
    """
    step, limit = prediction.step_seconds, prediction.limit
    number = prediction.seating.num_workers
    on = f"{number} worker{'' if number == 1 else 's'}"
    what = "the cores, too few for all that computes, are" if limit == "cores" else f"{limit} is"
    yield judged(
        "step",
        f"{_ms(step)} on {on}, {format_rate(prediction.examples_per_second)} examples/s: {what} the limit",
        {"seconds": step, "examples_per_second": prediction.examples_per_second, "workers": number},
        is_bad=limit == "cores",
        mend=_MENDS["cores"],
    )
    way = prediction.exchange
    sent = "of one worker, which sends nothing" if way == "nothing" else f"over {way}, what no backward pass hides"
    parts = {
        "compute": (prediction.compute_seconds, "forward and backward pass"),
        "input": (prediction.input_seconds, "read beside the step" if costs.reads_ahead else "read between the steps"),
        "update": (prediction.update_seconds, "optimizer, statistics and report"),
        "exchange": (prediction.exchange_seconds, sent),
    }
    for part, (seconds, what) in parts.items():
        is_bad = part != "compute" and (part == limit or (part == "exchange" and seconds > _MUCH * step))
        mend = _MENDS[part].format(recipe=name) if is_bad else ""
        yield CheckResult(
            part,
            f"{_ms(seconds)}, {100 * seconds / step:.0f} % of a step: {what}",
            "warn" if is_bad else "OK",
            _advice(name, recipe, costs, prediction) if part == limit == "compute" else mend,
            {"seconds": seconds, "share": seconds / step},
        )
    yield _save(recipe, costs, step)
    yield _memory(costs, prediction, usable)
    if prediction.finish_seconds is not None:
        found = f"to the end of the recipe about {format_duration(prediction.finish_seconds)}, without evaluations"
        yield CheckResult("time", found, numbers={"seconds": prediction.finish_seconds})


def _advice(name: str, recipe: Recipe, costs: RunCosts, prediction: Prediction) -> str:
    """What makes a run faster whose limit is what it computes, as it should be."""
    devices = f"more devices make it faster (lockstep plan {name} says how much)"
    if costs.is_cpu:
        return devices
    if prediction.compute_seconds < _SHORT_SECONDS * prediction.seating.most_towers:
        return "a pass so short mostly launches kernels: a larger batch_size takes hardly longer, and fewer towers less"
    return devices if recipe.towers.precision == "bf16" else f"{devices}, and so may bf16 (towers.precision=bf16)"


def _save(recipe: Recipe, costs: RunCosts, step_seconds: float) -> CheckResult:
    save, every = costs.save, recipe.checkpoints.every
    of_epochs = step_seconds * costs.epoch_size / costs.batch_size
    between = every.amount * {"steps": step_seconds, "seconds": 1.0, "epochs": of_epochs}[every.unit] or math.inf
    share = save.blocked_seconds / between
    of = "; nothing is saved in time" if between == math.inf else f", {100 * share:.1f} % of the time between two"
    return judged(
        "save",
        f"{format_size(save.num_bytes)}, safe after {_ms(save.seconds)}; steps wait {_ms(save.blocked_seconds)}{of}",
        {"bytes": save.num_bytes, "seconds": save.seconds, "blocked_seconds": save.blocked_seconds, "share": share},
        is_bad=save.seconds > between or share > _MUCH_OF_SAVES,
        mend=f"less often than each {every}, as --set checkpoints.every='600 s'",
    )


def _memory(costs: RunCosts, prediction: Prediction, usable: int) -> CheckResult:
    number = prediction.seating.num_local if costs.is_cpu else 1
    needed = prediction.memory_bytes * number
    of_all = f"{format_size(needed)} of {format_size(usable)}{' for all here' if number > 1 else ''}"
    return CheckResult(
        "memory of the run",
        f"{format_size(prediction.memory_bytes)} a worker, {of_all}",
        "fails" if needed > usable else "warn" if needed > _SAFE * usable else "OK",
        "a smaller batch_size, towers.activation_checkpointing, or fewer --workers" if needed > _SAFE * usable else "",
        {"bytes_a_worker": prediction.memory_bytes, "bytes": needed, "usable_bytes": usable},
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
