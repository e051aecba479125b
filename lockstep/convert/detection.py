"""Convert data sets of objects, PASCAL VOC and COCO, to the records that TensorFlow's object detection API reads."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.checks import check_one_of
from lockstep.convert.conversion_state import SkippedItem
from lockstep.convert.sharding import DEFAULT, Settings, Summary, convert
from lockstep.errors import DataError, InputError
from lockstep.images import jpeg
from lockstep.images.decode import EncodedImage
from lockstep.images.pillow import png_bytes
from lockstep.readers.coco import Coco
from lockstep.readers.combine import Concatenated
from lockstep.readers.image_records import EDGES
from lockstep.readers.label_map import Label, LabelMap, read_label_map, write_label_map
from lockstep.readers.object_table import AnnotatedImages
from lockstep.readers.open import open_detection
from lockstep.readers.paths import ANNOTATED
from lockstep.readers.reader import Reader
from lockstep.readers.voc import Voc, annotation_files, folder_of_year
from lockstep.records.example import Values, serialize_example
from lockstep.records.shards import data_path
from lockstep.storage.remote_path import AnyPath

YEARS = {"VOC2007": (2007,), "VOC2012": (2012,), "merged": (2007, 2012)}
"""The years of each VOC data set."""
LABEL_MAP = "label_map.pbtxt"

_EXAMPLES_PER_SHARD = 1000
_PNG_START = b"\x89PNG\r\n\x1a\n"


def convert_voc(
    data_dir: str | Path,
    output: Path,
    *,
    split: str | None = "train",
    year: str | None = None,
    label_map: LabelMap | None = None,
    ignore_difficult: bool = False,
    base: str | None = None,
    num_shards: int | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the examples of a data set in PASCAL VOC's format to shards BASE-00000-of-00002 ... in the folder `output`.

    The other arguments are those of `convert_detection`; `data_dir` holds the folder Annotations, or with a year the
    folders of the years: "VOC2007", "VOC2012", or "merged" for both, one after the other. The split is "train", "val",
    "trainval", "test" or another list of the data set; None: all annotations. Objects that are marked as difficult may
    be left out. Images that cannot be read, or differ in size from their annotation, are skipped.
    """
    if year is not None:
        check_one_of("year", year, [*YEARS])
    root = data_path(data_dir)
    folders: list[AnyPath] = [folder_of_year(root, each) for each in YEARS[year]] if year else [root]
    readers = _voc_readers(folders, split, not ignore_difficult, label_map)
    reader = Concatenated({folder.name: reader for folder, reader in zip(folders, readers, strict=True)})
    annotations = [[path.name, path.stat().st_mtime_ns] for folder in folders for path in annotation_files(folder)]
    options = {"split": split, "difficult": not ignore_difficult, "annotations": annotations}
    base = base or split or "all"
    return _convert_examples(reader, readers[0].classes, label_map, output, base, num_shards, options, settings)


