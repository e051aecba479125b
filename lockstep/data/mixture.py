"""Examples of several sources, each source as often as its weight says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np

from lockstep.checks import Checked, Hint, PositiveInt, Range, check_type, check_value
from lockstep.data.permutation import Int64s
from lockstep.data.repeating_orders import check_number_of_examples, walked
from lockstep.errors import InputError
from lockstep.randomness import UInt64s, key_of, mix, mix_arrays

_MOST_POSITIONS = 2**31  # The products of two places stay below 2 ** 63.


@dataclass(frozen=True)
class Mixture(Checked):
    """The order of a `Concatenated` reader that mixes its sources by weight.

    An epoch has `length` positions, whatever the sizes. Each source gets its `quotas` of them, spread evenly: among any
    positions in a row of an epoch it comes its share of times but for a few (less than one with two sources). A source
    is walked by permutations of its own, across the epochs: none of its examples comes again before all of them came.

    Args:
        sizes: number of examples of each source: `Concatenated.sizes`.
        weights: above 0, one for each source; they need not add up to 1.
        length: positions in an epoch, below 2 ** 31.

    Raises:
        InputError: the weights are not those of the sources, one of them is not above 0, a source has no examples, or
            it would get no position of an epoch.
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
        """Positions of each source in every epoch: length * weight / sum of weights, rounded by largest remainder."""
        weights = np.array([self.weights[name] for name in self.sizes], dtype=np.float64)
        weights /= weights.max()
        exact = self.length * (weights / weights.sum())
        quotas = np.floor(exact).astype(np.int64)
        largest = np.argsort(quotas - exact, kind="stable")[: self.length - int(quotas.sum())]
        quotas[largest] += 1
        return dict(zip(self.sizes, quotas.tolist(), strict=True))

    def epoch_size(self, size: int) -> int:
        """The stated length.

        Raises:
            InputError: the sources have more or fewer examples together.
        """
        check_number_of_examples("sizes", sum(self.sizes.values()), size)
        return self.length

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position, with the sources one after another as `Concatenated` has them."""
        self.epoch_size(size)
        quotas = np.array(list(self.quotas.values()))
        sizes = np.array(list(self.sizes.values()))
        starts = np.cumsum(sizes) - sizes
        epochs, places = np.divmod(positions, self.length)
        sources, ranks = _dealt(places, quotas, mix_arrays(mix(seed, key_of("mixture")), epochs.astype(np.uint64)))
        draws = epochs * quotas[sources] + ranks
        indices: Int64s = starts[sources] + walked(draws, sources, sizes[sources], seed)
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


def _dealt(places: Int64s, quotas: Int64s, keys: UInt64s) -> tuple[Int64s, Int64s]:
    """The source of each place of an epoch, and how many places before it have the same source.

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
