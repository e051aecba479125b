"""The state of a conversion, kept beside its shards: what it converts, and which shards are finished.

The bytes of a shard do not say what it was made of. With this state a conversion that was stopped keeps the shards it
has finished, and never takes those of another conversion for its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.screen import log

_MAX_BYTES = 1 << 30
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class SkippedItem:
    """An item that could not be converted."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished shard."""

    num_records: int
    num_bytes: int
    skipped: tuple[SkippedItem, ...] = ()


@dataclass
class ConversionState:
    """The fingerprint of a conversion, and its finished shards by number; kept in the file `path`."""

    path: Path
    fingerprint: str
    finished: dict[int, Shard] = field(default_factory=dict)

    def add(self, number: int, shard: Shard) -> None:
        """Note that a shard is finished, and save."""
        self.finished[number] = shard
        self.save()

    def save(self) -> None:
        """Write the file atomically."""
        finished = {str(number): asdict(shard) for number, shard in sorted(self.finished.items())}
        content = {"fingerprint": self.fingerprint, "finished": finished}
        with atomic_write(self.path, parents=True, failure=DataError) as file:
            file.write(json.dumps(content, indent=1).encode())


def conversion_fingerprint(items: Iterable[object], options: Mapping[str, object], num_shards: int) -> str:
    """Hash everything that decides the bytes of the shards; of each item its `repr`."""
    total = hashlib.sha256(json.dumps([num_shards, options], sort_keys=True).encode())
    for item in items:
        total.update(repr(item).encode(errors="surrogateescape") + b"\0")
    return total.hexdigest()


def start_or_resume(
    folder: Path, base: str, names: Sequence[str], fingerprint: str, *, overwrite: bool
) -> ConversionState:
    """Load the saved state of a conversion, or make a new one. The folder must be locked by `lock_shards`.

    Deletes the half-written files of a start that was killed: a live one would hold the lock. With `overwrite` shards
    of another conversion are overwritten; those that stay, with other names, are logged.

    Raises:
        DataError: there are shards of another conversion, or shards that have changed since; or the state cannot be
            read or written.
    """
    # Hidden, so that no pattern of shards matches it.
    path = folder / f".{base}.conversion.json"
    state = _load(path)
    present = _matching(folder, rf"{re.escape(base)}-\d{{5,}}-of-\d{{5,}}")
    if state is None or state.fingerprint != fingerprint:
        if present and not overwrite:
            raise _foreign(folder, [*present], "made of something else" if state else "of unknown origin")
        state = ConversionState(path, fingerprint)
    state.finished = _unchanged(state.finished, names, present, overwrite)
    state.save()
    if others := sorted({*present} - {*names}):
        log.warning("Left in %s, and of another conversion: %s", folder, shorten(others, _MAX_NAMED))
    shard_or_state = rf"{re.escape(base)}-\d+-of-\d+|{re.escape(path.name)}"
    for partial in _matching(folder, rf"\.({shard_or_state})\.\w{{32}}\.partial").values():
        partial.unlink()
    return state


def _unchanged(
    finished: Mapping[int, Shard], names: Sequence[str], present: Mapping[str, Path], overwrite: bool
) -> dict[int, Shard]:
    """Return the finished shards that are there with their size; another size is an error, or is overwritten."""
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
def lock_shards(folder: Path, base: str) -> Iterator[None]:
    """Lock the shards of this name against a second conversion, until this one and all its processes have ended."""
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"Shards of this name are being written in {folder} already.",
                given=f"{path}, held by another process",
                expected="one conversion at a time",
                hint="wait for it or stop it, or name another folder",
            ) from None
        yield


def _load(path: Path) -> ConversionState | None:
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        content = json.loads(path.read_bytes())
        finished = {int(number): _shard(shard) for number, shard in content["finished"].items()}
        return ConversionState(path, str(content["fingerprint"]), finished)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} does not say which shards are finished.",
            given=f"{type(error).__name__}: {error}",
            expected="what an earlier conversion wrote there",
            hint="delete it together with the shards beside it, or name another folder",
        ) from error


def _shard(content: Mapping[str, Any]) -> Shard:
    skipped = tuple(SkippedItem(str(each["name"]), str(each["reason"])) for each in content["skipped"])
    return Shard(int(content["num_records"]), int(content["num_bytes"]), skipped)


def _matching(folder: Path, pattern: str) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir()) if re.fullmatch(pattern, path.name)}


def _foreign(folder: Path, names: Sequence[str], given: str) -> DataError:
    return DataError(
        f"There are shards in {folder} already: {shorten(names, _MAX_NAMED)}",
        given=f"shards that are {given}",
        expected="no shards of this name, or those of the same conversion, which then goes on",
        hint="name another folder, move them away, or ask to overwrite them",
    )
