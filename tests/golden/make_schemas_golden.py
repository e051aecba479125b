"""Have TensorFlow write records of images, and read them by the reference systems' rules. Run by hand, never in tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*"
    /tmp/tensorflow/bin/python tests/golden/make_schemas_golden.py

It writes, beside itself, the records (`schemas_golden_*.tfrecord`), and what TensorFlow makes of them
(`schemas_golden.npz`, named "file/record/field"). The rules: inception's and slim's for images of one class, and those
of the object detection API's decoder of examples for the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
EDGES = ("ymin", "xmin", "ymax", "xmax")
HEIGHT, WIDTH, KEYPOINTS = 3, 4, 2
NAMES = {"cat": 1, "/m/0bt9lr": 2}
DISPLAY_NAMES = {"dog": 2}

random = np.random.default_rng(0)


def png(height: int, width: int, channels: int = 3, levels: int = 256) -> bytes:
    pixels = random.integers(0, levels, (height, width, channels)).astype(np.uint8)
    return bytes(tf.io.encode_png(pixels * (255 // (levels - 1))).numpy())


def jpeg() -> bytes:
    pixels = random.integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8)
    return bytes(tf.io.encode_jpeg(pixels, quality=100).numpy())


def boxes(count: int) -> dict[str, Any]:
    corners = np.sort(random.random((2, 2, count)), axis=0).reshape(4, count).astype(np.float32)
    return {f"image/object/bbox/{edge}": values for edge, values in zip(EDGES, corners, strict=True)}


def size(height: int, width: int) -> dict[str, Any]:
    return {"image/height": [height], "image/width": [width]}


def imagenet() -> list[dict[str, Any]]:
    label = {"image/class/label": [812], "image/class/text": [b"space shuttle"], "image/class/synset": [b"n04266014"]}
    return [
        {"image/encoded": [jpeg()], "image/format": [b"JPEG"], **label, **boxes(2), **size(HEIGHT, WIDTH)},
        {"image/encoded": [jpeg()], "image/class/label": [1], "image/object/bbox/xmin": np.array([], np.float32)},
        {"image/encoded": [png(2, 5)]},
    ]


def mnist() -> list[dict[str, Any]]:
    return [
        {"image/encoded": [png(28, 28, 1)], "image/format": [b"png"], "image/class/label": [label], **size(28, 28)}
        for label in (7, 0)
    ]


def detection() -> list[dict[str, Any]]:
    """Examples with all features, with texts that the label map has not got, with no objects, and with the least."""

    def of(key: str) -> str:
        return f"image/object/{key}"

    def floats(count: int) -> np.ndarray[Any, Any]:
        return random.random(count).astype(np.float32)

    whole = {
        **{"image/encoded": [jpeg()], "image/source_id": [b"7"], **size(HEIGHT, WIDTH), **boxes(3)},
        **{of("class/label"): [5, 6, 7], of("class/text"): [b"cat", b"/m/0bt9lr", b"dog"]},
        **{of("area"): floats(3), of("weight"): floats(3)},
        **{of("is_crowd"): [0, 1, 0], of("difficult"): [1, 0, 0], of("group_of"): [0, 0, 1]},
        **{of("keypoint/y"): floats(3 * KEYPOINTS), of("keypoint/x"): floats(3 * KEYPOINTS)},
    }
    unknown = {
        **{"image/encoded": [png(HEIGHT, WIDTH)], **size(HEIGHT, WIDTH), **boxes(2)},
        **{of("class/text"): [b"unicorn", b"cat"], of("keypoint/y"): floats(4), of("keypoint/x"): floats(4)},
    }
    return [
        whole,
        unknown,
        {"image/encoded": [jpeg()], **size(HEIGHT, WIDTH)},
        {"image/encoded": [jpeg()], **boxes(1), of("class/label"): [4], **size(HEIGHT, WIDTH)},
    ]


def with_masks(examples: list[dict[str, Any]], numerical: bool) -> list[dict[str, Any]]:
    def masks(count: int) -> Any:
        if numerical:
            return random.choice(np.array([-1, 0, 0.25, 1], np.float32), count * HEIGHT * WIDTH)
        return [png(HEIGHT, WIDTH, 1, 2) for _ in range(count)]

    counts = [len(each.get("image/object/bbox/ymin", ())) for each in examples]
    return [
        {**each, "image/object/mask": masks(count)} if count else each
        for each, count in zip(examples, counts, strict=True)
    ]


def example(values: dict[str, Any]) -> bytes:
    def feature(values: Any) -> tf.train.Feature:
        if isinstance(values, np.ndarray):
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        if values and isinstance(values[0], int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    features = tf.train.Features(feature={name: feature(each) for name, each in values.items()})
    return bytes(tf.train.Example(features=features).SerializeToString(deterministic=True))


def one(dtype: tf.DType, default: Any) -> tf.io.FixedLenFeature:
    return tf.io.FixedLenFeature((), dtype, default)


def parsed(record: bytes, wanted: dict[str, Any]) -> dict[str, Any]:
    values = tf.io.parse_single_example(record, wanted)
    return {
        name: tf.sparse.to_dense(each) if isinstance(each, tf.SparseTensor) else each for name, each in values.items()
    }


def joined_boxes(values: dict[str, Any]) -> tf.Tensor:
    return tf.stack([values[f"image/object/bbox/{edge}"] for edge in EDGES], axis=1)


def decoded(image: tf.Tensor) -> tf.Tensor:
    """With the transform that most decoders use; TensorFlow's own default is a faster and less exact one."""
    if tf.io.is_jpeg(image):
        return tf.io.decode_jpeg(image, channels=3, dct_method="INTEGER_ACCURATE")
    return tf.io.decode_image(image, channels=3)


