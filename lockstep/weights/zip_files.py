"""Zip archives: how they begin, what reading a damaged one raises, and whether all of their files are listed."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

MAGIC, EMPTY = b"PK\x03\x04", b"PK\x05\x06"

FAULTS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""Beside OSError. The library has an error of its own, and raises these too."""

# The record at the end of an archive (APPNOTE.TXT, 4.3.16), which a comment may follow.
_END, _MOST_COMMENT_BYTES = struct.Struct("<4s4H2LH"), (1 << 16) - 1
_UNCOUNTED = 0xFFFF
"""What the record says of so many files or more."""


def check_count(archive: zipfile.ZipFile, path: Path) -> None:
    """Compare the number of files that are listed with the number that the end of the archive has.

    The library does not: an entry of the list whose length is damaged hides those that follow it.

    Raises:
        BadZipFile: the numbers differ.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END.size - _MOST_COMMENT_BYTES))
        tail = file.read()
    count, found = _END.unpack_from(tail, tail.rindex(EMPTY))[4], len(archive.infolist())
    if count not in (found, _UNCOUNTED):
        raise zipfile.BadZipFile(f"its end says that it has {count} files, and {found} are found")
