"""Reads image files in folders: one folder a class, or without labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.images.pillow import FORMATS
from lockstep.listing import hint_for_path, shorten
from lockstep.readers.fingerprint import Fingerprint, checksum, named_parts, tells_options
from lockstep.readers.image_files import FileNames, load_decoder
from lockstep.readers.label_map import BACKGROUND, read_labels
from lockstep.readers.label_tables import files_by_label, label_table_among
from lockstep.readers.reader import Cost, Int64s
from lockstep.readers.split_folders import ENDINGS
from lockstep.records.index_cache import Cache
from lockstep.records.shards import Paths, data_path, list_of_paths
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath, DataPath, Entry, ObjectStat, RemotePath

_THREADS = 16


@tells_options
class ImageFolder:
    """Images in folders named after their class.

    The classes are the folders in the order of their names, or those that a file of labels names, in its order; the
    label of the first is 0, or 1 with a background class. The images of a class are all files with the ending of an
    image in its folder and below, in the order of their paths. Anything else there is named in the log. In place of
    folders of classes there may be one table of CSV, with columns such as filename and label: see `files_by_label`.

    A batch is {"image": a list of `EncodedImage`, "label": int64 (batch,)}.

    Args:
        labels: the names of the folders, or a file with one a line; other folders are not read. The log names those
            that have no images, or are not there: one part of the data may lack a class.
        background: add a class 0 without images, as in the ImageNet of TensorFlow's reference models.
        decoding: how images are decoded when they are asked for.
        cache: where what is read of an object store is kept; by default in the user's cache.
    """

    cost: Cost = "decode"

    def __init__(
        self,
        path: str | AnyPath,
        labels: str | AnyPath | tuple[str, ...] | None = None,
        *,
        background: bool = False,
        decoding: Decoding = AS_STORED,
        cache: Cache = None,
    ) -> None:
        folder = data_path(path)
        self._decoding = decoding
        self.decoder = load_decoder(decoding)
        files, stats = _files_by_class(folder, read_labels(labels) if labels else None)
        self.classes = (BACKGROUND, *files) if background else tuple(files)
        """The name of each class, by its label."""
        self.counts = {name: len(names) for name, names in files.items()}
        """The number of images of each class, by its name."""
        self._labels = np.repeat(np.arange(len(files)) + background, [len(names) for names in files.values()])
        self._names = FileNames(folder, (name for names in files.values() for name in names), stats, cache)

    def __len__(self) -> int:
        return len(self._labels)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these examples, not decoded, and their labels."""
        images = list(self._names.read_each(indices.tolist(), self._decoding))
        return {"image": images, "label": torch.from_numpy(self._labels[indices])}

    def example_id(self, index: int) -> str:
        """Return the path of the image within the folder."""
        return self._names[index]

    def fingerprint(self) -> Fingerprint:
        """Return the label, number of images, and checksum of their names and sizes in bytes, for each class.

        Of more than 1024 images, the sizes of 1024 are looked at, evenly spaced.
        """
        labels = np.unique(self._labels).tolist()
        bounds = np.searchsorted(self._labels, [*labels, labels[-1] + 1])
        blocks = self._names.blocks(bounds)
        counts = np.diff(bounds).tolist()
        return named_parts(
            (self.classes[label], f"label {label}, {count} images, {checksum(*block)}")
            for label, count, block in zip(labels, counts, blocks, strict=True)
        )


