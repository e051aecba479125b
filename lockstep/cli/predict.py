"""`lockstep predict`: the classes of images in files and folders, the objects on them, or what a task of your own says.

Classes are written as CSV and JSON, and as a page to look at; objects as JSON, and drawn onto the images; the outputs
of a task of your own as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.checks import NonNegativeInt, PositiveInt, Probability, check_value
from lockstep.cli.shared import Command, add_json_argument, add_weights_arguments, check_output_folder
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.reporting.console import show_progress
from lockstep.screen import log, write_json, write_lines
from lockstep.terminal import in_columns

if TYPE_CHECKING:
    from lockstep.cli.given_run import ChosenRun
    from lockstep.recipes.parts import Pictures
    from lockstep.runs.predict import ClassProbability, FoundObjects, Outputs, Predictions

CSV, JSON, PAGE, PICTURES = "predictions.csv", "predictions.json", "predictions.html", "pictures"

_Result = TypeVar("_Result")

_SIDE_PIXELS = 160
_TOP = 5
_MOST_NAMED = 10


def _add_arguments(predict: argparse.ArgumentParser) -> None:
    add_weights_arguments(predict)
    predict.add_argument("images", nargs="+", metavar="FILE|FOLDER", help="images, and folders with images below them")
    predict.add_argument("--to", type=Path, metavar="DIR", help=f"for {CSV}, {JSON} and {PAGE}; {PICTURES} of objects")
    add_json_argument(predict)
    predict.add_argument("--force", action="store_true", help="write to a folder that is not empty")
    predict.add_argument("--top", metavar="N", help="the N most probable classes of each image, or all (default: 5)")
    predict.add_argument(
        "--min-score", type=float, metavar="X", help="draw no objects of lower scores (default: as the recipe)"
    )
    predict.add_argument(
        "--show", type=int, default=100, metavar="N", help=f"so many images on {PAGE}, or in {PICTURES} (default: 100)"
    )
    predict.add_argument("--device", choices=["cpu"], help="leave the accelerators alone")


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    check_value("show", arguments.show, NonNegativeInt)
    if arguments.to:
        check_output_folder(arguments.to, overwrite=arguments.force)
    elif not arguments.json:
        raise InputError(
            "What is predicted is written to a folder, or as JSON to the standard output.",
            given="neither --to nor --json",
            expected="one of them, or both",
            hint="--to predictions",
        )

    from lockstep.cli.given_run import chosen_run
    from lockstep.recipes.data import DetectionData

    run = chosen_run(arguments)
    of_data = _found_objects if isinstance(run.recipe.data, DetectionData) else _classes
    find = of_data if run.recipe.task is None else _own_outputs
    predictions, text = find(arguments, run)
    if arguments.json:
        write_json(json.loads(text))
    for bad in predictions.skipped[:_MOST_NAMED]:
        log.warning("skipped: %s", bad.reason)
    if len(predictions.skipped) > _MOST_NAMED:
        log.warning("and %d more: %s names all", len(predictions.skipped) - _MOST_NAMED, JSON)
    if arguments.json:
        return 0
    skipped = f", {len(predictions.skipped)} skipped" if predictions.skipped else ""
    images = f"{len(predictions)} image{'s' if len(predictions) != 1 else ''}"
    write_lines([f"{arguments.to}: {images}{skipped}, by the {predictions.weights} weights of step {predictions.step}"])
    return 0


def _classes(arguments: argparse.Namespace, run: ChosenRun) -> tuple[Predictions | FoundObjects | Outputs, str]:
    if arguments.min_score is not None:
        raise _not_for("a classifier", f"--min-score {arguments.min_score:g}", "the run of a detector")
    top = _top(arguments.top or str(_TOP))

    from lockstep.runs.predict import predict, predictions_json

    predictions = _on_images(predict, "predicting", arguments, run, top=top)
    text = predictions_json(predictions)
    if arguments.to:
        _write(predictions, text, arguments.to, arguments.show)
    if not arguments.json and len(predictions) <= _MOST_NAMED:
        best = [[name, _text(predictions.classes(index)[0])] for index, name in enumerate(predictions.files)]
        write_lines(in_columns(best))
    return predictions, text


def _found_objects(arguments: argparse.Namespace, run: ChosenRun) -> tuple[Predictions | FoundObjects | Outputs, str]:
    if arguments.top is not None:
        raise _not_for("a detector", f"--top {arguments.top}", "the run of a classifier")
    from lockstep.recipes.parts import Pictures

    scored = run.recipe.evaluate.detection
    how = scored.pictures if scored else Pictures()
    if arguments.min_score is not None:
        check_value("min_score", arguments.min_score, Probability)
        how = replace(how, min_score=arguments.min_score)

    from lockstep.runs.predict import detect, found_objects_json

    found = _on_images(detect, "detecting", arguments, run)
    text = found_objects_json(found)
    if arguments.to:
        _write_objects(found, text, arguments.to, arguments.show, how)
    return found, text


def _own_outputs(arguments: argparse.Namespace, run: ChosenRun) -> tuple[Outputs, str]:
    for flag, given in {"--top": arguments.top, "--min-score": arguments.min_score}.items():
        if given is not None:
            raise _not_for("one of a task of your own", f"{flag} {given}", "the run of a task of Lockstep")

    from lockstep.runs.predict import outputs

    found = _on_images(outputs, "predicting", arguments, run)
    text = found.as_json()
    if arguments.to:
        with atomic_write(arguments.to / JSON, parents=True, failure=InputError) as file:
            file.write(text.encode())
    return found, text


def _on_images(
    find: Callable[..., _Result], title: str, arguments: argparse.Namespace, run: ChosenRun, **options: Any
) -> _Result:
    how = {"weights": run.weights, "device": arguments.device, "allow_code": arguments.allow_code}
    with show_progress(title) as show:
        return find(run.name, arguments.images, **how, progress=show, **options)


def _not_for(what: str, flag: str, expected: str) -> InputError:
    return InputError(
        f"The model of this run is {what}.", given=flag, expected=expected, hint=f"leave {flag.split()[0]} out"
    )


def _top(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise InputError(
            "This is no number of classes.",
            given=f"--top {text}",
            expected="a whole number from 1 on, or all",
            hint="leave --top out for the 5 most probable",
        )
    check_value("top", int(text), PositiveInt)
    return int(text)


def _write(predictions: Predictions, text: str, folder: Path, num_shown: int) -> None:
    """Write all files, or none."""
    from lockstep.runs.predict import predictions_csv

    files = {
        # Files are named by people: their names need not be text.
        CSV: predictions_csv(predictions).encode(errors="backslashreplace"),
        JSON: text.encode(),
    }
    if num_shown:
        files[PAGE] = _page(predictions, num_shown)
    with ExitStack() as stack:
        for name, content in files.items():
            stack.enter_context(atomic_write(folder / name, parents=True, failure=InputError)).write(content)


def _write_objects(found: FoundObjects, text: str, folder: Path, num_shown: int, how: Pictures) -> None:
    """Write all files, or none: what was found, and the first images with it."""
    from lockstep.runs.showing import drawn, examples, write_picture

    with ExitStack() as stack:
        file = stack.enter_context(atomic_write(folder / JSON, parents=True, failure=InputError))
        file.write(text.encode())
        first = found.images[:num_shown]
        shown = examples(found.reader, [image.example_index for image in first], order="sequential")
        for image, example in zip(first, shown, strict=True):
            if example.original:
                path = folder / PICTURES / f"{image.source_id}.png"
                write_picture(path, drawn(example.original, image.found, found.class_names, how))


def _page(predictions: Predictions, num_shown: int) -> bytes:
    from lockstep.cli.cards import card, html_page
    from lockstep.images.drawing import printable
    from lockstep.runs.showing import examples

    found = predictions.by_position()
    first = range(min(num_shown, len(predictions.reader)))
    shown = [card(each, _SIDE_PIXELS) for each in examples(predictions.reader, first, order="sequential")]
    cards = [
        replace(
            each,
            details=printable(", ".join(map(_text, found.get(each.position, ())))),
            tiles=tuple(tile._replace(caption="") for tile in each.tiles),
        )
        for each in shown
    ]
    title = f"{predictions.reader.folder}, by the {predictions.weights} weights of step {predictions.step}"
    return html_page(printable(title), cards)


def _text(found: ClassProbability) -> str:
    return f"{found.name} {100 * found.probability:.1f} %"


COMMAND = Command(
    "predict the classes of images in files and folders, or the objects on them",
    _add_arguments,
    _run,
    flags={"show": "--show", "top": "--top", "min_score": "--min-score"},
)
