"""Orders that show each example once an epoch, and the permutations that they are made of.

An order says by arithmetic which example stands at a position of the stream, so nothing is stored or replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np

from lockstep.checks import Checked, PositiveInt, wrong_type
from lockstep.errors import InputError
from lockstep.randomness import UInt64s, key_of, mix, mix_arrays

if TYPE_CHECKING:
    import numpy.typing as npt

Int64s: TypeAlias = "npt.NDArray[np.int64]"

_ROUNDS = 6


class Order(Protocol):
    """An order of the examples: a value without state."""

    is_exactly_once: ClassVar[bool]
    """Whether every epoch has each example once."""

    def epoch_size(self, size: int) -> int:
        """Return the positions in an epoch over `size` examples; InputError if made for another number of them."""
        ...

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position of a stream over `size` examples, in any epochs."""
        ...


@dataclass(frozen=True)
class Sequential:
    """The order of the reader, again and again."""

    is_exactly_once: ClassVar[bool] = True

    def epoch_size(self, size: int) -> int:
        """Return the number of examples."""
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position; the seed does not matter."""
        return positions % size


@dataclass(frozen=True)
class Shuffled:
    """A new permutation of all examples each epoch, in constant memory and without a start-up cost."""

    is_exactly_once: ClassVar[bool] = True

    def epoch_size(self, size: int) -> int:
        """Return the number of examples."""
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position: place p % size of the permutation of epoch p // size."""
        epochs, places = np.divmod(positions.astype(np.uint64), np.uint64(size))
        return permuted(places, mix_arrays(mix(seed, key_of("order")), epochs), size)


@dataclass(frozen=True)
class BlockShuffled(Checked):
    """Blocks of consecutive examples in shuffled order; the examples are shuffled within a window of blocks.

    For storage that is slow at single examples: a window reads its `window_blocks` blocks alone, and none of them is
    read again in the epoch. Both permutations are new each epoch; the last block may be short, and stands anywhere.
    Other libraries shuffle a list of files and read it through a shuffle buffer of `block_size * window_blocks`.

    Args:
        block_size: consecutive examples in a block, 1 or more.
        window_blocks: blocks among which examples are shuffled, 1 or more.
    """

    block_size: PositiveInt
    window_blocks: PositiveInt = 64
    is_exactly_once: ClassVar[bool] = True

    def epoch_size(self, size: int) -> int:
        """Return the number of examples."""
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position."""
        epochs, places = np.divmod(positions, size)
        keys = mix_arrays(mix(seed, key_of("blocks")), epochs.astype(np.uint64))
        layout = _Layout(size, self.block_size, (keys % np.uint64(-(-size // self.block_size))).astype(np.int64))
        windows = layout.slots(places) // self.window_blocks
        starts = layout.start(windows * self.window_blocks)
        ends = layout.start(np.minimum((windows + 1) * self.window_blocks, layout.num_blocks))
        window_keys = mix_arrays(keys, key_of("within"), windows.astype(np.uint64))
        shuffled = starts + permuted(places - starts, window_keys, ends - starts)
        return layout.indices(shuffled, mix_arrays(keys, key_of("order")))


def order_of(order: Order | str) -> Order:
    """Return the order of a name, or the order itself."""
    named: dict[str, Order] = {"shuffled": Shuffled(), "sequential": Sequential()}
    if isinstance(order, str):
        if order not in named:
            raise InputError(
                f"There is no order called {order!r}.",
                given=f"order={order!r}",
                expected=" or ".join(f'"{name}"' for name in named),
                hint='use "shuffled" to train and "sequential" to keep the order of the reader',
            )
        return named[order]
    if isinstance(order, type) or not hasattr(order, "indices"):
        raise wrong_type(
            "order",
            order,
            expected="a name, or an order: it has indices, epoch_size and is_exactly_once",
            hint='give "shuffled", "sequential", or an order such as BlockShuffled(block_size=32)',
        )
    return order


def permuted(places: Int64s | UInt64s, keys: UInt64s, sizes: Int64s | int) -> Int64s:
    """Permute places by keys: each place, below its size, to another; keys and sizes broadcast to the places.

    A Feistel network over pairs of mixed radix whose product barely exceeds the size (Black, Rogaway: Ciphers with
    arbitrary finite domains, 2002), repeated for the few values that fall outside (cycle walking).
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
    num_columns = (sizes + num_rows - np.uint64(1)) // num_rows
    rows, columns = np.divmod(values, num_columns)
    for number in range(0, _ROUNDS, 2):
        rows = _shifted(rows, num_rows, keys, number, columns)
        columns = _shifted(columns, num_columns, keys, number + 1, rows)
    passed: UInt64s = rows * num_columns + columns
    return passed


def _shifted(half: UInt64s, modulus: UInt64s, keys: UInt64s, number: int, other: UInt64s) -> UInt64s:
    """One round: add a hash of the key, the round and the other half, modulo `modulus`."""
    # In place, and lighter than `mix_arrays`: this is most of what the stream costs when the examples lie in memory.
    bits, first, second = _constants()
    shifted = other + np.uint64(number << 40)
    shifted ^= keys
    shifted *= first
    shifted ^= shifted >> bits
    shifted *= second
    shifted >>= bits
    shifted *= modulus  # The upper half of 32 random bits times the modulus is a number below it.
    shifted >>= bits
    shifted += half
    # Unsigned: where nothing has to be taken off, the difference wraps round and is the larger of the two.
    reduced: UInt64s = np.minimum(shifted, shifted - modulus)
    return reduced


@cache
def _constants() -> tuple[np.uint64, np.uint64, np.uint64]:
    """Return half the number of bits, and the factors of the hash; made once, and only when numpy is needed."""
    return np.uint64(32), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class _Layout:
    """Slots of the blocks of an epoch, one after another; the last, perhaps short, block stands in any of them.

    `slot_of_last` is the slot of the last block, for each row: rows may belong to several epochs.
    """

    def __init__(self, size: int, block_size: int, slot_of_last: Int64s) -> None:
        self.num_blocks = -(-size // block_size)
        self._block_size = block_size
        self._missing = self.num_blocks * block_size - size
        self._slot_of_last = slot_of_last

    def start(self, slots: Int64s) -> Int64s:
        """Return the first place of each slot."""
        return slots * self._block_size - np.where(slots > self._slot_of_last, self._missing, 0)

    def slots(self, places: Int64s) -> Int64s:
        """Return the slot of each place."""
        return self._as_if_full(places) // self._block_size

    def indices(self, places: Int64s, keys: UInt64s) -> Int64s:
        """Return the example at each place, with the full blocks permuted by the keys."""
        slots, offsets = np.divmod(self._as_if_full(places), self._block_size)
        blocks = np.full(len(slots), self.num_blocks - 1)
        full = np.flatnonzero(slots != self._slot_of_last)
        if full.size:
            slots_of_full = slots[full] - (slots[full] > self._slot_of_last[full])
            blocks[full] = permuted(slots_of_full, keys[full], self.num_blocks - 1)
        return blocks * self._block_size + offsets

    def _as_if_full(self, places: Int64s) -> Int64s:
        """Return the places as they were if the last block were as long as the others."""
        return places + np.where(places >= self.start(self._slot_of_last + 1), self._missing, 0)
