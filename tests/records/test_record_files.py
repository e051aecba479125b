from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from object_server import Fault, FaultyProxy
from worker_processes import HANG_SECONDS

from lockstep.errors import DataError, InputError
from lockstep.records import open_files, record_files
from lockstep.records.example import parse_example, parse_sequence_example
from lockstep.records.index_cache import LimitedCache
from lockstep.records.record_files import RecordFile, RecordFiles
from lockstep.records.record_index import build_index
from lockstep.records.tfrecord import TAIL_BYTES, Compression, deflating, frame, masked_crc32c, read_all, write_records
from lockstep.storage.remote_path import RemotePath

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tfrecord"
WRITTEN_BY_TENSORFLOW = sorted(FIXTURES.glob("*.tfrecord"))
MORE_FILES = sorted(Path(folder).rglob("*")) if (folder := os.environ.get("LOCKSTEP_MORE_TFRECORDS")) else []
PAYLOADS = [b"first", b"", b"the third one"]
PENGUIN = ["species", "body_mass_g", "culmen_depth_mm", "culmen_length_mm", "flipper_length_mm"]
STORED = [random.Random(number).randbytes(1_000_000) for number in range(3)]
COMPRESSIONS: list[Compression | None] = [None, "gzip", "zlib"]


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.tfrecord"
    write_records(path, PAYLOADS)
    return path


@pytest.fixture
def stored(bucket: RemotePath, tmp_path: Path) -> str:
    write_records(tmp_path / "a.tfrecord", STORED)
    (bucket / "a.tfrecord").upload(tmp_path / "a.tfrecord")
    return str(bucket / "a.tfrecord")


@pytest.mark.parametrize("cache_gb", [0.01, 0], ids=["cached", "not kept"])
def test_a_record_that_was_damaged_on_its_way_is_fetched_again(
    stored: str, object_store: FaultyProxy, cache_gb: float
) -> None:
    cache = LimitedCache(None, cache_gb)
    object_store.faults = [Fault("flip", 1 if cache_gb else 2, path="tfrecord")]
    files = RecordFiles(stored, cache=cache)
    assert [data[:-TAIL_BYTES] for data, _ in files.read_each([0, 1, 2])] == STORED
    assert object_store.faults[0].num_met > object_store.faults[0].times
    assert [data[:-TAIL_BYTES] for data, _ in RecordFiles(stored, cache=cache).read_each([1])] == STORED[1:2]


def test_a_record_that_is_damaged_in_the_store_is_named(bucket: RemotePath, path: Path) -> None:
    damaged = path.read_bytes().replace(b"third", b"fifth")
    (bucket / "a.tfrecord").write_bytes(damaged)
    with pytest.raises(DataError, match=r"Record 2 of s3://.*a\.tfrecord"):
        [*RecordFiles(str(bucket / "a.tfrecord")).read_each([0, 1, 2])]


def payloads(path: Path) -> list[bytes]:
    file = RecordFile(path)
    return [file.read(record) for record in range(len(file))]


def compressed(data: bytes, compression: Compression | None) -> bytes:
    deflate, rest = deflating(compression)
    return deflate(data) + rest()


def lying_head(length: int) -> bytes:
    """The head of a record, true to its checksum, of a length that need not be."""
    data = length.to_bytes(8, "little")
    return data + masked_crc32c(data).to_bytes(4, "little")


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
    offsets, lengths, *_ = build_index(path)
    data = path.read_bytes()
    assert [data[start : start + size] for start, size in zip(offsets, lengths, strict=True)] == PAYLOADS


def test_reading_all_tells_where_each_record_ends(path: Path) -> None:
    data = path.read_bytes()
    for count, (end, _) in enumerate(read_all(path), start=1):
        assert data[:end] == b"".join(map(frame, PAYLOADS[:count]))


def test_what_the_system_does_not_read_at_once_is_read_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "_MOST_AT_ONCE", 3)
    with path.open("rb", buffering=0) as file:
        assert open_files.read_at(file, 1000, 5) == path.read_bytes()[5:1005]


@pytest.mark.process
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
    assert caught.value.hint == "copy or convert the file again"


@given(length=st.integers(1, 2**64 - 1), held=st.integers(0, 40), compression=st.sampled_from(COMPRESSIONS))
@settings(max_examples=50, deadline=None)
def test_a_length_that_lies_is_an_error_and_takes_no_memory(
    length: int, held: int, compression: Compression | None
) -> None:
    data = frame(b"before") + (lying_head(length) + bytes(held))[: 12 + length + 3]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lying"
        path.write_bytes(compressed(data, compression))
        message = (
            rf"(?i)record 1.*, at byte 22{' after decompression' if compression else ''}, is (not whole|too large)"
        )
        with pytest.raises(DataError, match=message):
            build_index(path)
        found: list[bytes] = []
        with pytest.raises(DataError, match=message):
            found.extend(payload for _, payload in read_all(path))
        assert found == [b"before"]


