"""ImageNet's files, prepared and listed for conversion as by the TensorFlow reference's build_imagenet_data.

`write_boxes` makes one CSV file of the bounding boxes, `sort_validation` puts the validation images into a folder for
each class, and `imagenet_sets` lists all images with their labels and boxes.

A line of the CSV file is `n00007846_64193.JPEG,0.0060,0.2620,0.7545,0.9940`: the image, and left, top, right and bottom
as shares of the size at which annotators saw it, which is not always that of the file.
"""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from lockstep.checks import check_one_of
from lockstep.convert.image_folder import Box, LabelledImage, Synset, find_sets, labelled, shuffled
from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.readers.boxed_images import BoxedImage, BoxedObject
from lockstep.readers.label_map import read_labels
from lockstep.readers.voc import read_voc_xml
from lockstep.screen import log
from lockstep.types import ProgressFunction

_ENDING = ".JPEG"


def imagenet_sets(
    folder: Path, synsets: Path, metadata: Path, boxes: Path | None = None
) -> dict[str, list[LabelledImage]]:
    """List the images in the folders `train` and `validation` (or `val`) of a folder, shuffled; one may be missing.

    Each holds a folder for each synset with its images, named *.JPEG. `convert_images` converts them.

    Args:
        folder: holds the folders of the sets.
        synsets: a file with a synset a line; that of the first line has the label 1. Folders of other synsets are left
            out, and a synset without a folder keeps its number; both are logged.
        metadata: a file with a readable name for each synset, after a tab.
        boxes: a file written by `write_boxes`; by default no image has a box.
    """
    names = read_labels(synsets)
    texts = _read_metadata(metadata)
    if missing := [name for name in names if name not in texts]:
        raise DataError(
            f"{metadata} lacks names.",
            given=f"none for {shorten(missing)}",
            expected=f"a line for each of the {len(names)} synsets of {synsets}",
            hint="take the metadata that belong to this list of synsets",
        )
    boxes_of = read_boxes(boxes) if boxes else {}
    classes = {name: (label, texts[name]) for label, name in enumerate(names, 1)}
    sets = {name: _list_images(folder, path, classes, boxes_of) for name, path in find_sets(folder).items()}
    return {name: shuffled(images) for name, images in sets.items()}


def _list_images(
    root: Path, folder: Path, classes: Mapping[str, tuple[int, str]], boxes: Mapping[str, tuple[Box, ...]]
) -> list[LabelledImage]:
    present = {path.name for path in folder.iterdir() if path.is_dir()}
    if missing := [name for name in classes if name not in present]:
        log.warning("No folder in %s for %s", folder, shorten(missing))
    if others := sorted(present - {*classes}):
        log.warning("Not converted in %s: %s", folder, shorten(others))
    images = []
    for synset, (label, text) in classes.items():
        for path in sorted((folder / synset).glob(f"*{_ENDING}")):
            images.append(labelled(root, path, label, text, Synset(synset, boxes.get(path.name, ()))))
    if not images:
        raise DataError(
            f"There are no images of ImageNet in {folder}.",
            given=f"no file named {_ENDING} in a folder named after one of {len(classes)} synsets",
            expected=f"files such as n01440764/n01440764_10026{_ENDING}",
            hint="name the folder above train and validation; lockstep convert imagenet-validation sorts the latter",
        )
    return images


def _read_metadata(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        parts = [line.strip().split("\t") for line in lines if line.strip()]
        if wrong := [line for line in parts if len(line) != 2]:
            raise ValueError(f"a line with {len(wrong[0]) - 1} tabs, {wrong[0][0][:100]!r}")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} does not name synsets.",
            given=str(error),
            expected="lines of a synset, a tab and its name, such as n02119247 and black fox",
            hint="take the file imagenet_metadata.txt of the TensorFlow reference, or one like it",
        ) from error
    return dict(parts)


@dataclass(frozen=True)
class BoxCounts:
    """The numbers of boxes, images and files that `write_boxes` has seen."""

    num_files: int
    num_images: int
    num_boxes: int
    num_skipped: int
    """Boxes of another class, or without an area."""


