"""Indices of data files that are made once and kept for the next time.

The index of `folder/name` is kept as `folder/.lockstep-index/name`; where that folder cannot be written, in the user's
cache ($XDG_CACHE_HOME/lockstep/record-index, by default in ~/.cache). It holds for one size and one time of change
of the file, to the nanosecond. Several processes may write it at once: each writes a file of its own and renames it.

8 bytes     what kind of index this is
16 bytes    size and time of change of the file, little-endian
...         the content
4 bytes     CRC-32C of all before
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import google_crc32c

from lockstep.records.open_files import Version

Index = TypeVar("Index")

_HEAD = struct.Struct("<8sqq")
_CRC = struct.Struct("<I")
_ANYBODY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH

_logger = logging.getLogger("lockstep")


def kept_index(path: Path, kind: bytes, version: Version, decode: Callable[[bytes], Index | None]) -> Index | None:
    """The index of this kind that is kept of a file as it is now; None where there is none.

    Args:
        path: of the file.
        kind: 8 bytes.
        version: of the file as it is now.
        decode: makes the index from its content; None where the content is none.
    """
    found = (_kept_at(place, kind, version, decode) for place in _places(path))
    return next((index for index in found if index is not None), None)


def keep_index(path: Path, kind: bytes, version: Version, content: bytes) -> None:
    """Write an index where it can be written, without waiting for the disk: damage is seen when it is read."""
    data = _HEAD.pack(kind, *version) + content
    data += _CRC.pack(google_crc32c.value(data))
    for place in _places(path):
        with suppress(OSError):
            _make_folder(place.parent)
            temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
            temporary.write_bytes(data)
            temporary.replace(place)
            return


def _places(path: Path) -> Iterator[Path]:
    """Where the index of a file may be kept, the best place first."""
    whole = path.absolute()
    yield whole.parent / ".lockstep-index" / path.name
    with suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        yield cache / "lockstep" / "record-index" / hashlib.sha256(os.fsencode(whole)).hexdigest()[:32]


def _kept_at(place: Path, kind: bytes, version: Version, decode: Callable[[bytes], Index | None]) -> Index | None:
    try:
        data = place.read_bytes()
    except OSError:
        return None
    end = len(data) - _CRC.size
    if end >= _HEAD.size and google_crc32c.value(data[:end]) == _CRC.unpack_from(data, end)[0]:
        if _HEAD.unpack_from(data) != (kind, *version):
            return None
        if (index := decode(data[_HEAD.size : end])) is not None:
            return index
    _logger.warning("%s is damaged: the records are counted again", place)
    return None


def _make_folder(folder: Path) -> None:
    """Have the folder; a parent that says of itself that it is not to be written is not, even if root could."""
    if folder.parent.is_dir() and not folder.parent.stat().st_mode & _ANYBODY_WRITES:
        raise PermissionError(folder)
    folder.mkdir(parents=True, exist_ok=True)
