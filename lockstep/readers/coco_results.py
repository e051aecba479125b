"""Files of detections in COCO's format of results (https://cocodataset.org/#format-results), read and written."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError
from lockstep.listing import shorten
from lockstep.mask_runs import Flips, flips_of_pixels, pixels_in
from lockstep.readers.coco_annotations import integer_in, number_of, numbers_of, value_in
from lockstep.readers.object_table import Column, Float64s
from lockstep.readers.reader import Int64s
from lockstep.records.shards import check_local

_MOST_BYTES = 1 << 30  # ten million detections

_ENTRY = struct.Struct("<qq4dd?q")
_COLUMNS = np.dtype(
    [("image", "<i8"), ("category_id", "<i8"), ("box", "<f8", 4), ("score", "<f8"), ("has_id", "?"), ("id", "<i8")]
)
_DETECTION_BYTES = 7 * 8  # of an entry, before its id


class MaskText(NamedTuple):
    """A mask over a whole image, see `lockstep.mask_runs`."""

    height: int
    width: int
    runs: str

    def flips(self) -> Flips:
        """Return where it changes between 0 and 1."""
        return flips_of_pixels(pixels_in(self.runs, self.height, self.width)[None])[0]


class ImageResults(NamedTuple):
    """What a detector has found on one image."""

    boxes: Float64s
    """x and y of the upper left corner, width and height, in pixels of the stored image, (detections, 4)."""
    labels: Int64s
    """The ids of categories."""
    scores: Float64s
    masks: Sequence[MaskText] = ()
    """Mask of each detection; none of a detector without masks."""
    keypoints: Float64s | None = None
    """x and y in pixels of the stored image, and a score, (detections, keypoints, 3); None of one without keypoints."""

    def above(self, min_score: float) -> ImageResults:
        """Keep those of this score or a higher one."""
        return self.at(np.flatnonzero(self.scores >= min_score))

    def at(self, places: Int64s) -> ImageResults:
        """Keep those at these places, in their order."""
        masks = [self.masks[place] for place in places.tolist()] if self.masks else ()
        points = None if self.keypoints is None else self.keypoints[places]
        return ImageResults(self.boxes[places], self.labels[places], self.scores[places], masks, points)


class CocoResults:
    """The content of a file of results: detections by the id of their image.

    All of them are in the order of the file; each has the place of its image's id.
    """

    def __init__(self, path: Path, image_ids: list[str], entries: Column) -> None:
        self.path, self._entries = path, entries
        self._places = {image_id: place for place, image_id in enumerate(image_ids)}
        self._order = np.argsort(entries["image"], kind="stable")
        self._starts = np.searchsorted(entries["image"][self._order], np.arange(len(image_ids) + 1))

    def __len__(self) -> int:
        return len(self._entries)

    def on(self, image_id: str) -> ImageResults:
        """Return the detections on an image, in the order of the file."""
        place = self._places.get(image_id)
        span = slice(0) if place is None else slice(self._starts[place], self._starts[place + 1])
        found = self._entries[self._order[span]]
        return ImageResults(found["box"], found["category_id"], found["score"])

    def check(self, image_ids: Collection[str], labels: Collection[int], source: str) -> None:
        """Raise a DataError where a detection is on an image that is not there, or of a category that is none.

        The labels of categories are empty if they are not known; errors name the data by `source`.
        """
        if unknown := [place for image_id, place in self._places.items() if image_id not in image_ids]:
            number = int(np.isin(self._entries["image"], unknown).argmax())
            image_id = list(self._places)[self._entries["image"][number]]
            expected = f"images of {source}, such as {shorten(sorted(image_ids)[:3])}"
            raise _unusable(self.path, number, f"image_id {image_id}", expected)
        if labels and not (known := np.isin(self._entries["category_id"], list(labels))).all():
            number = int(known.argmin())
            given = f"category_id {self._entries['category_id'][number]}"
            raise _unusable(self.path, number, given, f"categories of {source}: {shorten([*map(str, sorted(labels))])}")


def read_coco_results(path: str | Path) -> CocoResults:
    """Read a file of results: a list of entries of `image_id`, `category_id`, `bbox` and `score`.

    An image's id is a whole number or a text, "42" the same as 42. Boxes are x, y, width and height in pixels, of
    magnitudes below 2**31; scores are any finite numbers. An entry may have an `id`, of its own then; whatever else it
    has, such as a mask, is skipped.

    Raises:
        DataError: the file is larger than 1 GiB, no such list, or an entry is none; twice the same entry is none. The
            error names the entry, counted from 0.
    """
    check_local(path)
    path = Path(path)
    image_places: dict[str, int] = {}

    def packed(found: dict[str, Any]) -> object:
        """Pack an entry to bytes, or say what is wrong with it; return any other dict, such as a mask, as it is."""
        if "image_id" not in found:
            return found
        try:
            image_id = _image_id(found["image_id"])
            numbers = _numbers_of_entry(found)
        except ValueError as error:
            return str(error)
        return _ENTRY.pack(image_places.setdefault(image_id, len(image_places)), *numbers)

    packed_entries = _document(path, packed)
    for number, entry in enumerate(packed_entries):
        if not isinstance(entry, bytes):
            raise _unusable(path, number, entry if isinstance(entry, str) else f"no image_id: {entry!r:.60}")
    entries = np.frombuffer(b"".join(packed_entries), _COLUMNS)
    _check_unique(entries, path)
    return CocoResults(path, list(image_places), entries)


def write_coco_results(path: str | Path, found: Iterable[tuple[str, ImageResults]]) -> None:
    """Write a file of results, image by image, in a folder made if need be; it is there once all of it is written.

    `found` gives the id of each image, and what was found on it, with the ids of categories as labels. Numbers are
    written with all their digits, so that they are scored alike when they are read. Whole numbers as ids of images are
    written as numbers, as COCO's annotations have them.

    Raises:
        InputError: the file cannot be written.
    """
    with atomic_write(Path(path), parents=True, failure=InputError) as file:
        separator = b"["
        for entry in _entries(found):
            file.write(separator + json.dumps(entry, allow_nan=False).encode())
            separator = b",\n"
        file.write(b"]\n" if separator != b"[" else b"[]\n")


def _entries(found: Iterable[tuple[str, ImageResults]]) -> Iterator[dict[str, Any]]:
    for image_id, detections in found:
        is_number = image_id.isascii() and image_id.isdecimal() and str(int(image_id)) == image_id
        rows = (column.tolist() for column in (detections.labels, detections.boxes, detections.scores))
        for place, (label, box, score) in enumerate(zip(*rows, strict=True)):
            entry: dict[str, Any] = {"image_id": int(image_id) if is_number else image_id, "category_id": label}
            entry |= {"bbox": box, "score": score}
            if detections.masks:
                height, width, runs = detections.masks[place]
                entry["segmentation"] = {"size": [height, width], "counts": runs}
            if detections.keypoints is not None:
                entry["keypoints"] = detections.keypoints[place].ravel().tolist()
            yield entry


def _document(path: Path, packed: Any) -> list[Any]:
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"{size} bytes, more than {_MOST_BYTES}")
        document = json.loads(path.read_bytes().decode(), object_hook=packed)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read.",
            given=f"{type(error).__name__}: {error}",
            expected="a whole file of JSON of at most 1 GiB that may be read",
            hint="check the path, and write the file again; drop detections of low scores if there are too many",
        ) from error
    if not isinstance(document, list):
        raise DataError(
            f"{path} cannot be used as detections in COCO's format of results.",
            given=f"a {type(document).__name__}",
            expected="a list of entries",
            hint="give the file that the detector wrote, not that of the annotations",
        )
    return document


def _image_id(value: object) -> str:
    if type(value) is int or (isinstance(value, str) and value):
        return str(value)
    raise ValueError(f"image_id {value!r:.40}")


def _numbers_of_entry(found: dict[str, Any]) -> tuple[float, ...]:
    category_id = integer_in(found, "category_id")
    x, y, width, height = numbers_of(value_in(found, "bbox"), "bbox", 4)
    if min(width, height) < 0:
        raise ValueError(f"bbox {found['bbox']!r:.60}, of a negative width or height")
    score = number_of(value_in(found, "score"), "score", sys.float_info.max)
    has_id = found.get("id") is not None
    return category_id, x, y, width, height, score, has_id, integer_in(found, "id") if has_id else 0


def _check_unique(entries: Column, path: Path) -> None:
    """Refuse an id that comes twice, and an entry that is the same as another one."""
    content = np.ascontiguousarray(entries).view(np.uint8).reshape(-1, _COLUMNS.itemsize)[:, :_DETECTION_BYTES]
    places = np.arange(len(entries))
    having_id = places[entries["has_id"]]
    for values, where, what in (
        (np.ascontiguousarray(content).view(f"V{_DETECTION_BYTES}").ravel(), places, "the same detection"),
        (entries["id"][having_id], having_id, "the same id"),
    ):
        _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        repeated = first[inverse] != np.arange(len(values))
        if repeated.any():
            number = int(repeated.argmax())
            given = f"{what} as entry {where[first[inverse[number]]]}"
            raise _unusable(path, int(where[number]), given, "each detection once, each id of one entry")


def _unusable(path: Path, number: int, given: str, expected: str = "") -> DataError:
    return DataError(
        f"Entry {number} of {path} cannot be used as a detection in COCO's format of results.",
        given=given,
        expected=expected
        or "image_id, category_id, bbox of x, y, width and height in pixels, 0 or more of the last two, and a score",
        hint="write the file for these images, with the ids of the annotations; or leave the entry out",
    )
