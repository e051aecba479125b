"""The manifest of a checkpoint: its files with sizes and hashes, and how they are verified."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

from lockstep.cores import usable_cores
from lockstep.durable import open_at_once, sync_and_close
from lockstep.errors import CheckpointError
from lockstep.storage.remote_path import AnyPath

Content = TypeVar("Content")

FORMAT = 1
MANIFEST = "manifest.json"
VALUES = "values.json"
SUFFIX = ".safetensors"
MAX_MANIFEST_BYTES = 1 << 20
_MOST_HASHED_AT_ONCE = 4
"""Files that are hashed while others are read."""
_FILE_NAME = re.compile(rf"{re.escape(VALUES)}|[A-Za-z0-9_][A-Za-z0-9_.-]*{re.escape(SUFFIX)}")


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written; another one may be intact."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str

    def check_size(self, folder: Path) -> None:
        """Compare the file's size, without reading it."""
        try:
            size_bytes = (folder / self.name).stat().st_size
        except OSError as error:
            raise unreadable(folder / self.name, error) from error
        if size_bytes != self.size_bytes:
            raise damaged(folder / self.name, f"{size_bytes:,} bytes", f"{self.size_bytes:,} bytes")

    def check(self, folder: Path) -> None:
        """Compare the file's size and hash."""
        self.check_size(folder)
        self.check_hash(folder, _sha256(self.read_unchecked(folder)))

    def read_unchecked(self, folder: Path) -> bytes:
        """Read the file's bytes, as many as there should be."""
        return read_bytes(folder / self.name, self.size_bytes)

    def check_hash(self, folder: Path, found: str) -> None:
        """Compare the hash of the file's bytes, which is in hexadecimal."""
        if found != self.sha256:
            raise damaged(folder / self.name, f"sha256 {found}", f"sha256 {self.sha256}")


class _Threads:
    """Threads that make the calls they are given: one by default, in their order.

    A `ThreadPoolExecutor` takes no calls once the interpreter is ending, when a checkpoint may be half written.
    """

    def __init__(self, count: int = 1) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # Daemons, which an exit does not wait for: a reader that was abandoned leaves them without calls.
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> _Threads:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # a Ctrl-C, when some may have started
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def submit(self, function: Callable[..., Content], *arguments: Any) -> Future[Content]:
        future: Future[Content] = Future()
        self._calls.put((future, partial(function, *arguments)))
        return future

    def _run(self) -> None:
        while given := self._calls.get():
            future, call = given
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del given, future, call  # a call may hold a whole file


class RunningHash:
    """The SHA-256 of a file, in hexadecimal, that is given part by part."""

    def __init__(self, parts: Iterable[bytes | memoryview] = ()) -> None:
        self._sha256 = hashlib.sha256()
        self.after: list[str] = []
        """What it was after each part."""
        for part in parts:
            self.update(part)

    def update(self, part: bytes | memoryview) -> None:
        """Add the next part."""
        self._sha256.update(part)
        self.after.append(self._sha256.hexdigest())


