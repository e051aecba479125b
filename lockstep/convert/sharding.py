"""The machine of all converters: items become records, in shards that several processes write."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from lockstep.checks import check_range, check_type
from lockstep.convert.crew import work_off
from lockstep.convert.manifest import Manifest, Shard, Skipped, claim, fingerprint, held
from lockstep.cores import usable_cores
from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError
from lockstep.records.shards import check_local
from lockstep.records.tfrecord import frame

Item = TypeVar("Item")
Progress = Callable[[int, int], None]

_logger = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Summary:
    """What a conversion has made; that of an earlier start which was kept counts too, but for the seconds."""

    num_shards: int
    num_kept: int
    """Shards that were finished before this start."""
    num_records: int
    num_bytes: int
    skipped: tuple[Skipped, ...]
    """In the order of the items."""
    seconds: float

    def __add__(self, other: Summary) -> Summary:
        """Both conversions as one."""
        return Summary(
            self.num_shards + other.num_shards,
            self.num_kept + other.num_kept,
            self.num_records + other.num_records,
            self.num_bytes + other.num_bytes,
            self.skipped + other.skipped,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Settings:
    """How a conversion runs; its bytes do not depend on it.

    Raises:
        InputError: a number is out of range.
    """

    num_processes: int | None = None
    """By default one for each core that may be used."""
    max_skipped: int | None = None
    """Items that may be skipped; by default any number."""
    overwrite: bool = False
    """Write over the shards of another conversion."""
    progress: Progress | None = None
    """Called with the number of items done and of all, after each."""

    def __post_init__(self) -> None:
        if self.num_processes is not None:
            check_range("num_processes", self.num_processes, 1)
        if self.max_skipped is not None:
            check_range("max_skipped", self.max_skipped, 0)


DEFAULT = Settings()


def convert(
    items: Sequence[Item],
    serialize: Callable[[Item], bytes | Skipped],
    output: Path,
    base: str,
    num_shards: int,
    *,
    options: Mapping[str, object] | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the records of all items to the files BASE-00000-of-00002, BASE-00001-of-00002 ... in the folder `output`.

    Shard i holds the items from the whole part of i * items / shards on, as in the TensorFlow reference's builders. The
    bytes are the same however many processes write, and however often they were stopped: a finished shard is kept when
    the same conversion is asked for again. What tells one conversion from another is the number of shards, the options
    and the `repr` of every item, kept in the hidden file .BASE.conversion.json, which also lists what was skipped.

    Args:
        items: what to convert. They reach the processes by fork.
        serialize: makes the record of an item, or says why there is none.
        output: the folder, made if need be.
        base: the name before the number of the shard.
        num_shards: 1 up to the number of items.
        options: what else decides the bytes of the records, as values of JSON.
        settings: how it runs.

    Raises:
        InputError: there are fewer items than shards, or no shards.
        DataError: shards of another conversion are there; more was skipped than allowed, or everything; the system
            refuses to write. What `serialize` raises comes through as it is.
        WorkerError: a process died, or `serialize` raised no error of Lockstep.
    """
    _check(len(items), output, base, num_shards)
    started = time.monotonic()
    with held(output, base):
        names = [shard_name(base, number, num_shards) for number in range(num_shards)]
        made_of = fingerprint(items, options or {}, num_shards)
        manifest = claim(output, base, names, made_of, overwrite=settings.overwrite)
        num_kept = len(manifest.finished)
        conversion = _Conversion(items, serialize, output, base, num_shards)
        _write_missing(conversion, manifest, settings)
    shards = [manifest.finished[number] for number in range(num_shards)]
    skipped = tuple(each for shard in shards for each in shard.skipped)
    num_records = sum(shard.num_records for shard in shards)
    if not num_records:
        raise _too_many(skipped, f"all {len(items)} items skipped", "one record or more")
    num_bytes = sum(shard.num_bytes for shard in shards)
    return Summary(num_shards, num_kept, num_records, num_bytes, skipped, time.monotonic() - started)


def shard_name(base: str, number: int, num_shards: int) -> str:
    """The name of a shard: "train-00003-of-00128"."""
    return f"{base}-{number:05d}-of-{num_shards:05d}"


class _Finished(NamedTuple):
    """A shard stands whole in its place."""

    number: int
    shard: Shard


@dataclass(frozen=True)
class _Conversion:
    """What is converted into what."""

    items: Sequence[object]
    serialize: Callable[..., bytes | Skipped]
    output: Path
    base: str
    num_shards: int

    def range_of(self, number: int) -> range:
        """Which items a shard holds."""
        bounds = np.linspace(0, len(self.items), self.num_shards + 1).astype(int)
        return range(*bounds[number : number + 2].tolist())

    def write(self, number: int) -> Generator[Skipped | _Finished | None, None, None]:
        """Write a shard; yields None or `Skipped` after each item, and at last that it is finished."""
        path = self.output / shard_name(self.base, number, self.num_shards)
        num_records, skipped = 0, []
        with atomic_write(path, parents=True, failure=DataError) as file:
            for index in self.range_of(number):
                made = self.serialize(self.items[index])
                if isinstance(made, Skipped):
                    skipped.append(made)
                    yield made
                else:
                    file.write(frame(made))
                    num_records += 1
                    yield None
            num_bytes = file.tell()
        yield _Finished(number, Shard(num_records, num_bytes, tuple(skipped)))


def _write_missing(conversion: _Conversion, manifest: Manifest, settings: Settings) -> None:
    """Write the shards that are not finished."""
    num_items = len(conversion.items)
    skipped = [each for shard in manifest.finished.values() for each in shard.skipped]
    done = sum(len(conversion.range_of(number)) for number in manifest.finished)
    missing = [number for number in range(conversion.num_shards) if number not in manifest.finished]
    _check_skipped(skipped, settings.max_skipped)
    with closing(work_off(missing, conversion.write, settings.num_processes or usable_cores())) as events:
        for event in events:
            if isinstance(event, _Finished):
                manifest.add(*event)
                continue
            done += 1
            if event is not None:
                _logger.warning("Skipped %s: %s", event.name, event.reason)
                skipped.append(event)
                _check_skipped(skipped, settings.max_skipped)
            if settings.progress:
                settings.progress(done, num_items)


def _check(num_items: int, output: Path, base: str, num_shards: int) -> None:
    check_local(output)
    check_type("num_shards", num_shards, int, expected="a whole number", hint="give the number of files to write")
    check_range("num_shards", num_shards, 1)
    if num_items < num_shards:
        raise InputError(
            f"There are too few items for {num_shards} shards of {base}.",
            given=f"{num_items} items",
            expected="one item or more for each shard",
            hint="ask for fewer shards" if num_items else "check where the items come from",
        )


def _check_skipped(skipped: Sequence[Skipped], most: int | None) -> None:
    if most is not None and len(skipped) > most:
        raise _too_many(skipped, f"{len(skipped)} skipped", f"at most {most} skipped")


def _too_many(skipped: Sequence[Skipped], given: str, expected: str) -> DataError:
    last = skipped[-1]
    return DataError(
        f"Too many items cannot be converted, at last {last.name}.",
        given=f"{given}; {last.name}: {last.reason}",
        expected=expected,
        hint="repair them, leave them out, or allow more to be skipped: finished shards are kept",
    )
