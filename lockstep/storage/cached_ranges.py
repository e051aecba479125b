"""Ranges of objects, read through the cache of blocks: what is missing is fetched by large requests, all at once.

With a cache that all of the data fits into, what is near is fetched along, for it is needed before the epoch ends.
Where it does not fit, this is done only in places that have been read of lately: with `BlockShuffled` the neighbours
are needed soon, and with `Shuffled` they would be dropped before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lockstep.screen import log
from lockstep.storage.block_cache import BLOCK_BYTES, BlockCache, BlockKey, block_key, object_id, open_block_cache
from lockstep.storage.ranges import ObjectRange, fetch_ranges
from lockstep.storage.remote_path import ObjectStat, RemotePath

_STRETCH = (1 << 20) // BLOCK_BYTES
"""Neighbours that are fetched together."""
_WAVE, _WAVES_UNDER_WAY = (1 << 23) // BLOCK_BYTES, 3
"""What is asked for at once; the next ones are on their way while one is written to the disk."""
_REMEMBERED_PART, _MOST_REMEMBERED = 4, 1 << 14
"""Stretches that have been read of lately are those of the last quarter of what the cache keeps, and not more."""


class _Object(NamedTuple):
    """One version of an object."""

    path: RemotePath
    version: ObjectStat
    id: bytes

    def key(self, number: int) -> BlockKey:
        return block_key(self.id, number)

    def range_of(self, numbers: range) -> ObjectRange:
        """Return the bytes of blocks: all have `BLOCK_BYTES` but for the last one of the object."""
        start = numbers.start * BLOCK_BYTES
        stop = min(numbers.stop * BLOCK_BYTES, self.version.st_size)
        return ObjectRange(self.path, self.version, start, stop - start)


Wave = list[tuple[_Object, range]]
"""Runs of blocks that are asked for at once."""
Blocks = dict[int, bytes | None]
"""Blocks of an object by their numbers, in order; None for one that is not there."""


class CachedRanges:
    """Reads ranges of objects as `fetch_ranges` does, each block once for as long as it is in the cache.

    It may be forked and pickled, and used by several threads. The cache is opened, or made, by the first read: see
    `open_block_cache` for its size, in 10**9 bytes. Without a folder nothing is kept.
    """

    def __init__(self, folder: Path | None, cache_gb: float | None = None) -> None:
        self._folder, self._cache_gb = folder, cache_gb
        self._total_bytes = 0
        self._lately: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    def expect(self, num_bytes: int) -> None:
        """Expect that objects of this size, together, are read each epoch; where they do not fit it is told."""
        self._total_bytes += num_bytes
        if num_bytes and (cache := self._cache) and self._total_bytes > cache.fitting_bytes:
            log.info(
                "The data of %.1f GB does not fit into the cache, which keeps %.1f GB: each epoch reads it from the "
                "network again. Raise data.cache_gb; or have neighbours read together by "
                "feed.order.kind=block_shuffled and feed.order.block_size=32, which is another order of the examples",
                *(self._total_bytes / 1e9, cache.fitting_bytes / 1e9),
                chief_only=True,
            )

    @property
    def _cache(self) -> BlockCache | None:
        return open_block_cache(self._folder, self._cache_gb)

    def read(self, wanted: Sequence[ObjectRange]) -> list[bytes]:
        """Read ranges, all at once, and return them in the order of `wanted`; errors are those of `fetch_ranges`."""
        if not wanted or (cache := self._cache) is None:
            return fetch_ranges(wanted)
        found: list[bytes] = []
        lacking: list[tuple[int, _Object, Blocks]] = []
        missing: dict[_Object, set[int]] = {}
        for place, each in enumerate(wanted):
            of = _object_of(each)
            blocks = {number: _kept(cache, of, number) for number in _blocks_of(each)}
            if absent := {number for number, block in blocks.items() if block is None}:
                lacking.append((place, of, blocks))
                missing.setdefault(of, set()).update(absent)
            # At once: the memory of its blocks serves for the next ones.
            found.append(b"" if absent else _joined(each, blocks))
        if missing:
            fetched = self._fetched(cache, missing)
            for place, of, blocks in lacking:
                blocks.update({number: fetched[of, number] for number, block in blocks.items() if block is None})
                found[place] = _joined(wanted[place], blocks)
        return found

    def forget(self, wanted: ObjectRange) -> None:
        """Drop a range from the cache: what it holds has turned out to be damaged before it came there."""
        if cache := self._cache:
            for number in _blocks_of(wanted):
                cache.forget(_object_of(wanted).key(number))

    def _fetched(self, cache: BlockCache, missing: Mapping[_Object, set[int]]) -> dict[tuple[_Object, int], bytes]:
        """Fetch blocks and what is near them, keep all, and return those that were missing.

        First come those that nobody else fetches now; then the others, once they are there.
        """
        spans = [(of, span) for of, numbers in missing.items() for span in self._spans(cache, of, numbers)]
        blocks: dict[tuple[_Object, int], bytes] = {}
        for waits in (False, True):
            with cache.claimed([(of.id, span) for of, span in spans], waits=waits) as ours:
                blocks |= _fill(cache, [span for span, is_ours in zip(spans, ours, strict=True) if is_ours], missing)
            spans = [span for span, is_ours in zip(spans, ours, strict=True) if not is_ours]
        return blocks

    def _spans(self, cache: BlockCache, of: _Object, numbers: set[int]) -> list[range]:
        """Choose what is fetched for missing blocks of an object: the stretches that they are in, or they alone."""
        num_blocks = -(-of.version.st_size // BLOCK_BYTES)
        chosen = {*numbers}
        for start in {number - number % _STRETCH for number in numbers}:
            if self._reads_ahead(cache, of, start):
                chosen |= {*range(start, min(start + _STRETCH, num_blocks))}
        return _runs(sorted(chosen))

    def _reads_ahead(self, cache: BlockCache, of: _Object, start: int) -> bool:
        """Tell whether a stretch is fetched as a whole, and remember that it has been read of."""
        if not cache.may_write:
            return False
        if self._total_bytes <= cache.fitting_bytes or (of.id, start) in self._lately:
            return True
        self._lately[of.id, start] = None
        most = cache.fitting_bytes // (_REMEMBERED_PART * _STRETCH * BLOCK_BYTES)
        if len(self._lately) > min(most, _MOST_REMEMBERED):
            self._lately.popitem(last=False)
        return False


def _object_of(wanted: ObjectRange) -> _Object:
    return _Object(wanted.path, wanted.version, object_id(str(wanted.path), *wanted.version))


def _blocks_of(wanted: ObjectRange) -> range:
    stop = min(wanted.offset + wanted.size, wanted.version.st_size)
    return range(wanted.offset // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if stop > wanted.offset else range(0)


def _kept(cache: BlockCache, of: _Object, number: int) -> bytes | None:
    return cache.get(of.key(number), min(BLOCK_BYTES, of.version.st_size - number * BLOCK_BYTES))


def _fill(
    cache: BlockCache, spans: Sequence[tuple[_Object, range]], missing: Mapping[_Object, set[int]]
) -> dict[tuple[_Object, int], bytes]:
    """Fetch what spans lack, and keep it; return the blocks in them that were missing, whoever has fetched them."""
    blocks: dict[tuple[_Object, int], bytes] = {}
    runs = []
    for of, span in spans:
        lacking = []
        for number in span:
            if number not in missing[of]:
                is_there = cache.has(of.key(number))
            elif is_there := (data := _kept(cache, of, number)) is not None:
                blocks[of, number] = data
            if not is_there:
                lacking.append(number)
        runs += [(of, run) for run in _runs(lacking)]
    for (of, run), data in _in_turn(_waves(runs)):
        for number in run:
            at = (number - run.start) * BLOCK_BYTES
            block = data[at : at + BLOCK_BYTES]
            cache.put(of.key(number), block)
            if number in missing[of]:
                blocks[of, number] = block
    return blocks


def _in_turn(waves: Sequence[Wave]) -> Iterator[tuple[tuple[_Object, range], bytes]]:
    """Fetch waves in their order, `_WAVES_UNDER_WAY` at once: what is taken makes room for the next one."""
    left = iter(waves)
    with ThreadPoolExecutor(_WAVES_UNDER_WAY) as pool:
        under_way = deque((wave, pool.submit(_contents_of, wave)) for wave in islice(left, _WAVES_UNDER_WAY))
        while under_way:
            wave, contents = under_way.popleft()
            yield from zip(wave, contents.result(), strict=True)
            del contents
            under_way.extend((wave, pool.submit(_contents_of, wave)) for wave in islice(left, 1))


def _waves(runs: Sequence[tuple[_Object, range]]) -> list[Wave]:
    """Divide what is fetched, so that some is on its way while some is written to the disk."""
    waves: list[Wave] = []
    num_blocks = _WAVE
    for run in runs:
        if num_blocks >= _WAVE:
            waves.append([])
            num_blocks = 0
        waves[-1].append(run)
        num_blocks += len(run[1])
    return waves


def _contents_of(wave: Sequence[tuple[_Object, range]]) -> list[bytes]:
    return fetch_ranges([of.range_of(run) for of, run in wave])


def _runs(numbers: Sequence[int]) -> list[range]:
    """Put numbers that follow one another together."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _joined(wanted: ObjectRange, blocks: Blocks) -> bytes:
    """Put a range together from its blocks, which are all there, in their order."""
    start = wanted.offset % BLOCK_BYTES
    parts = [memoryview(block) for block in blocks.values() if block is not None]
    if parts:
        size = min(wanted.size, wanted.version.st_size - wanted.offset)
        parts[-1] = parts[-1][: start + size - (len(parts) - 1) * BLOCK_BYTES]
        parts[0] = parts[0][start:]
    return b"".join(parts)