def write_files(
    folder: Path, contents: Mapping[str, Iterable[bytes | memoryview]]
) -> dict[str, tuple[FileEntry, RunningHash]]:
    """Write new files, given by their parts, which are on the disk when this returns.

    One thread hashes what is written meanwhile, another waits for the disk.

    Returns:
        By name the entry of each file, and its hash.
    """
    written: dict[str, tuple[FileEntry, RunningHash]] = {}
    with _Threads() as hasher, _Threads() as syncer:
        synced = []
        for name, parts in contents.items():
            size_bytes, running = 0, RunningHash()
            with (folder / name).open("xb", buffering=0) as file:
                for part in parts:
                    hashed = hasher.submit(running.update, part)
                    size_bytes += len(part)
                    rest = memoryview(part)
                    while rest:  # the system takes at most 2 GiB at once
                        rest = rest[file.write(rest) or 0 :]
                    hashed.result()
                synced.append(syncer.submit(sync_and_close, os.dup(file.fileno())))
            written[name] = FileEntry(name, size_bytes, running.after[-1]), running
        for each in synced:
            each.result()
    return written


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    saved_unix_seconds: int
    files: tuple[FileEntry, ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores of the evaluations after the step, by name; finite."""
    best_by: str | None = None
    """The score by which it was among the best when it was written."""

    def encode(self) -> bytes:
        """The bytes of the file, its own hash included."""
        body = {"format": FORMAT, **asdict(self)}
        return (json.dumps(body | {"sha256": hash_of_json(body)}, indent=1) + "\n").encode()

    def read_files(
        self, folder: Path, read: Callable[[str, BinaryIO, int], tuple[Content, Iterable[bytes | memoryview]]]
    ) -> dict[str, Content]:
        """Read the content of each file, by name, verified; the sizes of all are compared first.

        Files are hashed by threads while the next ones are read. `read` returns the content of a file, given its name,
        the file and its size; and all its bytes, in parts. It raises ValueError where it is none.

        Raises:
            DamagedError: a file is not what was written, or cannot be read.
        """
        for file in self.files:
            file.check_size(folder)
        contents: dict[str, Content] = {}
        with _Threads(min(_MOST_HASHED_AT_ONCE, usable_cores())) as threads:
            hashing: list[tuple[FileEntry, Future[RunningHash]]] = []
            for file in self.files:
                try:
                    with open(folder / file.name, "rb", opener=open_at_once) as opened:
                        contents[file.name], parts = read(file.name, opened, file.size_bytes)
                except OSError as error:
                    raise unreadable(folder / file.name, error) from error
                except (ValueError, RecursionError) as error:
                    file.check(folder)  # which says more, if it is not what was written
                    what = f"content that cannot be read ({error})"
                    raise damaged(folder / file.name, what, "what was written") from error
                hashing.append((file, threads.submit(RunningHash, parts)))
                del parts
            for file, running in hashing:
                file.check_hash(folder, running.result().after[-1])
        return contents

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint."""
        return cls.decode(read_bytes(folder / MANIFEST, MAX_MANIFEST_BYTES + 1), folder / MANIFEST)

    @classmethod
    def decode(cls, data: bytes, path: AnyPath) -> Manifest:
        """Return the manifest that was encoded; `path` is its file, for messages."""
        body = _as_object(data, path)
        given, expected = body.pop("sha256", None), hash_of_json(body)
        if given != expected:
            raise damaged(path, f"sha256 {expected}", f"sha256 {given}, as it says itself")
        if body.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is in a format that this version of Lockstep does not know.",
                given=f"format {body.get('format')!r}",
                expected=f"format {FORMAT}",
                hint="use the version of Lockstep that wrote it, or a later one",
            )
        try:
            files = tuple(FileEntry(**entry) for entry in body["files"])
            scores = {str(name): float(score) for name, score in body.get("scores", {}).items()}
            manifest = cls(int(body["step"]), int(body["saved_unix_seconds"]), files, scores, body.get("best_by"))
            names = [file.name for file in files]
            are_named = VALUES in names and all(map(_FILE_NAME.fullmatch, names))
            if not all(type(file.size_bytes) is int for file in files):
                raise ValueError("sizes that are no numbers of bytes")
            if not all(map(math.isfinite, scores.values())):
                raise ValueError("scores that are not finite")
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise damaged(path, f"other fields ({error!r})", f"those of format {FORMAT}") from error
        if not are_named:
            raise damaged(path, f"files {names}", f"{VALUES}, and sections with names of their own and {SUFFIX!r}")
        if manifest.best_by not in (None, *manifest.scores):
            raise damaged(path, f"the best by {manifest.best_by!r}", "one of the scores, or none")
        return manifest


def damaged(path: AnyPath, given: object, expected: object) -> DamagedError:
    """The error for a file that is not what was written."""
    return DamagedError(
        f"{path} is damaged.",
        given=given,
        expected=expected,
        hint=f"put {path.parent} back from a copy, or delete it, so that the checkpoint before it is used",
    )


def unreadable(path: Path, error: OSError) -> DamagedError:
    """The error for a file that cannot be read at all."""
    return damaged(path, error.strerror, "a file that can be read")


def read_bytes(path: Path, size_bytes: int) -> bytes:
    """The first `size_bytes` of a file, or all of it if it is shorter."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            return file.read(size_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


def _as_object(data: bytes, path: AnyPath) -> dict[str, Any]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise damaged(path, f"more than {MAX_MANIFEST_BYTES:,} bytes", f"at most {MAX_MANIFEST_BYTES:,} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"no JSON ({error})", "a JSON object") from error
    if not isinstance(body, dict):
        raise damaged(path, f"a JSON {type(body).__name__}", "a JSON object")
    return body


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_of_json(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of facts as JSON, whatever their order."""
    return _sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