@given(
    written=st.lists(st.binary(max_size=20), min_size=1, max_size=4),
    place=st.integers(0, 10**6),
    compression=st.sampled_from(COMPRESSIONS),
)
@settings(max_examples=50, deadline=None)
def test_a_flipped_bit_is_found(written: list[bytes], place: int, compression: Compression | None) -> None:
    data = bytearray(compressed(b"".join(map(frame, written)), compression))
    byte, bit = divmod(place % (8 * len(data)), 8)
    data[byte] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flipped"
        path.write_bytes(data)
        for read in (payloads, lambda path: [payload for _, payload in read_all(path)]):
            found = read_or_refused(read, path)
            if isinstance(found, str):
                assert re.search(f"{path}.*, at byte ", found)
            else:  # a compressed stream has bits that say nothing
                assert compression
                assert found == written


def read_or_refused(read: Callable[[Path], list[bytes]], path: Path) -> list[bytes] | str:
    try:
        return read(path)
    except DataError as error:
        return error.what


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_compressed_file_cut_anywhere_is_named_with_record_and_byte(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "cut"
    data = compressed(b"".join(map(frame, PAYLOADS)), compression)
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=f"{path}.*at byte "):
            RecordFile(path)
        found: list[bytes] = []
        with pytest.raises(DataError, match=f"{path}.*at byte "):
            found.extend(payload for _, payload in read_all(path))
        assert found == PAYLOADS[: len(found)]
    assert caught_given(path) == "the compressed stream ends before its end mark"


def caught_given(path: Path) -> object:
    with pytest.raises(DataError) as caught:
        build_index(path)
    assert caught.value.what == f"Record 3 of {path}, at byte 66 after decompression, cannot be decompressed."
    assert str(caught.value.expected).endswith("stream of records")
    assert caught.value.hint == "copy or convert the file again"
    return caught.value.given


