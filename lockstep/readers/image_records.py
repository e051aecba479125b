"""Reads images in TFRecord files, by a schema: features of records become fields of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lockstep.checks import wrong_type
from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding, EncodedImage
from lockstep.listing import shorten
from lockstep.ragged import Ragged
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.image_files import check_not_turned, load_decoder
from lockstep.readers.reader import Cost, Int64s
from lockstep.readers.records import OfRecordFiles
from lockstep.records.example import Float32s, Values, parse_example, scan_example
from lockstep.records.index_cache import Cache
from lockstep.records.record_files import RecordFiles
from lockstep.records.shards import Paths
from lockstep.records.tfrecord import TAIL_BYTES

EDGES = ("ymin", "xmin", "ymax", "xmax")

# Boxes may reach out of the image by this share, by rounding or for objects at its edge. Boxes in pixels exceed it.
_BEYOND = 0.1
_NAMED_AT_MOST = 20


@tells_options
class ImageRecords(OfRecordFiles):
    """Images in files of `tf.train.Example` records, with the labels, boxes or other fields of a schema.

    Args:
        paths: the files, whose records follow one another: a path, a pattern such as "train-*", or several of these.
        schema: which features become which fields: `ImageNetSchema`, `DetectionSchema`, `MnistSchema` or your own.
        verify: whether checksums of payloads are compared.
        decoding: how images are decoded when they are asked for; they are not turned if there are boxes.
        cache: the folder where the files' indices are kept; by default in the user's cache.
    """

    cost: Cost = "decode"

    def __init__(
        self, paths: Paths, schema: Schema, *, verify: bool = True, decoding: Decoding = AS_STORED, cache: Cache = None
    ) -> None:
        if isinstance(schema, type) or not (hasattr(schema, "features") and hasattr(schema, "fields")):
            raise wrong_type(
                "schema",
                schema,
                expected="a schema: it has features and fields",
                hint="give one such as ImageNetSchema(boxes=True)",
            )
        if any(name.rpartition("/")[2] in EDGES for name in schema.features):
            check_not_turned(decoding)
        self._records = RecordFiles(paths, verify=verify, cache=cache)
        self.schema = schema
        """What makes fields of the features of a record."""
        self._features, self._decoding = schema.features, decoding
        self.decoder = load_decoder(decoding)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the schema's fields of these examples; images are not decoded unless it does so."""
        numbers = indices.tolist()
        examples = [
            ParsedExample(
                parse_example(data, source, self._features, -TAIL_BYTES),
                source,
                self._decoding,
                partial(self._records.read, number),
            )
            for number, (data, source) in zip(numbers, self._records.read_each(numbers), strict=True)
        ]
        return self.schema.fields(examples)


