from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import DataError
from lockstep.readers import records as records_module
from lockstep.readers.reader import Reader
from lockstep.readers.records import Records
from lockstep.records.example import serialize_example
from lockstep.records.record_files import RecordFile
from lockstep.records.template import Field, Integer, Pixels, Template, read_each
from lockstep.records.tfrecord import Compression, frame, write_records

FIELDS: dict[str, Field] = {"image": Pixels("image_raw", (1, 2, 3)), "label": Integer("label")}


def payload(label: int, pixels: bytes | None = None, **more: Any) -> bytes:
    pixels = bytes([label & 0xFF] * 6) if pixels is None else pixels
    return serialize_example({"image_raw": [pixels], "label": np.array([label]), "height": np.array([2]), **more})


def reversed_keys(label: int, **more: Any) -> bytes:
    """The same example, its features in another order: of the same length, laid out otherwise."""
    example = payload(label, **more)
    head, rest = example[:2], example[2:]
    entries = b""
    while rest:
        size = 2 + rest[1]
        entries, rest = rest[:size] + entries, rest[size:]
    return head + entries


def write(folder: Path, *files: Sequence[bytes]) -> list[Path]:
    paths = [folder / f"{number}.tfrecords" for number in range(len(files))]
    for path, payloads in zip(paths, files, strict=True):
        write_records(path, payloads)
    return paths


def labels(reader: Reader, *indices: int) -> list[int]:
    batch = reader.read_batch(np.array(indices))
    assert batch["image"].shape == (len(indices), 1, 2, 3)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].dtype == torch.int64
    assert [int(image.unique()) for image in batch["image"]] == [label & 0xFF for label in batch["label"].tolist()]
    found: list[int] = batch["label"].tolist()
    return found


