"""Make the images in shards smaller, for good: decoding them then costs a fraction of the time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.checks import Checked, OneOf, PositiveInt, Range
from lockstep.convert.image_folder import jpeg_bytes
from lockstep.convert.sharding import DEFAULT, Settings, Summary, convert
from lockstep.errors import DataError, InputError
from lockstep.images import jpeg, pillow
from lockstep.images.decode import AS_STORED
from lockstep.images.resizing import resized
from lockstep.records.example import Float32s, Values, parse_example, serialize_example
from lockstep.records.record_files import RecordFiles
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath

PREPARED = "image/prepared"
"""The feature that names the preparation of a record."""
SUBSAMPLINGS = ("444", "422", "420")

_SHARD = re.compile(r"(.+)-\d+-of-\d+")
_IMAGE = "image/encoded"
_MASKS = "image/object/mask"
_AREA = "image/object/area"
_ORIENTATION = 0x0112  # the EXIF tag
_WRITE_AGAIN = "write the record again, with masks of the size of its image"
_JPEG_NAMES = (b"jpeg", b"jpg")


Features = dict[str, Values]
Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class Preparation(Checked):
    """The way to make images smaller: shrink them with antialiasing, never enlarge them, encode them as JPEG."""

    short_side: PositiveInt = 320
    """Pixels at most; the other side keeps the image's aspect."""
    quality: Annotated[int, Range(ge=1, le=100)] = 90
    """JPEG quality."""
    subsampling: Annotated[str, OneOf(SUBSAMPLINGS)] = "420"
    """Colours of the JPEG: "444" keeps all, "422" every second column, "420" also every second row only."""

    def __str__(self) -> str:
        return f"short_side={self.short_side} quality={self.quality} {self.subsampling}"

    def size(self, size: Size) -> Size:
        """Return the size that an image of this size becomes."""
        width, height = size
        short = min(width, height)
        to = min(short, self.short_side)
        # Integer arithmetic, rounded half up: the same on every machine.
        return (2 * width * to + short) // (2 * short), (2 * height * to + short) // (2 * short)


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`."""

    summary: Summary
    num_bytes_before: int
    """Size of the files that were read; compressed size of compressed ones."""


def prepare(
    shards: str | Path | Sequence[str | Path],
    output: Path,
    preparation: Preparation,
    *,
    base: str | None = None,
    settings: Settings = DEFAULT,
) -> Prepared:
    """Write the records of these shards, with smaller images, to as many shards in another folder.

    The records keep their order and everything that `prepared_record` does not change; the text of the preparation goes
    into each. The new shards are uncompressed, named BASE-00000-of-00002, by default as the given ones, which must then
    share one name, and hold about the same number of records each.
    """
    # The processes are forked from this one, and must find the decoder's library loaded.
    log.info("Images are decoded by %s", AS_STORED.chosen)
    records = RecordFiles(shards)
    paths = [file.path for file in records.files]
    _check_apart(paths, output)
    versions = [[str(file.path), *file.index.version] for file in records.files]
    summary = convert(
        range(len(records)),
        lambda index: prepared_record(records.read(index), preparation, records.describe(index)),
        output,
        base or _base_of(paths),
        len(paths),
        options={"preparation": str(preparation), "shards": versions},
        settings=settings,
    )
    return Prepared(summary, sum(file.index.version.size_bytes for file in records.files))


def _check_apart(paths: Sequence[AnyPath], output: Path) -> None:
    """Refuse to write beside the shards that are read: a pattern would match both."""
    for path in paths:
        if isinstance(path, Path) and path.parent.resolve() == output.resolve():
            raise InputError(
                "Prepared shards cannot be written among those that they are made of.",
                given=f"the folder {output}, which holds {path.name}",
                expected="another folder",
                hint=f"name another one, such as {output / 'prepared'}",
            )


def _base_of(paths: Sequence[AnyPath]) -> str:
    bases = {match[1] if (match := _SHARD.match(path.name)) else path.name.split(".")[0] for path in paths}
    if len(bases) == 1:
        return bases.pop()
    raise InputError(
        "The shards have no name in common.",
        given=", ".join(sorted(bases)),
        expected="shards of one name, such as train-00000-of-00002 and train-00001-of-00002",
        hint="say how those that are written are to be called, such as train",
    )


def prepared_record(record: bytes, preparation: Preparation, source: str = "The record") -> bytes:
    """Make the image of a record smaller, and note the preparation in it.

    The record is a `tf.train.Example` with an image, such as those of ImageNet and of detection; errors name it by
    `source`. Height and width become those of the new image, masks and areas shrink with it; boxes and keypoints are
    shares. All other features stay, the image's key too, a hash of the original. The image is not turned, and keeps its
    EXIF orientation.

    Raises:
        DataError: the record has no image or two, or was prepared before; or a mask has another size than the image.
    """
    features = parse_example(record, source)
    data = _image_of(features, source)
    before = AS_STORED.size(data, source)
    after = preparation.size(before)
    raster = resized(AS_STORED.decode(data, source), after[1], after[0])
    features[_IMAGE] = [_jpeg(raster, preparation, _orientation(data))]
    features[PREPARED] = [str(preparation).encode()]
    if _format(features) not in _JPEG_NAMES:
        features["image/format"] = [b"jpeg"]
    for name, length in (("image/width", after[0]), ("image/height", after[1])):
        if name in features:
            features[name] = np.array([length], dtype=np.int64)
    if before != after:
        _shrink_objects(features, before, after, source)
    return serialize_example(features)


def _image_of(features: Features, source: str) -> bytes:
    """Return the encoded image of a record, which must have one, and not be prepared already."""
    if PREPARED in features:
        raise _error(source, f"{PREPARED}: {features[PREPARED]!r}", "a record that was not", "prepare the originals")
    others = [name for name in features if name.endswith("/encoded") and name != _IMAGE and any(features[name])]
    if others:
        hint = "leave that feature out: only the first image would become smaller"
        raise _error(source, f"a second image, {others[0]}", f"{_IMAGE} alone", hint)
    match features.get(_IMAGE):
        case [bytes(data)]:
            return data
    expected = f"one image as {_IMAGE}, such as records of ImageNet and of detection have"
    raise _error(source, f"the features {', '.join(sorted(features)) or '(none)'}", expected, "name other records")


def _format(features: Features) -> bytes:
    """Return the image's format as the record names it; some readers choose the decoder by that."""
    match features.get("image/format", [b"jpeg"]):
        case [bytes(name)]:
            return name.lower()
    return b""


def _orientation(data: bytes) -> int:
    if data.startswith(jpeg.START):
        segments = jpeg.read_jpeg_header(data).exif
        return jpeg.orientation_of(data[slice(*segments[0])] if segments else b"")
    return jpeg.orientation_of(pillow.open_image(data).info.get("exif", b""))


def _jpeg(raster: Tensor, preparation: Preparation, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    options = {} if orientation == 1 else {"exif": exif}
    return jpeg_bytes(raster, quality=preparation.quality, subsampling=":".join(preparation.subsampling), **options)


def _shrink_objects(features: Features, before: Size, after: Size, source: str) -> None:
    if _AREA in features:
        areas = _numbers(features, _AREA, source)
        features[_AREA] = areas * np.float32(math.prod(after) / math.prod(before))
    masks = features.get(_MASKS)
    if isinstance(masks, list):
        features[_MASKS] = [_shrunk_mask(mask, before, after, source) for mask in masks]
    elif masks is not None:
        features[_MASKS] = _shrunk_numbers(_numbers(features, _MASKS, source), before, after, source)


def _numbers(features: Features, name: str, source: str) -> Float32s:
    values = features[name]
    if isinstance(values, list) or values.dtype != np.float32:
        raise _error(source, f"{name} of another kind", "floats", "write the records as the object detection API does")
    return values.astype(np.float32, copy=False)


def _shrunk_mask(mask: bytes, before: Size, after: Size, source: str) -> bytes:
    try:
        image = pillow.open_image(mask)
        if image.size == before:  # known from the header: no memory is taken for another size
            return pillow.png_bytes(image.resize(after, Image.Resampling.NEAREST))
    except MemoryError:
        raise
    except Exception as error:  # damaged data raises anything
        hint = "leave the record out, or write it again"
        raise _error(source, f"{type(error).__name__}: {error}", f"a whole PNG in {_MASKS}", hint) from error
    raise _error(source, f"a mask of {_text(image.size)} pixels", f"{_text(before)}, as its image", _WRITE_AGAIN)


def _shrunk_numbers(values: Float32s, before: Size, after: Size, source: str) -> Float32s:
    """Shrink masks that are floats, of shape (objects * height * width,), to the nearest pixel."""
    if len(values) % math.prod(before):
        expected = f"a multiple of {_text(before)}, as its image"
        raise _error(source, f"{len(values)} pixels of masks", expected, _WRITE_AGAIN)
    masks = values.reshape(-1, before[1], before[0])
    columns, rows = ((2 * np.arange(to) + 1) * length // (2 * to) for length, to in zip(before, after, strict=True))
    return masks[:, rows[:, None], columns].ravel()


def _text(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _error(source: str, given: str, expected: str, hint: str) -> DataError:
    return DataError(f"{source} cannot be prepared.", given=given, expected=expected, hint=hint)