class Schema(Protocol):
    """Makes fields of a batch from parsed records; a frozen dataclass with these members is one."""

    @property
    def features(self) -> frozenset[str]:
        """The names of all features that `fields` asks for; others are not parsed."""
        ...

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """Return the fields of a batch: tensors with the batch first, or lists of its length."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedExample:
    """The features of one record that a schema asked for. Errors name the record and the feature."""

    features: dict[str, Values] = field(repr=False)
    """The values of each feature that the record has."""
    source: str
    """The record and its file, for errors."""
    decoding: Decoding
    record: Callable[[], bytes] = field(repr=False)
    """Reads the record again, for errors that list its features: keeping it would keep its images twice."""

    def image(self, name: str) -> EncodedImage:
        """Return the only image of a feature."""
        return self.images(name, 1)[0]

    def images(self, name: str, count: int) -> list[EncodedImage]:
        """Return the images of a feature, `count` of them."""
        values = self.byte_strings(name)
        if len(values) != count:
            raise self.unusable(name, f"{count} encoded image{'s' * (count > 1)}")
        return [EncodedImage(value, self.source, self.decoding) for value in values]

    def integer(self, name: str, default: int | None = None) -> int:
        """Return the only int64 of a feature; `default`, if there is one, for a record without the feature."""
        if default is not None and name not in self.features:
            return default
        values = self.int64s(name)
        if len(values) != 1:
            raise self.unusable(name, "one int64")
        return int(values[0])

    def text(self, name: str) -> str:
        """Return the only text of a feature; "" if it is missing."""
        if name not in self.features:
            return ""
        values = self.texts(name)
        if len(values) != 1:
            raise self.unusable(name, "one text")
        return values[0]

    def texts(self, name: str) -> list[str]:
        """Return the texts of a feature, none if it is missing; bytes that are not UTF-8 are replaced."""
        return [value.decode(errors="replace") for value in self.byte_strings(name)]

    def byte_strings(self, name: str) -> list[bytes]:
        """Return the byte strings of a feature, none if it is missing."""
        values = self.features.get(name, [])
        if not isinstance(values, list):
            raise self.unusable(name, "byte strings")
        return values

    def int64s(self, name: str, count: int | None = None) -> Int64s:
        """Return the int64 values of a feature: none if it is missing, else `count` of them, if given."""
        values: Int64s = self._numbers(name, count, np.dtype(np.int64))
        return values

    def float32s(self, name: str, count: int | None = None) -> Float32s:
        """Return the float32 values of a feature: none if it is missing, else `count` of them, if given."""
        values: Float32s = self._numbers(name, count, np.dtype(np.float32))
        return values

    def unusable(self, name: str, expected: str, given: str = "") -> DataError:
        """Make the error for a feature that cannot be used; by default `given` is the number and kind of its values."""
        return DataError(
            f"{self.source} has no usable feature {name!r}.",
            given=given or self._given(name),
            expected=expected,
            hint="name the feature that holds it, read the file by another schema, or write the records again",
        )

    def _numbers(self, name: str, count: int | None, dtype: np.dtype[Any]) -> Any:
        values = self.features.get(name)
        if values is None:
            return np.empty(0, dtype)
        if isinstance(values, list) or values.dtype != dtype:
            raise self.unusable(name, f"values of {dtype}")
        if count is not None and len(values) not in (0, count):
            raise self.unusable(name, f"{count} values of {dtype}, or none")
        return values

    def _given(self, name: str) -> str:
        values = self.features.get(name)
        if values is None:
            names = sorted(scan_example(self.record(), self.source))
            return f"the features {shorten(names, _NAMED_AT_MOST) or '(none)'}"
        return f"{len(values)} values of {'bytes' if isinstance(values, list) else values.dtype}"


def boxes_of(examples: Sequence[ParsedExample], prefix: str) -> Ragged:
    """Read each example's boxes, as `stored_boxes`, clipped to their image; they may have no area then."""
    boxes = stored_boxes(examples, prefix)
    return boxes.replaced(torch.from_numpy(boxes.values.numpy().clip(0, 1)))


def stored_boxes(examples: Sequence[ParsedExample], prefix: str, *, check: bool = True) -> Ragged:
    """Read each example's boxes: float32 (boxes, 4) of top, left, bottom and right as shares of height and width.

    They come from the features `ymin`, `xmin`, `ymax` and `xmax`, missing for an example without boxes. A DataError
    names an example whose features differ in length, and a box with an edge that is not as `are_edges` wants it, unless
    `check` is off.
    """
    edges = [[example.float32s(prefix + edge) for example in examples] for edge in EDGES]
    counts = _counts(edges, examples, prefix)
    joined = np.stack([np.concatenate([np.empty(0, np.float32), *values]) for values in edges], axis=1)
    if check and not (usable := are_edges(joined)).all():
        wrong = int(np.flatnonzero(~usable.all(1))[0])
        example = examples[int(np.searchsorted(np.cumsum(counts), wrong, side="right"))]
        raise example.unusable(
            prefix + EDGES[int(usable[wrong].argmin())],
            "shares of height and width from 0 to 1, the top before the bottom and the left before the right",
            given="a box of top, left, bottom and right " + ", ".join(f"{share:g}" for share in joined[wrong]),
        )
    return Ragged(torch.from_numpy(joined), torch.tensor(counts, dtype=torch.int64))


def are_edges(boxes: Float32s) -> npt.NDArray[np.bool_]:
    """Tell which edges of boxes, shares of shape (boxes, 4), can be meant; they reach out by a tenth at most.

    No edge can that is no number or farther outside, as those of boxes in pixels are, and no top or left of a box that
    is upside down.
    """
    usable = (boxes >= -_BEYOND) & (boxes <= 1 + _BEYOND)  # NaN is neither
    usable[:, :2] &= ~(boxes[:, :2] > boxes[:, 2:])
    return usable


def _counts(edges: Sequence[Sequence[Float32s]], examples: Sequence[ParsedExample], prefix: str) -> list[int]:
    """Return each example's number of boxes; an error names one whose edges differ in number."""
    counts = [max(map(len, of_one)) for of_one in zip(*edges, strict=True)]
    for example, count, of_one in zip(examples, counts, zip(*edges, strict=True), strict=True):
        for edge, values in zip(EDGES, of_one, strict=True):
            if len(values) != count:
                raise example.unusable(prefix + edge, f"{count} values of float32, as many as of another edge")
    return counts
