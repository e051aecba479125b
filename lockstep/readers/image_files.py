"""The images that the annotations of a data set name: files in a folder, each of a size that is known."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.listing import shorten
from lockstep.readers.reader import Int64s
from lockstep.screen import log
from lockstep.tracing import now_reading

_MOST_BYTES = 0x7FFF_F000  # what the system reads at once
_MOST_ASKED = 1024  # for their size: over a network each takes about a millisecond


class ImageFiles:
    """Files in a folder or below, by their index; held as one string of bytes, about 30 a file.

    Args:
        folder: where they are.
        names: their paths within it.
        sizes: height and width of each, (files, 2), as its annotation says.
        decoding: how they are decoded once they are asked for.

    Raises:
        InputError: they would be turned, and what the annotation says of them would not.
        DataError: a name leads out of the folder; the folder cannot be read, or a file is not there.
    """

    def __init__(self, folder: Path, names: Sequence[str], sizes: Int64s, decoding: Decoding) -> None:
        check_not_turned(decoding)
        _check_within(folder, names)
        _check_present(folder, names)
        self.sizes = sizes
        """Height and width of each, (files, 2)."""
        self._folder, self._decoding = os.fspath(folder), decoding
        # As one string of bytes: a million strings would be several times as large.
        encoded = [os.fsencode(name) for name in names]
        self._names = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])
        # Looked up now: loader processes are forked from this one, and must find the decoder's library loaded.
        self.decoder = decoding.chosen
        """What decodes the images, with its version."""
        log.info("Images in %s are decoded by %s", folder, self.decoder)

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, index: int) -> str:
        """The path of a file within the folder."""
        return os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])

    def path(self, index: int) -> str:
        """Where a file is."""
        return f"{self._folder}/{self.name(index)}"

    def blocks(self, bounds: Int64s) -> list[tuple[bytes, Int64s, Int64s]]:
        """What is known of groups of files without reading them, as `names_and_sizes` says."""
        return names_and_sizes(self._folder, self._names, self._ends, bounds)

    def read(self, index: int) -> EncodedImage:
        """An image, not decoded.

        Raises:
            DataError: it cannot be read, its header is damaged, or announces another size than the annotation.
        """
        path = self.path(index)
        image = EncodedImage(bytes_of(path), path, self._decoding)
        (width, height), (expected_height, expected_width) = image.size, self.sizes[index].tolist()
        if (height, width) != (expected_height, expected_width):
            raise DataError(
                f"{path} is not of the size that its annotation is for.",
                given=f"{width} x {height} pixels",
                expected=f"{expected_width} x {expected_height} pixels",
                hint="put the annotated image there, or annotate it as it is stored",
            )
        return image


def names_and_sizes(folder: str, names: bytes, ends: Int64s, bounds: Int64s) -> list[tuple[bytes, Int64s, Int64s]]:
    """For some groups of files, one after the other, what is known of them without reading: blocks for a checksum.

    Args:
        folder: where the files are.
        names: within the folder, one after the other.
        ends: where each name begins, and the end of the last.
        bounds: the index of the first file of each group, and the number of all files.

    Returns:
        Of each group the names, their ends, and the sizes in bytes of some of its files: 1024 of all files, evenly
        spaced, are asked for theirs; 0 stands for one that is not there.
    """
    asked = np.linspace(0, bounds[-1] - 1, min(bounds[-1], _MOST_ASKED)).astype(np.int64)
    found = (_size_of(f"{folder}/{os.fsdecode(names[ends[index] : ends[index + 1]])}") for index in asked.tolist())
    sizes = np.fromiter(found, np.int64, len(asked))
    return [
        (
            names[ends[first] : ends[last]],
            ends[first : last + 1] - ends[first],
            sizes[slice(*np.searchsorted(asked, [first, last]))],
        )
        for first, last in pairwise(bounds.tolist())
    ]


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 (a thousand paths need not be parsed)
    except OSError:
        return 0


def bytes_of(path: str) -> bytes:
    """What a file holds.

    Raises:
        DataError: it cannot be read, is something else than a file, such as a pipe or a device, or larger than 2 GiB.
    """
    # Few calls of the system: `open` and `read` make eight. And none that waits for the other end of a pipe.
    now_reading(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                raise OSError(f"no file, or one of more than {_MOST_BYTES} bytes")
            return os.read(descriptor, status.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read.",
            given=str(error),
            expected="the image that was there when the folder was listed",
            hint="put it back, or begin again with the folder as it is now",
        ) from error


def check_not_turned(decoding: Decoding) -> None:
    """Refuse to turn images of which boxes or masks are known: these would stay where they are.

    Raises:
        InputError: saying what to do instead.
    """
    if decoding.exif:
        raise InputError(
            "Images cannot be turned as EXIF asks for, and their boxes be left where they are.",
            given="Decoding(exif=True) for images with boxes",
            expected="Decoding(exif=False): boxes and masks are those of the raster as it is stored",
            hint="leave exif out; if the boxes are those of the turned images, write these files anew, turned",
        )


def _check_within(folder: Path, names: Sequence[str]) -> None:
    if outside := [name for name in names if ".." in name and ".." in Path(name).parts]:
        raise DataError(
            f"The annotations name files that are not in {folder}.",
            given=shorten(outside),
            expected="paths within the folder, without ..",
            hint="name the folder above all of them, and write the file names from there on",
        )


def _check_present(folder: Path, names: Sequence[str]) -> None:
    parted = [name.rpartition("/") for name in names]
    # A folder is listed once: asking for a hundred thousand files one by one takes minutes over a network.
    try:
        listed = {parent: _names_in(f"{folder}/{parent}") for parent in {parent for parent, _, _ in parted}}
    except OSError as error:
        raise DataError(
            f"The images in {folder} cannot be listed.",
            given=str(error),
            expected="the folder of the images that the annotations name",
            hint="name the folder in which the annotations' file names are to be found",
        ) from error
    if missing := [name for name, (parent, _, last) in zip(names, parted, strict=True) if last not in listed[parent]]:
        raise DataError(
            f"Images are missing in {folder}.",
            given=f"no {shorten(missing)}",
            expected=f"all {len(names)} that the annotations name",
            hint="put them there, or name the folder that they are in",
        )


def _names_in(folder: str) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries}
