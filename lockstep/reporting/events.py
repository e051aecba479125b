"""TensorBoard's event files: TFRecord files, each record an `Event` message of the `tensorboard` package."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import DataError
from lockstep.reporting.append import AppendOnly
from lockstep.screen import log

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary


class EventFile:
    """A new event file in a folder, named as TensorBoard expects; a written event is safe from a kill."""

    def __init__(self, folder: Path) -> None:
        # Imported by those alone who write events: the command line needs neither torch nor tensorboard for --help.
        from tensorboard.compat.proto.event_pb2 import Event

        from lockstep.records.tfrecord import frame

        self._event, self._frame = Event, frame
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
        self._file.write(self._frame(event.SerializeToString()))


def _new_path(folder: Path) -> Path:
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    paths = (folder / f"{name}.{count}" for count in itertools.count())
    return next(path for path in paths if not path.exists())


def event_paths(folder: Path) -> list[Path]:
    """The event files directly in a folder, in the order in which TensorBoard reads them."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())


def cut_events(path: Path, from_step: int) -> set[str]:
    """Drop the first event after a step and all that follow it; the tags that the step itself has are returned.

    A torn or damaged record is dropped, with what follows it, since no reader gets past it: the log says so.
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
    except (DataError, DecodeError) as error:
        log.warning("%s: no event after byte %d can be read (%s)", path, size, str(error).splitlines()[0])
    if 0 < size < path.stat().st_size:
        file = AppendOnly(path)
        file.cut(size)
        file.close()
    return tags


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    from tensorboard.compat.proto.event_pb2 import Event

    from lockstep.records.tfrecord import read_all

    for end, message in read_all(path):
        yield end, Event.FromString(message)
