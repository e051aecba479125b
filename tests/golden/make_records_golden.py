"""Have TensorFlow write small TFRecord files. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*"
    /tmp/tensorflow/bin/python tests/golden/make_records_golden.py

It writes, beside itself, the same three `tf.train.Example`s plain, in gzip and in zlib (`records_golden.*`), two
`tf.train.SequenceExample`s (`sequences_golden.tfrecord`), and all their values (`records_golden.json`: bytes and
floats as hexadecimal digits of their bytes, integers as they are). Given a folder, it instead reads the files of these
names there, which somebody else wrote, and says whether TensorFlow finds the same values in them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
COMPRESSIONS = {"tfrecord": None, "gz": "GZIP", "zlib": "ZLIB"}

EXAMPLES: list[dict[str, Any]] = [
    {
        "image/encoded": [bytes(range(256))],
        "image/class/label": [812],
        "image/object/bbox/xmin": np.array([0.0, 0.25, 1.0], np.float32),
        "image/object/class/text": [b"raccoon", "Waschbär".encode(), b""],
    },
    {
        "name in Ελληνικά": [b"\xff\xfe"],
        "integers": [0, 1, -1, 127, 128, 300, 2**31, -(2**31), 2**63 - 1, -(2**63)],
        "many integers": list(range(-100, 400, 3)),
        "floats": np.array([0.0, -0.0, 1 / 3, 1e-45, 3.4e38, np.inf, -np.inf, np.nan], np.float32),
        "no bytes": [],
        "no floats": np.array([], np.float32),
    },
    {},
]
SEQUENCES: list[tuple[dict[str, Any], dict[str, list[Any]]]] = [
    (
        {"video/id": [b"one"], "video/frames": [3]},
        {
            "image/encoded": [[b"first"], [b"second"], [b"third"]],
            "boxes": [np.array([0.5], np.float32), np.array([], np.float32), np.array([0.25, 0.75], np.float32)],
            "labels": [[7], [-1, 300], [2**40]],
            "no steps": [],
        },
    ),
    ({}, {}),
]


def main() -> None:
    if len(sys.argv) > 1:
        print("the same" if found(Path(sys.argv[1])) == found(HERE) == golden() else "not the same")
        return
    for suffix, compression in COMPRESSIONS.items():
        write(HERE / f"records_golden.{suffix}", map(example, EXAMPLES), compression)
    write(HERE / "sequences_golden.tfrecord", (sequence(*each) for each in SEQUENCES), None)
    text = json.dumps({"tensorflow": tf.__version__, **golden()}, indent=1, sort_keys=True, ensure_ascii=False)
    (HERE / "records_golden.json").write_text(text + "\n")


def write(path: Path, messages: Any, compression: str | None) -> None:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for message in messages:
            writer.write(message.SerializeToString(deterministic=True))


def feature(values: Any) -> tf.train.Feature:
    if isinstance(values, np.ndarray):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    if values and isinstance(values[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def features(values: dict[str, Any]) -> tf.train.Features:
    return tf.train.Features(feature={name: feature(each) for name, each in values.items()})


def example(values: dict[str, Any]) -> tf.train.Example:
    return tf.train.Example(features=features(values))


def sequence(context: dict[str, Any], lists: dict[str, list[Any]]) -> tf.train.SequenceExample:
    steps = {name: tf.train.FeatureList(feature=map(feature, each)) for name, each in lists.items()}
    return tf.train.SequenceExample(context=features(context), feature_lists=tf.train.FeatureLists(feature_list=steps))


def golden() -> dict[str, Any]:
    """All values, as JSON."""
    return as_json([example(each) for each in EXAMPLES], [sequence(*each) for each in SEQUENCES])


def found(folder: Path) -> dict[str, Any]:
    """All values that TensorFlow finds in the files of a folder, as JSON."""
    names = {suffix: str(folder / f"records_golden.{suffix}") for suffix in COMPRESSIONS}
    kinds = [
        [tf.train.Example.FromString(record.numpy()) for record in tf.data.TFRecordDataset(names[suffix], compression)]
        for suffix, compression in COMPRESSIONS.items()
    ]
    assert str(kinds[0]) == str(kinds[1]) == str(kinds[2])  # as text, because NaN is unlike itself
    records = tf.data.TFRecordDataset(str(folder / "sequences_golden.tfrecord"))
    return as_json(kinds[0], [tf.train.SequenceExample.FromString(record.numpy()) for record in records])


def as_json(examples: list[tf.train.Example], sequences: list[tf.train.SequenceExample]) -> dict[str, Any]:
    def values(feature: tf.train.Feature) -> dict[str, Any]:
        kind = feature.WhichOneof("kind")
        held = getattr(feature, kind).value
        if kind == "int64_list":
            return {kind: list(held)}
        return {kind: [value.hex() if kind == "bytes_list" else np.float32(value).tobytes().hex() for value in held]}

    def named(features: tf.train.Features) -> dict[str, Any]:
        return {name: values(feature) for name, feature in features.feature.items()}

    def steps(sequence: tf.train.SequenceExample) -> dict[str, Any]:
        lists = sequence.feature_lists.feature_list
        return {name: [values(feature) for feature in each.feature] for name, each in lists.items()}

    return {
        "examples": [named(each.features) for each in examples],
        "sequences": [{"context": named(each.context), "feature_lists": steps(each)} for each in sequences],
    }


if __name__ == "__main__":
    main()
