"""`lockstep benchmark`: what limits a run, input or step; what its batch size costs, and what other settings bring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from lockstep.checks import Range, check_one_of, check_value
from lockstep.cli.shared import Command, add_json_argument, add_settings_argument, write_found
from lockstep.errors import InputError
from lockstep.reporting.console import format_rate
from lockstep.screen import log
from lockstep.tracing import INPUT_STAGES

if TYPE_CHECKING:
    from lockstep.cli.batch_size_benchmark import Sweep
    from lockstep.cli.input_benchmark import Advice, Measured, Timing
    from lockstep.cli.settings_benchmark import MeasuredSettings
    from lockstep.data.loader import Loader
    from lockstep.recipes.recipe import Recipe
    from lockstep.runs.build import Parts
    from lockstep.types import Batch
    from lockstep.workers.rank import Worker

_BATCH_SIZE = 64
_CROP_SIZE = 224
_MIN_SECONDS = 0.1
_SECONDS = {"input": 10.0, "batch-size": 60.0, "settings": 60.0}


@dataclass(frozen=True)
class _Workload:
    """A loader to be measured, and the training step that takes its batches."""

    loader: Loader
    num_towers: int = 1
    step: Callable[[Batch], object] | None = None


def _add_arguments(benchmark: argparse.ArgumentParser) -> None:
    benchmark.add_argument(
        "part",
        choices=[*_SECONDS],
        help="what is measured: the way from files to batches; steps of larger and larger batches, while they fit; or "
        "steps with other settings, such as another precision, beside the recipe's",
    )
    benchmark.add_argument(
        "what", help="a recipe, a file.toml, or for input a path to data: images in folders, shards, VOC, COCO"
    )
    benchmark.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="how long in all (default: 10; 60 for batch sizes, at most, and settings)",
    )
    benchmark.add_argument("--batch-size", type=int, metavar="N", help="default: the recipe's, 64 for a path")
    benchmark.add_argument(
        "--augment",
        metavar="NAME",
        help="lenet, cifarnet, vgg or inception; for a path (default: a random resized crop of 224, and flip)",
    )
    benchmark.add_argument("--processes", type=int, metavar="N", help="loader processes (default: as in training)")
    benchmark.add_argument("--threads", type=int, default=0, metavar="N", help="loader threads in place of processes")
    benchmark.add_argument("--device", choices=["cpu"], help="leave the accelerators alone")
    add_settings_argument(
        benchmark, "change a field of the recipe; for settings, a change to measure beside it, unless it is of `data`"
    )
    add_json_argument(benchmark)


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from lockstep.cli.source import check_source, is_recipe

    if arguments.seconds is None:
        arguments.seconds = _SECONDS[arguments.part]
    check_value("seconds", arguments.seconds, Annotated[float, Range(ge=_MIN_SECONDS)])
    check_source(arguments.what)
    recipe = _recipe(arguments) if is_recipe(arguments.what) else None
    if (arguments.part != "input" or arguments.settings) and recipe is None:
        raise InputError(
            f"A path to data has no {'fields' if arguments.part == 'input' else 'training step'}.",
            given=" ".join([arguments.what, *(f"--set {setting}" for setting in arguments.settings)]),
            expected="a recipe, whose steps are measured",
            hint=f"name a recipe or a file.toml; how fast it is read says lockstep benchmark input {arguments.what}",
        )

    import torch

    from lockstep.workers.rank import join

    threads = torch.get_num_threads()
    try:
        worker = join(arguments.device or (recipe.device if recipe else None))
        if arguments.part == "input":
            _measure_input(arguments, recipe, worker)
        else:
            assert recipe is not None, "refused above"
            measure = _measure_batch_sizes if arguments.part == "batch-size" else _measure_settings
            measure(arguments, recipe, worker)
    finally:
        torch.set_num_threads(threads)
    return 0


def _measure_input(arguments: argparse.Namespace, recipe: Recipe | None, worker: Worker) -> None:
    from lockstep.cli.input_benchmark import advise, measure

    workload = _workload_of_recipe(recipe, worker) if recipe else _workload_of_path(arguments)
    measured = measure(
        workload.loader,
        arguments.seconds,
        device=worker.device,
        num_towers=workload.num_towers,
        step=workload.step,
        announce=lambda doing: log.info("measuring %s", doing),
    )
    results = arguments.what, workload.loader, measured, advise(measured)
    write_found(arguments, _as_json(*results), _as_text(*results))


def _measure_batch_sizes(arguments: argparse.Namespace, recipe: Recipe, worker: Worker) -> None:
    from lockstep.cli.batch_size_benchmark import measure_batch_sizes, with_largest_images

    recipe = with_largest_images(recipe)
    parts, step = _trained(recipe, worker)
    sweep = measure_batch_sizes(recipe, parts, step, worker.device, arguments.seconds)
    facts = {"what": arguments.what, "device": str(worker.device), **sweep.as_json()}
    write_found(arguments, facts, _sweep_as_text(arguments.what, sweep))


def _measure_settings(arguments: argparse.Namespace, recipe: Recipe, worker: Worker) -> None:
    from lockstep.cli.settings_benchmark import compare_settings

    own = _settings_of_recipe(arguments)
    measured = [setting for setting in arguments.settings if setting not in own]
    found = compare_settings(
        recipe, lambda changed: _trained(changed, worker), worker.device, measured, arguments.seconds
    )
    facts = {"what": arguments.what, "device": str(worker.device), **found.as_json()}
    write_found(arguments, facts, _comparison_as_text(arguments.what, own, found))


def _settings_of_recipe(arguments: argparse.Namespace) -> list[str]:
    """The settings with which the recipe is measured; where others are measured beside it, those of its data."""
    return [each for each in arguments.settings if arguments.part != "settings" or each.startswith("data.")]


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from lockstep.recipes.shipped import find
    from lockstep.recipes.toml import with_settings

    given = {"--batch-size": arguments.batch_size, "--processes": arguments.processes, "--threads": arguments.threads}
    of_input = [flag for flag, value in given.items() if value is not None and (flag, value) != ("--threads", 0)]
    if arguments.part != "input" and of_input:
        raise InputError(
            "Steps are measured without what reads ahead, and batches from the smallest on.",
            given=" ".join(of_input),
            expected=f"{of_input[0]} for the input alone",
            hint=f"leave it out, or measure the input: lockstep benchmark input {arguments.what} {of_input[0]} N",
        )
    if arguments.augment is not None:
        raise InputError(
            "A recipe says itself how its images are augmented.",
            given=f"--augment {arguments.augment} for the recipe {arguments.what}",
            expected="--augment for a path to data alone",
            hint="leave it out, or change data.augment in the recipe",
        )
    recipe = with_settings(find(arguments.what), _settings_of_recipe(arguments))
    # The same few batches again and again may make the weights diverge, which is no reason to stop.
    recipe = replace(recipe, nonfinite="skip", nonfinite_budget=sys.maxsize, warm_start=None)
    if arguments.batch_size is not None:
        recipe = replace(recipe, batch_size=arguments.batch_size)
    if arguments.processes is not None or arguments.threads:
        feed = replace(recipe.feed, num_processes=arguments.processes, num_threads=arguments.threads)
        recipe = replace(recipe, feed=feed)
    return recipe


def _workload_of_recipe(recipe: Recipe, worker: Worker) -> _Workload:
    """Build the loader and the training step of a recipe, as one worker has them; or the loader alone."""
    from lockstep.runs.build import prepared

    if not _is_trained(recipe):
        recipe.data.check_complete()
        return _Workload(prepared(recipe, worker).training(), recipe.towers_for(1).num_towers)
    parts, step = _trained(recipe, worker)
    return _Workload(parts.loader, parts.towers.num_towers, step)


def _trained(recipe: Recipe, worker: Worker) -> tuple[Parts, Callable[[Batch], object]]:
    import torch

    from lockstep.exchange.exchange import is_exact
    from lockstep.runs.build import build
    from lockstep.training import choices
    from lockstep.training.step import bind

    parts = build(recipe, worker)
    exact = is_exact(recipe.exchange)
    resolved = choices.resolve(
        parts.state, parts.towers, parts.loader, worker, exact=exact, saved=None, num_threads=recipe.num_threads
    )
    torch.set_num_threads(resolved.threads)
    step, counts = bind(parts.state, parts.towers, recipe.exchange), parts.task.counts(parts.state.model)
    return parts, lambda batch: step(parts.task.losses, batch, counts)


def _is_trained(recipe: Recipe) -> bool:
    """Whether the model of the recipe can learn from its data: the input of detectors that cannot is measured too."""
    from lockstep.detection.tf_supported import check_supported
    from lockstep.detection.values import Detector
    from lockstep.recipes.data import DetectionData

    if not isinstance(recipe.data, DetectionData):
        return True
    with suppress(InputError):
        if isinstance(recipe.model, Detector):
            check_supported(recipe.model)
            return True
    return False


def _workload_of_path(arguments: argparse.Namespace) -> _Workload:
    import numpy as np

    from lockstep.augmentations.crops import RandomResizedCrop
    from lockstep.augmentations.slim_presets import SLIM_PRESETS
    from lockstep.augmentations.turns import HorizontalFlip
    from lockstep.data.loader import Loader
    from lockstep.images.decode import EncodedImage
    from lockstep.readers.combine import OnlyFields
    from lockstep.readers.open import open_source

    name = arguments.augment
    if name is not None:
        check_one_of("augment", name, list(SLIM_PRESETS))
    augment = SLIM_PRESETS[name]().train if name else (RandomResizedCrop(_CROP_SIZE), HorizontalFlip())
    reader = open_source(arguments.what)
    first = reader.read_batch(np.zeros(1, np.int64)) if len(reader) else {}
    # A flip would have to know which keypoints are left and which are right.
    fields = [field for field in first if field not in ("keypoints", "keypoint_visibility")]
    images = first.get("image")
    return _Workload(
        Loader(
            reader if len(fields) == len(first) else OnlyFields(reader, fields),
            batch_size=_BATCH_SIZE if arguments.batch_size is None else arguments.batch_size,
            augment=augment if isinstance(images, list) and isinstance(images[0], EncodedImage) else (),
            num_processes=arguments.processes,
            num_threads=arguments.threads,
        )
    )


def _as_text(what: str, loader: Loader, measured: Measured, advice: Advice) -> Iterator[str]:
    augment = ", ".join(type(each).__name__ for each in loader.augment)
    yield f"{what}: {len(loader.reader)} examples, batches of {loader.batch_size}, {augment or 'not augmented'}"
    who = "the trainer's own process reads from memory" if measured.in_memory else loader.pool.describe(1)
    yield f"one worker of {measured.num_cores} cores, {who}"
    yield ""
    rows = {
        "reading, for the first time": measured.first_read,
        "reading, again": measured.read,
        "one process with one thread": measured.alone,
        "the loader as it runs": measured.loader,
    }
    yield from _paces(rows | ({"the training step alone": measured.step} if measured.step else {}))
    if measured.loader.queue_fill is not None:
        yield f"of what may be read ahead {100 * measured.loader.queue_fill:.0f} % was there when a batch was taken"
    yield "all but the first line with warm caches: the same examples again and again"
    yield from _cores(measured)
    yield ""
    yield advice.verdict
    yield from (f"- {change}" for change in advice.changes)


def _cores(measured: Measured) -> Iterator[str]:
    from lockstep.cli.input_benchmark import DEVICE_RATES, cores_for

    if cores_for(measured, 1) is None:
        return
    step = [] if measured.step is None else [measured.step.examples_per_second]
    needed = (f"{format_rate(rate)} examples/s {cores_for(measured, rate)}" for rate in (*DEVICE_RATES, *step))
    yield f"cores that the input of a device needs: of {', of '.join(needed)}{' (this step)' if step else ''}"


def _paces(rows: Mapping[str, Timing]) -> Iterator[str]:
    stages = [stage for stage in (*INPUT_STAGES, "copy") if any(pace.share(stage) for pace in rows.values())]
    lines = [["", "examples/s", "a CPU-second", *stages]]
    for name, pace in rows.items():
        shares = [f"{100 * pace.share(stage):.0f} %" if stage in pace.stage_seconds else "" for stage in stages]
        per_cpu = pace.examples_per_cpu_second
        lines.append([name, format_rate(pace.examples_per_second), format_rate(per_cpu) if per_cpu else "", *shares])
    yield from _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield f"{name:<{widths[0]}}{numbers}".rstrip()


def _sweep_as_text(what: str, sweep: Sweep) -> Iterator[str]:
    yield f"{what}: {sweep.model}; {sweep.machine}"
    yield ""
    rows = [["", "ms a step", "examples/s", "GB of memory"]]
    for each in sweep.sizes:
        numbers = f"{1e3 * each.seconds:.1f}", format_rate(each.rate), f"{each.peak_bytes / 1e9:.2f}"
        rows.append([f"{each.batch_size} examples", *numbers])
    yield from _table(rows)
    yield sweep.ended
    yield ""
    yield sweep.verdict
    yield f"- {what} has {sweep.batch_size}. Another batch size is another experiment, with a learning rate of its own."
    yield f"- To train with the largest: lockstep train {what} --set batch_size={sweep.sizes[-1].batch_size}"


def _comparison_as_text(what: str, own: Sequence[str], found: MeasuredSettings) -> Iterator[str]:
    yield f"{what}: {found.model}; {found.machine}"
    yield ""
    rows = [["", "ms a step", "of the recipe's", "half of the rounds"]]
    rows.append(["the recipe", f"{1e3 * found.seconds:.1f}", "", ""])
    for each in found.changes:
        if each.ratios:
            half = "{:.2f} to {:.2f}".format(*each.quarters)
            rows.append([" ".join(each.settings), f"{1e3 * each.seconds:.1f}", f"{each.ratio:.2f}", half])
    yield from _table(rows)
    yield from (f"{' '.join(each.settings)} cannot be measured: {each.failed}" for each in found.changes if each.failed)
    yield ""
    yield found.verdict
    if found.best:
        settings = " ".join(f"--set {quote(setting)}" for setting in (*own, *found.best.settings))
        yield "- Numbers are rounded otherwise then: it is another run, whose scores may be others."
        yield f"- To train so: lockstep train {what} {settings}"


def _as_json(what: str, loader: Loader, measured: Measured, advice: Advice) -> dict[str, Any]:
    from lockstep.cli.input_benchmark import DEVICE_RATES, Timing, cores_for

    paces = {name: pace for name, pace in vars(measured).items() if isinstance(pace, Timing)}
    others = {name: value for name, value in vars(measured).items() if name not in paces}
    return {
        "what": what,
        "num_examples": len(loader.reader),
        "batch_size": loader.batch_size,
        **others,
        "cores_for": {str(rate): cores_for(measured, rate) for rate in DEVICE_RATES},
        **{name: {**vars(pace), "examples_per_second": pace.examples_per_second} for name, pace in paces.items()},
        **asdict(advice),
    }


COMMAND = Command(
    "measure what limits a run, and say what to change",
    _add_arguments,
    _run,
    flags={
        "seconds": "--seconds",
        "augment": "--augment",
        "batch_size": "--batch-size",
        "num_processes": "--processes",
        "num_threads": "--threads",
    },
)
