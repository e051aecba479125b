"""ImageNet as files, made into records as by the TensorFlow reference's build_imagenet_data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from lockstep.convert.bounding_boxes import read_boxes
from lockstep.convert.image_folder import find_sets, labelled, shuffled
from lockstep.convert.imagenet_example import Box, LabelledImage, Synset
from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.readers.label_map import read_labels

_ENDING = ".JPEG"

_logger = logging.getLogger("lockstep")


def imagenet_sets(
    folder: Path, synsets: Path, metadata: Path, boxes: Path | None = None
) -> dict[str, list[LabelledImage]]:
    """The images of the folders `train` and `validation` (or `val`) in a folder, shuffled; one of them may be missing.

    Within each lies a folder for each synset, and in it the images, named .JPEG. `convert_images` converts them.

    Args:
        folder: as above.
        synsets: one a line; that of the first line has the label 1. Other folders are not read, and a synset without a
            folder keeps its number; both are named in the log.
        metadata: a name for people for each synset, after a tab.
        boxes: the file that `write_boxes` has written; by default no image has a box.

    Raises:
        DataError: a file cannot be read or has another form, a synset has no name, or there are no images.
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
    sets = {name: _images(folder, path, classes, boxes_of) for name, path in find_sets(folder).items()}
    return {name: shuffled(images) for name, images in sets.items()}


def _images(
    root: Path, folder: Path, classes: Mapping[str, tuple[int, str]], boxes: Mapping[str, tuple[Box, ...]]
) -> list[LabelledImage]:
    """The images of a set, by synset and name."""
    present = {path.name for path in folder.iterdir() if path.is_dir()}
    if missing := [name for name in classes if name not in present]:
        _logger.warning("No folder in %s for %s", folder, shorten(missing))
    if others := sorted(present - {*classes}):
        _logger.warning("Not converted in %s: %s", folder, shorten(others))
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
    """The name for people of each synset."""
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
