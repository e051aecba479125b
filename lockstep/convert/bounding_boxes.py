"""The bounding boxes of ImageNet: from its XML to one CSV file, as by the TensorFlow reference, and from there.

A line of the CSV file is `n00007846_64193.JPEG,0.0060,0.2620,0.7545,0.9940`: the image, and left, top, right and bottom
as shares of the size at which people saw it when they drew the box, which is not always that of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.convert.imagenet_example import Box
from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.readers.voc import VocAnnotation, VocObject, read_voc_xml

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BoxCounts:
    """What has become of a folder of boxes."""

    num_files: int
    """Files of XML."""
    num_images: int
    """With a box that is kept."""
    num_boxes: int
    """That are kept."""
    num_skipped: int
    """Boxes of another class, or without an area."""


def write_boxes(
    folder: Path,
    output: Path,
    synsets: Collection[str] | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> BoxCounts:
    """Write the boxes of all files SYNSET/NAME.xml in a folder to one CSV file, in the order of their paths.

    Edges that are exchanged are put in order, and those outside of the image moved to its edge; a box without an area
    is skipped. With synsets, folders of others are, and boxes of an object of another class among them; not a box whose
    object is no synset, since many dogs have a name there.

    Args:
        folder: holds a folder for each synset.
        output: the CSV file, written whole or not at all.
        synsets: the classes that are wanted; by default all.
        overwrite: write over a file that is there.
        progress: called with the number of files done and of all, after each.

    Raises:
        DataError: there are no such files, one cannot be read, declares a document type or lacks a value; or the CSV
            file is there, or cannot be written.
    """
    if output.exists() and not overwrite:
        raise DataError(
            f"{output} is there already.",
            given="a file",
            expected="none, unless it is to be written over",
            hint="name another file, or ask to overwrite it",
        )
    paths = sorted(folder.glob("*/*.xml"))
    if not paths:
        raise _no_files(folder)
    num_images = num_boxes = num_skipped = 0
    with atomic_write(output, parents=True, failure=DataError) as file:
        for number, path in enumerate(paths, 1):
            annotation = None if synsets is not None and path.parent.name not in synsets else read_voc_xml(path)
            objects = annotation.objects if annotation else ()
            boxes = list(_kept(annotation, path.parent.name, synsets or ())) if annotation else []
            # Not the name in the file, which is "%s" in some.
            file.write("".join(_line(f"{path.stem}.JPEG", box) for box in boxes).encode())
            num_images += bool(boxes)
            num_boxes += len(boxes)
            num_skipped += len(objects) - len(boxes)
            if progress:
                progress(number, len(paths))
    return BoxCounts(len(paths), num_images, num_boxes, num_skipped)


def read_boxes(path: Path) -> dict[str, tuple[Box, ...]]:
    """The boxes of each image, by the name of its file.

    Raises:
        DataError: the file cannot be read, or a line is no box; it is named.
    """
    boxes: dict[str, tuple[Box, ...]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                name, box = _parsed(line, f"line {number}")
                boxes[name] = (*boxes.get(name, ()), box)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is no list of bounding boxes.",
            given=str(error),
            expected="lines such as n00007846_64193.JPEG,0.0060,0.2620,0.7545,0.9940: left, top, right and bottom",
            hint="make it by lockstep convert boxes",
        ) from error
    return boxes


def _kept(annotation: VocAnnotation, synset: str, synsets: Collection[str]) -> Iterator[Box]:
    """The boxes of an image that are written."""
    for each in annotation.objects:
        box = _relative(each, annotation.width, annotation.height)
        of_another = each.name != synset and each.name in synsets
        if box.xmin < box.xmax and box.ymin < box.ymax and not of_another:
            yield box


def _relative(found: VocObject, width: int, height: int) -> Box:
    """Whole pixels as shares of the size at which the image was shown."""
    top, left, bottom, right = (int(edge) for edge in found.box)
    xmin, xmax = sorted(min(max(edge / width, 0.0), 1.0) for edge in (left, right))
    ymin, ymax = sorted(min(max(edge / height, 0.0), 1.0) for edge in (top, bottom))
    return Box(xmin, ymin, xmax, ymax)


def _line(name: str, box: Box) -> str:
    return f"{name},{','.join(f'{edge:.4f}' for edge in box)}\n"


def _parsed(line: str, place: str) -> tuple[str, Box]:
    name, *edges = line.rstrip("\n").split(",")
    try:
        box = Box(*map(float, edges))
    except (TypeError, ValueError):
        raise ValueError(f"{place}: {line[:100]!r}") from None
    if not (0 <= box.xmin <= box.xmax <= 1 and 0 <= box.ymin <= box.ymax <= 1):
        raise ValueError(f"{place}: {line[:100]!r}")
    return name, box


def _no_files(folder: Path) -> DataError:
    return DataError(
        f"There are no bounding boxes in {folder}.",
        given="no file SYNSET/NAME.xml",
        expected="a folder for each synset, with a file of XML for each image",
        hint="name the folder above those of the synsets",
    )
