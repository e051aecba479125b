"""A cache on the disk of a host for what is read of objects in a store: of a bounded size, for all its processes.

It is two files in the folder of the cache, made once and never grown. `remote-blocks` holds blocks of 64 KiB:

4096 bytes   "LSBLOCK1", the number of sets, CRC-32C of both
...          the sets, each of 32 entries: tag of the block's key (0: none), CRC-32C of the content, time of last use
...          64 KiB for the content of each entry; the file is sparse

As in the cache of a processor, the key of a block names the two sets that may hold it, and the least recently used of
their blocks makes room. So a look-up is two short reads at known places, whether there are ten blocks or ten million,
and small objects take no file each.

Nothing is locked and nothing has to be repaired: a block counts only if its content has the length that is expected
and the checksum of its entry, which begins with a part of the key. What a process that was killed, two that wrote to
one place, or a disk that lost power have left there does not, and is fetched again. `remote-blocks.lock` has no
content: whoever fetches blocks locks their numbers in it, so that others wait for them, for a while.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from lockstep.durable import atomic_write
from lockstep.screen import log

BLOCK_BYTES = 1 << 16
"""What is checked and kept as one. Smaller blocks take more look-ups, larger ones more bytes for one record."""
MOST_GB = 20.0
"""Size of a cache where nobody has given one, in 10**9 bytes; half of what is free on its disk, where that is less."""
_MAGIC = b"LSBLOCK1"
_HEAD = struct.Struct("<8sQI")
_HEAD_BYTES = 4096
_WAYS = 32
_ENTRY = struct.Struct("<8sII")
_SET_BYTES = _WAYS * _ENTRY.size
_NO_TAG = bytes(8)
_LONGEST_WAIT_SECONDS, _POLL_SECONDS, _SECONDS_BETWEEN_STAMPS = 20.0, 0.004, 60

_told: set[Path] = set()
"""Caches of which this process has said that they cannot be used."""


class BlockKey(NamedTuple):
    """What names a block: the same object, of the same version, and the same number give the same one."""

    tag: bytes
    seed: int
    """The checksum of the content goes on from it."""
    sets: tuple[int, int]
    """Drawn evenly from all 32-bit numbers."""


def block_key(object_id: bytes, number: int) -> BlockKey:
    """Make the key of a block by its number in an object; the id of the object is 16 bytes, see `object_id`."""
    tag, seed, first, second = struct.unpack("<8sIII", blake2b(b"%d" % number, digest_size=20, key=object_id).digest())
    return BlockKey(tag, seed, (first, second))


def object_id(url: str, size_bytes: int, version: int) -> bytes:
    """Return the id of one version of an object: 16 bytes."""
    return blake2b(f"{url}\0{size_bytes}\0{version}".encode(), digest_size=16).digest()


class BlockCache:
    """Blocks on the disk. It may be forked, and used by several threads and processes at once.

    Without a size, a cache that is there has its own, and a new one a share of the free disk. One of another size that
    is there is replaced, unless somebody has it open.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, size_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._place, self._locks = folder / "remote-blocks", folder / "remote-blocks.lock"
        with self._locked([(0, 1)], waits=True):  # those that begin together
            self._descriptor, self._num_sets = self._opened(size_bytes)
            _flock(self._descriptor, is_alone=False)
        self._finalize = weakref.finalize(self, os.close, self._descriptor)
        self._finalize.atexit = False  # a thread that goes on then would write into what is opened next
        self._contents_start = _HEAD_BYTES + self._num_sets * _SET_BYTES
        self.may_write = True
        """Whether blocks are kept: not from the moment on at which the disk is full."""

    @property
    def fitting_bytes(self) -> int:
        """What it keeps for certain: of nine tenths of its size every block finds room in one of its sets."""
        return self._num_sets * _WAYS * BLOCK_BYTES * 9 // 10

    def get(self, key: BlockKey, size: int) -> bytes | None:
        """Return a block's content if it is there, has `size` bytes, and they have the checksum of its entry."""
        for number in key.sets:
            start, entries = self._entries(number)
            if (way := _way_of(key.tag, entries)) is None:
                continue
            _, check, stamp = _ENTRY.unpack_from(entries, way * _ENTRY.size)
            data = self._read(size, self._content(start, way))
            if len(data) == size and google_crc32c.extend(key.seed, data) == check:
                if (now := int(time.time())) >= stamp + _SECONDS_BETWEEN_STAMPS:
                    self._write(_ENTRY.pack(key.tag, check, now), start + way * _ENTRY.size)
                return data
        return None

    def has(self, key: BlockKey) -> bool:
        """Whether there is an entry of the block; its content may still turn out to be damaged."""
        return any(_way_of(key.tag, self._entries(number)[1]) is not None for number in key.sets)

    def put(self, key: BlockKey, data: bytes) -> None:
        """Keep a block, in place of the least recently used one that it could stand in for. Says once if it cannot."""
        start, way = self._place_for(key)
        entry, now = start + way * _ENTRY.size, int(time.time())
        self._write(_ENTRY.pack(_NO_TAG, 0, now), entry)  # until all of it is there, this is nobody's
        self._write(data, self._content(start, way))
        self._write(_ENTRY.pack(key.tag, google_crc32c.extend(key.seed, data), now), entry)

    def forget(self, key: BlockKey) -> None:
        """Drop a block, if it is there."""
        for number in key.sets:
            start, entries = self._entries(number)
            if (way := _way_of(key.tag, entries)) is not None:
                self._write(bytes(_ENTRY.size), start + way * _ENTRY.size)

    @contextmanager
    def claimed(self, spans: Sequence[tuple[bytes, range]], *, waits: bool) -> Iterator[list[bool]]:
        """Let nobody else fetch some blocks meanwhile; tells of each span whether others left it to us.

        A span is the numbers of neighbours in the object with an id. With `waits` all are ours, after those who fetch
        them are done, or have taken long. Who has claimed some must not claim more.
        """
        places = [(1 + (_number_of(of) << 32) + numbers.start, len(numbers)) for of, numbers in spans]
        with self._locked(places, waits=waits) as taken:
            yield [place in taken for place in places]

    # Entries ----------------------------------------------------------------------------------------------------------

    def _entries(self, number: int) -> tuple[int, bytes]:
        """Return where a set starts in the file, and its entries."""
        start = _HEAD_BYTES + number % self._num_sets * _SET_BYTES
        entries = self._read(_SET_BYTES, start)
        return start, entries if len(entries) == _SET_BYTES else bytes(_SET_BYTES)

    def _content(self, start: int, way: int) -> int:
        """Return where the content of an entry starts."""
        return self._contents_start + ((start - _HEAD_BYTES) // _ENTRY.size + way) * BLOCK_BYTES

    def _place_for(self, key: BlockKey) -> tuple[int, int]:
        """Choose the entry for a block: its own, or else a free one of the emptier set, or the oldest of both sets."""
        choices, latest = [], int(time.time()) + _SECONDS_BETWEEN_STAMPS
        for number in key.sets:
            start, entries = self._entries(number)
            if (way := _way_of(key.tag, entries)) is not None:
                return start, way
            # One of a clock that was set wrong would stay for ever.
            stamps = [stamp if stamp <= latest else 0 for _, _, stamp in _ENTRY.iter_unpack(entries)]
            oldest = min(stamps)
            choices.append((-stamps.count(0), oldest, start, stamps.index(oldest)))
        return min(choices)[2:]

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError:  # a bad place of the disk holds nothing
            return b""

    def _write(self, data: bytes, offset: int) -> None:
        if not self.may_write:
            return
        try:
            if os.pwrite(self._descriptor, data, offset) != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            self.may_write = False
            _tell(self._place, error)

    # The files --------------------------------------------------------------------------------------------------------

    def _opened(self, size_bytes: int | None) -> tuple[int, int]:
        """Open the file, or make it anew, if it is missing or damaged, or of another size and nobody has it open.

        Returns it and its number of sets.
        """
        found = self._found()
        if size_bytes is None:
            size_bytes = min(int(MOST_GB * 1e9), shutil.disk_usage(self._place.parent).free // 2)
            if found:
                return found
        num_sets = max(1, size_bytes // (_SET_BYTES + _WAYS * BLOCK_BYTES))
        if found and found[1] == num_sets:
            return found
        if found and not _flock(found[0], is_alone=True):
            log.info("%s keeps its size while another run has it open: that run has another data.cache_gb", self._place)
            return found
        if found:
            os.close(found[0])
            log.info("%s is made anew: it had another size", self._place)
        self._make(num_sets)
        if (found := self._found()) is None:
            raise OSError(errno.EBUSY, "Another process has made it meanwhile", str(self._place))
        return found

    def _found(self) -> tuple[int, int] | None:
        with suppress(FileNotFoundError):
            descriptor = os.open(self._place, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            status = os.fstat(descriptor)
            if status.st_uid not in (os.geteuid(), self._place.parent.stat().st_uid):  # blocks of whose making?
                os.close(descriptor)
                raise PermissionError(errno.EPERM, "It belongs to another user", str(self._place))
            head = os.pread(descriptor, _HEAD.size, 0) if stat.S_ISREG(status.st_mode) else b""
            if len(head) == _HEAD.size:
                magic, num_sets, check = _HEAD.unpack(head)
                size = _HEAD_BYTES + num_sets * (_SET_BYTES + _WAYS * BLOCK_BYTES)
                is_sound = magic == _MAGIC and check == google_crc32c.value(head[:-4]) and num_sets
                if is_sound and status.st_size == size:
                    return descriptor, num_sets
            os.close(descriptor)
        return None

    def _make(self, num_sets: int) -> None:
        head = struct.pack("<8sQ", _MAGIC, num_sets)
        with atomic_write(self._place) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(head + struct.pack("<I", google_crc32c.value(head)))
            file.truncate(_HEAD_BYTES + num_sets * (_SET_BYTES + _WAYS * BLOCK_BYTES))

    @contextmanager
    def _locked(self, places: Iterable[tuple[int, int]], *, waits: bool) -> Iterator[set[tuple[int, int]]]:
        """Lock ranges of the second file; where that cannot be done, blocks are fetched more than once."""
        try:
            if not hasattr(fcntl, "F_OFD_SETLK"):
                raise OSError("this system has no locks of an open file")
            descriptor = os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # the folder may have been deleted meanwhile, too
            yield {*places}
            return
        try:
            end = time.monotonic() + _LONGEST_WAIT_SECONDS * waits
            taken = set()
            for place in sorted(places):  # in one order, so that no two wait for each other
                while not (is_ours := _lock(descriptor, fcntl.F_WRLCK, *place)) and time.monotonic() < end:
                    time.sleep(_POLL_SECONDS)
                if is_ours or waits:
                    taken.add(place)
            yield taken
        finally:
            _lock(descriptor, fcntl.F_UNLCK, 0, 0)  # all; a process that was forked meanwhile has it open, too
            os.close(descriptor)


@lru_cache(8)
def open_block_cache(folder: Path | None, cache_gb: float | None = None) -> BlockCache | None:
    """Open the cache of a folder, once in a process; None if there is to be none, or can be none, which is told.

    `cache_gb` is its size in 10**9 bytes; 0: none; None: 20, and at most half of what is free.
    """
    if cache_gb == 0:
        return None
    try:
        if folder is None:
            raise OSError("the user has no home")
        return BlockCache(folder, None if cache_gb is None else int(cache_gb * 1e9))
    except OSError as error:
        _tell(folder or Path(), error)
        return None


def _tell(place: Path, error: OSError) -> None:
    if place not in _told:
        _told.add(place)
        log.warning(
            "What is read of object stores cannot be kept, and is read again each time: %s. "
            "Name a folder that may be written, on a disk with room: data.cache; or a smaller size: data.cache_gb",
            error,
        )


def _way_of(tag: bytes, entries: bytes) -> int | None:
    """Find the entry with a tag."""
    at = entries.find(tag)
    while at % _ENTRY.size and at >= 0:
        at = entries.find(tag, at + 1)
    return None if at < 0 else at // _ENTRY.size


def _number_of(object_id: bytes) -> int:
    """Return a number of 30 bits for an object: two that have the same one only wait for each other."""
    return int.from_bytes(object_id[:4], "little") >> 2


def _flock(descriptor: int, *, is_alone: bool) -> bool:
    """Mark an open file as in use; tells whether it could be done, which `is_alone` is if nobody else uses it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _lock(descriptor: int, kind: int, start: int, count: int) -> bool:
    """Lock or unlock a range for an open file: threads and processes keep each other out alike. No if it is taken."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, start, count, 0))
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)  # others: a file system without locks
    return True
