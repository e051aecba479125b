from __future__ import annotations

import gzip
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.convert import mnist
from lockstep.convert.mnist import convert_mnist
from lockstep.errors import DataError, InputError
from lockstep.readers.mnist import FILES
from lockstep.records.example import parse_example
from lockstep.records.record_files import RecordFiles
from lockstep.records.tfrecord import write_records

ORIGINALS = Path(__file__).parents[2] / "data" / "mnist"
NUM_TRAIN, NUM_TEST = 5, 3


@pytest.fixture
def originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files like the original ones, of a few images; image i is of the shade i, and its label is i."""
    folder = tmp_path / "originals"
    folder.mkdir()
    for file, count in zip(FILES, (NUM_TRAIN, NUM_TRAIN, NUM_TEST, NUM_TEST), strict=True):
        shape = (count, 28, 28) if "images" in file.name else (count,)
        values = np.broadcast_to(np.arange(count, dtype=np.uint8).reshape(-1, *[1] * (len(shape) - 1)), shape)
        header = bytes((0, 0, 8, len(shape))) + np.array(shape, dtype=">u4").tobytes()
        (folder / file.name).write_bytes(gzip.compress(header + values.tobytes()))
    monkeypatch.setattr(mnist, "ensure_files", lambda path: path)
    return folder


@pytest.mark.parametrize(("name", "count"), [("mnist_train.tfrecord", NUM_TRAIN), ("mnist_test.tfrecord", NUM_TEST)])
def test_slims_layout_has_pngs(originals: Path, tmp_path: Path, name: str, count: int) -> None:
    written = convert_mnist(tmp_path / "out", "png", originals)
    assert (tmp_path / "out" / name, count) in written
    records = RecordFiles(tmp_path / "out" / name)
    assert len(records) == count
    for index in range(count):
        example = {feature: list(values) for feature, values in parse_example(records.read(index)).items()}
        image = Image.open(BytesIO(example.pop("image/encoded")[0]))
        assert (image.format, image.mode) == ("PNG", "L")
        assert np.asarray(image).tolist() == np.full((28, 28), index).tolist()
        assert example == {
            "image/format": [b"png"],
            "image/class/label": [index],
            "image/height": [28],
            "image/width": [28],
        }


def test_what_is_there_is_kept(originals: Path, tmp_path: Path) -> None:
    convert_mnist(tmp_path / "out", "png", originals)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tfrecord")}
    (tmp_path / "out" / "mnist_test.tfrecord").unlink()
    convert_mnist(tmp_path / "out", "png", originals)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tfrecord")}
    assert after.keys() == before.keys()
    assert after[tmp_path / "out" / "mnist_train.tfrecord"] == before[tmp_path / "out" / "mnist_train.tfrecord"]


def test_a_file_of_something_else_is_left_alone(originals: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "mnist_train.tfrecord"
    write_records(path, [b"mine"])
    before = path.read_bytes()
    message = (
        r"mnist_train\.tfrecord does not hold the records of MNIST\.\n  given:    1 records\n  expected: 5 records"
    )
    with pytest.raises(DataError, match=message):
        convert_mnist(tmp_path / "out", "png", originals)
    assert path.read_bytes() == before


def test_the_references_layout_has_pixels(tmp_path: Path) -> None:
    written = convert_mnist(tmp_path, "raw", ORIGINALS)
    assert {each.path.name: each.num_records for each in written} == {
        "train.tfrecords": 55_000,
        "validation.tfrecords": 5_000,
        "test.tfrecords": 10_000,
    }
    assert len(parse_example(RecordFiles(tmp_path / "test.tfrecords").read(0))["image_raw"][0]) == 784


@pytest.mark.parametrize(
    ("output", "layout", "error", "message"),
    [
        ("out", "jpeg", InputError, "layout cannot be 'jpeg'"),
        ("s3:/bucket", "raw", DataError, "not on this machine"),
    ],
)
def test_what_cannot_be_done_is_refused(output: str, layout: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert_mnist(Path(output), layout)
