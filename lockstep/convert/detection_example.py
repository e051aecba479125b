"""Examples of detection as records: the features that TensorFlow's object detection API reads, by their names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.errors import InputError
from lockstep.images import jpeg
from lockstep.images.decode import EncodedImage
from lockstep.records.example import Values, serialize_example

PNG_START = b"\x89PNG\r\n\x1a\n"


def detection_example(fields: Mapping[str, Any]) -> bytes:
    """The `tf.train.Example` of one example of a reader, as one row of what its `read_batch` gives.

    JPEGs and PNGs go in as they are, so they are to be read with the same `Decoding`; an image of another format
    becomes a PNG, which loses nothing. Each mask becomes a PNG of one bit a pixel.

    Args:
        fields: "image", an `EncodedImage`; "boxes", float32 (objects, 4) top, left, bottom, right as shares of height
            and width; "source_id", without which the name of the file is taken; and for each object any of "labels",
            "class_text", "area" (pixels), "is_crowd", "difficult", "truncated", "group_of", "view", "weights",
            "keypoints" (objects, keypoints, 2) y, x as shares, "keypoint_visibility" (objects, keypoints), and "masks",
            with a `decode` that gives uint8 (objects, height, width). Other fields are left out.

    Raises:
        InputError: a field has more or fewer values than there are boxes.
        DataError: the image's header cannot be read, or its format is to be changed and it cannot be decoded.
    """
    image, boxes = fields["image"], fields["boxes"]
    features = {**_features_of_image(image, fields.get("source_id")), **_features_of_boxes(boxes)}
    for name, feature, values_of in _OF_OBJECTS:
        if name in fields:
            if len(fields[name]) != len(boxes):
                raise _of_other_length(image.source, name, len(fields[name]), len(boxes))
            features[f"image/object/{feature}"] = values_of(fields[name])
    return serialize_example(features)


def png_of(image: Image.Image) -> bytes:
    """The file of an image, without loss."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _features_of_image(image: EncodedImage, source_id: str | None) -> dict[str, Values]:
    # Boxes and masks are those of the raster as it is stored.
    image = replace(image, decoding=replace(image.decoding, exif=False))
    width, height = image.size
    name = os.path.basename(image.source)  # noqa: PTH119 - a source need not be a path
    data, kind = image.data, b"png"
    if data.startswith(jpeg.START):
        kind = b"jpeg"
    elif not data.startswith(PNG_START):
        data = png_of(Image.fromarray(image.decode().permute(1, 2, 0).numpy()))
    return {
        "image/encoded": [data],
        "image/format": [kind],
        "image/filename": [name.encode(errors="surrogateescape")],
        "image/key/sha256": [hashlib.sha256(data).hexdigest().encode()],
        "image/source_id": [(source_id or name).encode(errors="surrogateescape")],
        "image/height": np.array([height], dtype=np.int64),
        "image/width": np.array([width], dtype=np.int64),
    }


def _features_of_boxes(boxes: Tensor) -> dict[str, Values]:
    edges = zip(("ymin", "xmin", "ymax", "xmax"), boxes.unbind(1), strict=True)
    return {f"image/object/bbox/{edge}": _floats(values) for edge, values in edges}


def _floats(values: Tensor) -> Values:
    return values.flatten().float().numpy()


def _int64s(values: Tensor) -> Values:
    return values.flatten().long().numpy()


def _texts(values: list[str]) -> Values:
    return [value.encode() for value in values]


def _masks(masks: Any) -> Values:
    # Of one bit a pixel: several times as fast to write and to read as a byte a pixel.
    return [png_of(Image.fromarray(mask)) for mask in masks.decode().numpy().astype(bool)]


# Field, feature of the record, and how to get from one to the other.
_OF_OBJECTS: tuple[tuple[str, str, Callable[[Any], Values]], ...] = (
    ("labels", "class/label", _int64s),
    ("class_text", "class/text", _texts),
    ("area", "area", _floats),
    ("is_crowd", "is_crowd", _int64s),
    ("difficult", "difficult", _int64s),
    ("truncated", "truncated", _int64s),
    ("group_of", "group_of", _int64s),
    ("view", "view", _texts),
    ("weights", "weight", _floats),
    ("keypoints", "keypoint/y", lambda points: _floats(points[..., 0])),
    ("keypoints", "keypoint/x", lambda points: _floats(points[..., 1])),
    ("keypoint_visibility", "keypoint/visibility", _int64s),
    ("masks", "mask", _masks),
)


def _of_other_length(source: str, name: str, given: int, expected: int) -> InputError:
    return InputError(
        f"The field {name!r} of {source} does not fit its boxes.",
        given=f"{given} values",
        expected=f"{expected}, one for each box",
        hint="give every field of objects a value for each of them",
    )
