"""The global random generators of the process, seeded for each example by its position, and put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lockstep.data.rows import Rows
from lockstep.randomness import key_of, mix, mix_arrays
from lockstep.readers.reader import ItemReader
from lockstep.workers.random_streams import RandomStreams

_KEY = key_of("global generators")
_MASK = (1 << 64) - 1
_CPU = torch.device("cpu")

_spare: list[RandomStreams] = []
"""Streams that nobody uses now: to make them costs more than to use them."""


def seed_global_generators(seed: int, position: int) -> None:
    """Seed Python's, numpy's and torch's generators by a hash of the seed and the position of an example."""
    _seed_all(mix(seed, position, _KEY))


@contextmanager
def restore_global_generators() -> Iterator[RandomStreams]:
    """Put the three global generators back, after the block, to where they were before it."""
    streams = _spare.pop() if _spare else RandomStreams(_CPU)
    streams.set_aside()
    try:
        yield streams
    finally:
        streams.put_back()
        _spare.append(streams)


def seeded_items(reader: ItemReader, rows: Rows, seed: int) -> list[Any]:
    """Read the items of some rows, each with the generators as `seed_global_generators` seeds them for its position.

    Torch's generator is seeded for each item. To seed Python's and numpy's takes five times as long, and few items draw
    from them: they are seeded for the first item, and if the items have moved one, all are read again with that one
    seeded for each; after that it always is. What an item draws once and keeps so depends on the seed and the batch
    alone.
    """
    keys = mix_arrays(seed & _MASK, rows.positions.astype(np.uint64), _KEY).tolist()
    with restore_global_generators() as streams:
        if keys:
            _seed_all(keys[0])
        if (before := streams.marks()) is None:
            reader.draws_from_numpy = reader.draws_from_python = True
        while True:
            try:
                items = _read_seeded(reader, rows.indices.tolist(), keys)
            except Exception:
                if not _draws_more(reader, streams, before):
                    raise
            else:
                if not _draws_more(reader, streams, before):
                    return items


def _read_seeded(reader: ItemReader, indices: list[int], keys: list[int]) -> list[Any]:
    seed_torch = torch.default_generator.manual_seed
    items = []
    for index, key in zip(indices, keys, strict=True):
        seed_torch(key)
        if reader.draws_from_numpy:
            _seed_numpy(key)
        if reader.draws_from_python:
            random.seed(key)
        items.append(reader.item(index))
    return items


def _draws_more(reader: ItemReader, streams: RandomStreams, before: tuple[object, object] | None) -> bool:
    """Note which streams the items have moved; returns whether one of them was not known to be drawn from."""
    if before is None or (after := streams.marks()) == before:
        return False
    numpy, python = after is None or after[0] != before[0], after is None or after[1] != before[1]
    is_new = (numpy and not reader.draws_from_numpy) or (python and not reader.draws_from_python)
    reader.draws_from_numpy |= numpy
    reader.draws_from_python |= python
    return is_new


def _seed_all(key: int) -> None:
    random.seed(key)
    _seed_numpy(key)
    torch.default_generator.manual_seed(key)


def _seed_numpy(key: int) -> None:
    np.random.seed(key & 0xFFFFFFFF)
