from __future__ import annotations

import gzip
import multiprocessing
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.convert import mnist
from lockstep.convert.mnist import convert_mnist
from lockstep.errors import DataError, InputError
from lockstep.readers.mnist import FILES, SPLITS, load_idx, mnist_reader, mnist_records
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
    monkeypatch.setattr(mnist, "ensure_files", lambda path: [path / file.name for file in FILES])
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


def test_shards_of_mnist_that_exist_are_kept(originals: Path, tmp_path: Path) -> None:
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


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records with pixels."""
    folder = tmp_path_factory.mktemp("raw")
    convert_mnist(folder, "raw", ORIGINALS)
    return folder


def test_the_references_layout_has_pixels(raw: Path) -> None:
    features = parse_example(RecordFiles(raw / "test.tfrecords").read(0))
    assert {name: list(values) for name, values in features.items()} == {
        "image_raw": [load_idx(ORIGINALS / FILES[2].name)[0].tobytes()],
        "label": [7],
        "height": [28],
        "width": [28],
        "depth": [1],
    }


@pytest.mark.parametrize("split", SPLITS)
def test_the_records_are_the_examples_that_the_reader_has_without_them(raw: Path, split: str) -> None:
    records, reader = mnist_records(raw / f"{split}.tfrecords", verify=False), mnist_reader(split, ORIGINALS)
    assert (len(records), records.fingerprint()) == (len(reader), reader.fingerprint())
    assert records.example_id(17) == reader.example_id(17)
    indices = np.arange(len(reader))
    ours, theirs = reader.read_batch(indices), records.read_batch(indices)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype
        assert torch.equal(ours[name], values)


def test_raw_records_that_are_there_need_no_originals(raw: Path, tmp_path: Path) -> None:
    assert [each.num_records for each in convert_mnist(raw, "raw", tmp_path)] == [55_000, 5_000, 10_000]


@pytest.mark.process
def test_two_processes_may_convert_at_once(raw: Path, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / f"{name}.tfrecords").symlink_to(raw / f"{name}.tfrecords")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=convert_mnist, args=(tmp_path, "raw", ORIGINALS)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "test.tfrecords").read_bytes() == (raw / "test.tfrecords").read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


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
