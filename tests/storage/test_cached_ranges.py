"""Ranges through the cache: the same bytes, from the network once, whatever becomes of the cache and of the store."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from object_server import Fault, FaultyProxy

from lockstep.errors import DataError
from lockstep.storage import cached_ranges, retries
from lockstep.storage.block_cache import BLOCK_BYTES, BlockCache, open_block_cache
from lockstep.storage.cached_ranges import CachedRanges
from lockstep.storage.ranges import ObjectRange
from lockstep.storage.remote_path import ObjectStat, RemotePath

MB = 1 << 20
CONTENT = random.Random(0).randbytes(3 * MB + 12_345)
SIZE_GB = 0.1


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.0)


@pytest.fixture
def file(bucket: RemotePath, object_store: FaultyProxy) -> RemotePath:
    (bucket / "train").write_bytes(CONTENT)
    object_store.reset()
    return bucket / "train"


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    cache = open_block_cache(tmp_path, SIZE_GB)
    assert cache
    return cache


def through(cache: BlockCache, total_bytes: int = len(CONTENT)) -> CachedRanges:
    ranges = CachedRanges(cache._place.parent, SIZE_GB)
    ranges.expect(total_bytes)
    return ranges


def refused(*_: object) -> bytes:
    raise OSError(5, "Input/output error")


def parts_of(file: RemotePath, seed: int, count: int = 12) -> list[ObjectRange]:
    """Some ranges, from none to two blocks, and one beyond the end."""
    draw, version = random.Random(seed), file.stat()
    starts = [draw.randrange(len(CONTENT)) for _ in range(count)]
    parts = [
        ObjectRange(file, version, start, draw.choice([0, 1, 5000, BLOCK_BYTES, 2 * BLOCK_BYTES])) for start in starts
    ]
    return [*parts, ObjectRange(file, version, len(CONTENT) - 10, 20)]


def check(ranges: CachedRanges, parts: Sequence[ObjectRange]) -> None:
    assert ranges.read(parts) == [CONTENT[part.offset : part.offset + part.size] for part in parts]


def whole(file: RemotePath) -> ObjectRange:
    return ObjectRange(file, file.stat(), 0, len(CONTENT))


@pytest.mark.parametrize("total_bytes", [len(CONTENT), 10**12], ids=["fits", "does not fit"])
def test_the_bytes_are_those_of_the_object(file: RemotePath, cache: BlockCache, total_bytes: int) -> None:
    ranges, direct = through(cache, total_bytes), CachedRanges(None)
    for seed in range(4):
        check(ranges, parts_of(file, seed))
        check(direct, parts_of(file, seed))
    assert ranges.read([]) == []


def test_an_epoch_that_fits_is_read_once(file: RemotePath, cache: BlockCache, object_store: FaultyProxy) -> None:
    for seed in range(6):
        check(through(cache), parts_of(file, seed))
    assert object_store.num_bytes <= len(CONTENT)
    part = whole(file)
    check(through(cache), [part])
    assert object_store.num_bytes == len(CONTENT)
    assert object_store.num_requests("train") <= 4  # of a megabyte
    object_store.refuses = True
    check(through(cache), [part])


def test_what_does_not_fit_is_read_ahead_where_it_is_read_again(
    file: RemotePath, cache: BlockCache, object_store: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    through(cache)
    assert not caplog.messages
    ranges = through(cache, 10**12)
    [line] = caplog.messages
    assert line.startswith("The data of 1000.0 GB does not fit into the cache, which keeps 0.1 GB")
    for number, expected in ((0, 1), (3, 16), (5, 16), (15, 16)):
        check(ranges, [ObjectRange(file, file.stat(), number * BLOCK_BYTES, 100)])
        assert object_store.num_bytes == expected * BLOCK_BYTES


def test_what_was_read_long_ago_is_not_read_ahead(file: RemotePath, tmp_path: Path, object_store: FaultyProxy) -> None:
    """Its neighbours would be dropped before they are needed, and the object would be fetched many times over."""
    ranges = CachedRanges(tmp_path, 0.012)  # of 10 MB kept, two are "lately"
    ranges.expect(10**12)
    for number, expected in ((0, 1), (16, 2), (32, 3), (3, 4), (33, 19)):
        check(ranges, [ObjectRange(file, file.stat(), number * BLOCK_BYTES, 100)])
        assert object_store.num_bytes == expected * BLOCK_BYTES


def test_threads_fetch_a_block_once(file: RemotePath, cache: BlockCache, object_store: FaultyProxy) -> None:
    object_store.delay_seconds = 0.05
    ranges = through(cache)
    threads = [threading.Thread(target=check, args=(ranges, [whole(file)])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert object_store.num_bytes == len(CONTENT)


READER = """
import sys
from pathlib import Path
from lockstep.storage.cached_ranges import CachedRanges
from lockstep.storage.ranges import ObjectRange
from lockstep.storage.remote_path import RemotePath
file = RemotePath(sys.argv[1])
version = file.stat()
ranges = CachedRanges(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
while True:
    [data] = ranges.read([ObjectRange(file, version, 0, version.st_size)])
    assert data == Path(sys.argv[3]).read_bytes()
    print("read", flush=True)
    sys.stdin.readline() or sys.exit()
"""


@pytest.fixture
def reader(file: RemotePath, cache: BlockCache, tmp_path: Path) -> list[str]:
    """The command of a process that reads all of the object each time it is sent a line, and checks it."""
    (tmp_path / "content").write_bytes(CONTENT)
    return [sys.executable, "-c", READER, str(file), str(tmp_path), str(tmp_path / "content")]


def started(command: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.process
def test_processes_fetch_a_block_once(reader: list[str], object_store: FaultyProxy) -> None:
    object_store.delay_seconds = 0.1
    processes = [started(reader) for _ in range(2)]
    for process in processes:
        tell(process)
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "read\n"
        process.communicate("")
        assert process.returncode == 0
    assert object_store.num_bytes == len(CONTENT)


@pytest.mark.slow
def test_killed_at_any_moment_nothing_wrong_is_read(
    reader: list[str], file: RemotePath, cache: BlockCache, object_store: FaultyProxy
) -> None:
    """50 readers, two at a time, are killed while they fill a cache, which is damaged now and then."""
    draw = random.Random(0)
    object_store.bytes_per_second = 30e6
    num_kept = []
    for _ in range(25):
        processes = [started(reader) for _ in range(2)]
        for process in processes:
            tell(process)
        for process in processes:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0.0, 0.15))
            process.kill()
            process.communicate()
        damage(cache, draw, 3)
        before = object_store.num_bytes
        check(through(cache), [whole(file)])
        num_kept.append(len(CONTENT) - (object_store.num_bytes - before))
        damage(cache, draw, 1000)
    assert max(num_kept) > len(CONTENT) // 2


def damage(cache: BlockCache, draw: random.Random, count: int) -> None:
    """Change bytes anywhere, in entries as often as in contents."""
    end = os.fstat(cache._descriptor).st_size
    for _ in range(count):
        start = draw.choice([draw.randrange(4096, cache._contents_start), draw.randrange(cache._contents_start, end)])
        os.pwrite(cache._descriptor, draw.randbytes(draw.choice([1, 16, 100])), start)


def damaged_blocks(cache: BlockCache) -> Iterator[int]:
    start, end = cache._contents_start, os.fstat(cache._descriptor).st_size
    for offset in range(start, end, BLOCK_BYTES):
        if any(os.pread(cache._descriptor, 16, offset)):
            os.pwrite(cache._descriptor, b"another content", offset)
            yield offset


def test_damaged_blocks_are_fetched_again(file: RemotePath, cache: BlockCache, object_store: FaultyProxy) -> None:
    ranges = through(cache)
    check(ranges, [whole(file)])
    assert len([*damaged_blocks(cache)]) == 49
    check(ranges, [whole(file)])
    assert object_store.num_bytes == 2 * len(CONTENT)
    check(ranges, [whole(file)])
    assert object_store.num_bytes == 2 * len(CONTENT)


@pytest.mark.parametrize("kind", ["cut", "short", "drop", "status"])
def test_nothing_but_whole_answers_is_kept(
    file: RemotePath, cache: BlockCache, object_store: FaultyProxy, kind: str
) -> None:
    object_store.faults = [Fault(kind, 2, path="train")]  # type: ignore[arg-type]
    ranges, part = through(cache), whole(file)
    check(ranges, [part])
    object_store.refuses = True
    check(ranges, [part])


def test_damage_from_the_network_is_forgotten(file: RemotePath, cache: BlockCache, object_store: FaultyProxy) -> None:
    """Only who knows what it should be can find it: a record, by its checksum."""
    object_store.faults = [Fault("flip", path="train")]
    ranges = through(cache)
    version = file.stat()
    part = ObjectRange(file, version, 0, MB)
    assert ranges.read([part]) != [CONTENT[:MB]]
    assert ranges.read([part]) != [CONTENT[:MB]]
    ranges.forget(part)
    check(ranges, [part])


def test_an_object_that_changed_is_refused(file: RemotePath, cache: BlockCache) -> None:
    ranges, part = through(cache), whole(file)
    first = part._replace(size=10)
    check(ranges, [first])
    file.write_bytes(CONTENT[::-1])
    check(ranges, [first])  # it holds what was listed
    with pytest.raises(DataError, match="has changed since it was listed"):
        ranges.read([part])
    assert ranges.read([whole(file)]) == [CONTENT[::-1]]


@pytest.mark.parametrize("loss", ["deleted", "cut short", "a bad disk"])
def test_a_cache_that_is_lost_in_mid_run_is_read_past(
    file: RemotePath, cache: BlockCache, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges, part = through(cache), whole(file)
    check(ranges, [part])
    if loss == "deleted":
        shutil.rmtree(cache._place.parent)
    elif loss == "cut short":
        os.truncate(cache._place, 5000)
    else:
        monkeypatch.setattr(os, "pread", refused)
    check(ranges, [part])
    check(ranges, parts_of(file, 0))


def test_no_cache_is_made_before_it_is_needed(tmp_path: Path) -> None:
    ranges = pickle.loads(pickle.dumps(CachedRanges(tmp_path)))
    ranges.expect(0)  # of data on this machine
    assert ranges.read([]) == []
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_read_past(
    file: RemotePath, cache: BlockCache, object_store: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", refused)
    ranges = through(cache)
    check(ranges, [ObjectRange(file, file.stat(), MB, 100)])
    before = object_store.num_bytes
    check(ranges, [ObjectRange(file, file.stat(), 2 * MB, 100)])
    assert object_store.num_bytes - before == BLOCK_BYTES  # nothing more, for it could not be kept


def test_no_more_is_fetched_than_is_soon_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(cached_ranges, "_contents_of", lambda wave: started.append(1) or [b"x"] * len(wave))
    of = cached_ranges._Object(RemotePath("memory://b/x"), ObjectStat(1 << 30, 1), bytes(16))
    taken = cached_ranges._in_turn([[(of, range(number, number + 1))] for number in range(20)])
    for number in range(1, 21):
        assert next(taken)[1] == b"x"
        assert len(started) <= number + 2
    assert len(started) == 20
