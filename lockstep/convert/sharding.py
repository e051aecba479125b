"""Convert items to records in shards, written by several processes: what all converters share."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from lockstep.checks import Checked, NonNegativeInt, PositiveInt, check_type, check_value
from lockstep.convert.conversion_state import (
    ConversionState,
    Shard,
    SkippedItem,
    conversion_fingerprint,
    lock_shards,
    start_or_resume,
)
from lockstep.convert.worker_pool import run_tasks
from lockstep.cores import usable_cores
from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError
from lockstep.records.shards import check_local
from lockstep.records.tfrecord import frame
from lockstep.screen import log
from lockstep.types import ProgressFunction

Item = TypeVar("Item")


@dataclass(frozen=True)
class Summary:
    """The result of a conversion; shards kept from an earlier start count too, but not in the seconds."""

    num_shards: int
    num_kept: int
    """Shards finished by an earlier start."""
    num_records: int
    num_bytes: int
    skipped: tuple[SkippedItem, ...]
    seconds: float

    def __add__(self, other: Summary) -> Summary:
        """Add up two conversions, field by field."""
        return Summary(*(getattr(self, name) + getattr(other, name) for name in Summary.__dataclass_fields__))


@dataclass(frozen=True)
class Settings(Checked):
    """Settings of a conversion that do not change the bytes of the shards."""

    num_processes: PositiveInt | None = None
    """By default one for each usable core."""
    max_skipped: NonNegativeInt | None = None
    """Items that may be skipped; None: any number."""
    overwrite: bool = False
    """Overwrite the shards of another conversion."""
    progress: ProgressFunction | None = None
    """Called after each item with the numbers of items done and of all items."""


DEFAULT = Settings()


def convert(
    items: Sequence[Item],
    serialize: Callable[[Item], bytes | SkippedItem],
    output: Path,
    base: str,
    num_shards: int,
    *,
    options: Mapping[str, object] | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the records of all items to the files BASE-00000-of-00002, BASE-00001-of-00002 ... in the folder `output`.

    Shard i starts with item floor(i * items / shards), as in the TensorFlow reference's builders. The bytes do not
    depend on the number of processes, nor on how often they were stopped: the same call again keeps finished shards. A
    conversion is the same if the number of shards, the options and the `repr` of every item are. The hidden file
    .BASE.conversion.json holds their hash, and lists the skipped items.

    Args:
        items: handed to the processes by fork.
        serialize: makes the record of an item, or says why it is skipped. What it raises comes through.
        output: the folder, made if need be.
        base: the name before the number of a shard.
        num_shards: 1 up to the number of items.
        options: what else decides the bytes of the records, as values of JSON.
        settings: how the conversion runs.

    Raises:
        DataError: there are shards of another conversion; or more items were skipped than allowed, or all.
        WorkerError: a process died, or `serialize` raised something that is no error of Lockstep.
    """
    _check(len(items), output, base, num_shards)
    started = time.monotonic()
    with lock_shards(output, base):
        names = [shard_name(base, number, num_shards) for number in range(num_shards)]
        fingerprint = conversion_fingerprint(items, options or {}, num_shards)
        state = start_or_resume(output, base, names, fingerprint, overwrite=settings.overwrite)
        num_kept = len(state.finished)
        _write_missing(_Conversion(items, serialize, output, base, num_shards), state, settings)
    shards = [state.finished[number] for number in range(num_shards)]
    skipped = tuple(each for shard in shards for each in shard.skipped)
    num_records = sum(shard.num_records for shard in shards)
    if not num_records:
        raise _too_many(skipped, f"all {len(items)} items skipped", "one record or more")
    num_bytes = sum(shard.num_bytes for shard in shards)
    return Summary(num_shards, num_kept, num_records, num_bytes, skipped, time.monotonic() - started)


def shard_name(base: str, number: int, num_shards: int) -> str:
    """Format the name of a shard: "train-00003-of-00128"."""
    return f"{base}-{number:05d}-of-{num_shards:05d}"


class _Finished(NamedTuple):
    """The event that a shard is whole and in its place."""

    number: int
    shard: Shard


@dataclass(frozen=True)
class _Conversion:
    """Which items become which shards."""

    items: Sequence[object]
    serialize: Callable[..., bytes | SkippedItem]
    output: Path
    base: str
    num_shards: int

    def range_of(self, number: int) -> range:
        """Return the indices of the items in a shard."""
        bounds = np.linspace(0, len(self.items), self.num_shards + 1).astype(int)
        return range(*bounds[number : number + 2].tolist())

    def write(self, number: int) -> Generator[SkippedItem | _Finished | None, None, None]:
        """Write a shard. Yields None or `SkippedItem` after each item, then `_Finished`."""
        path = self.output / shard_name(self.base, number, self.num_shards)
        num_records, skipped = 0, []
        with atomic_write(path, parents=True, failure=DataError) as file:
            for index in self.range_of(number):
                made = self.serialize(self.items[index])
                if isinstance(made, SkippedItem):
                    skipped.append(made)
                    yield made
                else:
                    file.write(frame(made))
                    num_records += 1
                    yield None
            num_bytes = file.tell()
        yield _Finished(number, Shard(num_records, num_bytes, tuple(skipped)))


def _write_missing(conversion: _Conversion, state: ConversionState, settings: Settings) -> None:
    """Write the shards that are not finished."""
    num_items = len(conversion.items)
    skipped = [each for shard in state.finished.values() for each in shard.skipped]
    done = sum(len(conversion.range_of(number)) for number in state.finished)
    missing = [number for number in range(conversion.num_shards) if number not in state.finished]
    _check_skipped(skipped, settings.max_skipped)
    with closing(run_tasks(missing, conversion.write, settings.num_processes or usable_cores())) as events:
        for event in events:
            if isinstance(event, _Finished):
                state.add(*event)
                continue
            done += 1
            if event is not None:
                log.warning("Skipped %s: %s", event.name, event.reason)
                skipped.append(event)
                _check_skipped(skipped, settings.max_skipped)
            if settings.progress:
                settings.progress(done, num_items)


def _check(num_items: int, output: Path, base: str, num_shards: int) -> None:
    check_local(output)
    check_type("num_shards", num_shards, int, expected="a whole number", hint="give the number of files to write")
    check_value("num_shards", num_shards, PositiveInt)
    if num_items < num_shards:
        raise InputError(
            f"There are too few items for {num_shards} shards of {base}.",
            given=f"{num_items} items",
            expected="one item or more for each shard",
            hint="ask for fewer shards" if num_items else "check where the items come from",
        )


def _check_skipped(skipped: Sequence[SkippedItem], most: int | None) -> None:
    if most is not None and len(skipped) > most:
        raise _too_many(skipped, f"{len(skipped)} skipped", f"at most {most} skipped")


def _too_many(skipped: Sequence[SkippedItem], given: str, expected: str) -> DataError:
    last = skipped[-1]
    return DataError(
        f"Too many items cannot be converted, at last {last.name}.",
        given=f"{given}; {last.name}: {last.reason}",
        expected=expected,
        hint="repair them, leave them out, or allow more to be skipped: finished shards are kept",
    )
