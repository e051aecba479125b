"""The members of a tar archive, found by one walk over its headers; and the index of its samples, which is kept.

An archive is blocks of 512 bytes: for each member a header, then its content, padded by zeros; in the end two blocks of
zeros. What does not fit into a header (a long name, a large size) is the content of a member of its own before it. The
formats are ustar with the extensions of POSIX (POSIX.1-2017, "pax") and of GNU (GNU tar's manual, "Basic Tar Format").
Why this is not the standard library's `tarfile`: docs/decisions/0022-own-tar-headers.md.

A sample, as WebDataset packs them, is the members that follow one another with one key: their name up to the first dot
after the last slash. The rest of the name after that dot is the ending: `train/0001.jpg` and `train/0001.cls` are one
sample with two members.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.records.index_cache import Cache, load_index, ranges_through, save_index
from lockstep.records.open_files import Version, open_file, read_at, version_of
from lockstep.screen import log, one_line
from lockstep.storage.remote_path import AnyPath, RemotePath

Int64s = npt.NDArray[np.int64]

# A smaller archive is walked in about the time that its index is read in.
_WORTH_KEEPING_BYTES = 1 << 20

_KIND = b"LSTARIX2"
_COUNTS = struct.Struct("<qqqq")

BLOCK_BYTES = 512

# Types of members: a byte in their headers.
FILES = b"0\x007"
FOLDERS = b"5"
_LINKS, _DEVICES, _LABELS = b"12", b"346", b"V"
_SPARSE = b"S"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _PAX_OF_SUN, _PAX_OF_ALL = b"x", b"X", b"g"

_WITHOUT_CONTENT = FOLDERS + _LINKS + _DEVICES + _LABELS
_EXTENSIONS = _LONG_NAME + _LONG_LINK + _PAX + _PAX_OF_SUN + _PAX_OF_ALL
_READ = FILES + FOLDERS + _DEVICES + _LABELS
_REFUSED = {b"1": "a hard link", b"2": "a symbolic link", _SPARSE: "a sparse file"}

_SUM = slice(148, 156)
_POSIX = b"ustar\0"
_LONGEST_EXTENSION_BYTES = 1 << 20

# Headers of small members are close together, those of large ones far apart.
_WINDOW_BYTES = 1 << 12
_REST_BYTES = 1 << 20
# No program pads further, and what an interrupted copy leaves would take minutes to look through.
_LONGEST_REST_BYTES = 1 << 24

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


class Member(NamedTuple):
    """A file, a folder, a device or a label in an archive."""

    name: bytes
    start: int
    """Byte of the file where its header begins."""
    offset: int
    """Byte of the file where its content begins."""
    size_bytes: int
    kind: bytes
    """Its type, one byte: one of FILES or FOLDERS, else a device or a label."""
    header_crc: int
    """CRC-32C of the block before its content."""


def members_of(file: BinaryIO, path: AnyPath, size_bytes: int) -> Iterator[Member]:
    """Yield the members of an archive in turn, each once it is known to be whole; refuse links and sparse files.

    The file is unbuffered; no size in a header is believed beyond that of the file.
    """
    walk = _Walk(file, path, size_bytes)
    try:
        yield from walk.members()
    except _BadHeaderError as fault:
        raise walk.damaged(str(fault)) from None


def header_crc(block: bytes) -> int:
    """Compute the CRC-32C of a block; tar's own checksum is a sum, the same for 01.jpg and 10.jpg."""
    crc: int = google_crc32c.value(block)
    return crc


def readable_name(name: bytes) -> str:
    """Write a name on one line, with bytes that are not UTF-8 and unprintable characters escaped."""
    return one_line(name.decode(errors="backslashreplace"))


