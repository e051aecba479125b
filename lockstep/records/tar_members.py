"""The members of a tar archive, by one walk over its headers: what lies between them is not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lockstep.errors import DataError
from lockstep.records.open_files import read_at
from lockstep.records.tar_headers import (
    BLOCK_BYTES,
    DEVICES,
    FILES,
    FOLDERS,
    LABELS,
    LONG_LINK,
    LONG_NAME,
    PAX,
    PAX_OF_ALL,
    PAX_OF_SUN,
    SPARSE,
    WITHOUT_CONTENT,
    BadHeaderError,
    Header,
    pax_number,
    read_header,
    read_pax,
)
from lockstep.screen import one_line

_EXTENSIONS = LONG_NAME + LONG_LINK + PAX + PAX_OF_SUN + PAX_OF_ALL
_LONGEST_EXTENSION_BYTES = 1 << 20
_READ = FILES + FOLDERS + DEVICES + LABELS
_REFUSED = {b"1": "a hard link", b"2": "a symbolic link", SPARSE: "a sparse file"}

# Headers of small members lie close together, those of large ones far apart.
_WINDOW_BYTES = 1 << 12
_REST_BYTES = 1 << 20
# No program pads further. What an interrupted copy leaves takes minutes to look through.
_LONGEST_REST_BYTES = 1 << 24

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


class Member(NamedTuple):
    """One member of an archive."""

    name: bytes
    start: int
    """Where its header is, in bytes from the start of the file."""
    offset: int
    """Where its content is."""
    size_bytes: int
    """Of its content."""
    kind: bytes
    """One of FILES, FOLDERS, DEVICES or LABELS."""
    header_crc: int
    """Of the block before its content."""


def members_of(file: BinaryIO, path: Path, size_bytes: int) -> Iterator[Member]:
    """Yield the members of an archive in turn, once each is known to be whole.

    Args:
        file: unbuffered.
        path: of the file, for errors.
        size_bytes: of the file; no length that it announces is believed beyond it.

    Raises:
        DataError: the file is no tar archive, compressed, cut short or damaged, or holds links or sparse files.
    """
    walk = _Walk(file, path, size_bytes)
    try:
        while (member := walk.next()) is not None:
            yield member
        walk.check_end()
    except BadHeaderError as fault:
        raise walk.damaged(str(fault)) from None


def shown(name: bytes) -> str:
    """A name as people read it, on one line: what is not UTF-8 in it, or no character to be seen, escaped."""
    return one_line(name.decode(errors="backslashreplace"))


class _Walk:
    """A walk over the headers of an archive, and how far it has come."""

    def __init__(self, file: BinaryIO, path: Path, size_bytes: int) -> None:
        self._file, self._path, self._size_bytes = file, path, size_bytes
        self._window, self._window_start = b"", 0
        self._number = 0
        self._place = 0
        self._extended: dict[bytes, bytes] = {}
        """What the extensions say of the member that follows."""

    def next(self) -> Member | None:
        """The next member, with what the extensions before it say; None at the end mark."""
        member = None
        while member is None and (header := self._header()) is not None:
            size_bytes = self._content_bytes(header)
            if header.kind in _EXTENSIONS:
                self._extend(header.kind, size_bytes)
            else:
                member = self._member(header, size_bytes)
                self._extended.clear()
                self._number += 1
            self._place += BLOCK_BYTES + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return member

    def check_end(self) -> None:
        """Refuse what follows the end mark: most programs would pass over it in silence."""
        if self._extended:
            raise BadHeaderError("an end mark, where a member was announced")
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
        """The error for a header, or an extension of one, that is none."""
        return DataError(
            f"Member {self._number} of {self._path}, at byte {self._place}, has no valid header.",
            given=given,
            expected="the header of a member of a tar archive, in the format of ustar, pax or GNU",
            hint="copy the file again, or pack it anew" if self._place else "check that this is a tar archive",
        )

    def _header(self) -> Header | None:
        block = self._read(BLOCK_BYTES, self._place)
        if not self._place:
            self._check_first(block)
        elif not block:
            raise self._cut_short(f"the end of the file after {self._number} members", "an end mark: a block of zeros")
        if len(block) < BLOCK_BYTES:
            raise self._cut_short(f"{len(block)} bytes up to the end of the file", f"{BLOCK_BYTES} bytes of a header")
        return read_header(block) if block.strip(b"\0") else None

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

    def _content_bytes(self, header: Header) -> int:
        """The size of a member's content, all of which is there."""
        size_bytes = header.size_bytes
        if header.kind not in _EXTENSIONS + WITHOUT_CONTENT and (size := self._extended.get(b"size")):
            size_bytes = pax_number(size)
        left = self._size_bytes - self._place - BLOCK_BYTES
        if size_bytes > left:
            name = f" ({shown(self._name(header))!r})"
            raise self._cut_short(f"{left} bytes up to the end of the file", f"{size_bytes} bytes of content", name)
        return size_bytes

    def _extend(self, kind: bytes, size_bytes: int) -> None:
        """Take in what an extension says."""
        if size_bytes > _LONGEST_EXTENSION_BYTES:
            raise BadHeaderError(f"an extension of {size_bytes} bytes, where {_LONGEST_EXTENSION_BYTES} is the most")
        content = self._read(size_bytes, self._place + BLOCK_BYTES)
        if kind == LONG_NAME:
            self._extended[b"path"] = content
        elif kind == PAX_OF_ALL:
            if {b"path", b"size"} & read_pax(content).keys():
                raise BadHeaderError("a global pax header that gives all members one path or size")
        elif kind != LONG_LINK:
            self._extended.update(read_pax(content))

    def _name(self, header: Header) -> bytes:
        return self._extended.get(b"path", b"").partition(b"\0")[0] or header.name

    def _member(self, header: Header, size_bytes: int) -> Member:
        name, kind = self._name(header), header.kind
        if any(keyword.startswith(b"GNU.sparse.") for keyword in self._extended):
            kind = SPARSE
        if kind not in _READ:
            what = _REFUSED.get(kind) or f"a member of type {shown(kind)!r}"
            raise DataError(
                f"{shown(name)!r} in {self._path} is {what}.",
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
        """Bytes from an offset on, fewer at the end of the file."""
        start = offset - self._window_start
        if not 0 <= start <= len(self._window) - size:
            self._window = read_at(self._file, max(size, _WINDOW_BYTES), offset)
            self._window_start, start = offset, 0
        return self._window[start : start + size]