def of_one_class(record: bytes) -> dict[str, Any]:
    """By the rules of inception's `parse_example_proto`."""
    values = parsed(
        record,
        {
            "image/encoded": one(tf.string, ""),
            "image/class/label": tf.io.FixedLenFeature([1], tf.int64, -1),
            "image/class/text": one(tf.string, ""),
            **{f"image/object/bbox/{edge}": tf.io.VarLenFeature(tf.float32) for edge in EDGES},
        },
    )
    return {
        "pixels": decoded(values["image/encoded"]),
        "label": values["image/class/label"][0],
        "text": values["image/class/text"],
        "boxes": joined_boxes(values),
    }


def of_digit(record: bytes) -> dict[str, Any]:
    """By the rules of slim's dataset of MNIST."""
    wanted = {
        "image/encoded": one(tf.string, ""),
        "image/class/label": tf.io.FixedLenFeature([1], tf.int64, tf.zeros([1], tf.int64)),
    }
    values = parsed(record, wanted)
    pixels = tf.io.decode_image(values["image/encoded"], channels=1)
    return {"image": tf.transpose(pixels, (2, 0, 1)), "label": values["image/class/label"][0]}


def table(names: dict[str, int]) -> tf.lookup.StaticHashTable:
    initializer = tf.lookup.KeyValueTensorInitializer(list(names), tf.constant(list(names.values()), tf.int64))
    return tf.lookup.StaticHashTable(initializer, -1)


def of_objects(record: bytes, numerical: bool) -> dict[str, Any]:
    """By the rules of the object detection API's `TfExampleDecoder`."""
    floats = ("area", "weight", "keypoint/y", "keypoint/x", *(f"bbox/{edge}" for edge in EDGES))
    kinds = {
        **dict.fromkeys(floats, tf.float32),
        **dict.fromkeys(("class/label", "is_crowd", "difficult", "group_of"), tf.int64),
        "class/text": tf.string,
        "mask": tf.float32 if numerical else tf.string,
    }
    values = parsed(
        record,
        {
            "image/source_id": one(tf.string, ""),
            "image/height": one(tf.int64, 1),
            "image/width": one(tf.int64, 1),
            **{f"image/object/{name}": tf.io.VarLenFeature(kind) for name, kind in kinds.items()},
        },
    )
    own = {name: values[f"image/object/{name}"] for name in kinds}
    boxes, height, width = joined_boxes(values), int(values["image/height"]), int(values["image/width"])
    mapped = tf.maximum(table(NAMES).lookup(own["class/text"]), table(DISPLAY_NAMES).lookup(own["class/text"]))
    if numerical:
        masks = tf.reshape(tf.cast(own["mask"] > 0, tf.uint8), (-1, height, width))
    else:
        decoded = [tf.io.decode_image(mask, channels=1)[..., 0] > 0 for mask in own["mask"]]
        masks = tf.cast(tf.reshape(tf.stack(decoded) if decoded else [], (-1, height, width)), tf.uint8)
    return {
        "source_id": values["image/source_id"],
        "boxes": boxes,
        "labels": own["class/label"] if tf.size(mapped) == 0 else mapped,
        "numbers": own["class/label"],
        "weights": own["weight"] if tf.size(own["weight"]) else tf.ones(len(boxes)),
        "area": own["area"],
        "keypoints": tf.reshape(tf.stack([own["keypoint/y"], own["keypoint/x"]], 1), (-1, KEYPOINTS, 2)),
        "masks": masks,
        **{name: tf.cast(own[name], tf.bool) for name in ("is_crowd", "difficult", "group_of")},
    }


def main() -> None:
    objects = detection()
    files: dict[str, tuple[list[dict[str, Any]], Any]] = {
        "imagenet": (imagenet(), of_one_class),
        "mnist": (mnist(), of_digit),
        "numerical": (with_masks(objects, True), lambda record: of_objects(record, True)),
        "png": (with_masks(objects, False), lambda record: of_objects(record, False)),
    }
    found: dict[str, Any] = {}
    for name, (examples, read) in files.items():
        records = [example(each) for each in examples]
        with tf.io.TFRecordWriter(str(HERE / f"schemas_golden_{name}.tfrecord")) as writer:
            for number, record in enumerate(records):
                writer.write(record)
                for field, value in read(record).items():
                    array = np.asarray(value)
                    # Texts as such: an array of objects could be loaded by pickle alone.
                    found[f"{name}/{number}/{field}"] = np.array(array.item().decode()) if array.dtype == "O" else array
    np.savez_compressed(HERE / "schemas_golden.npz", **found)


if __name__ == "__main__":
    main()
