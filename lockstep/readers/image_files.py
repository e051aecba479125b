"""The images that the annotations of a data set name: files in a folder, each of a size that is known."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.errors import DataError
from lockstep.images.decode import Decoding
from lockstep.images.encoded import EncodedImage
from lockstep.readers.reader import Int64s

_NAMED_AT_MOST = 5

_logger = logging.getLogger("lockstep")


class ImageFiles:
    """Files in a folder or below, by their index; held as one string of bytes, about 30 a file.

    Args:
        folder: where they are.
        names: their paths within it.
        sizes: height and width of each, (files, 2), as its annotation says.
        decoding: how they are decoded once they are asked for.

    Raises:
        DataError: the folder cannot be read, or a file is not there.
    """

    def __init__(self, folder: Path, names: Sequence[str], sizes: Int64s, decoding: Decoding) -> None:
        _check_present(folder, names)
        self.sizes = sizes
        """Height and width of each, (files, 2)."""
        self._folder, self._decoding = os.fspath(folder), decoding
        # As one string of bytes: a million strings would be several times as large.
        encoded = [os.fsencode(name) for name in names]
        self._names = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])
        # Looked up now: loader processes are forked from this one, and must find the decoder's library loaded.
        _logger.info("Images in %s are decoded by %s", folder, decoding.chosen)

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, index: int) -> str:
        """The path of a file within the folder."""
        return os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])

    def path(self, index: int) -> str:
        """Where a file is."""
        return f"{self._folder}/{self.name(index)}"

    def read(self, index: int) -> EncodedImage:
        """An image, not decoded.

        Raises:
            DataError: it cannot be read, its header is damaged, or announces another size than the annotation.
        """
        path = self.path(index)
        image = EncodedImage(_bytes_of(path), path, self._decoding)
        (width, height), (expected_height, expected_width) = image.size, self.sizes[index].tolist()
        if (height, width) != (expected_height, expected_width):
            raise DataError(
                f"{path} is not of the size that its annotation is for.",
                given=f"{width} x {height} pixels",
                expected=f"{expected_width} x {expected_height} pixels",
                mend="put the annotated image there; if it lies on its side, decode with exif=True or without",
            )
        return image


def named(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


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
            mend="name the folder in which the annotations' file names are to be found",
        ) from error
    if missing := [name for name, (parent, _, last) in zip(names, parted, strict=True) if last not in listed[parent]]:
        raise DataError(
            f"Images are missing in {folder}.",
            given=f"no {named(missing)}",
            expected=f"all {len(names)} that the annotations name",
            mend="put them there, or name the folder that they are in",
        )


def _names_in(folder: str) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries}


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read.",
            given=str(error),
            expected="the image that was there when the folder was listed",
            mend="put it back, or begin again with the folder as it is now",
        ) from error