@tells_options
class ImageList:
    """Images without labels, in files and folders.

    Files come in the order in which they are given, whatever their names end in. Of a folder these are all files with
    the ending of an image in it and below, in the order of their paths; anything else there is named in the log. A
    file that is named twice comes once.

    A batch is {"image": a list of `EncodedImage`}.

    Args:
        paths: files, folders, or both; one of them, or several.
        decoding: how images are decoded when they are asked for.

    Raises:
        DataError: a path is not there, or there is no image.
    """

    cost: Cost = "decode"

    def __init__(self, paths: Paths, decoding: Decoding = AS_STORED) -> None:
        given = [data_path(path) for path in list_of_paths(paths)]
        files = [*dict.fromkeys(file for path in given for file in _files_at(path))]
        if not files:
            raise DataError(
                "There are no images.",
                given=f"no image in {shorten([*map(str, given)])}" if given else "no path",
                expected=f"files of {FORMATS}, or folders with some",
                hint="check the path; of folders, files are read by their endings, such as .jpg",
            )
        above = _folder_above(given)
        is_absolute = any(path.is_absolute() for path in given)
        self.folder = str(above) if is_absolute else os.path.relpath(str(above))
        """The folder that all files are in or below: relative to the current one, if all paths given were."""
        self._decoding = decoding
        self.decoder = load_decoder(decoding)
        names = [file.relative_to(above).as_posix() for file in files]  # type: ignore[arg-type]  # both of one kind
        stats = [file.stat() for file in files if isinstance(file, RemotePath)]
        self._names = FileNames(self.folder, names, stats or None)

    def __len__(self) -> int:
        return len(self._names)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these files, not decoded."""
        return {"image": list(self._names.read_each(indices.tolist(), self._decoding))}

    def example_id(self, index: int) -> str:
        """Return the path of the file within `folder`."""
        return self._names[index]


def _folder_above(given: Sequence[AnyPath]) -> AnyPath:
    """Return the folder that all of these files and folders are in, of one bucket or of this machine."""
    places = [path.absolute() for path in given]
    folders = [place if place.is_dir() else place.parent for place in places]
    stored = [folder for folder in folders if isinstance(folder, RemotePath)]
    if not stored:
        return Path(os.path.commonpath([str(folder) for folder in folders]))
    if len(stored) < len(folders) or len({folder.bucket for folder in stored}) > 1:
        raise DataError(
            "The images are not in one place.",
            given=shorten([*map(str, given)]),
            expected="files and folders of one bucket, or of this machine",
            hint="name those of one place",
        )
    return DataPath(f"{stored[0].scheme}://{os.path.commonpath([folder.key for folder in stored])}")


def _files_by_class(
    path: AnyPath, labels: tuple[str, ...] | None
) -> tuple[dict[str, list[str]], list[ObjectStat] | None]:
    """Return the images of each class, as paths within the folder, and of a store size and version of all of them."""
    try:
        entries: list[AnyPath] = sorted(path.iterdir())
        if table := label_table_among(entries):
            return _in_order_of(labels, files_by_label(table), path), None
        folders = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        others = sorted({entry.name for entry in entries} - {*folders})
        there = folders if labels is None else sorted({*labels} & {*folders})
        if labels and not there:
            raise _unusable(path, f"no folder {shorten(labels)}", "a folder for each label")
        with ThreadPoolExecutor(_THREADS) as pool:
            listed = dict(zip(there, pool.map(lambda name: images_below(path / name), there), strict=True))
        classes = folders if labels is None else labels
        files = {name: [f"{name}/{image}" for image in listed[name].names] if name in there else [] for name in classes}
        others += [f"{name}/{other}" for name, found in listed.items() for other in found.others]
    except OSError as error:
        raise _unusable(path, str(error), "a folder of folders that may be read") from error
    if not files:
        raise _unusable(path, f"only {shorten(others)}" if others else "an empty folder", "a folder for each class")
    if empty := [name for name, found in files.items() if not found]:
        if labels is None or len(empty) == len(files):
            raise _unusable(path, f"no images in {shorten(empty)}", f"one {', '.join(ENDINGS)} or more for each class")
        log.warning("There are no images of %s in %s", shorten(empty), path, chief_only=True)
    if others := sorted([*others, *({*folders} - {*files})]):
        log.warning("Not read in %s: %s", path, shorten(others), chief_only=True)
    stats = [stat for found in listed.values() for stat in found.stats or ()]
    return files, stats or None


def _in_order_of(labels: tuple[str, ...] | None, files: dict[str, list[str]], path: AnyPath) -> dict[str, list[str]]:
    """Order the classes of a table as a file of labels does, of which the table may lack some."""
    if labels is None:
        return files
    if unnamed := sorted({*files} - {*labels}):
        raise DataError(
            f"The file of labels lacks classes of the table in {path}.",
            given=f"no {shorten(unnamed)}",
            expected=f"a line for each class: {len(labels)} are named",
            hint="write each class on a line of its own, in the order that it is to have in all splits",
        )
    return {name: files.get(name, []) for name in labels}


def _files_at(path: AnyPath) -> Iterator[AnyPath]:
    place = path.looked_up() if isinstance(path, RemotePath) else path.absolute()
    try:
        if not place.is_dir():
            place.stat()
            yield place
            return
        found = images_below(place)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read.",
            given=f"{path}: {error.strerror}",
            expected="image files, and folders of them",
            hint=hint_for_path(path),
        ) from error
    if found.others:
        log.warning("Not read in %s: %s", path, shorten(found.others))
    if isinstance(place, RemotePath):
        listed = zip(found.names, found.stats or (), strict=True)
        yield from (DataPath(f"{place}/{name}", Entry(is_folder=False, stat=stat)) for name, stat in listed)
    else:
        yield from (place / name for name in found.names)


class ListedImages(NamedTuple):
    """What is in a folder and below, as sorted paths within it."""

    names: list[str]
    """The files with the ending of an image."""
    others: list[str]
    """Everything else: files and links."""
    stats: list[ObjectStat] | None = None
    """Size and version of each image, in an object store."""


def images_below(folder: AnyPath) -> ListedImages:
    """List what is in a folder and below. Hidden folders and links to folders are not entered."""
    if isinstance(folder, RemotePath):
        return _images_in_store(folder)
    top = str(folder)
    images, others = [], []
    for at, folders, names in os.walk(top, onerror=_raise):
        prefix = "" if at == top else os.path.relpath(at, top).replace(os.sep, "/") + "/"
        found = {name for name in names if name.lower().endswith(ENDINGS) and not name.startswith(".")}
        hidden = {name for name in folders if name.startswith(".")}
        linked = {name for name in folders if Path(at, name).is_symlink()}
        images += [f"{prefix}{name}" for name in found]
        others += [f"{prefix}{name}" for name in ({*names} - found) | hidden | linked]
        folders[:] = {*folders} - hidden
    return ListedImages(sorted(images), sorted(others))


def _images_in_store(folder: RemotePath) -> ListedImages:
    images, others = {}, []
    for name, stat in folder.walk_files().items():
        *above, last = name.split("/")
        if hidden := next((place for place, part in enumerate(above, 1) if part.startswith(".")), 0):
            others.append("/".join(above[:hidden]))
        elif last.lower().endswith(ENDINGS) and not last.startswith("."):
            images[name] = stat
        else:
            others.append(name)
    return ListedImages([*images], sorted({*others}), [*images.values()])


def _raise(error: OSError) -> None:
    raise error


def _unusable(path: AnyPath, given: str, expected: str) -> DataError:
    return DataError(
        f"{path} is no folder of images with a folder for each class.",
        given=given,
        expected=expected,
        hint="name the folder above those of the classes; put the images of each class into one folder",
    )
