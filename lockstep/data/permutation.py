"""Permutations of 0 to size - 1 as arithmetic: any place of any of them, in constant memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lockstep.randomness import UInt64s

Int64s = npt.NDArray[np.int64]

_ROUNDS = 6
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permuted(places: Int64s | UInt64s, keys: UInt64s, sizes: Int64s | int) -> Int64s:
    """What stands at each place of the permutation of its key; keys and sizes broadcast to the places.

    A Feistel network over pairs of mixed radix whose product barely exceeds the size (Black, Rogaway: Ciphers with
    arbitrary finite domains, 2002), repeated for the few values that fall outside (cycle walking). Every place has to
    be below its size.
    """
    bounds = np.asarray(sizes, dtype=np.uint64)
    values = _passed_once(places.astype(np.uint64, copy=False), keys, bounds)
    outside = np.flatnonzero(values >= bounds)
    if outside.size:
        keys, bounds = np.broadcast_to(keys, values.shape), np.broadcast_to(bounds, values.shape)
    while outside.size:
        values[outside] = _passed_once(values[outside], keys[outside], bounds[outside])
        outside = outside[values[outside] >= bounds[outside]]
    return values.astype(np.int64)


def _passed_once(values: UInt64s, keys: UInt64s, sizes: UInt64s) -> UInt64s:
    """Permute 0 to a * b - 1, where a * b is the first such product at or above the size with a = ceil(sqrt(size))."""
    num_rows = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    num_columns = (sizes + num_rows - _ONE) // num_rows
    rows, columns = np.divmod(values, num_columns)
    for number in range(0, _ROUNDS, 2):
        rows = _shifted(rows, num_rows, keys, number, columns)
        columns = _shifted(columns, num_columns, keys, number + 1, rows)
    passed: UInt64s = rows * num_columns + columns
    return passed


def _shifted(half: UInt64s, modulus: UInt64s, keys: UInt64s, number: int, other: UInt64s) -> UInt64s:
    """One round: add a hash of the key, the round and the other half, modulo `modulus`."""
    # In place, and lighter than `mix_arrays`: this is most of what the stream costs when the examples lie in memory.
    shifted = other + np.uint64(number << 40)
    shifted ^= keys
    shifted *= _FIRST
    shifted ^= shifted >> _HALF
    shifted *= _SECOND
    shifted >>= _HALF
    shifted *= modulus  # The upper half of 32 random bits times the modulus is a number below it.
    shifted >>= _HALF
    shifted += half
    # Unsigned: where nothing has to be taken off, the difference wraps round and is the larger of the two.
    reduced: UInt64s = np.minimum(shifted, shifted - modulus)
    return reduced
