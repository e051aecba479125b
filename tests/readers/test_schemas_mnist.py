from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import DataError
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.mnist import mnist_records
from lockstep.readers.schemas import MnistSchema
from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import write_records


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def digit(label: int) -> Any:
    return np.random.default_rng(label).integers(0, 256, (28, 28)).astype(np.uint8)


def png(pixels: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def with_png(label: int, **changes: Any) -> dict[str, Any]:
    """As slim writes it."""
    return {
        "image/encoded": [png(digit(label))],
        "image/format": [b"png"],
        "image/class/label": np.array([label]),
        "image/height": np.array([28]),
        "image/width": np.array([28]),
        **changes,
    }


def with_pixels(label: int) -> dict[str, Any]:
    """As TensorFlow's example of reading MNIST writes it."""
    sizes = {name: np.array([size]) for name, size in (("height", 28), ("width", 28), ("depth", 1))}
    return {"image_raw": [digit(label).tobytes()], "label": np.array([label]), **sizes}


def test_both_layouts_give_the_same_batches(tmp_path: Path) -> None:
    write_records(tmp_path / "mnist_train.tfrecord", [serialize_example(with_png(label)) for label in range(5)])
    write_records(tmp_path / "train.tfrecords", [serialize_example(with_pixels(label)) for label in range(5)])
    png_reader = ImageRecords(tmp_path / "mnist_train.tfrecord", MnistSchema())
    raw_reader = mnist_records(tmp_path / "train.tfrecords")
    assert (png_reader.cost, raw_reader.cost) == ("decode", "memory")
    indices = np.array([3, 0, 3, 4])
    for reader in (png_reader, raw_reader):
        batch = reader.read_batch(indices)
        assert batch.keys() == {"image", "label"}
        assert (batch["image"].dtype, batch["label"].dtype) == (torch.uint8, torch.int64)
        assert batch["label"].tolist() == indices.tolist()
        np.testing.assert_array_equal(batch["image"], [[digit(label)] for label in indices])


@pytest.mark.parametrize("feature", ["image_raw", "label"])
def test_raw_pixels_and_label_are_required(tmp_path: Path, feature: str) -> None:
    example = with_pixels(3)
    del example[feature]
    write_records(tmp_path / "a", [serialize_example(example)])
    with pytest.raises(DataError, match=f"Record 0 of {tmp_path}/a, at byte 0, has no usable feature '{feature}'."):
        mnist_records([tmp_path / "a"]).read_batch(np.array([0]))


def test_checksums_of_raw_pixels_may_be_left_alone(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [serialize_example(with_pixels(label)) for label in (3, 5)])
    data = bytearray((tmp_path / "a").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a").write_bytes(data)
    assert mnist_records(tmp_path / "a", verify=False).read_batch(np.array([1]))["label"].tolist() == [5]
    with pytest.raises(DataError, match="is damaged"):
        mnist_records(tmp_path / "a").read_batch(np.array([1]))


COLOUR = np.zeros((28, 28, 3), np.uint8)
COLOUR[5, 5, 2] = 1


@pytest.mark.parametrize(
    ("changes", "feature", "given_", "expected"),
    [
        ({"image/encoded": [png(digit(1)[:27])]}, "image/encoded", "one of 28 x 27", "an image of 28 x 28 pixels"),
        ({"image/encoded": [png(COLOUR)]}, "image/encoded", "one in colour", "a grey image"),
        ({"image/encoded": []}, "image/encoded", "0 values of bytes", "1 encoded image"),
        ({"image/class/label": np.array([1, 2])}, "image/class/label", "2 values of int64", "one int64"),
    ],
    ids=["a row short", "in colour", "no image", "two labels"],
)
def test_a_record_that_is_no_digit_is_named(
    tmp_path: Path, changes: Any, feature: str, given_: str, expected: str
) -> None:
    write_records(tmp_path / "a", [serialize_example(with_png(3, **changes))])
    with pytest.raises(DataError) as caught:
        ImageRecords(tmp_path / "a", MnistSchema()).read_batch(np.array([0]))
    assert caught.value.what == f"Record 0 of {tmp_path}/a, at byte 0, has no usable feature {feature!r}."
    assert (caught.value.given, caught.value.expected) == (given_, expected)


def test_a_digit_without_a_label_is_no_zero(tmp_path: Path) -> None:
    example = with_png(3)
    del example["image/class/label"]
    write_records(tmp_path / "a", [serialize_example(example)])
    with pytest.raises(DataError) as caught:
        ImageRecords(tmp_path / "a", MnistSchema()).read_batch(np.array([0]))
    assert caught.value.given == "the features image/encoded, image/format, image/height, image/width"
    assert caught.value.expected == "one int64"
