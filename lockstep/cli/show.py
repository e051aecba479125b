"""`lockstep show`: write examples, before and after augmentation, to an HTML page or a contact sheet."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.checks import FiniteFloat, Range, check_value
from lockstep.cli.shared import Command, add_json_argument, check_target, write_found
from lockstep.durable import atomic_write
from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.cli.source import ExampleStream
    from lockstep.runs.showing import Compared, Comparison

_SIDE_PIXELS = {".html": 448, ".png": 300}
_MAX_PICTURES = 1000
_MIN_SCORE = 0.5


def _add_arguments(show: argparse.ArgumentParser) -> None:
    show.add_argument("source", help="a recipe, a file.toml, or a path to data: images in folders, shards, VOC, COCO")
    show.add_argument("--to", required=True, metavar="FILE", help="page.html, or sheet.png for all in one image")
    show.add_argument("--force", action="store_true", help="overwrite the file")
    show.add_argument(
        "--positions", default="0:16", metavar="FIRST:END", help="places in the stream (default: 0:16, the first 16)"
    )
    show.add_argument("--order", choices=["shuffled", "sequential"], help="default: the recipe's, shuffled for a path")
    show.add_argument("--seed", type=int, metavar="N", help="default: the recipe's, 0 for a path")
    show.add_argument(
        "--augment", metavar="WHAT", help="crop, lenet, cifarnet, vgg, inception, or a recipe (default: the recipe's)"
    )
    show.add_argument("--size", type=int, metavar="N", help="height and width that a preset crops to, in pixels")
    show.add_argument(
        "--detections", metavar="FILE", help="also show detections beside the objects: a file of results as COCO's"
    )
    show.add_argument(
        "--min-score", type=float, metavar="X", help="leave out detections of lower scores (default: 0.5)"
    )
    add_json_argument(show)
    show.add_argument("--repeat", type=int, default=1, metavar="N", help="augment each so many times")


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from lockstep.cli.source import check_source, example_stream

    path = Path(arguments.to)
    what = "Examples are shown as a page of HTML or as one PNG."
    check_target(path, _SIDE_PIXELS, what, overwrite=arguments.force)
    check_value("repeat", arguments.repeat, Annotated[int, Range(ge=1, le=_MAX_PICTURES)])
    positions = _positions(arguments.positions, arguments.repeat)
    side = _SIDE_PIXELS[path.suffix]
    _check_detections(arguments)
    check_source(arguments.source)

    from lockstep.cli.cards import card, contact_sheet, html_page
    from lockstep.images.pillow import png_bytes
    from lockstep.runs.showing import examples

    stream = example_stream(
        arguments.source,
        arguments.augment,
        arguments.size,
        arguments.order,
        arguments.seed,
        truth=arguments.detections is not None,
    )
    shown = examples(
        stream.reader,
        positions,
        order=stream.order,
        seed=stream.seed,
        pipeline=stream.pipeline,
        num_draws=arguments.repeat,
        detections=_comparison(arguments, stream),
    )
    cards, compared = [], []
    for example in shown:
        cards.append(card(example, side))
        compared += [example.compared] if example.compared else []
    title = _title(arguments, positions, stream)
    page = html_page(title, cards) if path.suffix == ".html" else png_bytes(contact_sheet(title, cards, side))
    with atomic_write(path, failure=InputError) as file:
        file.write(page)
    _tell(arguments, len(cards), sum(bool(card.problem) for card in cards), compared)
    return 0


def _tell(arguments: argparse.Namespace, num_shown: int, num_bad: int, compared: Sequence[Compared]) -> None:
    names = ("right", "wrong", "missed")
    counts = {name: sum(getattr(each, f"num_{name}") for each in compared) for name in names} if compared else None
    facts = {"file": arguments.to, "examples": num_shown, "problems": num_bad, "detections": counts}
    text = f"{arguments.to}: {num_shown} example{'s' if num_shown > 1 else ''}"
    text += f", {num_bad} with a problem" if num_bad else ""
    if counts:
        text += "; detections: {right} right, {wrong} wrong, {missed} objects missed".format(**counts)
    write_found(arguments, facts, [text])


def _check_detections(arguments: argparse.Namespace) -> None:
    from lockstep.cli.source import is_recipe

    if arguments.min_score is not None:
        check_value("min_score", arguments.min_score, FiniteFloat)
        if arguments.detections is None:
            raise InputError(
                "Only detections have a least score to be shown.",
                given=f"--min-score {arguments.min_score:g} without --detections",
                expected="--detections FILE",
                hint="name the file, or leave --min-score out",
            )
    if arguments.detections is not None and is_recipe(arguments.source):
        raise InputError(
            "Detections have the ids of annotations, so they are shown beside the objects of a path.",
            given=f"--detections {arguments.detections} with the recipe {arguments.source}",
            expected="a path to COCO's annotations, VOC's folder or records of detection",
            hint=f"name the data that the detector was run on, and the recipe by --augment {arguments.source}",
        )


def _comparison(arguments: argparse.Namespace, stream: ExampleStream) -> Comparison | None:
    from lockstep.readers.coco_results import read_coco_results
    from lockstep.runs.showing import comparison

    if arguments.detections is None:
        return None
    min_score = _MIN_SCORE if arguments.min_score is None else arguments.min_score
    return comparison(stream.reader, read_coco_results(arguments.detections), min_score, arguments.source)


def _positions(text: str, num_draws: int) -> range:
    # Fifteen digits: sums with as many epochs as there are draws stay far within 64 bits.
    found = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text)
    positions = range(int(found[1]), int(found[2] or int(found[1]) + 1)) if found else range(0)
    if not positions or len(positions) * num_draws > _MAX_PICTURES:
        draws = f", {num_draws} draws of each" if num_draws > 1 else ""
        raise InputError(
            "These positions cannot be shown.",
            given=f"--positions {text}{draws}",
            expected=f"FIRST:END, such as 0:16 for the first 16, or one position; at most {_MAX_PICTURES} pictures",
            hint="give positions from 0 on, the first one below the end",
        )
    return positions


def _title(arguments: argparse.Namespace, positions: range, stream: ExampleStream) -> str:
    from lockstep.images.drawing import printable

    order = stream.order if isinstance(stream.order, str) else type(stream.order).__name__
    augmented = f", augmented by {arguments.augment}" if arguments.augment else ""
    places = f"from position {positions[0]} to {positions[-1]}"
    return printable(f"{arguments.source}, {order}, seed {stream.seed}, {places}{augmented}")


COMMAND = Command(
    "show examples, before and after they are augmented",
    _add_arguments,
    _run,
    flags={"repeat": "--repeat", "size": "--size", "seed": "--seed", "min_score": "--min-score"},
)