def convert_coco(
    annotations: str | Path,
    images: str | Path,
    output: Path,
    *,
    masks: bool = False,
    keypoints: bool = False,
    label_map: LabelMap | None = None,
    zero_based: bool | None = None,
    base: str | None = None,
    num_shards: int | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the examples of a data set in COCO's format to shards BASE-00000-of-00002 ... in the folder `output`.

    The first arguments, `masks`, `keypoints` and `zero_based` are those of `Coco`, the others those of
    `convert_detection`. Without a label map the labels are the ids of the categories, or the ids + 1 if they count from
    0. The name of the shards is by default that of the file of annotations. Images are skipped as by `convert_voc`.
    """
    reader = Coco(annotations, images, masks=masks, keypoints=keypoints, label_map=label_map, zero_based=zero_based)
    path = data_path(annotations)
    options = {
        "annotations": [path.name, path.stat().st_size, path.stat().st_mtime_ns],
        "masks": masks,
        "keypoints": keypoints,
    }
    base = base or path.stem
    return _convert_examples(reader, reader.classes, label_map, output, base, num_shards, options, settings)


def convert_detection(
    path: str | Path,
    output: Path,
    *,
    split: str = "train",
    label_map: LabelMap | None = None,
    base: str | None = None,
    num_shards: int | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the images and objects at a path, in any format that `open_detection` reads, to shards in a folder.

    Without a label map the labels are those of the data, and `label_map.pbtxt` is written beside the shards. Images are
    skipped as by `convert_voc`.

    Args:
        path: a folder of VOC, or of images and XML; YOLO's `data.yaml`; a table of CSV; COCO's annotations.
        output: the folder of the shards, made if need be.
        split: the list or set that is read, if there are any.
        label_map: the number of each class.
        base: the name before the number of a shard; by default that of the split.
        num_shards: by default one for each 1000 examples.
        settings: how the conversion runs.
    """
    reader = open_detection(path, split=split, label_map=label_map)
    if not isinstance(reader, AnnotatedImages):
        raise InputError(
            f"{path} has no annotations to convert.",
            given=f"data that is read by {type(reader).__name__}",
            expected=ANNOTATED,
            hint="name annotations; records and tables are read as they are",
        )
    return _convert_examples(
        reader, reader.classes, label_map, output, base or split, num_shards, reader.fingerprint(), settings
    )


def _voc_readers(
    folders: Sequence[AnyPath], split: str | None, difficult: bool, label_map: LabelMap | None
) -> list[Voc]:
    """Make a reader of each folder; a class has the same label in all of them."""
    readers = [Voc(folder, split, difficult=difficult, label_map=label_map) for folder in folders]
    if all(reader.classes == readers[0].classes for reader in readers):
        return readers
    joint = LabelMap.alphabetical(name for reader in readers for name in reader.classes.values())
    return [Voc(folder, split, difficult=difficult, label_map=joint) for folder in folders]


def _convert_examples(
    reader: Reader,
    classes: Mapping[int, str],
    label_map: LabelMap | None,
    output: Path,
    base: str,
    num_shards: int | None,
    options: Mapping[str, object],
    settings: Settings,
) -> Summary:
    """Write the shards, and then a label map, unless one was given; another one that is there is an error."""
    made = None if label_map else LabelMap(tuple(Label(number, name) for number, name in sorted(classes.items())))
    path = output / LABEL_MAP
    if made and path.exists() and not settings.overwrite and (there := read_label_map(path)) != made:
        raise DataError(
            f"{path} is the label map of other classes.",
            given=f"{len(there.labels)} classes there, {len(made.labels)} here, or others of the same number",
            expected="no label map, or one of the same classes and numbers",
            hint="name another folder, or give a label map that has all classes",
        )
    if num_shards is None:
        num_shards = max(1, math.ceil(len(reader) / _EXAMPLES_PER_SHARD))
    items = [(index, reader.example_id(index)) for index in range(len(reader))]
    options = {**options, "classes": classes}
    summary = convert(items, partial(_record, reader), output, base, num_shards, options=options, settings=settings)
    if made:
        write_label_map(path, made)
    return summary


def _record(reader: Reader, example: tuple[int, str]) -> bytes | SkippedItem:
    index, name = example
    try:
        batch = reader.read_batch(np.array([index], dtype=np.int64))
        return detection_example({field: values[0] for field, values in batch.items()})
    except DataError as error:
        return SkippedItem(name, f"{error.what} {error.given}")


def detection_example(fields: Mapping[str, Any]) -> bytes:
    """Serialize one example of a reader, one row of its `read_batch`, as a `tf.train.Example`.

    JPEGs and PNGs stay as they are; an image of another format becomes a PNG, without loss. Each mask becomes a PNG of
    one bit a pixel.

    Args:
        fields: "image", an `EncodedImage`; "boxes", float32 (objects, 4) top, left, bottom, right as shares of height
            and width; "source_id", by default the name of the file; and for each object any of "labels", "class_text",
            "area" (pixels), "is_crowd", "difficult", "truncated", "group_of", "view", "weights", "keypoints" (objects,
            keypoints, 2) y, x as shares, "keypoint_visibility" (objects, keypoints), and "masks", with a `decode` that
            gives uint8 (objects, height, width). Other fields are left out.

    Raises:
        InputError: a field has more or fewer values than there are boxes.
        DataError: the image's header cannot be read; or its format must change, and it cannot be decoded.
    """
    image, boxes = fields["image"], fields["boxes"]
    features = _features_of_image(image, fields.get("source_id"))
    features |= {f"image/object/bbox/{edge}": _floats(boxes[:, column]) for column, edge in enumerate(EDGES)}
    for name, feature, values_of in _OF_OBJECTS:
        if name in fields:
            if len(fields[name]) != len(boxes):
                raise InputError(
                    f"The field {name!r} of {image.source} does not fit its boxes.",
                    given=f"{len(fields[name])} values",
                    expected=f"{len(boxes)}, one for each box",
                    hint="give every field of objects a value for each of them",
                )
            features[f"image/object/{feature}"] = values_of(fields[name])
    return serialize_example(features)


def _features_of_image(image: EncodedImage, source_id: str | None) -> dict[str, Values]:
    # Boxes and masks belong to the stored raster, before it is turned.
    image = replace(image, decoding=replace(image.decoding, exif=False))
    width, height = image.size
    name = os.path.basename(image.source)  # noqa: PTH119 - a source need not be a path
    data, kind = image.data, b"png"
    if data.startswith(jpeg.START):
        kind = b"jpeg"
    elif not data.startswith(_PNG_START):
        data = png_bytes(Image.fromarray(image.decode().permute(1, 2, 0).numpy()))
    return {
        "image/encoded": [data],
        "image/format": [kind],
        "image/filename": [name.encode(errors="surrogateescape")],
        "image/key/sha256": [hashlib.sha256(data).hexdigest().encode()],
        "image/source_id": [(source_id or name).encode(errors="surrogateescape")],
        "image/height": np.array([height], dtype=np.int64),
        "image/width": np.array([width], dtype=np.int64),
    }


def _floats(values: Tensor) -> Values:
    return values.flatten().float().numpy()


def _int64s(values: Tensor) -> Values:
    return values.flatten().long().numpy()


def _texts(values: list[str]) -> Values:
    return [value.encode() for value in values]


def _masks(masks: Any) -> Values:
    # One bit a pixel: several times as fast to write and to read as a byte a pixel.
    return [png_bytes(Image.fromarray(mask)) for mask in masks.decode().numpy().astype(bool)]


# The fields of objects, the features they become, and how.
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
