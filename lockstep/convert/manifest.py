"""What stands beside the shards of a conversion: which one they are of, and which of them are finished.

A shard is kept when the same conversion goes on, and never taken for one of another conversion, because its bytes
alone do not say what it was made of.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.listing import shorten

if sys.platform != "win32":
    import fcntl

_MOST_BYTES = 1 << 30
_MOST_NAMED = 3

_logger = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True)
class Skipped:
    """An item of which no record could be made."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shard:
    """What is known of a finished shard."""

    num_records: int
    num_bytes: int
    skipped: tuple[Skipped, ...] = ()


@dataclass
class Manifest:
    """A conversion by the fingerprint of what decides its bytes, and its finished shards by their number."""

    path: Path
    fingerprint: str
    finished: dict[int, Shard] = field(default_factory=dict)

    def add(self, number: int, shard: Shard) -> None:
        """Note that a shard is finished.

        Raises:
            DataError: the system refuses to write the manifest.
        """
        self.finished[number] = shard
        self.write()

    def write(self) -> None:
        """Write it, whole or not at all; raises as `add`."""
        finished = {str(number): asdict(shard) for number, shard in sorted(self.finished.items())}
        content = {"fingerprint": self.fingerprint, "finished": finished}
        with atomic_write(self.path, parents=True, failure=DataError) as file:
            file.write(json.dumps(content, indent=1).encode())


def fingerprint(items: Iterable[object], options: Mapping[str, object], num_shards: int) -> str:
    """A hash of all that decides the bytes of the shards; of each item its `repr`."""
    total = hashlib.sha256(json.dumps([num_shards, options], sort_keys=True).encode())
    for item in items:
        total.update(repr(item).encode(errors="surrogateescape") + b"\0")
    return total.hexdigest()


def claim(folder: Path, base: str, names: Sequence[str], made_of: str, *, overwrite: bool) -> Manifest:
    """The manifest of a conversion, begun or gone on with, in a folder that is held.

    What a start that was killed left half written is deleted: one that is alive would hold the folder.

    Args:
        folder: of the shards.
        base: with what their names begin.
        names: of the shards, by their number.
        made_of: the fingerprint of the conversion.
        overwrite: take shards of another conversion for such as may be written over; in the log those are named that
            will stay, because they have other names.

    Raises:
        DataError: shards are there that are not of this conversion, or have changed since; or the manifest cannot be
            read or written.
    """
    # Hidden, so that no pattern of shards stands for it.
    path = folder / f".{base}.conversion.json"
    manifest = _read_manifest(path)
    present = _matching(folder, rf"{re.escape(base)}-\d{{5,}}-of-\d{{5,}}")
    if manifest is None or manifest.fingerprint != made_of:
        if present and not overwrite:
            raise _foreign(folder, [*present], "made of something else" if manifest else "of unknown origin")
        manifest = Manifest(path, made_of)
    manifest.finished = _still_whole(manifest.finished, names, present, overwrite)
    manifest.write()
    if others := sorted({*present} - {*names}):
        _logger.warning("Left in %s, and of another conversion: %s", folder, shorten(others, _MOST_NAMED))
    shard_or_manifest = rf"{re.escape(base)}-\d+-of-\d+|{re.escape(path.name)}"
    for partial in _matching(folder, rf"\.({shard_or_manifest})\.\w{{32}}\.partial").values():
        partial.unlink()
    return manifest


def _still_whole(
    finished: Mapping[int, Shard], names: Sequence[str], present: Mapping[str, Path], overwrite: bool
) -> dict[int, Shard]:
    """The finished shards that are there; one that has changed is none of them, if it may be written over."""
    kept = {}
    for number, name in enumerate(names):
        shard = finished.get(number)
        if shard and name in present:
            if present[name].stat().st_size == shard.num_bytes:
                kept[number] = shard
            elif not overwrite:
                given = f"changed since it was finished with {shard.num_bytes} bytes"
                raise _foreign(present[name].parent, [name], given)
    return kept


@contextmanager
def held(folder: Path, base: str) -> Iterator[None]:
    """Hold the shards of this name against a second conversion, until this one and all its processes have ended.

    Where the system has no `flock` nothing is held.

    Raises:
        DataError: another conversion holds them, or the folder cannot be written.
    """
    path = folder / f".{base}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written.",
            given=str(error),
            expected="a folder that may be written",
            hint="name another folder, or let it be written",
        ) from error
    with file:
        if sys.platform != "win32":
            _lock(file.fileno(), path)
        yield


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"Shards of this name are being written in {path.parent} already.",
            given=f"{path}, held by another process",
            expected="one conversion at a time",
            hint="wait for it or stop it, or name another folder",
        ) from None


def _shard(content: Mapping[str, Any]) -> Shard:
    skipped = tuple(Skipped(str(each["name"]), str(each["reason"])) for each in content["skipped"])
    return Shard(int(content["num_records"]), int(content["num_bytes"]), skipped)


def _read_manifest(path: Path) -> Manifest | None:
    """The manifest that is kept there, or None.

    Raises:
        DataError: it cannot be read, or is none.
    """
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        content = json.loads(path.read_bytes())
        finished = {int(number): _shard(shard) for number, shard in content["finished"].items()}
        return Manifest(path, str(content["fingerprint"]), finished)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} does not say which shards are finished.",
            given=f"{type(error).__name__}: {error}",
            expected="what an earlier conversion wrote there",
            hint="delete it together with the shards beside it, or name another folder",
        ) from error


def _matching(folder: Path, pattern: str) -> dict[str, Path]:
    """What is in a folder under names that a regular expression matches."""
    return {path.name: path for path in sorted(folder.iterdir()) if re.fullmatch(pattern, path.name)}


def _foreign(folder: Path, names: Sequence[str], given: str) -> DataError:
    return DataError(
        f"There are shards in {folder} already: {shorten(names, _MOST_NAMED)}",
        given=f"shards that are {given}",
        expected="no shards of this name, or those of the same conversion, which then goes on",
        hint="name another folder, move them away, or ask to overwrite them",
    )
