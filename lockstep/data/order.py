"""Which example stands at which position of the stream: arithmetic, so that nothing has to be stored or replayed."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.errors import InputError
from lockstep.randomness import UInt64s, key_of, mix, mix_arrays

Int64s = npt.NDArray[np.int64]

_ROUNDS = 6
_HALF = np.uint64(32)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Order(Protocol):
    """An order of the examples: a value without state."""

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position of a stream over `size` examples; each once per epoch."""
        ...


@dataclass(frozen=True)
class Sequential:
    """The order of the reader, again and again."""

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position; the seed does not count."""
        return positions % size


@dataclass(frozen=True)
class Shuffled:
    """Another permutation of all examples each epoch, in constant memory and without a start-up cost.

    The index at position p is a keyed permutation of p % size, keyed by the seed and the epoch p // size: a Feistel
    network over pairs of mixed radix whose product barely exceeds the size (Black, Rogaway: Ciphers with arbitrary
    finite domains, 2002), repeated for the few values that fall outside (cycle walking).
    """

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position; the positions may lie in several epochs."""
        epochs, places = np.divmod(positions.astype(np.uint64), np.uint64(size))
        keys = mix_arrays(mix(seed, key_of("order")), epochs)
        places = _permuted(places, keys, size)
        while (outside := np.flatnonzero(places >= size)).size:
            places[outside] = _permuted(places[outside], keys[outside], size)
        return places.astype(np.int64)


def _permuted(values: UInt64s, keys: UInt64s, size: int) -> UInt64s:
    """Permute 0 .. a * b - 1, where a * b is the first such product at or above `size` with a = ceil(sqrt(size))."""
    num_rows = isqrt(size - 1) + 1
    num_columns = -(-size // num_rows)
    rows, columns = np.divmod(values, np.uint64(num_columns))
    for number in range(0, _ROUNDS, 2):
        rows = _shifted(rows, num_rows, keys, number, columns)
        columns = _shifted(columns, num_columns, keys, number + 1, rows)
    return rows * np.uint64(num_columns) + columns


def _shifted(half: UInt64s, modulus: int, keys: UInt64s, number: int, other: UInt64s) -> UInt64s:
    """One round: add a hash of the key, the round and the other half, modulo `modulus`."""
    # In place, and lighter than `mix_arrays`: this is most of what the stream costs when the examples lie in memory.
    shifted = other + np.uint64(number << 40)
    shifted ^= keys
    shifted *= _FIRST
    shifted ^= shifted >> _HALF
    shifted *= _SECOND
    shifted >>= _HALF
    shifted *= np.uint64(modulus)  # The upper half of 32 random bits times the modulus is a number below it.
    shifted >>= _HALF
    shifted += half
    # Unsigned: where nothing has to be taken off, the difference wraps round and is the larger of the two.
    reduced: UInt64s = np.minimum(shifted, shifted - np.uint64(modulus))
    return reduced


def order_of(order: Order | str) -> Order:
    """The order itself, or the one of that name.

    Raises:
        InputError: there is no order of that name.
    """
    if not isinstance(order, str):
        return order
    named: dict[str, Order] = {"shuffled": Shuffled(), "sequential": Sequential()}
    if order not in named:
        raise InputError(
            f"There is no order called {order!r}.",
            given=f"order={order!r}",
            expected=" or ".join(f'"{name}"' for name in named),
            mend='use "shuffled" to train and "sequential" to keep the order of the reader',
        )
    return named[order]