class _Walk:
    """A walk over the headers of an archive, and how far it has come."""

    def __init__(self, file: BinaryIO, path: AnyPath, size_bytes: int) -> None:
        self._file, self._path, self._size_bytes = file, path, size_bytes
        self._window, self._window_start = b"", 0
        self._number = 0
        self._place = 0
        self._extended: dict[bytes, bytes] = {}
        """Values that extensions give the next member."""

    def members(self) -> Iterator[Member]:
        """Yield the members up to the end mark, each with the values of the extensions before it."""
        while (header := self._header()) is not None:
            size_bytes = self._content_bytes(header)
            if header.kind in _EXTENSIONS:
                self._extend(header.kind, size_bytes)
            else:
                yield self._member(header, size_bytes)
                self._extended.clear()
                self._number += 1
            self._place += BLOCK_BYTES + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._check_end()

    def _check_end(self) -> None:
        """Refuse anything but zeros after the end mark; most programs would ignore it in silence."""
        if self._extended:
            raise _BadHeaderError("an end mark, where a member was announced")
        for place in range(self._place, min(self._size_bytes, self._place + _LONGEST_REST_BYTES), _REST_BYTES):
            if read_at(self._file, _REST_BYTES, place).strip(b"\0"):
                raise DataError(
                    f"{self._path} holds more after its end mark.",
                    given=f"{self._number} members, an end mark at byte {self._place}, and not only zeros after it",
                    expected="one archive; those that `cat` has joined end at the first one's mark",
                    hint="give the archives themselves, or join them by tar --concatenate",
                )
        if (rest := self._size_bytes - self._place) > _LONGEST_REST_BYTES:
            raise self._cut_short(f"zeros in its place, and {rest} bytes up to the end of the file", "its header")

    def damaged(self, given: str) -> DataError:
        """Make the error for a bad header, or a bad extension of one."""
        return DataError(
            f"Member {self._number} of {self._path}, at byte {self._place}, has no valid header.",
            given=given,
            expected="the header of a member of a tar archive, in the format of ustar, pax or GNU",
            hint="copy the file again, or pack it anew" if self._place else "check that this is a tar archive",
        )

    def _header(self) -> _Header | None:
        block = self._read(BLOCK_BYTES, self._place)
        if not self._place:
            self._check_first(block)
        elif not block:
            raise self._cut_short(f"the end of the file after {self._number} members", "an end mark: a block of zeros")
        if len(block) < BLOCK_BYTES:
            raise self._cut_short(f"{len(block)} bytes up to the end of the file", f"{BLOCK_BYTES} bytes of a header")
        return _read_header(block) if block.strip(b"\0") else None

    def _check_first(self, block: bytes) -> None:
        if not block:
            raise self.damaged("an empty file")
        for magic, name in _COMPRESSED.items():
            if block.startswith(magic):
                raise DataError(
                    f"{self._path} is compressed, so its samples cannot be read in any order.",
                    given=f"a file that begins as those of {name} do",
                    expected="a plain tar archive; the images in it are compressed already",
                    hint=f"decompress it ({name} -d), and give the path of the plain file",
                )

    def _content_bytes(self, header: _Header) -> int:
        """Return the size of a member's content; refuse one that ends beyond the file."""
        size_bytes = header.size_bytes
        if header.kind not in _EXTENSIONS + _WITHOUT_CONTENT and (size := self._extended.get(b"size")):
            if not size.isdigit() or len(size) > 18:
                raise _BadHeaderError(f"a pax header with the size {size[:40]!r}")
            size_bytes = int(size)
        left = self._size_bytes - self._place - BLOCK_BYTES
        if size_bytes > left:
            name = f" ({readable_name(self._name(header))!r})"
            raise self._cut_short(f"{left} bytes up to the end of the file", f"{size_bytes} bytes of content", name)
        return size_bytes

    def _extend(self, kind: bytes, size_bytes: int) -> None:
        """Keep the values of an extension for the next member."""
        if size_bytes > _LONGEST_EXTENSION_BYTES:
            raise _BadHeaderError(f"an extension of {size_bytes} bytes, where {_LONGEST_EXTENSION_BYTES} is the most")
        content = self._read(size_bytes, self._place + BLOCK_BYTES)
        if kind == _LONG_NAME:
            self._extended[b"path"] = content
        elif kind == _PAX_OF_ALL:
            if {b"path", b"size"} & _read_pax(content).keys():
                raise _BadHeaderError("a global pax header that gives all members one path or size")
        elif kind != _LONG_LINK:
            self._extended.update(_read_pax(content))

    def _name(self, header: _Header) -> bytes:
        return self._extended.get(b"path", b"").partition(b"\0")[0] or header.name

    def _member(self, header: _Header, size_bytes: int) -> Member:
        name, kind = self._name(header), header.kind
        if any(keyword.startswith(b"GNU.sparse.") for keyword in self._extended):
            kind = _SPARSE
        if kind not in _READ:
            what = _REFUSED.get(kind) or f"a member of type {readable_name(kind)!r}"
            raise DataError(
                f"{readable_name(name)!r} in {self._path} is {what}.",
                given=f"member {self._number}, at byte {self._place}, whose content is not stored as it is",
                expected="files, each with its content, and folders",
                hint="pack the files anew: tar --sort=name --dereference --hard-dereference -cf NEW.tar FOLDER",
            )
        if kind in FILES and name.endswith(b"/"):  # as the oldest archives name folders
            kind = FOLDERS
        return Member(name, self._place, self._place + BLOCK_BYTES, size_bytes, kind, header.crc)

    def _cut_short(self, given: str, expected: str, name: str = "") -> DataError:
        return DataError(
            f"{self._path} is cut short: member {self._number}{name}, at byte {self._place}, is not whole.",
            given=given,
            expected=expected,
            hint="copy the file again; where its writer has not closed it, pack it anew",
        )

    def _read(self, size: int, offset: int) -> bytes:
        start = offset - self._window_start
        if not 0 <= start <= len(self._window) - size:
            self._window = read_at(self._file, max(size, _WINDOW_BYTES), offset)
            self._window_start, start = offset, 0
        return self._window[start : start + size]


class _BadHeaderError(Exception):
    """Raised for a block that is not the header of a member; says why."""


