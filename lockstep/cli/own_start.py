"""`lockstep train photos/`: the recipe that is made of data, what is said of it, and what is shown at the end."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.given_run import changed_by_flags
from lockstep.cli.own_data import folder_of_run, own_run
from lockstep.durable import atomic_write
from lockstep.errors import WorkdirError
from lockstep.listing import shorten
from lockstep.recipes.recipe import Recipe
from lockstep.run_files import CONFUSION, CURVES, MISTAKES, RECIPE
from lockstep.runs.workdir import Result
from lockstep.screen import Lines, errors_alone, log, one_line
from lockstep.terminal import in_columns
from lockstep.types import Epochs, Steps

if TYPE_CHECKING:
    from lockstep.runs.chosen_recipe import Chosen
    from lockstep.runs.found_data import Found
    from lockstep.workers.rank import Worker

_DETECTIONS, _MOST_NAMED = "detections.json", 8
_START_SECONDS = 8.0
"""What passes before the first step and after the last."""


def begin_own_run(arguments: argparse.Namespace) -> None:
    """Make the recipe of a first start, say what it is, and write it into the folder of the run."""
    if own_run(arguments):
        return
    folder = folder_of_run(arguments)
    with errors_alone():
        found, chosen = _choose(arguments)
    log.info("%s", Lines("\n".join([*_described(found, arguments.recipe), "", *_choices(found, chosen)])))
    if chosen.num_steps:
        with errors_alone():
            seconds = _estimate(chosen, chosen.num_steps)
        log.info("%s", Lines(f"  {'time'.ljust(11)}  {_duration(seconds)} on this machine"))
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / RECIPE, failure=WorkdirError) as file:
        file.write(_toml(found, chosen, arguments.recipe).encode())
    log.info(
        "the recipe, with the reason for each choice, is %s; the same command goes on after a stop", folder / RECIPE
    )


def print_own_recipe(arguments: argparse.Namespace) -> str:
    """Say what would be trained, and return the recipe; nothing is written."""
    with errors_alone():
        found, chosen = _choose(arguments)
    if not arguments.print_recipe:
        log.info("%s", Lines("\n".join([*_described(found, arguments.recipe), "", *_choices(found, chosen)])))
    return _toml(found, chosen, arguments.recipe)


def _choose(arguments: argparse.Namespace) -> tuple[Found, Chosen]:
    from lockstep.runs.chosen_recipe import choose_recipe, find_weights
    from lockstep.runs.data_sets import find_data_sets
    from lockstep.runs.found_data import look_at
    from lockstep.workers.devices import num_accelerators

    found = look_at(find_data_sets(arguments.recipe))
    num_devices = 0 if arguments.device == "cpu" else num_accelerators()
    choose = partial(choose_recipe, found, folder_of_run(arguments).name, find_weights(), num_devices)
    chosen = choose()
    changed = changed_by_flags(chosen.recipe, arguments)
    if changed.end != chosen.recipe.end and isinstance(changed.end, Steps | Epochs):
        chosen = choose(changed.end)
        changed = changed_by_flags(chosen.recipe, arguments)
    return found, chosen._replace(recipe=changed)


def _toml(found: Found, chosen: Chosen, word: str) -> str:
    from lockstep.runs.chosen_recipe import explained

    command = f"Made by `lockstep train {shlex.quote(word)}`, of what it found there, to be edited."
    return explained(chosen, [command, "", *(line for line in _described(found, word)[1:] if line)])


# What is on the screen ----------------------------------------------------------------------------------------------


def _described(found: Found, word: str) -> list[str]:
    widths, heights = found.sizes.min(0), found.sizes.max(0)
    middle = sorted(map(tuple, found.sizes.tolist()))[len(found.sizes) // 2]
    same = (widths == heights).all()
    sizes = f"{widths[0]} x {widths[1]}" + ("" if same else f" to {heights[0]} x {heights[1]}") + " pixels"
    looked = "" if found.is_whole else f", of which {found.num_looked:,} were looked at"
    unread = f"{len(found.unread)} of a kind that is not read: {shorten(found.unread, 2)}" if found.unread else ""
    broken = f"{len(found.broken)}: {shorten(found.broken, 3, separator='; ')}" if found.broken else "none"
    rows = [
        ("images", f"{found.num_images:,} to learn from{looked}"),
        ("classes", f"{len(found.classes)}: {_class_counts(found)}"),
        ("evenness", _evenness(found)),
        ("sizes", sizes + ("" if same else f", typically {middle[0]} x {middle[1]}")),
        ("broken", broken),
        *([("not read", unread)] if unread else []),
        *([("no class", f"{shorten(found.empty, 3)}: without an image")] if found.empty else []),
    ]
    return [f"{word}: {found.kind}", *(f"  {line}" for line in _rows(rows))]


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    return in_columns([(name.ljust(11), one_line(text)) for name, text in rows])


def _class_counts(found: Found) -> str:
    what = [f"{name} {count:,}" for name, count in found.counts.items()]
    return shorten(what, _MOST_NAMED) + (" objects" if found.has_objects else "")


def _evenness(found: Found) -> str:
    counts = sorted(found.counts.values())
    least, most = counts[0], counts[-1]
    if len(counts) == 1 or most < 1.05 * least:
        return "even"
    rarest = min(found.counts, key=lambda name: found.counts[name])
    if least == 0:
        return f"there is none of {rarest}"
    ratio = most / least
    remark = "" if ratio < 3 else f"; expect more mistakes on {rarest}"
    return (
        f"{'fairly even' if ratio < 3 else 'uneven'}: {ratio:.1f} times as many of the largest as of {rarest}{remark}"
    )


def _choices(found: Found, chosen: Chosen) -> list[str]:
    recipe, data = chosen.recipe, chosen.recipe.data
    task = "detector: where objects are, and what" if found.has_objects else "classifier: one class for each image"
    where = recipe.warm_start.path if recipe.warm_start else None
    updates = f", {chosen.num_steps:,} updates" if isinstance(recipe.end, Epochs) else ""
    length = recipe.end.count if isinstance(recipe.end, Steps) else recipe.end
    falls_to_0 = f"steps={length!r}" in repr(recipe.optimizer)  # not where hours end it, or nothing does
    rate = f"; the rate falls to 0 as a cosine{'' if falls_to_0 else ', but not at this end: optimizer.lr.steps'}"
    resizer = getattr(data, "resizer", None)
    shape = f"{resizer.height} x {resizer.width}" if resizer else f"{data.image_size} x {data.image_size}"
    rows = [
        ("task", task),
        ("scored on", _scored(chosen)),
        ("network", "SqueezeNet 1.1 with an SSD on it" if found.has_objects else "SqueezeNet 1.1"),
        *_weights_rows(where),
        ("input", f"{shape} pixels, {recipe.batch_size} images an update"),
        ("schedule", f"{recipe.end or 'until it is stopped'}{updates}{rate}"),
        ("stops early", _stopping(chosen)),
    ]
    return ["what is trained", *(f"  {line}" for line in _rows(rows))]


def _weights_rows(path: str | None) -> list[tuple[str, str]]:
    """Say which weights are started from; without any, where they were looked for, what is lost, how to get them."""
    from lockstep.runs.chosen_recipe import LICENCE, places_of_weights

    if path:
        return [("weights", f"{path} ({LICENCE})")]
    places = places_of_weights()
    return [
        ("weights", f"none; these were looked for: {', '.join(map(str, places))}"),
        ("", "without them all layers learn from your images alone, which takes thousands of them and more epochs"),
        ("", f"to have them: the wheel holds them, and data/squeezenet of the project: copy the file to {places[-1]}"),
    ]


def _scored(chosen: Chosen) -> str:
    data: Any = chosen.recipe.data
    share = data.validation if data.validation_share else None
    held = f"{chosen.num_validation:,} images, {share}, held out by a hash of their names" if share else ""
    named = {"validation": chosen.num_validation, "test": chosen.num_test}
    given = ", ".join(f"{count:,} {split} images" for split, count in named.items() if count)
    return (held or given) + f"; {chosen.num_train:,} are trained on"


def _stopping(chosen: Chosen) -> str:
    patience = chosen.recipe.evaluate.patience
    if patience is None:
        few = f"{chosen.num_validation} images to validate say too little for that"
        return f"no: {few if chosen.num_validation else 'there are no images to validate'}"
    return f"after {patience} evaluations in a row without a better score, one every {chosen.recipe.evaluate.every}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _estimate(chosen: Chosen, num_steps: int) -> float:
    import torch

    from lockstep.cores import usable_cores

    recipe, cores = chosen.recipe, usable_cores()
    read, step = _time_updates(recipe)
    is_cpu = torch.accelerator.device_count() == 0 or recipe.device == "cpu"
    # Where processors compute, those that read take their share.
    update = step + read / cores if is_cpu else max(step, read / max(1, cores - 1))
    # A forward pass is a third of an update; mirrored images are another one.
    score = (step / 3 * (2 if recipe.evaluate.flip else 1) + read / cores) / recipe.batch_size
    return _START_SECONDS + num_steps * update + chosen.num_scored * score


def _time_updates(recipe: Recipe) -> tuple[float, float]:
    import torch

    from lockstep.recipes.parts import DataLoading
    from lockstep.runs.build import Examples

    recipe = replace(recipe, feed=DataLoading(num_processes=0, bad_examples=recipe.feed.bad_examples))
    device = torch.device("cpu")
    if torch.accelerator.device_count() and recipe.device != "cpu":
        device = torch.accelerator.current_accelerator() or device
    model, task = recipe.model.build(recipe.seed).to(device).train(), recipe.chosen_task
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in recipe.frozen))
    times = []
    with closing(Examples(recipe).training().batches(range(1), 1, device)) as batches:
        for _ in range(3):
            began = time.perf_counter()
            batch = next(batches)
            was_read = time.perf_counter()
            found = task.losses(model, batch) if task.losses else {}
            losses = found[0] if isinstance(found, tuple) else found
            torch.autograd.backward([loss for loss in losses.values() if loss.requires_grad])
            times.append((was_read - began, time.perf_counter() - was_read))
    return min(read for read, _ in times[1:]), min(step for _, step in times[1:])


# The end ------------------------------------------------------------------------------------------------------------


def conclude_own_run(recipe: Recipe, path: Path, result: Result, worker: Worker) -> None:
    """Score the last weights, show the worst mistakes, and say which commands follow; all workers call it together."""
    from lockstep.cli import evaluate
    from lockstep.cli.scoring import score_once
    from lockstep.recipes.data import DetectionData

    if result.split is not None:
        asked = [f"--{name}={path / file}" for name, file in (("mistakes", MISTAKES), ("confusion", CONFUSION))]
        if isinstance(recipe.data, DetectionData):
            asked += [f"--curves={path / CURVES}", f"--set=evaluate.detection.export_path={path / _DETECTIONS}"]
        score_once(evaluate.COMMAND.parse(["evaluate", str(path), "--split", result.split, "--force", *asked]), worker)
        if worker.is_chief:
            log.info("the worst mistakes: %s", path / MISTAKES)
    if worker.is_chief:
        run = shlex.quote(str(path))
        for line in (
            "what follows:",
            f"  lockstep predict {run} IMAGES --to {shlex.quote(str(path / 'predictions'))}",
            f"  lockstep export {run} --to {shlex.quote(str(path / 'model.pt2'))}",
            f"  lockstep report {run}",
        ):
            log.info("%s", Lines(line))