@pytest.mark.parametrize("data", [b"a text, and no records", bytes(100), b"PK\x03\x04 and so on, and on"])
def test_a_file_of_another_format_is_told_apart(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "some.tfrecord"
    path.write_bytes(data)
    for read in (build_index, lambda path: list(read_all(path)), RecordFiles):
        with pytest.raises(DataError) as caught:
            read(path)
        assert caught.value.what == f"Record 0 of {path}, at byte 0, has no valid header."
        assert caught.value.given == f"the bytes {data[:12].hex(' ')}"
        assert caught.value.expected == "the length of a record and its checksum; or all of it in gzip or zlib"
        assert caught.value.hint == "check that this is a TFRecord file"


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_compressed_file_of_another_format_is_told_apart(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(compressed(b"a text, and no records", compression))
    with pytest.raises(DataError, match=f"Record 0 of {path}, at byte 0 after decompression, has no valid header."):
        build_index(path)


def test_bytes_that_only_begin_like_zlib_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x78\x9c" + b"and then something else")
    with pytest.raises(DataError) as caught:
        RecordFiles(path)
    assert caught.value.what == f"Record 0 of {path}, at byte 0 after decompression, cannot be decompressed."
    assert "Error -3" in str(caught.value.given)
    assert caught.value.expected == "a whole zlib stream of records"


@pytest.mark.parametrize("opened_before", [False, True])
def test_a_file_that_changes_after_it_was_counted_is_noticed(path: Path, opened_before: bool) -> None:
    file = RecordFile(path)
    if opened_before:
        file.read(0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        file.read(2)
    assert caught.value.what == f"{path} has changed since its index was made."
    assert str(caught.value.given).startswith("65 bytes, changed at ")
    assert str(caught.value.expected).startswith("66 bytes, changed at ")
    assert caught.value.hint == "start again, and leave the files alone while they are read"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}/none cannot be opened.\n.*No such file"):
        RecordFile(tmp_path / "none")


def test_an_empty_file_holds_no_records(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert len(RecordFile(tmp_path / "empty")) == 0
    assert list(read_all(tmp_path / "empty")) == []


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_files_of_any_kind_follow_one_another(tmp_path: Path, compression: Compression | None) -> None:
    parts: list[list[bytes]] = [[], [b"a", b"b"], [], [b"c"], []]
    kinds = itertools.cycle([None, compression])
    paths = [tmp_path / f"{number}.tfrecord" for number in range(len(parts))]
    for path, part, kind in zip(paths, parts, kinds, strict=False):
        write_records(path, part, kind)
    files = RecordFiles(f"{tmp_path}/*.tfrecord")
    assert [files.read(index) for index in range(len(files))] == [b"a", b"b", b"c"]
    assert [files.example_id(index) for index in (1, 2)] == ["1.tfrecord:1", "3.tfrecord:0"]
    after = " after decompression" if compression else ""
    assert files.describe(1) == f"Record 1 of {paths[1]}, at byte 17{after},"
    assert files.locate(np.int64(2)) == (files.files[3], 0)
    assert len(RecordFiles([])) == 0


@pytest.mark.parametrize("index", [-1, 3])
def test_a_record_that_is_not_there_is_an_index_error(path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"there is no record {index} in 3 records"):
        RecordFiles(path).read(index)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("size", [0, 1, 100_000, 300_000])
def test_large_and_small_records_are_read_however_they_are_compressed(
    tmp_path: Path, compression: Compression | None, size: int
) -> None:
    written = [bytes(size), np.random.default_rng(size).bytes(size), b"small", bytes([7]) * size]
    assert write_records(tmp_path / "x", written, compression) == 4
    assert [payload for _, payload in read_all(tmp_path / "x")] == written
    assert payloads(tmp_path / "x") == written
    ends = [end for end, _ in read_all(tmp_path / "x")]
    assert ends == list(itertools.accumulate(len(payload) + 16 for payload in written))


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_compressed_streams_that_were_joined_are_one(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "joined"
    parts = [compressed(frame(each), compression) for each in (b"a", b"b" * 100_000, b"c")]
    path.write_bytes(b"".join(parts) + compressed(b"", compression))
    assert payloads(path) == [b"a", b"b" * 100_000, b"c"]


@pytest.mark.parametrize("after", [bytes(1), b"garbage", bytes(600)])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_bytes_after_the_end_are_not_overlooked(tmp_path: Path, compression: Compression | None, after: bytes) -> None:
    path = tmp_path / "longer"
    path.write_bytes(compressed(frame(b"a") + frame(b"b"), compression) + after)
    for read in (payloads, lambda path: list(read_all(path))):
        with pytest.raises(DataError, match=str(path)):
            read(path)


def test_there_are_two_compressions(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        write_records(tmp_path / "x", [], "GZIP")  # type: ignore[arg-type]
    assert caught.value.expected == "'gzip' or 'zlib'"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_checksums_of_payloads_may_be_left_alone(tmp_path: Path, compression: Compression | None) -> None:
    path = tmp_path / "x"
    damaged = bytearray(frame(b"first") + frame(b"second"))
    damaged[12] ^= 1
    path.write_bytes(compressed(bytes(damaged), compression))
    assert RecordFiles(path, verify=False).read(0) == b"girst"
    assert [payload for _, payload in read_all(path, verify=False)] == [b"girst", b"second"]
    files = RecordFiles(path)
    assert files.read(1) == b"second"
    for read in (lambda: files.read(0), lambda: list(read_all(path))):
        with pytest.raises(DataError, match=f"Record 0 of {path}, at byte 0( after decompression)?, is damaged"):
            read()


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(record_files, "mmap", refused)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("kept", [False, True])
def test_a_bomb_is_refused_before_memory_is_taken(tmp_path: Path, kept: bool) -> None:
    path = tmp_path / "bomb.gz"
    write_records(path, [bytes(1000)] * 1000, "gzip")
    assert path.stat().st_size < 10_000
    if kept:
        assert len(RecordFile(path)) == 1000
    with pytest.raises(DataError) as caught:
        RecordFiles(path, memory_limit_bytes=100_000)
    what = f"{path} cannot be decompressed into memory, which reading compressed records in any order needs."
    assert caught.value.what == what
    assert caught.value.given == f"{'1016000' if kept else 'more than 100000'} bytes after decompression"
    assert caught.value.expected == "at most 100000 bytes (memory_limit_bytes, for all compressed files)"
    hint = "raise the limit, or write them uncompressed: write_records(new, (record for _, record in read_all(old)))"
    assert caught.value.hint == hint


def test_what_the_refusal_advises_helps(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_records(old, PAYLOADS, "gzip")
    write_records(new, (record for _, record in read_all(old)))
    assert payloads(new) == PAYLOADS
    assert new.read_bytes() == b"".join(map(frame, PAYLOADS))


@pytest.mark.usefixtures("no_memory")
def test_all_compressed_files_together_are_limited(tmp_path: Path) -> None:
    for number in range(3):
        write_records(tmp_path / f"{number}.gz", [bytes(1000)], "gzip")
    with pytest.raises(DataError, match=rf"{tmp_path}/0.gz \(and 2 other files\)[\s\S]*given: +3048 bytes"):
        RecordFiles(f"{tmp_path}/*.gz", memory_limit_bytes=3047)


def test_a_large_record_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    write_records(path, [b"a", bytes(100_000)], "zlib")
    records = read_all(path, largest_record_bytes=99_999)
    assert next(records) == (17, b"a")
    with pytest.raises(DataError) as caught:
        next(records)
    assert caught.value.what == f"Record 1 of {path}, at byte 17 after decompression, is too large."
    assert caught.value.given == "100000 bytes"
    assert caught.value.expected == "at most 99999 bytes in a compressed file"
    assert caught.value.hint == "write the file uncompressed, if it can be trusted"
    assert len(list(read_all(path, largest_record_bytes=100_000))) == 2


def test_memory_that_the_system_has_not_got_is_a_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    write_records(tmp_path / "x", PAYLOADS, "gzip")
    monkeypatch.setattr(record_files, "mmap", refused)
    with pytest.raises(DataError, match=r"no more than is free: Cannot allocate memory"):
        RecordFiles(tmp_path / "x")


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_compressed_file_damaged_under_its_index_is_named(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "x"
    write_records(path, PAYLOADS, compression)
    file = RecordFile(path)
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(
        DataError, match=rf"Record \d of {path}, at byte \d+ after decompression, cannot be decompressed"
    ):
        file.read(0)


def test_compressed_files_say_what_memory_they_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_records(tmp_path / "x", [bytes(10**6)], "gzip")
    with caplog.at_level(logging.INFO, "lockstep"):
        RecordFiles(tmp_path / "x")
    assert caplog.messages == ["1 compressed files take 1.0 MB of memory"]


@pytest.mark.process
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_forked_process_reads_what_was_opened_before(tmp_path: Path, compression: Compression | None) -> None:
    write_records(tmp_path / "x", PAYLOADS, compression)
    files = RecordFiles(tmp_path / "x")
    if compression:
        (tmp_path / "x").unlink()

    def read_there() -> None:
        assert [files.read(index) for index in range(3)] == PAYLOADS

    process = multiprocessing.get_context("fork").Process(target=read_there)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_pickled_files_are_opened_again(tmp_path: Path, compression: Compression | None) -> None:
    write_records(tmp_path / "x", PAYLOADS, compression)
    files = RecordFiles(tmp_path / "x")
    files.read(0)
    again = pickle.loads(pickle.dumps(files))
    assert [again.read(index) for index in range(3)] == PAYLOADS


def test_compressed_files_are_opened_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_records(tmp_path / name, PAYLOADS, "gzip")
    both, inflated = threading.Barrier(2), record_files.inflated_blocks

    def meeting(file: Any) -> Iterator[bytes]:
        both.wait(HANG_SECONDS)  # broken where one waits for the other to be done
        return inflated(file)

    files = [RecordFile(tmp_path / name) for name in ("a", "b")]
    monkeypatch.setattr(record_files, "inflated_blocks", meeting)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda file: file.read(0), files)) == [PAYLOADS[0]] * 2


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_threads_read_at_once(tmp_path: Path, compression: Compression | None) -> None:
    written = [str(number).encode() * (number % 50) for number in range(400)]
    for shard in range(4):
        write_records(tmp_path / f"{shard}", written[shard * 100 : shard * 100 + 100], compression)
    files = RecordFiles(tmp_path / "?")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(files.read, [*range(400), *range(399, -1, -1)])) == written + written[::-1]


def test_a_compressed_file_that_tensorflow_wrote(tmp_path: Path) -> None:
    path = Path(shutil.copy(FIXTURES / "penguin-train-00000-of-00001.gz", tmp_path))
    files = RecordFiles(tmp_path / "penguin-*")
    assert [files.read(index) for index in range(len(files))] == [record for _, record in read_all(path)]
    assert len(files) == 234
    first = parse_example(files.read(0), files.describe(0))
    assert {name: len(values) for name, values in first.items()} == dict.fromkeys(PENGUIN, 1)


@pytest.mark.skipif(not MORE_FILES, reason="LOCKSTEP_MORE_TFRECORDS names no folder of other TFRecord files")
def test_every_other_file_of_records_is_read() -> None:
    for path in MORE_FILES:
        if path.is_file() and path.name != "LICENSE":
            files = RecordFiles(path)
            assert len(files)
            for index in range(len(files)):
                assert any(parse_sequence_example(files.read(index), files.describe(index))), files.describe(index)


def test_a_path_may_be_text(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "data.tfrecord")
    assert write_records(path, PAYLOADS) == len(PAYLOADS)
    assert [payload for _, payload in read_all(path)] == PAYLOADS


@pytest.mark.parametrize("path", [None, 3, b"data.tfrecord"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InputError, match=f"path is {type(path).__name__}(.|\n)*a path: text, or a Path"):
        write_records(path, [])
    with pytest.raises(InputError, match=f"path is {type(path).__name__}"):
        next(read_all(path))
