"""The index of a tar archive of samples, as WebDataset packs them. Built once from the headers alone, and kept.

A sample is the members that follow one another with one key: their name up to the first dot after the last slash. The
rest of the name after that dot is the ending: `train/0001.jpg` and `train/0001.cls` are one sample with two members.
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.records.index_cache import Cache, load_index, save_index
from lockstep.records.open_files import Version, open_file, read_at, version_of
from lockstep.records.tar_members import BLOCK_BYTES, FILES, FOLDERS, Member, header_crc, members_of, readable_name
from lockstep.screen import log

Int64s = npt.NDArray[np.int64]

# A smaller archive is walked in about the time that its index is read in.
_WORTH_KEEPING_BYTES = 1 << 20

_KIND = b"LSTARIX2"
_COUNTS = struct.Struct("<qqqq")


class TarIndex(NamedTuple):
    """Places of the members in an archive, grouped to samples."""

    offsets: Int64s
    """Start of each member's content, in bytes from the start of the file."""
    sizes: Int64s
    """Bytes of each content."""
    header_crcs: Int64s
    """CRC-32C of the block before each content."""
    starts: Int64s
    """Number of each sample's first member, and at the end the number of all members."""
    name_stops: Int64s
    """End of each name in `names`."""
    names: bytes
    """Names of the members, one after the other: tens of millions of strings would be several times as large."""
    not_read: bytes
    """Names of members that belong to no sample, each with a zero after it."""
    version: Version

    def members(self, sample: int) -> range:
        """Return the numbers of a sample's members."""
        return range(int(self.starts[sample]), int(self.starts[sample + 1]))

    def name(self, member: int) -> bytes:
        """Return the name of a member."""
        return self.names[int(self.name_stops[member - 1]) if member else 0 : int(self.name_stops[member])]


def tar_index_of(path: Path, cache: Cache = None) -> TarIndex:
    """Load the index of an archive from the cache if it still holds; else build it, and keep it if that is worth it.

    Members that belong to no sample are named in the log.
    """
    with open_file(path) as file:
        version = version_of(file)
        index = load_index(path, _KIND, version, partial(_decoded, version), cache)
        is_same = index is not None and _has_these_ends(file, index)
    if index is None or not is_same:
        index = build_tar_index(path)
        if version.size_bytes >= _WORTH_KEEPING_BYTES:
            save_index(path, _KIND, index.version, _encoded(index), cache)
    if names := index.not_read.split(b"\0")[:-1]:
        named = shorten([readable_name(name) for name in names])
        log.warning("Not read in %s: %s", path, named, chief_only=True)
    return index


def build_tar_index(path: Path) -> TarIndex:
    """Find all samples, by reading the headers; two members of one key and ending are an error.

    Files without an ending, or with a dot first, belong to no sample, as in WebDataset; nor do folders and devices.
    """
    with open_file(path) as file:
        return _Samples(path).index(file)


def key_and_ending(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name at the first dot after the last slash; the ending is in lower case.

    The ending is empty where the member belongs to no sample.
    """
    folder, slash, base = name.rpartition(b"/")
    stem, _, ending = base.partition(b".")
    return folder + slash + stem, ending.lower() if stem else b""


class _Samples:
    """Collects the samples of an archive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: list[Member] = []
        self._starts: list[int] = []
        self._not_read: list[bytes] = []
        self._key: bytes | None = None
        self._endings: set[bytes] = set()

    def index(self, file: BinaryIO) -> TarIndex:
        version = version_of(file)
        for member in members_of(file, self._path, version.size_bytes):
            if member.kind in FILES and key_and_ending(member.name)[1]:
                self._add(member)
            elif member.kind not in FOLDERS:
                self._not_read.append(member.name)
        return TarIndex(
            np.array([member.offset for member in self._members], dtype=np.int64),
            np.array([member.size_bytes for member in self._members], dtype=np.int64),
            np.array([member.header_crc for member in self._members], dtype=np.int64),
            np.array([*self._starts, len(self._members)], dtype=np.int64),
            np.cumsum([len(member.name) for member in self._members], dtype=np.int64),
            b"".join(member.name for member in self._members),
            b"".join(name + b"\0" for name in self._not_read),
            version,
        )

    def _add(self, member: Member) -> None:
        key, ending = key_and_ending(member.name)
        if key != self._key:
            self._key = key
            self._endings.clear()
            self._starts.append(len(self._members))
        elif ending in self._endings:
            raise DataError(
                f"{self._path} holds two members of one key and ending.",
                given=f"{readable_name(member.name)!r} at byte {member.start}, after another one in the sample "
                f"{readable_name(key)!r}",
                expected="members of a sample that end otherwise, upper and lower case being the same",
                hint="rename one of them",
            )
        self._endings.add(ending)
        self._members.append(member)


def _has_these_ends(file: BinaryIO, index: TarIndex) -> bool:
    """Check that the first and the last member are where the index has them.

    Archives packed alike have one size and, copied with their times, one time of change.
    """
    ends = [0, -1] if len(index.offsets) else []
    headers = [read_at(file, BLOCK_BYTES, int(index.offsets[member]) - BLOCK_BYTES) for member in ends]
    return all(header_crc(header) == index.header_crcs[member] for member, header in zip(ends, headers, strict=True))


def _encoded(index: TarIndex) -> bytes:
    counts = len(index.offsets), len(index.starts), len(index.names), len(index.not_read)
    arrays = np.concatenate([index.offsets, index.sizes, index.header_crcs, index.starts, index.name_stops])
    return b"".join([_COUNTS.pack(*counts), arrays.astype("<i8").tobytes(), index.names, index.not_read])


def _decoded(version: Version, content: bytes) -> TarIndex | None:
    """Decode an index; None if it does not match the size of the archive."""
    if len(content) < _COUNTS.size:
        return None
    members, starts, names_bytes, not_read_bytes = _COUNTS.unpack_from(content)
    numbers = 4 * members + starts
    texts = _COUNTS.size + 8 * numbers  # where the names begin
    if min(members, starts - 1, names_bytes) < 0 or len(content) != texts + names_bytes + not_read_bytes:
        return None
    array = np.frombuffer(content, dtype="<i8", count=numbers, offset=_COUNTS.size).astype(np.int64)
    lengths = [members, members, members, starts]
    offsets, sizes, crcs, sample_starts, name_stops = np.split(array, np.cumsum(lengths))
    names, not_read = content[texts : texts + names_bytes], content[texts + names_bytes :]
    index = TarIndex(offsets, sizes, crcs, sample_starts, name_stops, names, not_read, version)
    return index if _is_sound(index) else None


def _is_sound(index: TarIndex) -> bool:
    """Check that all offsets of the index are within the file, and within itself."""

    def rises(numbers: Int64s, first: int, last: int) -> bool:
        return bool((np.diff(numbers, prepend=first, append=last) >= 0).all())

    ends = index.offsets + index.sizes
    return (
        rises(index.starts, 0, len(index.offsets))
        and rises(index.name_stops, 0, len(index.names))
        and rises(np.stack([index.offsets, ends], axis=1).ravel(), BLOCK_BYTES, index.version.size_bytes)
    )
