"""Orders of the examples: each once an epoch, or some more often than others, by weight, by class or by source.

An order says by arithmetic which example stands at a position of the stream, so nothing is stored or replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeAlias

import numpy as np

from lockstep.checks import Checked, Hint, PositiveInt, Range, check_type, check_value, wrong_type
from lockstep.errors import InputError
from lockstep.randomness import Draws, UInt64s, key_of, mix, mix_arrays

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

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


class _EachOnce:
    """Base of the orders in which every epoch has each example once."""

    is_exactly_once: ClassVar[bool] = True

    def epoch_size(self, size: int) -> int:
        return size


@dataclass(frozen=True)
class Sequential(_EachOnce):
    """The order of the reader, again and again."""

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position; the seed does not matter."""
        return positions % size


@dataclass(frozen=True)
class Shuffled(_EachOnce):
    """A new permutation of all examples each epoch, in constant memory and without a start-up cost."""

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position: place p % size of the permutation of epoch p // size."""
        epochs, places = np.divmod(positions.astype(np.uint64), np.uint64(size))
        return permuted(places, mix_arrays(mix(seed, key_of("order")), epochs), size)


@dataclass(frozen=True)
class Repeated(Checked):
    """Repeated augmentation: each example comes several times in a row, augmented by other draws each time.

    The examples come in permutations of their own, across epochs: none comes again before all of them came. An epoch
    has as many positions as there are examples, as in the samplers of timm and torchvision, so that it takes as long as
    another one; it has a `num_repeats`-th of the examples.

    Args:
        num_repeats: how often an example comes in a row, 1 or more.
    """

    num_repeats: PositiveInt = 3
    is_exactly_once: ClassVar[bool] = False

    def epoch_size(self, size: int) -> int:
        """Return the number of examples."""
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position."""
        return Shuffled().indices(positions // self.num_repeats, size, seed)


@dataclass(frozen=True)
class BlockShuffled(_EachOnce, Checked):
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
        return slots * self._block_size - np.where(slots > self._slot_of_last, self._missing, 0)

    def slots(self, places: Int64s) -> Int64s:
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
        """Return what the places would be if the last block were as long as the others."""
        return places + np.where(places >= self.start(self._slot_of_last + 1), self._missing, 0)


Float64s: TypeAlias = "npt.NDArray[np.float64]"
Values: TypeAlias = "Sequence[Any] | npt.NDArray[Any] | Tensor"

_MOST_POSITIONS = 2**31  # The products of two places stay below 2 ** 63.


class Weighted:
    """Draws an example at every position by its weight, with replacement, independently of all other positions.

    An epoch has as many positions as there are examples; an example comes in it weight / mean weight times on average.

    Args:
        weights: one for each example, 0 or more; they need not add up to 1. An example of weight 0 never comes.
    """

    is_exactly_once: ClassVar[bool] = False

    def __init__(self, weights: Values) -> None:
        self._bounds = np.cumsum(_checked_weights(weights))

    def __repr__(self) -> str:
        return f"Weighted({len(self._bounds)} weights)"

    def epoch_size(self, size: int) -> int:
        """Return the number of examples, which must be that of the weights."""
        _check_number_of_examples("weights", len(self._bounds), size)
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example drawn at each position."""
        self.epoch_size(size)
        uniform = Draws(seed, positions).uniform("weighted order")
        indices: Int64s = np.searchsorted(self._bounds, uniform * self._bounds[-1], side="right")
        return indices


