"""What a run has left to look at: images among its summaries, a confusion matrix, its worst mistakes."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lockstep.errors import InputError
from lockstep.report.curves import SPEED, WAITING, Points, add_point
from lockstep.reporting.events import event_paths, read_events
from lockstep.run_files import CONFUSION, MISTAKES
from lockstep.runs.record import open_plain_file
from lockstep.screen import one_line

_MOST_PICTURES = 16
_MOST_BYTES, _MOST_PIXELS = 1 << 25, 50_000_000
_MOST_CLASSES_SHOWN, _MOST_CONFUSIONS = 40, 10
_LOSSLESS_BYTES, _LONGEST_PIXELS = 24_000, 1100
_SPEED_TAGS = {"examples_per_second": SPEED, "data_wait_share": WAITING}


@dataclass(frozen=True)
class ReportPicture:
    """A picture of the page."""

    caption: str
    url: str
    """With the picture in it, `data:image/png;base64,...`."""
    width: int
    height: int


@dataclass(frozen=True)
class Summarised:
    """What is taken from a run's summaries for TensorBoard."""

    inputs: tuple[ReportPicture, ...]
    """Images as the model sees them, augmented."""
    detections: tuple[ReportPicture, ...]
    """Images of the newest evaluation with what was detected on them."""
    speeds: dict[str, Points]
    """Throughput and share of waiting, for runs that have no timings."""


@dataclass(frozen=True)
class Confusion:
    """How often each class was taken for which."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """A row for each right class, a column for each predicted one."""

    @property
    def is_shown_whole(self) -> bool:
        """Whether it is small enough for a table with a cell for each pair of classes."""
        return len(self.classes) <= _MOST_CLASSES_SHOWN

    @property
    def largest(self) -> int:
        """The largest number of mistakes of one kind, at least 1."""
        return max((count for _, _, count in self._mistakes()), default=1) or 1

    @property
    def most_frequent(self) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: the right class, the predicted one, how often."""
        return sorted((each for each in self._mistakes() if each[2]), key=lambda each: -each[2])[:_MOST_CONFUSIONS]

    def _mistakes(self) -> Iterator[tuple[str, str, int]]:
        for right, row in enumerate(self.counts):
            for predicted, count in enumerate(row):
                if predicted != right:
                    yield self.classes[right], self.classes[predicted], count


def summarised(folders: Sequence[Path], problems: list[str]) -> Summarised:
    """Read the summaries in some folders of a run; what cannot be read is said in `problems`."""
    newest: dict[str, dict[str, tuple[int, bytes]]] = {"input": {}, "image-": {}}
    speeds: dict[str, Points] = {title: {} for title in _SPEED_TAGS.values()}
    files = [file for folder in folders for file in event_paths(folder) if not file.is_symlink()]
    try:
        for event in (event for file in files for event in read_events(file)):
            for value in event.summary.value:
                if value.tag in _SPEED_TAGS:
                    title = _SPEED_TAGS[value.tag]
                    add_point(speeds[title], title.lower(), event.step, value.simple_value)
                images = newest.get(value.tag.partition("/")[0].rstrip("0123456789"))
                if (
                    images is not None
                    and value.HasField("image")
                    and (value.tag in images or len(images) < _MOST_PICTURES)
                ):
                    images[value.tag] = event.step, value.image.encoded_image_string
    except InputError as error:
        problems.append(error.what)
    inputs, detections = (
        [encoded(data, f"{tag}, step {step}") for tag, (step, data) in images.items()] for images in newest.values()
    )
    return Summarised(tuple(filter(None, inputs)), tuple(filter(None, detections)), speeds)


def encoded(data: bytes, caption: str) -> ReportPicture | None:
    """Make a picture for the page of an encoded image: a large one is made smaller. None if it is no image."""
    if len(data) > _MOST_BYTES:
        return None
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            if image.width * image.height > _MOST_PIXELS:
                return None
            return picture_of(image, caption)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def picture_of(image: Image.Image, caption: str) -> ReportPicture:
    """Make a picture for the page of an image in memory: what is large is made smaller, and loses a little."""
    shown = image.convert("RGB")
    shown.thumbnail((_LONGEST_PIXELS, _LONGEST_PIXELS))
    kind, data = "png", _encoded(shown, "PNG")
    if len(data) > _LOSSLESS_BYTES:
        kind, data = "jpeg", _encoded(shown, "JPEG", quality=85)
    return ReportPicture(one_line(caption), f"data:image/{kind};base64,{base64.b64encode(data).decode()}", *shown.size)


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def worst_mistakes(path: Path, caption: str, problems: list[str]) -> ReportPicture | None:
    """Return the sheet of the worst mistakes in a run's folder; None where there is none."""
    data = bytes_in(path / MISTAKES, problems)
    picture = encoded(data, caption) if data is not None else None
    if data is not None and picture is None:
        problems.append(f"{MISTAKES} is no picture, or too large a one")
    return picture


def confusion(path: Path, problems: list[str]) -> Confusion | None:
    """Read the confusion matrix in a run's folder; None where there is none."""
    data = bytes_in(path / CONFUSION, problems)
    if data is None:
        return None
    try:
        header, *rows = csv.reader(io.StringIO(data.decode(errors="replace"), newline=""))
        counts = tuple(tuple(map(int, row[1:])) for row in rows)
        if not rows or any(len(row) != len(rows) for row in counts) or len(header) != len(rows) + 1:
            raise ValueError("it is not square")
        if any(count >> 63 for row in counts for count in row):
            raise ValueError("a count is negative, or too large")
    except (ValueError, csv.Error) as error:
        problems.append(f"{CONFUSION} is no confusion matrix: {error}")
        return None
    return Confusion(tuple(header[1:]), counts)


def bytes_in(path: Path, problems: list[str]) -> bytes | None:
    """Return what is in a file of a run's folder, or the first 32 MiB of it; None where there is none."""
    try:
        with open_plain_file(path) as file:
            return file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return None
