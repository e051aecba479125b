"""Random numbers as arithmetic: a counter hash instead of a generator with a state.

Every number is a pure function of its key, so there is nothing to save, replay or pass on.
The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

UInt64s: TypeAlias = "npt.NDArray[np.uint64]"

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*key: int) -> int:
    """Hash a key of integers to 64 bits; the order of the key counts."""
    state = 0
    for part in key:
        state = (state ^ (part & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * _FIRST & _MASK
        state = (state ^ state >> 27) * _SECOND & _MASK
        state ^= state >> 31
    return state


def key_of(text: str) -> int:
    """Return a stable number for a name, as part of a key."""
    return zlib.crc32(text.encode())


def mix_arrays(*key: UInt64s | int) -> UInt64s:
    """The same hash as `mix`, over arrays that broadcast together."""
    state: UInt64s = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in key:
            state = (state ^ np.asarray(part, dtype=np.uint64)) + np.uint64(_GOLDEN)
            state = (state ^ state >> np.uint64(30)) * np.uint64(_FIRST)
            state = (state ^ state >> np.uint64(27)) * np.uint64(_SECOND)
            state = state ^ state >> np.uint64(31)
    return state


class Draws:
    """The random numbers of a batch of examples: a hash of (seed, position, column)."""

    def __init__(self, seed: int, positions: npt.NDArray[np.int64] | UInt64s) -> None:
        self.seed = seed
        self.positions = positions.astype(np.uint64)

    def again(self, turn: int) -> Draws:
        """Return other draws for the same examples, for the `turn`-th repeat of an augmentation; at turn 0 these."""
        return Draws(mix(self.seed, key_of("again"), turn), self.positions) if turn else self

    def uniform(self, column: str) -> npt.NDArray[np.float64]:
        """One number in [0, 1) for each example; shape (batch,)."""
        return self._fractions(self.positions, key_of(column))

    def columns(self, names: Sequence[str]) -> npt.NDArray[np.float64]:
        """The numbers that `uniform` gives for each of these columns; shape (columns, batch)."""
        keys = np.array([key_of(name) for name in names], dtype=np.uint64)
        return self._fractions(self.positions, keys[:, None])

    def uniforms(self, column: str, count: int) -> npt.NDArray[np.float64]:
        """Several numbers in [0, 1) for each example, of which more begin with the same ones; shape (batch, count)."""
        return self._fractions(self.positions[:, None], key_of(column), np.arange(count, dtype=np.uint64))

    def _fractions(self, *key: UInt64s | int) -> npt.NDArray[np.float64]:
        return (mix_arrays(self.seed & _MASK, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def of_rows(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Draws:
        """Return the draws of some of the examples."""
        return Draws(self.seed, self.positions[rows])

    def integers(self, column: str, low: int, high: int) -> npt.NDArray[np.int64]:
        """One whole number in [low, high) for each example; shape (batch,)."""
        return low + np.floor(self.uniform(column) * (high - low)).astype(np.int64)