class Balanced:
    """Shows every class equally often, in a shuffled order.

    The stream is made of rounds with one example of each class, in a new order each round; so a batch whose size and
    start are multiples of the number of classes is balanced too. The examples of a class come in permutations of their
    own: none comes again before all of them came. An epoch has ceil(examples / classes) rounds.

    Args:
        labels: the class of each example, as a whole number or a word; a class that no example has does not count.
    """

    is_exactly_once: ClassVar[bool] = False

    def __init__(self, labels: Values) -> None:
        row = _as_row("labels", labels, kinds="biuU", expected="a whole number or a word for each example")
        classes, numbers = np.unique(row, return_inverse=True)
        self.num_classes = len(classes)
        """Classes that have an example."""
        self._by_class = np.argsort(numbers, kind="stable")
        self._sizes = np.bincount(numbers)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def __repr__(self) -> str:
        return f"Balanced({len(self._by_class)} labels of {self.num_classes} classes)"

    def epoch_size(self, size: int) -> int:
        """Return the number of examples, rounded up to a multiple of the number of classes."""
        _check_number_of_examples("labels", len(self._by_class), size)
        return -(-size // self.num_classes) * self.num_classes

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position."""
        self.epoch_size(size)
        rounds, places = np.divmod(positions, self.num_classes)
        round_keys = mix_arrays(mix(seed, key_of("classes of a round")), rounds.astype(np.uint64))
        classes = permuted(places, round_keys, self.num_classes)
        members = _walked(rounds, classes, self._sizes[classes], seed)
        indices: Int64s = self._by_class[self._starts[classes] + members]
        return indices


@dataclass(frozen=True)
class Mixture(Checked):
    """Mixes the sources of a `Concatenated` reader by weight.

    An epoch has `length` positions, whatever the sizes. Each source gets its `quotas` of them, spread evenly: any run
    of positions within an epoch has its share of each source but for a few (less than one with two sources). The
    examples of a source come in permutations of their own, across epochs: none comes again before all of them came.

    Args:
        sizes: number of examples of each source: `Concatenated.sizes`.
        weights: above 0, one for each source; they need not add up to 1.
        length: positions in an epoch, below 2 ** 31; enough of them that every source gets one.
    """

    sizes: Mapping[str, int]
    weights: Mapping[str, float]
    length: Annotated[int, Range(ge=1, lt=_MOST_POSITIONS), Hint("give the positions of an epoch")]
    is_exactly_once: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_weights()
        for name, size in self.sizes.items():
            check_value(f"sizes[{name!r}]", size, PositiveInt)
        for name, quota in self.quotas.items():
            if not quota:
                share = self.weights[name] / sum(self.weights.values())
                raise InputError(
                    f"An epoch of the mixture would have no example of {name!r}.",
                    given=f"{share:.3g} of a length of {self.length}",
                    expected="a length in which every source gets one position or more",
                    hint=f"give a length of {math.ceil(1 / share)} or more, or leave the source out",
                )

    @cached_property
    def quotas(self) -> dict[str, int]:
        """Positions of each source in an epoch: length * weight / sum of weights, rounded by largest remainder."""
        weights = np.array([self.weights[name] for name in self.sizes], dtype=np.float64)
        weights /= weights.max()
        exact = self.length * (weights / weights.sum())
        quotas = np.floor(exact).astype(np.int64)
        largest = np.argsort(quotas - exact, kind="stable")[: self.length - int(quotas.sum())]
        quotas[largest] += 1
        return dict(zip(self.sizes, quotas.tolist(), strict=True))

    def epoch_size(self, size: int) -> int:
        """Return the stated length; the reader must have as many examples as the sources together."""
        _check_number_of_examples("sizes", sum(self.sizes.values()), size)
        return self.length

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Return the index of the example at each position, with the sources one after another."""
        self.epoch_size(size)
        quotas = np.array(list(self.quotas.values()))
        sizes = np.array(list(self.sizes.values()))
        starts = np.cumsum(sizes) - sizes
        epochs, places = np.divmod(positions, self.length)
        sources, ranks = _assigned(places, quotas, mix_arrays(mix(seed, key_of("mixture")), epochs.astype(np.uint64)))
        draws = epochs * quotas[sources] + ranks
        indices: Int64s = starts[sources] + _walked(draws, sources, sizes[sources], seed)
        return indices

    def _check_weights(self) -> None:
        for name, given in (("sizes", self.sizes), ("weights", self.weights)):
            check_type(
                name,
                given,
                Mapping,
                expected="a mapping from the names of the sources to numbers",
                hint='give sizes=reader.sizes of a Concatenated reader, weights={"coco": 3, "voc": 1}',
            )
        if self.weights.keys() != self.sizes.keys() or not self.sizes:
            raise InputError(
                "The weights are not those of the sources.",
                given=f"weights of {', '.join(self.weights) or 'nothing'}",
                expected=f"one for each of {', '.join(self.sizes) or 'one source or more'}",
                hint="give every source of the Concatenated reader a weight, by its name",
            )
        for name, weight in self.weights.items():
            if not 0 < weight < math.inf:
                raise InputError(
                    f"The weight of {name!r} is out of range.",
                    given=f"weights[{name!r}]={weight}",
                    expected="above 0, finite",
                    hint="give it such a weight, or leave the source out of the Concatenated reader",
                )


def _walked(draws: Int64s, groups: Int64s, sizes: Int64s, seed: int) -> Int64s:
    """Return the place in its group of each draw, given by its number among the draws from that group.

    Draws from a group go through all of it, by a new permutation each time, before any example comes again.
    """
    cycles, places = np.divmod(draws, sizes)
    keys = mix_arrays(mix(seed, key_of("cycles")), groups.astype(np.uint64), cycles.astype(np.uint64))
    return permuted(places, keys, sizes)


def _check_number_of_examples(name: str, known: int, size: int) -> None:
    if known != size:
        raise InputError(
            f"The {name} are those of another number of examples than the reader has.",
            given=f"{name} of {known} examples",
            expected=f"{size}, one for each example of the reader",
            hint=f"make the {name} from this very reader: a Subset has not the examples of what it was cut from",
        )


def _checked_weights(weights: Values) -> Float64s:
    """Return the weights in float64, scaled so that no sum of them overflows."""
    array = _as_row("weights", weights, kinds="biuf", expected="a number for each example")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise InputError(
            f"The weight of example {bad[0]} is out of range.",
            given=f"weights[{bad[0]}]={array[bad[0]]}",
            expected="0 or more, finite",
            hint="give every example a weight in this range",
        )
    if not array.any():
        raise InputError(
            "All weights are 0, so no example could ever come.",
            given=f"{len(array)} weights of 0",
            expected="one weight or more above 0",
            hint="give the examples that shall come a weight above 0",
        )
    scaled: Float64s = array.astype(np.float64)
    scaled /= scaled.max()
    return scaled


def _as_row(name: str, values: Values, *, kinds: str, expected: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in kinds:
        raise InputError(
            f"The {name} are not {expected}.",
            given=f"an array of shape {array.shape} and type {array.dtype}",
            expected=f"shape (examples,), {expected}",
            hint=f"give the {name} as a list, an array or a tensor of one dimension",
        )
    return array


def _assigned(places: Int64s, quotas: Int64s, keys: UInt64s) -> tuple[Int64s, Int64s]:
    """Return the source of each place of an epoch, and how many places before it have the same source.

    Source after source, the largest first, takes every (places still open / quota)-th of them, from a start that the
    key of the epoch draws: systematic sampling, so each gets exactly its quota.
    """
    sources, ranks = np.empty_like(places), np.empty_like(places)
    rows, open_places, num_open = np.arange(len(places)), places, int(quotas.sum())
    for source in np.argsort(-quotas, kind="stable").tolist():
        quota = int(quotas[source])
        start = (mix_arrays(keys[rows], source) % np.uint64(num_open)).astype(np.int64)
        taken_before, phase = np.divmod(open_places * quota + start, num_open)
        taken = phase + quota >= num_open
        sources[rows[taken]] = source
        ranks[rows[taken]] = taken_before[taken]
        rows, open_places, num_open = rows[~taken], (open_places - taken_before)[~taken], num_open - quota
    return sources, ranks