class _Header(NamedTuple):
    name: bytes
    size_bytes: int
    """Size of the content without padding; 0 for types without content."""
    kind: bytes
    crc: int


def _read_header(block: bytes) -> _Header:
    """Read the header in a block, and verify its checksum."""
    expected = _number(block[_SUM], "checksum")
    rest = block[: _SUM.start] + b" " * 8 + block[_SUM.stop :]
    if sum(rest) != expected and sum(struct.unpack(f"{BLOCK_BYTES}b", rest)) != expected:  # some old ones summed so
        raise _BadHeaderError(f"a header with the checksum {sum(rest)} that says {expected}")
    name, kind = _text(block[:100]), block[156:157]
    size_bytes = 0 if kind in _WITHOUT_CONTENT else _number(block[124:136], "size")
    if block[257:263] == _POSIX and (prefix := _text(block[345:500])):
        name = prefix + b"/" + name
    return _Header(name, size_bytes, kind, header_crc(block))


def _read_pax(content: bytes) -> dict[bytes, bytes]:
    """Read a pax header's values by keyword, from lines "length keyword=value"; the length is the line's."""
    values = {}
    place = 0
    while place < len(content):
        digits, space, _ = content[place : place + 20].partition(b" ")
        end = place + int(digits) if space and digits.isdigit() else 0
        keyword, equals, value = content[place + len(digits) + 1 : end].partition(b"=")
        if not (equals and place < end <= len(content) and value.endswith(b"\n")):
            raise _BadHeaderError(f"a pax header with the line {content[place : place + 40]!r}")
        values[keyword] = value[:-1]
        place = end
    return values


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes, what: str) -> int:
    """Read octal digits; or, after a byte above 127, a number to base 256, as GNU tar writes it."""
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise _BadHeaderError(f"a header with a negative {what}")
        return int.from_bytes(field[1:], "big")
    digits = _text(field).strip()
    if digits.strip(b"01234567"):
        raise _BadHeaderError(f"a header with the {what} {digits!r}")
    return int(digits or b"0", 8)


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


def tar_index_of(path: AnyPath, cache: Cache = None) -> TarIndex:
    """Load the index of an archive from the cache if it still holds; else build it, and keep it if that is worth it.

    Members that belong to no sample are named in the log.
    """
    with open_file(path, ranges=ranges_through(cache)) as file:
        version = version_of(file)
        index = load_index(path, _KIND, version, partial(_decoded, version), cache)
        is_same = index is not None and (isinstance(path, RemotePath) or _has_these_ends(file, index))
    if index is None or not is_same:
        index = build_tar_index(path, cache)
        if version.size_bytes >= _WORTH_KEEPING_BYTES:
            save_index(path, _KIND, index.version, _encoded(index), cache)
    if names := index.not_read.split(b"\0")[:-1]:
        named = shorten([readable_name(name) for name in names])
        log.warning("Not read in %s: %s", path, named, chief_only=True)
    return index


def build_tar_index(path: AnyPath, cache: Cache = None) -> TarIndex:
    """Find all samples, by reading the headers; two members of one key and ending are an error.

    Files without an ending, or with a dot first, belong to no sample, as in WebDataset; nor do folders and devices.
    """
    members: list[Member] = []
    starts: list[int] = []
    not_read: list[bytes] = []
    key: bytes | None = None
    endings: set[bytes] = set()
    with open_file(path, ranges=ranges_through(cache)) as file:
        version = version_of(file)
        for member in members_of(file, path, version.size_bytes):
            own_key, ending = key_and_ending(member.name)
            if member.kind not in FILES or not ending:
                if member.kind not in FOLDERS:
                    not_read.append(member.name)
                continue
            if own_key != key:
                key, endings = own_key, set()
                starts.append(len(members))
            elif ending in endings:
                raise _same_ending(path, member, own_key)
            endings.add(ending)
            members.append(member)
    return TarIndex(
        np.array([member.offset for member in members], dtype=np.int64),
        np.array([member.size_bytes for member in members], dtype=np.int64),
        np.array([member.header_crc for member in members], dtype=np.int64),
        np.array([*starts, len(members)], dtype=np.int64),
        np.cumsum([len(member.name) for member in members], dtype=np.int64),
        b"".join(member.name for member in members),
        b"".join(name + b"\0" for name in not_read),
        version,
    )


def _same_ending(path: AnyPath, member: Member, key: bytes) -> DataError:
    name = readable_name(member.name)
    return DataError(
        f"{path} holds two members of one key and ending.",
        given=f"{name!r} at byte {member.start}, after another one in the sample {readable_name(key)!r}",
        expected="members of a sample that end otherwise, upper and lower case being the same",
        hint="rename one of them",
    )


def key_and_ending(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name at the first dot after the last slash; the ending is in lower case.

    The ending is empty where the member belongs to no sample.
    """
    folder, slash, base = name.rpartition(b"/")
    stem, _, ending = base.partition(b".")
    return folder + slash + stem, ending.lower() if stem else b""


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
