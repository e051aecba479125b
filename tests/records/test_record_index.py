from __future__ import annotations

import logging
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.records import index_cache, record_index
from lockstep.records.index_cache import cache_folder
from lockstep.records.record_files import RecordFile
from lockstep.records.record_index import build_index, index_of
from lockstep.records.tfrecord import Compression, frame, write_records

LIMIT = 1 << 20
PAYLOADS = [b"first", b"", b"the third one"]


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache; every index is worth keeping."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(record_index, "_WORTH_KEEPING_BYTES", 1)
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "some.tfrecord"
    write_records(path, PAYLOADS)
    return path


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose records were counted, instead of their index read."""
    paths = []

    def counting(path: Path, *arguments: Any) -> Any:
        paths.append(path)
        return build_index(path, *arguments)

    monkeypatch.setattr(record_index, "build_index", counting)
    return paths


def kept_index_of(path: Path) -> Path:
    return index_cache._place(cache_folder() or path, path)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def same(one: Any, other: Any) -> bool:
    return bool(
        np.array_equal(one.offsets, other.offsets)
        and np.array_equal(one.lengths, other.lengths)
        and one[2:] == other[2:]
    )


@given(lengths=st.lists(st.integers(0, 300) | st.integers(8_000, 9_000), max_size=12), block=st.integers(12, 600))
@settings(max_examples=50, deadline=None)
def test_records_are_counted_however_they_lie_in_blocks(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], block: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "x"
    path.write_bytes(b"".join(frame(bytes(length)) for length in lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_index, "_BLOCK_BYTES", block)
        index = build_index(path)
    assert index.lengths.tolist() == lengths
    starts = np.cumsum([0, *(length + 16 for length in lengths)])
    assert index.offsets.tolist() == (starts[:-1] + 12).tolist()
    assert index.size_bytes == path.stat().st_size == starts[-1]


@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
def test_an_index_is_kept_in_the_cache_and_read_the_next_time(
    path: Path, counted: list[Path], user_cache: Path, compression: Compression | None
) -> None:
    write_records(path, PAYLOADS, compression)
    first = index_of(path, LIMIT)
    assert files_in(path.parent) == [path]
    assert len(files_in(user_cache / "lockstep" / "record-index")) == 1
    second = index_of(path, LIMIT)
    assert counted == [path]
    assert same(first, second)
    assert second.compression == compression


def test_a_small_plain_file_is_counted_each_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_index, "_WORTH_KEEPING_BYTES", path.stat().st_size + 1)
    index_of(path, LIMIT)
    assert files_in(path.parent) == [path]


def test_the_index_is_kept_where_it_is_told_to(path: Path, counted: list[Path], tmp_path: Path) -> None:
    first = index_of(path, LIMIT, tmp_path / "mine")
    assert len(files_in(tmp_path / "mine")) == 1
    assert same(first, index_of(path, LIMIT, tmp_path / "mine"))
    assert counted == [path]


def test_an_index_that_cannot_be_kept_is_used_all_the_same(path: Path, counted: list[Path]) -> None:
    assert len(index_of(path, LIMIT, path).lengths) == 3
    assert len(index_of(path, LIMIT, path).lengths) == 3
    assert counted == [path, path]


def test_a_file_of_another_size_or_time_is_counted_again(path: Path, counted: list[Path]) -> None:
    index_of(path, LIMIT)
    with path.open("ab") as file:
        file.write(frame(b"more"))
    assert len(index_of(path, LIMIT).lengths) == 4
    status = path.stat()
    path.write_bytes(frame(bytes(status.st_size - 16)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert len(index_of(path, LIMIT).lengths) == 1
    assert len(counted) == 3
    index_of(path, LIMIT)
    assert len(counted) == 3


def test_a_damaged_index_is_said_and_made_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = index_of(path, LIMIT)
    kept = kept_index_of(path)
    data = kept.read_bytes()
    flipped = [data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :] for place in range(len(data))]
    for damaged in [*flipped, b"", data[:10], data[:-1], data + b"x"]:
        kept.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lockstep"):
            assert same(index_of(path, LIMIT), expected)
        assert caplog.messages == [f"{kept} is damaged: the index of {path} is made again"]
        assert kept.read_bytes() == data


def test_an_index_of_other_records_is_said_and_made_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = index_of(path, LIMIT)
    record_index._keep(expected._replace(lengths=np.append(expected.lengths, 1)), path, None)
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert same(index_of(path, LIMIT), expected)
    assert caplog.messages == [f"{kept_index_of(path)} is damaged: the index of {path} is made again"]


def test_half_an_index_is_none(path: Path, counted: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            index_of(path, LIMIT)
    assert not kept_index_of(path).exists()
    index_of(path, LIMIT)
    index_of(path, LIMIT)
    assert len(counted) == 2


@pytest.mark.process
def test_processes_and_threads_write_an_index_at_once(path: Path) -> None:
    expected = build_index(path)

    def read_there() -> None:
        for _ in range(20):
            assert same(index_of(path, LIMIT), expected)
            kept_index_of(path).unlink(missing_ok=True)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=read_there) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    with ThreadPoolExecutor(4) as pool:
        assert all(same(index, expected) for index in pool.map(lambda _: index_of(path, LIMIT), range(20)))
    assert files_in(path.parent.parent) == [kept_index_of(path), path]


def test_a_kept_index_of_a_compressed_file_tells_what_memory_it_takes(path: Path, counted: list[Path]) -> None:
    write_records(path, [bytes(1000)], "gzip")
    assert index_of(path, 1016).size_bytes == 1016
    with pytest.raises(DataError, match=rf"{path} cannot be decompressed into memory[\s\S]*given: +1016 bytes after"):
        index_of(path, 1015)
    assert counted == [path]


def test_files_are_read_by_an_index_that_was_kept(path: Path, counted: list[Path]) -> None:
    for _ in range(2):
        file = RecordFile(path)
        assert [file.read(record) for record in range(len(file))] == PAYLOADS
    assert counted == [path]


def swapped(one: Path, other: Path) -> None:
    content, times = one.read_bytes(), one.stat()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    for path in (one, other):
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
def test_files_of_one_size_and_time_that_change_places_have_other_checksums(
    path: Path, counted: list[Path], compression: Compression | None
) -> None:
    other = path.with_name("other.tfrecord")
    for seed, each in enumerate((path, other)):  # noise, which does not get smaller when it is compressed
        write_records(each, [np.random.default_rng(seed).bytes(100)], compression)
    time = path.stat().st_mtime_ns
    os.utime(other, ns=(time, time))
    assert path.stat().st_size == other.stat().st_size
    before = [index_of(each, LIMIT) for each in (path, other)]
    swapped(path, other)
    after = [index_of(each, LIMIT) for each in (path, other)]
    assert [index.checksum for index in after] == [index.checksum for index in reversed(before)]
    assert before[0].checksum != before[1].checksum
    assert counted == [path, other, path, other]


@given(
    lengths=st.lists(st.integers(1, 300) | st.integers(8_000, 9_000), min_size=1, max_size=6),
    block=st.integers(12, 600),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_the_checksum_is_of_all_payloads_however_they_lie_in_blocks(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], block: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("checksums") / "x"
    payloads = [bytes(length) for length in lengths]
    path.write_bytes(b"".join(map(frame, payloads)))
    expected = build_index(path).checksum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_index, "_BLOCK_BYTES", block)
        assert build_index(path).checksum == expected
        changed = data.draw(st.integers(0, len(payloads) - 1))
        payloads[changed] = payloads[changed][:-1] + b"\1"
        path.write_bytes(b"".join(map(frame, payloads)))
        assert build_index(path).checksum != expected
