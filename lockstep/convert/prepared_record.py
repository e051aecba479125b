"""Records whose images are made smaller, for good: decoding them then costs a fraction of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.checks import check_one_of, check_range, check_type
from lockstep.convert.detection_example import png_of
from lockstep.errors import DataError
from lockstep.images import jpeg, pillow
from lockstep.images.decode import AS_STORED
from lockstep.images.resizing import resized
from lockstep.records.example import Float32s, Values, parse_example, serialize_example

PREPARED = "image/prepared"
"""The feature that holds the name of the preparation."""
SUBSAMPLINGS = ("444", "422", "420")

_IMAGE = "image/encoded"
_MASKS = "image/object/mask"
_AREA = "image/object/area"
_ORIENTATION = 0x0112  # as EXIF numbers its tags
_WRITE_AGAIN = "write the record again, with masks of the size of its image"
_JPEG_NAMES = (b"jpeg", b"jpg")

Features = dict[str, Values]
Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class Preparation:
    """How images are made smaller: shrunk with antialiasing, never enlarged, and encoded as JPEG.

    Raises:
        InputError: a number out of its range, or another subsampling.
    """

    short_side: int = 320
    """In pixels, at most; the other side keeps the image's aspect."""
    quality: int = 90
    """Of the JPEG, 1 to 100."""
    subsampling: str = "420"
    """Of its colours: "444" keeps all of them, "422" every second column, "420" also every second row."""

    def __post_init__(self) -> None:
        for name, high in (("short_side", math.inf), ("quality", 101)):
            value = getattr(self, name)
            check_type(name, value, int, expected="a whole number", hint=f"give {name} as a whole number")
            check_range(name, value, 1, high)
        check_one_of("subsampling", self.subsampling, SUBSAMPLINGS)

    def __str__(self) -> str:
        return f"short_side={self.short_side} quality={self.quality} {self.subsampling}"

    def size(self, size: Size) -> Size:
        """What an image of this size becomes."""
        width, height = size
        short = min(width, height)
        to = min(short, self.short_side)
        # Whole numbers, rounded half up: the same on every machine.
        return (2 * width * to + short) // (2 * short), (2 * height * to + short) // (2 * short)


def prepared_record(record: bytes, preparation: Preparation, source: str = "The record") -> bytes:
    """The record with its image made smaller, and with the name of the preparation.

    Height and width become those of the new image. Masks shrink with it, to the nearest pixel, and areas in its own
    ratio; boxes and keypoints are shares. All other features stay, among them the image's key: a hash of what it was.
    The image is not turned, but its EXIF orientation stays with it.

    Args:
        record: a `tf.train.Example` with an image, such as those of ImageNet and of detection.
        preparation: what becomes of the image.
        source: what to call the record in an error.

    Raises:
        DataError: no example, one without an image, one that was prepared before or has a second image; an image or a
            mask that cannot be decoded, or masks of another size than the image.
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
    """The image of a record that can be prepared."""
    if PREPARED in features:
        raise _unfit(source, f"{PREPARED}: {features[PREPARED]!r}", "a record that was not", "prepare the originals")
    others = [name for name in features if name.endswith("/encoded") and name != _IMAGE and any(features[name])]
    if others:
        hint = "leave that feature out: only the first image would become smaller"
        raise _unfit(source, f"a second image, {others[0]}", f"{_IMAGE} alone", hint)
    match features.get(_IMAGE):
        case [bytes(data)]:
            return data
    expected = f"one image as {_IMAGE}, such as records of ImageNet and of detection have"
    raise _unfit(source, f"the features {', '.join(sorted(features)) or '(none)'}", expected, "name other records")


def _format(features: Features) -> bytes:
    """The name of the image's format, by which some readers choose the decoder."""
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
    file = BytesIO()
    subsampling = ":".join(preparation.subsampling)
    image = Image.fromarray(raster.permute(1, 2, 0).numpy())
    image.save(file, "JPEG", quality=preparation.quality, subsampling=subsampling, **options)
    return file.getvalue()


def _shrink_objects(features: Features, before: Size, after: Size, source: str) -> None:
    """Change what is told in pixels of the image."""
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
        raise _unfit(source, f"{name} of another kind", "floats", "write the records as the object detection API does")
    return values.astype(np.float32, copy=False)


def _shrunk_mask(mask: bytes, before: Size, after: Size, source: str) -> bytes:
    try:
        image = pillow.open_image(mask)
        if image.size == before:  # known from the header: no memory is taken for another size
            return png_of(image.resize(after, Image.Resampling.NEAREST))
    except MemoryError:
        raise
    except Exception as error:  # damaged data raises anything
        hint = "leave the record out, or write it again"
        raise _unfit(source, f"{type(error).__name__}: {error}", f"a whole PNG in {_MASKS}", hint) from error
    raise _unfit(source, f"a mask of {_text(image.size)} pixels", f"{_text(before)}, as its image", _WRITE_AGAIN)


def _shrunk_numbers(values: Float32s, before: Size, after: Size, source: str) -> Float32s:
    """The same for masks as floats, of shape (objects * height * width,)."""
    if len(values) % math.prod(before):
        expected = f"a multiple of {_text(before)}, as its image"
        raise _unfit(source, f"{len(values)} pixels of masks", expected, _WRITE_AGAIN)
    masks = values.reshape(-1, before[1], before[0])
    columns, rows = ((2 * np.arange(to) + 1) * length // (2 * to) for length, to in zip(before, after, strict=True))
    return masks[:, rows[:, None], columns].ravel()


def _text(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _unfit(source: str, given: str, expected: str, hint: str) -> DataError:
    return DataError(f"{source} cannot be prepared.", given=given, expected=expected, hint=hint)
