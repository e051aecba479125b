"""TensorBoard's event files: records of the TFRecord format, each an `Event` message of the `tensorboard` package.

A record is its length (8 bytes, little-endian), the masked CRC-32C of those bytes, the message, and its masked CRC-32C.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c

from lockstep.reporting.append import AppendOnly

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")

_logger = logging.getLogger("lockstep")


class EventFile:
    """A new event file in a folder, named as TensorBoard expects; a written event is safe from a kill."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # imported by those alone who write events

        self._event = Event
        self._file = AppendOnly(_new_path(folder))
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, summary: Summary, step: int) -> None:
        """Append one event with all the values of a summary."""
        self._append(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Have every event on the disk."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        self._file.write(frame(event.SerializeToString()))


def _new_path(folder: Path) -> Path:
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    paths = (folder / f"{name}.{count}" for count in itertools.count())
    return next(path for path in paths if not path.exists())


def event_paths(folder: Path) -> list[Path]:
    """The event files directly in a folder, in the order in which TensorBoard reads them."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())


def cut_events(path: Path, from_step: int) -> set[str]:
    """Drop the first event after a step and all that follow it; the tags that the step itself has are returned.

    A torn last record is dropped. So is what follows a damaged one, since no reader gets past it: the log says so.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    tags: set[str] = set()
    size = 0
    try:
        for end, event in _events(path):
            if event.step > from_step:
                break
            size = end
            if event.step == from_step:
                tags.update(value.tag for value in event.summary.value)
    except (_DamagedError, DecodeError):
        _logger.warning("%s is damaged after byte %d: no event from there on can be read.", path, size)
    if 0 < size < path.stat().st_size:
        file = AppendOnly(path)
        file.cut(size)
        file.close()
    return tags


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    from tensorboard.compat.proto.event_pb2 import Event

    for end, message in records(path):
        yield end, Event.FromString(message)


def frame(message: bytes) -> bytes:
    """A message as a record."""
    length = struct.pack("<Q", len(message))
    return length + _CRC.pack(_masked_crc(length)) + message + _CRC.pack(_masked_crc(message))


class _DamagedError(Exception):
    """The checksum of a record is not that of its bytes."""


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """The messages of a file, each with its end in bytes, without a torn last one."""
    with path.open("rb") as file:
        left = path.stat().st_size
        while left >= _HEAD.size:
            head = file.read(_HEAD.size)
            length, crc = _HEAD.unpack(head)
            _check(head[:8], crc)
            left -= _HEAD.size + length + _CRC.size
            if left < 0:
                return
            message = file.read(length)
            _check(message, *_CRC.unpack(file.read(_CRC.size)))
            yield file.tell(), message


def _check(data: bytes, crc: int) -> None:
    if _masked_crc(data) != crc:
        raise _DamagedError


def _masked_crc(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