def write_boxes(
    folder: Path,
    output: Path,
    synsets: Collection[str] | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressFunction | None = None,
) -> BoxCounts:
    """Write the boxes of all files SYNSET/NAME.xml in a folder to one CSV file, whole or not at all, by their paths.

    Swapped edges are put in order, edges outside of the image are moved to its border, and boxes without an area are
    skipped. Given synsets, the folders of others are skipped, and so are boxes whose object is another of these; boxes
    of objects that are no synset stay, since many dogs have a name there. `progress` is called after each file with the
    numbers of files done and of all files.

    Raises:
        DataError: a file cannot be read, declares a document type or lacks a value; or the CSV file exists.
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
        raise DataError(
            f"There are no bounding boxes in {folder}.",
            given="no file SYNSET/NAME.xml",
            expected="a folder for each synset, with a file of XML for each image",
            hint="name the folder above those of the synsets",
        )
    num_images = num_boxes = num_skipped = 0
    with atomic_write(output, parents=True, failure=DataError) as file:
        for number, path in enumerate(paths, 1):
            annotation = None if synsets is not None and path.parent.name not in synsets else read_voc_xml(path)
            objects = annotation.objects if annotation else ()
            boxes = list(_wanted_boxes(annotation, path.parent.name, synsets or ())) if annotation else []
            # Some annotations give "%s" as the name of their file.
            file.write(_csv_lines(f"{path.stem}.JPEG", boxes))
            num_images += bool(boxes)
            num_boxes += len(boxes)
            num_skipped += len(objects) - len(boxes)
            if progress:
                progress(number, len(paths))
    return BoxCounts(len(paths), num_images, num_boxes, num_skipped)


def read_boxes(path: Path) -> dict[str, tuple[Box, ...]]:
    """Read the boxes of each image, by the name of its file."""
    boxes: dict[str, tuple[Box, ...]] = {}
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            rows = csv.reader(file, strict=True)
            for row in rows:
                name, box = _parse_box(row, rows.line_num)
                boxes[name] = (*boxes.get(name, ()), box)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{path} is no list of bounding boxes.",
            given=str(error),
            expected="lines such as n00007846_64193.JPEG,0.0060,0.2620,0.7545,0.9940: left, top, right and bottom",
            hint="make it by lockstep convert boxes",
        ) from error
    return boxes


def _wanted_boxes(annotation: BoxedImage, synset: str, synsets: Collection[str]) -> Iterator[Box]:
    for each in annotation.objects:
        box = _relative_box(each, annotation.width, annotation.height)
        is_of_another = each.name != synset and each.name in synsets
        if box.xmin < box.xmax and box.ymin < box.ymax and not is_of_another:
            yield box


def _relative_box(found: BoxedObject, width: int, height: int) -> Box:
    """Convert whole pixels to shares of the size at which the image was shown."""
    top, left, bottom, right = (int(edge) for edge in found.box)
    xmin, xmax = sorted(min(max(edge / width, 0.0), 1.0) for edge in (left, right))
    ymin, ymax = sorted(min(max(edge / height, 0.0), 1.0) for edge in (top, bottom))
    return Box(xmin, ymin, xmax, ymax)


def _csv_lines(name: str, boxes: Sequence[Box]) -> bytes:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([name, *(f"{edge:.4f}" for edge in box)] for box in boxes)
    return text.getvalue().encode(errors="surrogateescape")


def _parse_box(row: Sequence[str], line: int) -> tuple[str, Box]:
    try:
        name, *edges = row
        box = Box(*map(float, edges))
        if not (0 <= box.xmin <= box.xmax <= 1 and 0 <= box.ymin <= box.ymax <= 1):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"line {line}: {','.join(row)[:100]!r}") from None
    return name, box


def sort_validation(
    folder: Path, labels: Path, output: Path, how: str = "link", *, progress: ProgressFunction | None = None
) -> int:
    """Put ILSVRC2012_val_00000001.JPEG and those after it into folders named after their classes; returns their number.

    Images that are in place already stay, so a call that was stopped can be repeated.

    Args:
        folder: holds the images, all in one folder as in ImageNet's archive.
        labels: a file with the class of each image, one a line (imagenet_2012_validation_synset_labels.txt).
        output: the folder above those of the classes, made if need be.
        how: "link" makes hard links, which take no room; "copy" copies; "move" leaves nothing behind.
        progress: called after each image with the numbers of images done and of all images.
    """
    check_one_of("how", how, tuple(_PLACING))
    synsets = _read_classes(labels)
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, len(synsets) + 1)]
    targets = [output / synset / name for synset, name in zip(synsets, names, strict=True)]
    _check_none_missing(folder, names, targets)
    place = _PLACING[how]
    try:
        for number, (name, target) in enumerate(zip(names, targets, strict=True), 1):
            if not _is_placed(folder / name, target):
                target.parent.mkdir(parents=True, exist_ok=True)
                place(folder / name, target)
            if progress:
                progress(number, len(names))
    except OSError as error:
        raise DataError(
            f"The images of {folder} cannot be put into {output}.",
            given=str(error),
            expected="folders that may be written; on one disk, to make links",
            hint="copy them where links cannot be made; what is done stays, and the same call goes on",
        ) from error
    return len(names)


def _read_classes(labels: Path) -> list[str]:
    try:
        synsets = [line.strip() for line in labels.read_text(encoding="utf-8").rstrip().splitlines()]
        wrong = [number for number, name in enumerate(synsets, 1) if name in ("", ".", "..") or "/" in name]
        if wrong or not synsets:
            raise ValueError(f"line {wrong[0]}, {synsets[wrong[0] - 1]!r}" if wrong else "no lines")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{labels} does not name the classes of validation images.",
            given=str(error),
            expected="a class a line, the first that of image 1: names of folders, such as n01751748",
            hint="take imagenet_2012_validation_synset_labels.txt, or a file like it",
        ) from error
    return synsets


def _check_none_missing(folder: Path, names: Sequence[str], targets: Sequence[Path]) -> None:
    """Refuse to begin if an image is neither in the folder nor in its place."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    missing = [name for name, target in zip(names, targets, strict=True) if name not in present and not target.exists()]
    if missing:
        raise DataError(
            f"Validation images are missing in {folder}.",
            given=f"{len(missing)} of {len(names)}, first {missing[0]}",
            expected="an image for each line of the labels",
            hint="unpack the archive there, all of it",
        )


def _is_placed(source: Path, target: Path) -> bool:
    """Return whether an earlier call has put the image in its place; another file there is an error."""
    if not target.exists():
        return False
    if source.exists() and not (target.samefile(source) or target.read_bytes() == source.read_bytes()):
        raise DataError(
            f"{target} is another file than {source}.",
            given="a file of this name, with other bytes",
            expected="nothing there, or the same image",
            hint="name another folder, or move it away",
        )
    return True


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as original, atomic_write(target) as file:
        shutil.copyfileobj(original, file)


_PLACING: dict[str, Callable[[Path, Path], None]] = {"link": os.link, "copy": _copy, "move": os.replace}
