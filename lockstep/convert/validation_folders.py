"""ImageNet's validation images into a folder for each class: its archive has them all in one, numbered."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.checks import check_one_of
from lockstep.durable import atomic_write
from lockstep.errors import DataError

Progress = Callable[[int, int], None]

_logger = logging.getLogger("lockstep")


def sort_validation(
    folder: Path, labels: Path, output: Path, how: str = "link", *, progress: Progress | None = None
) -> int:
    """Put ILSVRC2012_val_00000001.JPEG and those after it into folders named after their classes; returns their number.

    What has been put there before stays, so that a stopped call can be repeated.

    Args:
        folder: holds the images.
        labels: the class of each image, one a line (imagenet_2012_validation_synset_labels.txt).
        output: the folder above those of the classes, made if need be.
        how: "link" makes hard links, which take no room; "copy" copies; "move" leaves nothing behind.
        progress: called with the number of images done and of all, after each.

    Raises:
        InputError: there is no such way.
        DataError: the labels cannot be read, an image is missing, another file is in its place, or the system refuses.
    """
    check_one_of("how", how, tuple(_PLACING))
    synsets = _read(labels)
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, len(synsets) + 1)]
    targets = [output / synset / name for synset, name in zip(synsets, names, strict=True)]
    _check_present(folder, names, targets)
    place = _PLACING[how]
    try:
        for number, (name, target) in enumerate(zip(names, targets, strict=True), 1):
            if not _is_there(folder / name, target):
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


def _read(labels: Path) -> list[str]:
    """The class of each image, in the order of their numbers."""
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


def _check_present(folder: Path, names: Sequence[str], targets: Sequence[Path]) -> None:
    """Refuse to begin where an image is neither in its old place nor in its new one."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    missing = [name for name, target in zip(names, targets, strict=True) if name not in present and not target.exists()]
    if missing:
        raise DataError(
            f"Validation images are missing in {folder}.",
            given=f"{len(missing)} of {len(names)}, first {missing[0]}",
            expected="an image for each line of the labels",
            hint="unpack the archive there, all of it",
        )


def _is_there(source: Path, target: Path) -> bool:
    """Whether an image has been put in its place before."""
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
