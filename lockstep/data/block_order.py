"""A shuffle for slow storage, which reads what lies together together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lockstep.checks import Checked, PositiveInt
from lockstep.data.permutation import Int64s, permuted
from lockstep.randomness import UInt64s, key_of, mix, mix_arrays


@dataclass(frozen=True)
class BlockShuffled(Checked):
    """Blocks of consecutive examples in shuffled order; the examples are shuffled within a window of blocks.

    For storage that is slow at single examples: while a window lasts, nothing but its `window_blocks` blocks is read,
    and none of them is read again before the next epoch. Both permutations are other ones each epoch; the last block
    may be short, and stands anywhere. Elsewhere this is a shuffled list of files, read `block_size` records at a time
    into a shuffle buffer of `block_size * window_blocks`.

    Args:
        block_size: consecutive examples in a block, 1 or more.
        window_blocks: blocks among which examples are shuffled, 1 or more.

    Raises:
        InputError: one of them is below 1.
    """

    block_size: PositiveInt
    window_blocks: PositiveInt = 64
    is_exactly_once: ClassVar[bool] = True

    def epoch_size(self, size: int) -> int:
        """As many as there are examples."""
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position."""
        epochs, places = np.divmod(positions, size)
        keys = mix_arrays(mix(seed, key_of("blocks")), epochs.astype(np.uint64))
        layout = _Layout(size, self.block_size, (keys % np.uint64(-(-size // self.block_size))).astype(np.int64))
        windows = layout.slots(places) // self.window_blocks
        starts = layout.start(windows * self.window_blocks)
        ends = layout.start(np.minimum((windows + 1) * self.window_blocks, layout.num_blocks))
        window_keys = mix_arrays(keys, key_of("within"), windows.astype(np.uint64))
        shuffled = starts + permuted(places - starts, window_keys, ends - starts)
        return layout.indices(shuffled, mix_arrays(keys, key_of("order")))


class _Layout:
    """Where the blocks of an epoch stand: one after another in slots, the last block in a slot of its own choice.

    `slot_of_last` has the number of that slot for each row: the rows may belong to several epochs.
    """

    def __init__(self, size: int, block_size: int, slot_of_last: Int64s) -> None:
        self.num_blocks = -(-size // block_size)
        self._block_size = block_size
        self._missing = self.num_blocks * block_size - size
        self._slot_of_last = slot_of_last

    def start(self, slots: Int64s) -> Int64s:
        """The first place of a slot."""
        return slots * self._block_size - np.where(slots > self._slot_of_last, self._missing, 0)

    def slots(self, places: Int64s) -> Int64s:
        """The slot of each place."""
        return self._as_if_full(places) // self._block_size

    def indices(self, places: Int64s, keys: UInt64s) -> Int64s:
        """The example at each place, with the full blocks in the order of the keys' permutations."""
        slots, offsets = np.divmod(self._as_if_full(places), self._block_size)
        blocks = np.full(len(slots), self.num_blocks - 1)
        full = np.flatnonzero(slots != self._slot_of_last)
        if full.size:
            slots_of_full = slots[full] - (slots[full] > self._slot_of_last[full])
            blocks[full] = permuted(slots_of_full, keys[full], self.num_blocks - 1)
        return blocks * self._block_size + offsets

    def _as_if_full(self, places: Int64s) -> Int64s:
        """The places, if the last block were as long as the others."""
        return places + np.where(places >= self.start(self._slot_of_last + 1), self._missing, 0)
