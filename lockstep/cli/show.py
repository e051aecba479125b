"""`lockstep show`: examples before and after augmentation, as a page of HTML or as one image."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.checks import check_range
from lockstep.cli.page import card, html_page
from lockstep.cli.sheet import contact_sheet
from lockstep.cli.subject import Subject, subject
from lockstep.cli.target_file import check_target
from lockstep.data.showing import examples
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.images.drawing import printable
from lockstep.images.pillow import png_bytes
from lockstep.parallel.launch import STOPPED
from lockstep.screen import write_lines

_SIDE_PIXELS = {".html": 448, ".png": 300}
_MOST_PICTURES = 1000


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Write the page, and one line that says so."""
    path = Path(arguments.to)
    what = "Examples are shown as a page of HTML or as one PNG."
    check_target(path, _SIDE_PIXELS, what, overwrite=arguments.force)
    check_range("repeat", arguments.repeat, 1, _MOST_PICTURES + 1)
    positions = _positions(arguments.positions, arguments.repeat)
    try:
        chosen = subject(arguments.source, arguments.augment, arguments.size, arguments.order, arguments.seed)
        shown = examples(
            chosen.reader,
            positions,
            order=chosen.order,
            seed=chosen.seed,
            pipeline=chosen.pipeline,
            num_draws=arguments.repeat,
        )
        side = _SIDE_PIXELS[path.suffix]
        cards = [card(example, side) for example in shown]
    except KeyboardInterrupt:
        return STOPPED["SIGINT"]
    title = _title(arguments, positions, chosen)
    page = html_page(title, cards) if path.suffix == ".html" else png_bytes(contact_sheet(title, cards, side))
    with atomic_write(path, failure=InputError) as file:
        file.write(page)
    bad = sum(bool(card.problem) for card in cards)
    write_lines([f"{path}: {_counted(len(cards), 'example')}" + (f", {bad} with a problem" if bad else "")])
    return 0


def _positions(text: str, num_draws: int) -> range:
    """From "0:16", or of one position from "5".

    Raises:
        InputError: there are no such positions, or more of them than a page can show.
    """
    # Fifteen digits: sums with as many epochs as there are draws stay far within 64 bits.
    found = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text)
    positions = range(int(found[1]), int(found[2] or int(found[1]) + 1)) if found else range(0)
    if not positions or len(positions) * num_draws > _MOST_PICTURES:
        draws = f", {num_draws} draws of each" if num_draws > 1 else ""
        raise InputError(
            "These positions cannot be shown.",
            given=f"--positions {text}{draws}",
            expected=f"FIRST:END, such as 0:16 for the first 16, or one position; at most {_MOST_PICTURES} pictures",
            hint="give positions from 0 on, the first one below the end",
        )
    return positions


def _title(arguments: argparse.Namespace, positions: range, chosen: Subject) -> str:
    order = chosen.order if isinstance(chosen.order, str) else type(chosen.order).__name__
    augmented = f", augmented by {arguments.augment}" if arguments.augment else ""
    places = f"from position {positions[0]} to {positions[-1]}"
    return printable(f"{arguments.source}, {order}, seed {chosen.seed}, {places}{augmented}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
