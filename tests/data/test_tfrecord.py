from __future__ import annotations

import gzip
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.tfrecord import RecordFile, build_index, frame, masked_crc32c, read_all, write_records
from lockstep.errors import DataError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tfrecord"
WRITTEN_BY_TENSORFLOW = sorted(FIXTURES.glob("*.tfrecord"))
PAYLOADS = [b"first", b"", b"the third one"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.tfrecord"
    write_records(path, PAYLOADS)
    return path


def payloads(path: Path) -> list[bytes]:
    file = RecordFile(path)
    return [file.read(record) for record in range(len(file))]


@pytest.mark.parametrize("path", WRITTEN_BY_TENSORFLOW, ids=lambda path: path.name)
def test_what_we_write_is_byte_for_byte_what_tensorflow_writes(path: Path, tmp_path: Path) -> None:
    assert len(payloads(path)) == 4
    assert write_records(tmp_path / "again", payloads(path)) == 4
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@given(written=st.lists(st.binary(max_size=300), max_size=6))
@settings(max_examples=50, deadline=None)
def test_what_is_read_is_what_was_written(written: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        write_records(path, written)
        assert payloads(path) == written
        assert [payload for _, payload in read_all(path)] == written


def test_the_index_tells_where_the_payloads_lie(path: Path) -> None:
    offsets, lengths = build_index(path)
    data = path.read_bytes()
    assert [data[start : start + size] for start, size in zip(offsets, lengths, strict=True)] == PAYLOADS


def test_reading_all_tells_where_each_record_ends(path: Path) -> None:
    data = path.read_bytes()
    for count, (end, _) in enumerate(read_all(path), start=1):
        assert data[:end] == b"".join(map(frame, PAYLOADS[:count]))


def test_records_are_read_where_the_system_has_no_pread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pread")
    file = RecordFile(path)
    assert [file.read(2), file.read(0)] == [PAYLOADS[2], PAYLOADS[0]]


def test_a_forked_process_reads_the_file_that_is_open(path: Path) -> None:
    file = RecordFile(path)
    file.read(0)

    def read_there() -> None:
        assert file.read(2) == PAYLOADS[2]

    process = multiprocessing.get_context("fork").Process(target=read_there)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert file.read(0) == PAYLOADS[0]


def test_writing_that_fails_leaves_what_was_there(path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_records(path, failing())
    assert payloads(path) == PAYLOADS
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_full_disk_is_a_plain_error_and_leaves_what_was_there(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match=rf"{path} cannot be written.\n.*given: .*File too large"):
            write_records(path, [bytes(10_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert payloads(path) == PAYLOADS
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_is_a_plain_error(path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written[\s\S]*a folder that may be written"):
        write_records(path / "inside" / "records", [b""])


def test_a_file_cut_anywhere_is_named_with_record_and_byte(path: Path) -> None:
    data = path.read_bytes()
    starts = [0, *(end for end, _ in read_all(path))]
    for size in set(range(len(data))) - set(starts):
        path.write_bytes(data[:size])
        record = sum(start < size for start in starts) - 1
        message = rf"{path} is cut short: record {record}, at byte {starts[record]}, is not whole.\n"
        with pytest.raises(DataError, match=rf"{message}.*given: +{size - starts[record]} bytes up to the end"):
            build_index(path)
        found: list[bytes] = []
        with pytest.raises(DataError, match=message):
            found.extend(payload for _, payload in read_all(path))
        assert found == PAYLOADS[:record]


def test_a_file_cut_between_records_holds_those_before(path: Path) -> None:
    data = path.read_bytes()
    for count, end in enumerate([end for end, _ in read_all(path)], start=1):
        path.write_bytes(data[:end])
        assert payloads(path) == PAYLOADS[:count]


def test_a_byte_changed_anywhere_is_noticed(path: Path) -> None:
    data = path.read_bytes()
    starts = [0, *(end for end, _ in read_all(path))]
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        record = sum(start <= place for start in starts) - 1
        message = rf"Record {record} of {path}, at byte {starts[record]}, (is damaged|has no valid header)"
        with pytest.raises(DataError, match=message):
            payloads(path)
        with pytest.raises(DataError, match=message):
            list(read_all(path))


def test_a_damaged_payload_is_named_with_both_checksums(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"third", b"thirt"))
    file = RecordFile(path)
    assert file.read(0) == b"first"
    assert file.read(2, verify=False) == b"the thirt one"
    start = len(frame(b"first") + frame(b""))
    with pytest.raises(DataError) as caught:
        file.read(2)
    assert caught.value.what == f"Record 2 of {path}, at byte {start}, is damaged."
    assert str(caught.value.given).startswith("13 bytes with the checksum 0x")
    assert "which was written with them" in str(caught.value.expected)
    assert caught.value.mend == "copy or convert the file again"


def test_a_length_longer_than_the_file_takes_no_memory(path: Path) -> None:
    length = (1 << 62).to_bytes(8, "little")
    path.write_bytes(length + masked_crc32c(length).to_bytes(4, "little"))
    with pytest.raises(DataError, match=f"expected: at least {(1 << 62) + 16} bytes"):
        build_index(path)
    with pytest.raises(DataError, match="cut short: record 0"):
        list(read_all(path))


def test_a_file_of_another_format_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "packed.tfrecord"
    path.write_bytes(gzip.compress(frame(b"payload"), mtime=0))
    with pytest.raises(DataError) as caught:
        build_index(path)
    assert caught.value.what == f"Record 0 of {path}, at byte 0, has no valid header."
    assert str(caught.value.given).startswith("the bytes 1f 8b 08")
    assert caught.value.mend == "check that this is a TFRecord file, and not a compressed one"


def test_a_file_cut_short_after_it_was_opened_is_noticed(path: Path) -> None:
    file = RecordFile(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{path} is cut short: record 2"):
        file.read(2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}/none cannot be opened.\n.*No such file"):
        RecordFile(tmp_path / "none")


def test_an_empty_file_holds_no_records(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert len(RecordFile(tmp_path / "empty")) == 0
    assert list(read_all(tmp_path / "empty")) == []
