"""Shards whose images are made smaller, for good: from the files of records to others beside them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.convert.prepared_record import Preparation, prepared_record
from lockstep.convert.sharding import DEFAULT, Settings, Summary, convert
from lockstep.errors import InputError
from lockstep.images.decode import AS_STORED
from lockstep.records.record_files import RecordFiles

_SHARD = re.compile(r"(.+)-\d+-of-\d+")

_logger = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Prepared:
    """What `prepare` has made, and of how much."""

    summary: Summary
    num_bytes_before: int
    """Of the files that were read, compressed where they are."""


def prepare(
    shards: str | Path | Sequence[str | Path],
    output: Path,
    preparation: Preparation,
    *,
    base: str | None = None,
    settings: Settings = DEFAULT,
) -> Prepared:
    """Write the records of these shards, with smaller images, to as many shards in the folder `output`.

    The records keep their order, and what they hold but for what `prepared_record` changes. The shards are plain, named
    BASE-00000-of-00002, and all of about one number of records.

    Args:
        shards: a path, a pattern such as "train-*", or several of these, as `find_shards` takes them.
        output: another folder than that of the shards, made if need be.
        preparation: what becomes of the images. Its name goes into each record.
        base: the name before the number of a shard; by default that of the shards, if they have one.
        settings: how the conversion runs.

    Raises:
        InputError: `output` is a folder of the shards, or they have no name in common.
        DataError: a record that cannot be prepared, as `prepared_record`; or as `RecordFiles` and `convert`.
        WorkerError: as `convert`.
    """
    # Decoding processes are forked from this one, and must find the decoder's library loaded.
    _logger.info("Images are decoded by %s", AS_STORED.chosen)
    records = RecordFiles(shards)
    paths = [file.path for file in records.files]
    _check_apart(paths, output)
    versions = [[str(file.path), *file.index.version] for file in records.files]
    summary = convert(
        range(len(records)),
        lambda index: prepared_record(records.read(index), preparation, records.place(index)),
        output,
        base or _base_of(paths),
        len(paths),
        options={"preparation": str(preparation), "shards": versions},
        settings=settings,
    )
    return Prepared(summary, sum(file.index.version.size_bytes for file in records.files))


def _check_apart(paths: Sequence[Path], output: Path) -> None:
    """Refuse to write among the shards that are read: a pattern of theirs would stand for both."""
    for path in paths:
        if path.parent.resolve() == output.resolve():
            raise InputError(
                "Prepared shards cannot be written among those that they are made of.",
                given=f"the folder {output}, which holds {path.name}",
                expected="another folder",
                hint=f"name another one, such as {output / 'prepared'}",
            )


def _base_of(paths: Sequence[Path]) -> str:
    """The name that all shards begin with."""
    bases = {match[1] if (match := _SHARD.match(path.name)) else path.name.split(".")[0] for path in paths}
    if len(bases) == 1:
        return bases.pop()
    raise InputError(
        "The shards have no name in common.",
        given=", ".join(sorted(bases)),
        expected="shards of one name, such as train-00000-of-00002 and train-00001-of-00002",
        hint="say how those that are written are to be called, such as train",
    )
