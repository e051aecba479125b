"""What the commands that convert share: flags, progress on the screen, and the last line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lockstep.reporting.console import format_duration, format_rate
from lockstep.reporting.log import is_terminal
from lockstep.screen import log

if TYPE_CHECKING:
    from lockstep.convert.image_record import LabelledImage
    from lockstep.convert.sharding import Settings, Summary
    from lockstep.reporting.bar import Bar

_SECONDS_BETWEEN_DRAWINGS = 0.2
_SECONDS_BETWEEN_LINES = 10.0
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def add_output(command: argparse.ArgumentParser) -> None:
    """Where the shards go, and how they are written."""
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder of the shards")
    command.add_argument("--processes", type=int, metavar="N", help="how many convert at once (default: one a core)")
    command.add_argument(
        "--max-skipped", type=int, metavar="N", help="fail once more items cannot be converted (default: never)"
    )
    command.add_argument("--overwrite", action="store_true", help="write over the shards of another conversion")


def add_shards(command: argparse.ArgumentParser, *, train: int, validation: int) -> None:
    """How many shards of each set, with these defaults."""
    for name, default in (("train", train), ("validation", validation)):
        command.add_argument(f"--{name}-shards", type=int, default=default, metavar="N", help=f"default: {default}")


def convert_sets(arguments: argparse.Namespace, sets: Mapping[str, Sequence[LabelledImage]]) -> None:
    """Convert the sets of images of a folder one after the other, and report what was made."""
    from lockstep.convert.image_folder import convert_images

    num_shards = {"train": arguments.train_shards, "validation": arguments.validation_shards}
    summaries = []
    for name, images in sets.items():
        with settings_of(arguments, name) as settings:
            summary = convert_images(arguments.folder, images, arguments.to, name, num_shards[name], settings=settings)
        summaries.append(summary)
    report(summaries, arguments.to)


@contextmanager
def settings_of(arguments: argparse.Namespace, title: str) -> Iterator[Settings]:
    """The settings that `add_output` has asked for, with progress on the screen below a title until the end."""
    from lockstep.convert.sharding import Settings

    with showing(title) as show:
        yield Settings(
            num_processes=arguments.processes,
            max_skipped=arguments.max_skipped,
            overwrite=arguments.overwrite,
            progress=show,
        )


@contextmanager
def showing(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function of how many are done and of how many there are, which shows it below a title until the end."""
    display = _Display(title, sys.stderr)
    try:
        yield display.show
    finally:
        display.close()


def report(summaries: Sequence[Summary], output: Path) -> None:
    """The last line: what has been made of it all."""
    total = reduce(add, summaries)
    kept = f" ({total.num_kept} of them before)" if total.num_kept else ""
    skipped = f", {len(total.skipped)} skipped (listed in {output}/.*.conversion.json)" if total.skipped else ""
    log.info(
        "%d records in %d shards%s in %s, %s, in %s%s",
        total.num_records,
        total.num_shards,
        kept,
        output,
        size(total.num_bytes),
        format_duration(total.seconds),
        skipped,
    )


def size(num_bytes: int) -> str:
    """A number of bytes for people: "812 bytes", "12.3 MB"."""
    power = min((len(str(num_bytes)) - 1) // 3, len(_UNITS) - 1)
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {_UNITS[power]}"


class _Display:
    """How far a conversion is: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream = title, stream
        self._on_terminal = is_terminal(stream)
        self._bar: Bar | None = None
        self._first: tuple[int, float] | None = None
        self._next = time.monotonic() + (0.0 if self._on_terminal else _SECONDS_BETWEEN_LINES)

    def show(self, done: int, total: int) -> None:
        """Show how many are done, when the time for it has come."""
        now = time.monotonic()
        # What an earlier start has done says nothing of the pace.
        self._first = self._first or (done, now)
        if now < self._next and not (done == total and self._bar):
            return
        num_since, seconds = done - self._first[0], now - self._first[1]
        pace = num_since / seconds if seconds else 0.0
        left = f"{format_duration((total - done) / pace)} left" if pace else ""
        place = f"{self._title}: {done} of {total}"
        if self._on_terminal:
            self._draw(place, done / total, left, f"{format_rate(pace)}/s")
        else:
            log.info("%s", " | ".join(part for part in (place, f"{format_rate(pace)}/s", left) if part))
        self._next = now + (_SECONDS_BETWEEN_DRAWINGS if self._on_terminal else _SECONDS_BETWEEN_LINES)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.close()

    def _draw(self, place: str, fraction: float, left: str, measures: str) -> None:
        if self._bar is None:
            from lockstep.reporting.bar import Bar  # only a terminal needs rich, 50 ms to import

            self._bar = Bar(self._stream)
        self._bar.draw(place, fraction, left, measures)
