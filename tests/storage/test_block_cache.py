"""Blocks on the disk: found again, never wrong, never more of them than there may be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.storage import block_cache
from lockstep.storage.block_cache import BLOCK_BYTES, BlockCache, BlockKey, block_key, object_id, open_block_cache

SMALL = 64 * (BLOCK_BYTES + 16)
"""Two sets: each key has both, or one of them twice."""
OBJECT = object_id("s3://bucket/a", 10**9, 1)


def content(number: int, size: int = BLOCK_BYTES) -> bytes:
    return (b"%d " % number * size)[:size]


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path, 4096 * BLOCK_BYTES)


def entry_of(cache: BlockCache, key: BlockKey) -> tuple[int, int]:
    """Where the entry of a block stands in the file, and its content."""
    start, way = cache._place_for(key)
    return start + 16 * way, cache._content(start, way)


def test_blocks_are_found_again_by_others(cache: BlockCache, tmp_path: Path) -> None:
    for number in range(100):
        cache.put(block_key(OBJECT, number), content(number, 1 + number * 300))
    other = BlockCache(tmp_path)
    assert other.fitting_bytes == cache.fitting_bytes
    for number in range(100):
        key, size = block_key(OBJECT, number), 1 + number * 300
        assert other.has(key)
        assert other.get(key, size) == content(number, size)
        assert other.get(key, size + 1) is None
    assert other.get(block_key(OBJECT, 100), 5) is None


@pytest.mark.parametrize("other", [("s3://bucket/b", 10**9, 1), ("s3://bucket/a", 10, 1), ("s3://bucket/a", 10**9, 2)])
def test_another_version_is_another_object(cache: BlockCache, other: tuple[str, int, int]) -> None:
    cache.put(block_key(OBJECT, 0), b"old")
    assert cache.get(block_key(object_id(*other), 0), 3) is None


def test_a_cache_filled_by_nine_tenths_loses_nothing(cache: BlockCache) -> None:
    for number in range(3686):
        cache.put(block_key(OBJECT, number), b"%d" % number)
    assert all(cache.get(block_key(OBJECT, number), len(str(number))) for number in range(3686))


def test_the_least_recently_used_block_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(block_cache.time, "time", lambda: now)
    cache = BlockCache(tmp_path, SMALL)
    keys = [BlockKey(b"tag %4d" % number, number, (0, 1)) for number in range(66)]
    for key in keys[:64]:
        now += 100
        cache.put(key, b"x")
    assert cache.get(keys[0], 1) == b"x"  # used again
    for key in keys[64:]:
        now += 100
        cache.put(key, b"x")
    assert [number for number, key in enumerate(keys) if not cache.has(key)] == [1, 2]
    assert (tmp_path / "remote-blocks").stat().st_size <= 4096 + SMALL + 64 * 16


@pytest.mark.parametrize("place", [0, 1], ids=["entry", "content"])
def test_a_damaged_block_does_not_count(cache: BlockCache, place: int) -> None:
    key = block_key(OBJECT, 7)
    cache.put(key, content(7))
    offset = entry_of(cache, key)[place] + 9
    [byte] = os.pread(cache._descriptor, 1, offset)
    os.pwrite(cache._descriptor, bytes([byte ^ 4]), offset)
    assert cache.get(key, BLOCK_BYTES) is None
    cache.put(key, content(7))
    assert cache.get(key, BLOCK_BYTES) == content(7)


@pytest.mark.parametrize("num_writes", [0, 1, 2, 3])
def test_a_writer_may_be_killed_between_any_two_writes(
    cache: BlockCache, num_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it puts a block in the place of another one."""
    old, new = (BlockKey(tag, tag[0], (3, 3)) for tag in (b"old     ", b"new     "))
    cache.put(old, content(1))
    left, write, place = num_writes, cache._write, cache._place_for(old)
    monkeypatch.setattr(cache, "_place_for", lambda _: place)

    def write_until_killed(data: bytes, offset: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        write(data, offset)

    monkeypatch.setattr(cache, "_write", write_until_killed)
    if num_writes < 3:
        with pytest.raises(KeyboardInterrupt):
            cache.put(new, content(2))
    else:
        cache.put(new, content(2))
    left = 1
    assert cache.get(old, BLOCK_BYTES) == (content(1) if num_writes == 0 else None)
    assert cache.get(new, BLOCK_BYTES) == (content(2) if num_writes == 3 else None)


def test_two_blocks_with_one_tag_are_told_apart(cache: BlockCache) -> None:
    cache.put(BlockKey(b"one tag ", 1, (0, 1)), b"first")
    assert cache.get(BlockKey(b"one tag ", 2, (0, 1)), 5) is None


def test_what_is_forgotten_is_gone(cache: BlockCache) -> None:
    cache.put(block_key(OBJECT, 0), b"x")
    cache.forget(block_key(OBJECT, 0))
    cache.forget(block_key(OBJECT, 1))
    assert not cache.has(block_key(OBJECT, 0))


def test_who_fetches_blocks_is_waited_for(cache: BlockCache) -> None:
    order: list[str] = []

    def claim_and_say() -> None:
        with cache.claimed([(OBJECT, range(0, 2)), (OBJECT, range(7, 9))], waits=True) as ours:
            order.append("second")
            assert ours == [True, True]

    with cache.claimed([(OBJECT, range(4, 8))], waits=False) as ours:
        assert ours == [True]
        other = object_id("s3://bucket/b", 1, 1)
        with cache.claimed([(OBJECT, range(6, 9)), (OBJECT, range(8, 9)), (other, range(4, 8))], waits=False) as free:
            assert free == [False, True, True]
        waiting = threading.Thread(target=claim_and_say)
        waiting.start()
        waiting.join(0.05)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_who_takes_too_long_is_waited_for_no_longer(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_LONGEST_WAIT_SECONDS", 0.01)
    with cache.claimed([(OBJECT, range(1))], waits=True), cache.claimed([(OBJECT, range(1))], waits=True) as ours:
        assert ours == [True]


def test_another_size_is_another_cache(tmp_path: Path, cache: BlockCache) -> None:
    key, before = block_key(OBJECT, 0), cache.fitting_bytes
    cache.put(key, b"x")
    beside = BlockCache(tmp_path, SMALL)
    assert beside.fitting_bytes == before, "while it is in use it is kept"
    assert beside.get(key, 1) == b"x"
    cache._finalize(), beside._finalize()
    other = BlockCache(tmp_path, SMALL)
    assert other.fitting_bytes < before
    assert not other.has(key)
    assert BlockCache(tmp_path).fitting_bytes == other.fitting_bytes


@pytest.mark.parametrize("damage", [lambda file: file.truncate(100), lambda file: file.write(b"LSBLOCK9")])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: object) -> None:
    BlockCache(tmp_path, SMALL).put(block_key(OBJECT, 0), b"x")
    with (tmp_path / "remote-blocks").open("r+b") as file:
        damage(file)  # type: ignore[operator]
    cache = BlockCache(tmp_path, SMALL)
    cache.put(block_key(OBJECT, 0), b"y")
    assert BlockCache(tmp_path, SMALL).get(block_key(OBJECT, 0), 1) == b"y"


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that anybody may write to; that of the owner of the folder is."""
    BlockCache(tmp_path, SMALL).put(block_key(OBJECT, 0), b"x")
    owner = tmp_path.stat().st_uid
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        assert BlockCache(tmp_path).get(block_key(OBJECT, 0), 1) == b"x"
    right = os.fstat
    patched = lambda descriptor: os.stat_result((*right(descriptor)[:4], owner + 1, *right(descriptor)[5:]))  # noqa: E731
    monkeypatch.setattr(os, "fstat", patched)
    with pytest.raises(PermissionError, match="another user"):
        BlockCache(tmp_path)


@pytest.mark.parametrize("name", ["remote-blocks", ".remote-blocks.PID.partial"])
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    """Not even one of a name that another user can foresee, where the folder is one for all."""
    (tmp_path / "precious").write_bytes(b"1234")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name.replace("PID", str(os.getpid()))).symlink_to(tmp_path / "precious")
    if name == "remote-blocks":
        with pytest.raises(OSError, match="symbolic links"):
            BlockCache(tmp_path / "cache", SMALL)
    else:
        BlockCache(tmp_path / "cache", SMALL).put(block_key(OBJECT, 0), b"x")
    assert (tmp_path / "precious").read_bytes() == b"1234"


def test_a_pipe_in_its_place_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "remote-blocks")
    cache = BlockCache(tmp_path, SMALL)
    cache.put(block_key(OBJECT, 0), b"x")
    assert BlockCache(tmp_path).get(block_key(OBJECT, 0), 1) == b"x"


def test_stamps_of_a_clock_that_was_wrong_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 4e9
    monkeypatch.setattr(block_cache.time, "time", lambda: now)
    cache = BlockCache(tmp_path, SMALL)
    for number in range(64):
        cache.put(BlockKey(b"tag %4d" % number, number, (0, 1)), b"x")
    now = 1e9
    keys = [BlockKey(b"new %4d" % number, number, (0, 1)) for number in range(64)]
    for key in keys:
        cache.put(key, b"y")
    assert all(cache.get(key, 1) == b"y" for key in keys)


@pytest.mark.process
def test_what_is_opened_at_the_end_of_a_process_is_not_written_to(tmp_path: Path) -> None:
    """By a thread that still reads, into a file that has been given the number of the cache's."""
    code = f"""
import atexit, os
def end():
    for _ in range(9):
        os.open({str(tmp_path / "other")!r}, os.O_RDWR | os.O_CREAT)
    cache.put(block_key(bytes(16), 0), b"x")
atexit.register(end)
from pathlib import Path
from lockstep.storage.block_cache import BlockCache, block_key
cache = BlockCache(Path({str(tmp_path)!r}), {SMALL})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "other").stat().st_size == 0


def test_half_of_what_is_free_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000 * BLOCK_BYTES})
    monkeypatch.setattr(block_cache.shutil, "disk_usage", lambda _: usage)
    assert 400 * BLOCK_BYTES < BlockCache(tmp_path / "a").fitting_bytes <= 450 * BLOCK_BYTES
    usage.free = 10**13  # type: ignore[attr-defined]
    assert 17.9e9 < BlockCache(tmp_path / "b").fitting_bytes <= 18e9


@pytest.fixture
def _forgets_caches() -> None:
    open_block_cache.cache_clear()
    block_cache._told.clear()


@pytest.mark.usefixtures("_forgets_caches")
def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").write_text("no folder")
    assert open_block_cache(tmp_path / "a" / "b") is None
    assert open_block_cache(tmp_path / "a" / "b", 1.0) is None
    [line] = caplog.messages
    assert "cannot be kept" in line
    assert "data.cache" in line
    assert open_block_cache(tmp_path / "c", 0) is None
    assert not (tmp_path / "c").exists()


@pytest.mark.usefixtures("_forgets_caches")
def test_a_full_disk_is_told_once_and_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_block_cache(tmp_path, 0.01)
    assert cache
    assert open_block_cache(tmp_path, 0.01) is cache
    cache.put(block_key(OBJECT, 0), b"x")

    def no_room(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_room)
    cache.put(block_key(OBJECT, 1), b"y")
    cache.put(block_key(OBJECT, 2), b"z")
    assert [cache.get(block_key(OBJECT, number), 1) for number in range(3)] == [b"x", None, None]
    [line] = caplog.messages
    assert "No space left on device" in line
