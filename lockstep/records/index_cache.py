"""Indices of data files, kept on the disk so that a file is indexed once.

The index of `folder/name` is kept as `folder/.lockstep-index/name`; where that folder cannot be written, in the user's
cache ($XDG_CACHE_HOME/lockstep/record-index, by default in ~/.cache). It holds for one size and one time of change
of the file, to the nanosecond. Several processes may write it at once: each writes a file of its own and renames it.

8 bytes     the kind of index
16 bytes    size and time of change of the file, little-endian
...         the content
4 bytes     CRC-32C of all before
"""

from __future__ import annotations

import hashlib
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
from lockstep.screen import log

Index = TypeVar("Index")

_HEAD = struct.Struct("<8sqq")
_CRC = struct.Struct("<I")
_ANYBODY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def load_index(path: Path, kind: bytes, version: Version, decode: Callable[[bytes], Index | None]) -> Index | None:
    """Load the index of a file; None where none is kept for this version of it.

    Args:
        path: of the file.
        kind: 8 bytes.
        version: of the file now.
        decode: makes the index from its content, or returns None for content that is no index.
    """
    found = (_load(place, kind, version, decode) for place in _places(path))
    return next((index for index in found if index is not None), None)


def save_index(path: Path, kind: bytes, version: Version, content: bytes) -> None:
    """Save an index where it can be written, without waiting for the disk: damage is noticed on loading."""
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
    """Yield the places where the index of a file may be kept, the best place first."""
    whole = path.absolute()
    yield whole.parent / ".lockstep-index" / path.name
    with suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        yield cache / "lockstep" / "record-index" / hashlib.sha256(os.fsencode(whole)).hexdigest()[:32]


def _load(place: Path, kind: bytes, version: Version, decode: Callable[[bytes], Index | None]) -> Index | None:
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
    log.warning("%s is damaged: the records are counted again", place)
    return None


def _make_folder(folder: Path) -> None:
    """Make the folder, unless the mode of its parent forbids to write there, even if root could."""
    if folder.parent.is_dir() and not folder.parent.stat().st_mode & _ANYBODY_WRITES:
        raise PermissionError(folder)
    folder.mkdir(parents=True, exist_ok=True)
