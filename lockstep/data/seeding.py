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
    from them: they are seeded for the first item, and an item that moves them is read again with both seeded for it;
    after that they always are. What an item draws once and keeps so depends on the seed and the batch alone.
    """
    keys = mix_arrays(seed & _MASK, rows.positions.astype(np.uint64), _KEY).tolist()
    with restore_global_generators() as streams:
        if keys and not reader.draws_beyond_torch:
            _seed_all(keys[0])
        before = streams.state()
        return [
            _item(reader, index, key, streams, before) for index, key in zip(rows.indices.tolist(), keys, strict=True)
        ]


def _item(reader: ItemReader, index: int, key: int, streams: RandomStreams, before: tuple[object, ...] | None) -> Any:
    if not reader.draws_beyond_torch and before is not None:
        torch.default_generator.manual_seed(key)
        try:
            item = reader.item(index)
        except Exception:
            if streams.state() == before:
                raise
        else:
            if streams.state() == before:
                return item
    reader.draws_beyond_torch = True
    _seed_all(key)
    return reader.item(index)


def _seed_all(key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