@pytest.fixture
def no_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches may be read by template alone."""

    def parse(*_: object) -> dict[str, Tensor]:
        raise AssertionError("parsed record by record")

    monkeypatch.setattr(records_module, "read_each", parse)


@pytest.mark.usefixtures("no_parsing")
def test_records_of_one_layout_are_read_by_template(tmp_path: Path) -> None:
    reader = Records(write(tmp_path, [payload(label) for label in range(10)]), FIELDS)
    assert len(reader) == 10
    assert reader.cost == "memory"
    assert labels(reader, 7, 0, 7, 9) == [7, 0, 7, 9]


def test_a_batch_is_a_copy(tmp_path: Path) -> None:
    reader = Records(write(tmp_path, [payload(5)]), FIELDS)
    batch = reader.read_batch(np.array([0]))
    batch["image"].zero_()
    assert labels(reader, 0) == [5]


@pytest.mark.usefixtures("no_parsing")
@pytest.mark.parametrize("values", [[128, 300, 16383], [-1, -(2**63)], [2**62, 2**63 - 1]])
def test_labels_of_several_bytes_are_read_by_template(tmp_path: Path, values: list[int]) -> None:
    reader = Records(write(tmp_path, [payload(label) for label in values]), FIELDS)
    assert labels(reader, *range(len(values))) == values


@pytest.mark.parametrize(
    ("payloads", "expected"),
    [
        pytest.param([payload(1), reversed_keys(2), payload(3)], [1, 2, 3], id="another order of features"),
        pytest.param([payload(1), payload(2, height=np.array([3]))], [1, 2], id="another value of another feature"),
        pytest.param([payload(1), payload(200), payload(3)], [1, 200, 3], id="other lengths"),
        pytest.param([payload(1), reversed_keys(2, more=[b"x"])], [1, 2], id="other features"),
    ],
)
def test_records_laid_out_otherwise_are_parsed(tmp_path: Path, payloads: list[bytes], expected: list[int]) -> None:
    reader = Records(write(tmp_path, payloads), FIELDS)
    assert labels(reader, *range(len(payloads))) == expected
    assert labels(reader, 0) == [1]


def test_a_label_that_does_not_end_where_it_should_breaks_the_template() -> None:
    one = np.frombuffer(payload(1), dtype=np.uint8)
    other = one.copy()
    other[-1] |= 0x80  # The label comes last.
    template = Template(payload(1), FIELDS, "record 0")
    assert template.read(one[None]) is not None
    assert template.read(np.stack([one, other])) is None


@given(data=st.data(), seed=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_whatever_follows_the_template_is_what_the_parser_reads(data: st.DataObject, seed: list[int]) -> None:
    first = payload(seed[0])
    template = Template(first, FIELDS, "record 0")
    changes = st.lists(st.tuples(st.integers(0, len(first) - 1), st.integers(0, 255)), max_size=2)
    records = [payload(label, b"\x01\x80\xff\x00\x0a\x12") for label in seed]
    for place in range(len(records)):
        changed = bytearray(records[place])
        for where, value in data.draw(changes):
            changed[where % len(changed)] = value
        records[place] = bytes(changed)
    records = [record for record in records if len(record) == len(first)]
    if not records:
        return
    read = template.read(np.stack([np.frombuffer(record, dtype=np.uint8) for record in records]))
    if read is not None:
        parsed = read_each([(record, "a record") for record in records], FIELDS)
        assert all(torch.equal(read[name], parsed[name]) for name in FIELDS)


def test_files_follow_one_another(tmp_path: Path) -> None:
    paths = write(tmp_path, [payload(0), payload(1)], [], [reversed_keys(2)], [payload(3), payload(4), payload(5)])
    reader = Records(paths, FIELDS)
    assert len(reader) == 6
    assert labels(reader, 4, 0, 2, 5, 1, 3, 4) == [4, 0, 2, 5, 1, 3, 4]
    assert [reader.example_id(index) for index in (1, 2, 5)] == ["0.tfrecords:1", "2.tfrecords:0", "3.tfrecords:2"]


def test_a_damaged_record_is_named_when_it_is_first_read(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [payload(label) for label in range(5)])
    path.write_bytes(path.read_bytes().replace(bytes([3]) * 6, bytes([9]) * 6))
    reader = Records([path], FIELDS)
    assert labels(reader, 0, 4) == [0, 4]
    for _ in range(2):
        with pytest.raises(DataError, match=rf"Record 3 of {path}, at byte \d+, is damaged."):
            reader.read_batch(np.array([2, 3]))


def test_each_checksum_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    once = RecordFile.read

    def counted(self: Any, record: int, verify: bool = True) -> bytes:
        read.append(int(record))
        return once(self, record, verify)

    reader = Records(write(tmp_path, [payload(label) for label in range(5)]), FIELDS)
    labels(reader, 0, 1)
    monkeypatch.setattr(RecordFile, "read", counted)
    labels(reader, 1, 2, 0)
    labels(reader, 2, 1)
    assert read == [2]


def test_checksums_may_be_left_alone(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [payload(label) for label in range(5)])
    path.write_bytes(path.read_bytes().replace(bytes([3]) * 6, bytes([9]) * 6))
    batch = Records([path], FIELDS, verify=False).read_batch(np.array([3]))
    assert batch["image"].unique().tolist() == [9]


def test_nor_is_that_of_the_first_which_is_the_template(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [payload(label) for label in range(1, 4)])
    path.write_bytes(path.read_bytes().replace(bytes([1]) * 6, bytes([9]) * 6))
    assert labels(Records([path], FIELDS, verify=False), 2, 1) == [3, 2]


@pytest.mark.usefixtures("no_parsing")
@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_compressed_records_are_read_by_template_too(tmp_path: Path, compression: Compression) -> None:
    write_records(tmp_path / "x-0-of-2", [payload(label) for label in range(5)], compression)
    write_records(tmp_path / "x-1-of-2", [payload(label) for label in range(5, 9)], compression)
    reader = Records(f"{tmp_path}/x-*", FIELDS)
    assert labels(reader, 7, 0, 3, 8) == [7, 0, 3, 8]


def test_shards_of_a_pattern_must_be_there(tmp_path: Path) -> None:
    write_records(tmp_path / "x-0-of-2", [payload(0)])
    with pytest.raises(DataError, match=f"Shards are missing in {tmp_path}: x-1-of-2"):
        Records(tmp_path / "x-*", FIELDS)


def test_no_descriptor_is_held_for_a_file_that_is_mapped(tmp_path: Path) -> None:
    reader = Records(write(tmp_path, *([payload(label)] for label in range(150))), FIELDS)
    assert labels(reader, *range(150)) == list(range(150))
    held = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.resolve().parent == tmp_path]
    assert len(held) == 128


def test_a_file_that_changes_before_it_is_mapped_is_noticed(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [payload(1), payload(2)])
    reader = Records([path], FIELDS, verify=False)
    write(tmp_path, [payload(3)])
    with pytest.raises(DataError, match=f"{path} has changed since its index was made"):
        reader.read_batch(np.array([0]))


def test_a_file_that_is_replaced_is_read_on_as_it_was(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [payload(label) for label in range(5)])
    reader = Records([path], FIELDS)
    labels(reader, 1)
    write(tmp_path, [payload(7)])
    assert labels(reader, 1, 3) == [1, 3]


LONELY = {"image_raw": [bytes(6)], "label": np.array([1])}


@pytest.mark.parametrize(
    ("features", "key", "given_", "expected"),
    [
        ({"label": np.array([1]), "x": []}, "image_raw", "the features label, x", "one value of 6 bytes"),
        ({}, "image_raw", "the features (none)", "one value of 6 bytes"),
        ({**LONELY, "image_raw": [bytes(5)]}, "image_raw", "1 values of 5 bytes", "one value of 6 bytes"),
        ({**LONELY, "image_raw": [b"", b"a"]}, "image_raw", "2 values of 0, 1 bytes", "one value of 6 bytes"),
        ({**LONELY, "image_raw": np.zeros(6, np.float32)}, "image_raw", "6 values of float32", "one value of 6 bytes"),
        ({**LONELY, "label": np.array([1, 2])}, "label", "2 values of int64", "one int64"),
        ({**LONELY, "label": np.ones(1, np.float32)}, "label", "1 values of float32", "one int64"),
        ({**LONELY, "label": []}, "label", "0 values of no bytes", "one int64"),
    ],
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_record_without_a_field_is_named(
    tmp_path: Path, features: Any, key: str, given_: str, expected: str, before: int
) -> None:
    paths = write(tmp_path, [payload(1)] * before + [serialize_example(features)])
    with pytest.raises(DataError) as caught:
        Records(paths, FIELDS).read_batch(np.arange(before + 1))
    start = before * len(frame(payload(1)))
    assert caught.value.what == f"Record {before} of {paths[0]}, at byte {start}, has no usable feature {key!r}."
    assert (caught.value.given, caught.value.expected) == (given_, expected)
    assert caught.value.hint == "name the feature that holds it, or write the records again"


def test_a_record_that_is_no_example_is_named(tmp_path: Path) -> None:
    paths = write(tmp_path, [payload(1), b"\xff"])
    start = len(frame(payload(1)))
    with pytest.raises(DataError, match=rf"Record 1 of {paths[0]}, at byte {start}, is not a tf.train.Example."):
        Records(paths, FIELDS).read_batch(np.array([1]))
