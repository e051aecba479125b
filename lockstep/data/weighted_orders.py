"""Orders that show some examples more often than others: by weight, by class, or by source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lockstep.checks import Checked, Hint, PositiveInt, Range, check_type, check_value
from lockstep.data.order import Int64s, permuted
from lockstep.errors import InputError
from lockstep.randomness import Draws, UInt64s, key_of, mix, mix_arrays

Float64s = npt.NDArray[np.float64]
Values = Sequence[Any] | npt.NDArray[Any] | Tensor

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
        classes, numbers = np.unique(_checked_labels(labels), return_inverse=True)
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
                raise self._too_short(name)

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

    def _too_short(self, name: str) -> InputError:
        share = self.weights[name] / sum(self.weights.values())
        return InputError(
            f"An epoch of the mixture would have no example of {name!r}.",
            given=f"{share:.3g} of a length of {self.length}",
            expected="a length in which every source gets one position or more",
            hint=f"give a length of {math.ceil(1 / share)} or more, or leave the source out",
        )


def _walked(draws: Int64s, groups: Int64s, sizes: Int64s, seed: int) -> Int64s:
    """Return the example that draw number 0, 1, 2, ... from a group of a size gets.

    Draws from a group go through all of it, by a new permutation each time, before any example comes again.
    """
    cycles, places = np.divmod(draws, sizes)
    keys = mix_arrays(mix(seed, key_of("cycles")), groups.astype(np.uint64), cycles.astype(np.uint64))
    return permuted(places, keys, sizes)


def _check_number_of_examples(name: str, known: int, size: int) -> None:
    """Refuse a reader with another number of examples than an order was made for."""
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


def _checked_labels(labels: Values) -> npt.NDArray[Any]:
    return _as_row("labels", labels, kinds="biuU", expected="a whole number or a word for each example")


def _as_row(name: str, values: Values, *, kinds: str, expected: str) -> npt.NDArray[Any]:
    """Return the values as an array of one dimension, of numpy's `kinds`."""
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
