"""`lockstep benchmark input`: how fast the way from files to batches is, what limits the run, and what to change."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from lockstep.checks import check_one_of, check_range
from lockstep.cli.subject import is_recipe, open_data
from lockstep.data.advice import Advice, advise
from lockstep.data.loader import Loader
from lockstep.data.throughput import Measured, Throughput, measure
from lockstep.errors import InputError
from lockstep.images.augment import LOCATION_FIELDS, HorizontalFlip
from lockstep.images.decode import EncodedImage
from lockstep.images.resized_crops import RandomResizedCrop
from lockstep.images.slim_presets import SLIM_PRESETS
from lockstep.parallel.launch import STOPPED
from lockstep.readers.combine import OnlyFields
from lockstep.readers.reader import Reader
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.reporting.console import format_rate
from lockstep.runs.build import build
from lockstep.screen import log, write_json, write_lines
from lockstep.tracing import INPUT_STAGES
from lockstep.training import choices
from lockstep.training.step import bind
from lockstep.types import Batch
from lockstep.workers.rank import Worker, join

_BATCH_SIZE = 64
_CROP_SIZE = 224
_LEAST_SECONDS = 0.1


@dataclass(frozen=True)
class _Subject:
    """What is measured."""

    loader: Loader
    num_towers: int = 1
    step: Callable[[Batch], object] | None = None


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, and write a table with a verdict, or JSON; what is measured at the moment goes to the log."""
    check_range("seconds", arguments.seconds, _LEAST_SECONDS)
    threads = torch.get_num_threads()
    try:
        recipe = _recipe(arguments) if is_recipe(arguments.what) else None
        worker = join(arguments.device or (recipe.device if recipe else None))
        subject = _of_recipe(recipe, worker) if recipe else _of_path(arguments)
        measured = measure(
            subject.loader,
            arguments.seconds,
            device=worker.device,
            num_towers=subject.num_towers,
            step=subject.step,
            tell=lambda doing: log.info("measuring %s", doing),
        )
    except KeyboardInterrupt:
        return STOPPED["SIGINT"]
    finally:
        torch.set_num_threads(threads)
    found = arguments.what, subject.loader, measured, advise(measured)
    if arguments.json:
        write_json(_as_json(*found))
    else:
        write_lines(_text(*found))
    return 0


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe with what the flags say."""
    if arguments.augment is not None:
        raise InputError(
            "A recipe says itself how its images are augmented.",
            given=f"--augment {arguments.augment} for the recipe {arguments.what}",
            expected="--augment for a path to data alone",
            hint="leave it out, or change data.augment in the recipe",
        )
    # Weights that grow beyond all bounds by one batch, again and again, are no reason to stop.
    recipe = replace(find(arguments.what), nonfinite="skip", nonfinite_budget=sys.maxsize, warm_start=None)
    if arguments.batch_size is not None:
        recipe = replace(recipe, batch_size=arguments.batch_size)
    if arguments.processes is not None or arguments.threads:
        feed = replace(recipe.feed, num_processes=arguments.processes, num_threads=arguments.threads)
        recipe = replace(recipe, feed=feed)
    return recipe


def _of_recipe(recipe: Recipe, worker: Worker) -> _Subject:
    """The loader of a recipe as one worker has it, and its training step."""
    parts = build(recipe, worker)
    exact = getattr(recipe.exchange, "exact", False)
    settled = choices.resolve(parts.state, parts.towers, parts.loader, worker, exact=exact, saved=None)
    torch.set_num_threads(settled.threads)
    step = bind(parts.state, parts.towers, recipe.exchange)
    return _Subject(parts.loader, parts.towers.count, lambda batch: step(parts.task.losses, batch))


def _of_path(arguments: argparse.Namespace) -> _Subject:
    """A loader of what lies there, with a usual augmentation where it is images."""
    what, name = arguments.what, arguments.augment
    if name is not None:
        check_one_of("augment", name, list(SLIM_PRESETS))
    reader = _without_places(open_data(what))
    augment = SLIM_PRESETS[name]().train if name else (RandomResizedCrop(_CROP_SIZE), HorizontalFlip())
    return _Subject(
        Loader(
            reader,
            batch_size=_BATCH_SIZE if arguments.batch_size is None else arguments.batch_size,
            augment=augment if _has_images(reader) else (),
            num_processes=arguments.processes,
            num_threads=arguments.threads,
        )
    )


def _without_places(reader: Reader) -> Reader:
    """The reader without the places of objects, which crops would leave wrong."""
    names = reader.read_batch(np.zeros(1, np.int64)).keys() if len(reader) else set()
    kept = [name for name in names if name not in LOCATION_FIELDS]
    return OnlyFields(reader, kept) if len(kept) < len(names) else reader


def _has_images(reader: Reader) -> bool:
    """Whether there are images to decode."""
    images = reader.read_batch(np.zeros(1, np.int64)).get("image") if len(reader) else None
    return isinstance(images, list) and isinstance(images[0], EncodedImage)


def _text(what: str, loader: Loader, measured: Measured, advice: Advice) -> Iterator[str]:
    names_of = ", ".join(type(augment).__name__ for augment in loader.augment)
    yield f"{what}: {len(loader.reader)} examples, batches of {loader.batch_size}, {names_of or 'not augmented'}"
    yield f"one worker of {measured.num_cores} cores, {_who_reads(loader, measured)}"
    yield ""
    yield from _table(_rows(loader, measured))
    if measured.loader.queue_fill is not None:
        yield f"of what may be read ahead {100 * measured.loader.queue_fill:.0f} % was there when a batch was taken"
    yield "all but the first line with warm caches: the same examples again and again"
    yield ""
    yield advice.verdict
    yield from (f"- {change}" for change in advice.changes)


def _rows(loader: Loader, measured: Measured) -> dict[str, Throughput]:
    rows = {
        "reading, for the first time": measured.first_read,
        "reading, again": measured.read,
        "one process with one thread": measured.alone,
        "the loader as it runs": measured.loader,
    }
    return rows | ({"the training step alone": measured.step} if measured.step else {})


def _table(rows: Mapping[str, Throughput]) -> Iterator[str]:
    """Names to the left, numbers to the right."""
    stages = [stage for stage in (*INPUT_STAGES, "copy") if any(pace.share(stage) for pace in rows.values())]
    lines = [["", "examples/s", "a CPU-second", *stages]]
    for name, pace in rows.items():
        shares = [f"{100 * pace.share(stage):.0f} %" if stage in pace.stage_seconds else "" for stage in stages]
        per_cpu = pace.examples_per_cpu_second
        lines.append([name, format_rate(pace.examples_per_second), format_rate(per_cpu) if per_cpu else "", *shares])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield f"{name:<{widths[0]}}{numbers}".rstrip()


def _who_reads(loader: Loader, measured: Measured) -> str:
    return "the trainer's own process reads from memory" if measured.in_memory else loader.pool.describe(1)


def _as_json(what: str, loader: Loader, measured: Measured, advice: Advice) -> dict[str, Any]:
    paces = {name: _pace(pace) for name, pace in vars(measured).items() if isinstance(pace, Throughput)}
    others = {name: value for name, value in vars(measured).items() if name not in paces}
    return {
        "what": what,
        "num_examples": len(loader.reader),
        "batch_size": loader.batch_size,
        **others,
        **paces,
        **asdict(advice),
    }


def _pace(pace: Throughput) -> dict[str, Any]:
    return {**vars(pace), "stage_seconds": dict(pace.stage_seconds), "examples_per_second": pace.examples_per_second}
