"""Image files in a folder: their names, their bytes, and for annotated ones the size that the annotation gives."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.listing import shorten
from lockstep.readers.reader import Int64s
from lockstep.records.index_cache import Cache, ranges_through
from lockstep.records.open_files import FilePart, Version, read_stored
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath, DataPath, ObjectStat, RemotePath
from lockstep.tracing import now_reading

_MOST_BYTES = 0x7FFF_F000  # what the system reads at once
_NO_STAT = ObjectStat(0, 0)
_THREADS = 16
_MOST_ASKED = 1024  # for their size: over a network each takes about a millisecond


class ImageFiles:
    """Annotated image files in a folder or below, by index.

    Args:
        sizes: height and width that the annotations give them, (files, 2).
        decoding: how they are decoded when they are asked for; they are not turned, as their annotations are not.
        cache: where what is read of an object store is kept; by default in the user's cache.
    """

    def __init__(
        self, folder: AnyPath, names: Sequence[str], sizes: Int64s, decoding: Decoding, cache: Cache = None
    ) -> None:
        check_not_turned(decoding)
        self.sizes = sizes
        """Height and width of each, (files, 2)."""
        self.names = present_files(folder, names, cache)
        self._decoding = decoding
        self.decoder = load_decoder(decoding)

    def __len__(self) -> int:
        return len(self.sizes)

    def read_each(self, indices: Int64s) -> list[EncodedImage]:
        """Read images, and check that their headers have the sizes of the annotations; they are not decoded."""
        numbers = indices.tolist()
        images = self.names.read_each(numbers, self._decoding)
        return [self._checked(image, number) for image, number in zip(images, numbers, strict=True)]

    def _checked(self, image: EncodedImage, index: int) -> EncodedImage:
        (width, height), (expected_height, expected_width) = image.size, self.sizes[index].tolist()
        if (height, width) != (expected_height, expected_width):
            raise DataError(
                f"{image.source} is not of the size that its annotation is for.",
                given=f"{width} x {height} pixels",
                expected=f"{expected_width} x {expected_height} pixels",
                hint="put the annotated image there, or annotate it as it is stored",
            )
        return image


class FileNames:
    """The names of files in a folder or below, by index; one string of bytes, as a million strings would be large.

    Args:
        stats: size and version of each, as an object store has listed them; None for files of this machine.
        cache: where what is read of an object store is kept; by default in the user's cache.
    """

    def __init__(
        self,
        folder: str | AnyPath,
        names: Iterable[str],
        stats: Sequence[ObjectStat] | None = None,
        cache: Cache = None,
    ) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._folder = str(folder)
        self._stats = None if stats is None else np.array(stats, np.int64).reshape(-1, 2)
        self._ranges = ranges_through(cache)
        if self._stats is not None:
            self._ranges.expect(int(self._stats[:, 0].sum()))
        self._names = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])

    def path(self, index: int) -> str:
        """Return the path of a file."""
        return f"{self._folder}/{self[index]}"

    def read_each(self, indices: Iterable[int], decoding: Decoding) -> Iterator[EncodedImage]:
        """Read the images in files, which are not decoded: in turn, or if they are in a store all with the first."""
        if self._stats is None:
            for index in indices:
                path = self.path(index)
                yield EncodedImage(_bytes_of(path), path, decoding)
            return
        wanted = [self._place(index, *self._stats[index].tolist()) for index in indices]
        if wanted:
            now_reading(str(wanted[0].path))
        for place, data in zip(wanted, read_stored(self._ranges, wanted), strict=True):
            yield EncodedImage(data, str(place.path), decoding)

    def _place(self, index: int, size_bytes: int, stamp: int) -> FilePart:
        path = self.path(index)
        if size_bytes > _MOST_BYTES:
            raise _unreadable(path, f"one of more than {_MOST_BYTES} bytes")
        return FilePart(DataPath(path), Version(size_bytes, stamp), size_bytes, 0)

    def blocks(self, bounds: Int64s) -> list[tuple[bytes, Int64s, Int64s]]:
        """Make the blocks to checksum for groups of files that follow one another, without reading the files.

        The bounds are the index of the first file of each group, and at the end the number of all files. A block has of
        a group the names, their ends, and the sizes in bytes of some of its files (0 for a missing one): of 1024 among
        all files, evenly spaced.
        """
        asked = np.linspace(0, bounds[-1] - 1, min(bounds[-1], _MOST_ASKED)).astype(np.int64)
        if self._stats is None:
            sizes = np.fromiter((_size_of(self.path(index)) for index in asked.tolist()), np.int64, len(asked))
        else:
            sizes = self._stats[asked, 0]
        names, ends = self._names, self._ends
        return [
            (
                names[ends[first] : ends[last]],
                ends[first : last + 1] - ends[first],
                sizes[slice(*np.searchsorted(asked, [first, last]))],
            )
            for first, last in pairwise(bounds.tolist())
        ]


def present_files(folder: AnyPath, names: Sequence[str], cache: Cache = None) -> FileNames:
    """Return files that annotations name, all of which have to be in a folder or below."""
    _check_within(folder, names)
    return FileNames(folder, names, _check_present(folder, names), cache)


def upright_sizes(folder: AnyPath, names: Sequence[str], decoding: Decoding, cache: Cache = None) -> Int64s:
    """Read the height and width of images, (files, 2), by their headers, where annotations do not say them.

    Those of an image that cannot be read are 0, and the log names it: it is a bad example, of which reading it tells.

    Raises:
        DataError: an image is missing, or would be turned as EXIF asks for: tools draw boxes on turned images, and
            those of the raster as it is stored would be others.
    """
    files, sizes = present_files(folder, names, cache), np.zeros((len(names), 2), np.int64)
    unread = []
    for place, read in enumerate(_reading(files, decoding, isinstance(folder, RemotePath))):
        try:
            image = read()
            size, orientation = image.size, image.orientation
        except DataError:
            unread.append(names[place])
            continue
        sizes[place] = size[::-1]
        if orientation != 1:
            raise DataError(
                f"{image.source} is stored as a raster that is turned when it is shown.",
                given=f"the EXIF orientation {orientation}",
                expected="an upright image: the boxes do not say which of both they are drawn on",
                hint="write such images anew, turned, with ImageMagick: mogrify -auto-orient *.jpg",
            )
    if unread:
        what = "%d of %d images in %s cannot be read, and are bad examples: %s"
        log.warning(what, len(unread), len(names), folder, shorten(unread), chief_only=True)
    return sizes


def _reading(files: FileNames, decoding: Decoding, is_remote: bool) -> Iterator[Callable[[], EncodedImage]]:
    """Yield what reads each image: of a store many are read at once, so that none waits for the one before."""
    if not is_remote:
        yield from (partial(next, files.read_each([place], decoding)) for place in range(len(files)))
        return
    for first in range(0, len(files), _MOST_ASKED):
        places = range(first, min(first + _MOST_ASKED, len(files)))
        yield from (partial(next, iter([image])) for image in files.read_each(places, decoding))


def load_decoder(decoding: Decoding) -> str:
    """Load the library that decodes images, and return its name and version.

    It is done before loader processes are forked: they must find the library loaded.
    """
    return decoding.chosen


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 (a thousand paths need not be parsed)
    except OSError:
        return 0


def _bytes_of(path: str) -> bytes:
    """Read a file of at most 2 GiB; pipes and devices are refused."""
    # Few system calls, where `open` and `read` make eight; and none that waits for the other end of a pipe.
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
        raise _unreadable(path, str(error)) from error


def _unreadable(path: str, given: str) -> DataError:
    return DataError(
        f"{path} cannot be read.",
        given=given,
        expected="the image that was there when the folder was listed",
        hint="put it back, or begin again with the folder as it is now",
    )


def check_not_turned(decoding: Decoding) -> None:
    """Refuse to turn images that have boxes or masks, which would not be turned with them."""
    if decoding.exif:
        raise InputError(
            "Images cannot be turned as EXIF asks for, and their boxes be left where they are.",
            given="Decoding(exif=True) for images with boxes",
            expected="Decoding(exif=False): boxes and masks are those of the raster as it is stored",
            hint="leave exif out; if the boxes are those of the turned images, write these files anew, turned",
        )


def _check_within(folder: AnyPath, names: Sequence[str]) -> None:
    if outside := [name for name in names if name.startswith("/") or (".." in name and ".." in Path(name).parts)]:
        raise DataError(
            f"The annotations name files that are not in {folder}.",
            given=shorten(outside),
            expected="paths within the folder, without .. and not from / on",
            hint="name the folder above all of them, and write the file names from there on",
        )


def _check_present(folder: AnyPath, names: Sequence[str]) -> list[ObjectStat] | None:
    """Refuse names that are not there; returns what the listing tells of each, where it is that of a store."""
    parted = [name.rpartition("/") for name in names]
    parents = sorted({parent for parent, _, _ in parted})
    # Each folder is listed once: over a network, asking for a hundred thousand files one by one takes minutes.
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            listed = dict(zip(parents, pool.map(partial(_listed, folder), parents), strict=True))
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
    if not isinstance(folder, RemotePath):
        return None
    return [listed[parent][last] for parent, _, last in parted]


def _listed(folder: AnyPath, parent: str) -> dict[str, ObjectStat]:
    """List what is in a folder by name; in an object store only files, with what is told of each."""
    if isinstance(folder, RemotePath):
        return {path.name: path.stat() for path in (folder / parent).iterdir() if path.is_file()}
    with os.scandir(f"{folder}/{parent}") as entries:
        return dict.fromkeys((entry.name for entry in entries), _NO_STAT)
