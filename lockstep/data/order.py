"""Which example stands at which position of the stream: arithmetic, so that nothing has to be stored or replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.checks import wrong_type
from lockstep.data.permutation import permuted
from lockstep.errors import InputError
from lockstep.randomness import key_of, mix, mix_arrays

Int64s = npt.NDArray[np.int64]


class Order(Protocol):
    """An order of the examples: a value without state."""

    is_exactly_once: ClassVar[bool]
    """Whether every epoch has each example once; an order that is not says what it promises instead."""

    def epoch_size(self, size: int) -> int:
        """Positions in an epoch over `size` examples.

        Raises:
            InputError: the order was made for another number of examples.
        """
        ...

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position of a stream over `size` examples; they may lie in several epochs."""
        ...


@dataclass(frozen=True)
class Sequential:
    """The order of the reader, again and again."""

    is_exactly_once: ClassVar[bool] = True

    def epoch_size(self, size: int) -> int:
        """As many as there are examples."""
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position; the seed does not count."""
        return positions % size


@dataclass(frozen=True)
class Shuffled:
    """Another permutation of all examples each epoch, in constant memory and without a start-up cost."""

    is_exactly_once: ClassVar[bool] = True

    def epoch_size(self, size: int) -> int:
        """As many as there are examples."""
        return size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        """Index of the example at each position: place p % size of the permutation of epoch p // size."""
        epochs, places = np.divmod(positions.astype(np.uint64), np.uint64(size))
        return permuted(places, mix_arrays(mix(seed, key_of("order")), epochs), size)


def order_of(order: Order | str) -> Order:
    """The order itself, or the one of that name.

    Raises:
        InputError: there is no order of that name, or it is no order.
    """
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
