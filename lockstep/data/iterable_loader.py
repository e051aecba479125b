"""Batches of an iterable dataset, which can only be iterated: it trains, but is not resumed exactly."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from lockstep.augmentations.augment import Augment, num_partners
from lockstep.checks import PositiveInt, check_value, wrong_type
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.errors import DataError, InputError, LockstepError
from lockstep.readers.fingerprint import Fingerprint, fingerprint_of
from lockstep.readers.reader import Collation, Cost, ItemReader
from lockstep.screen import log
from lockstep.types import Batch
from lockstep.workers.rank import join

_END = object()


class IterableLoader(Loader):
    """Batches of an iterable dataset, such as torch's `IterableDataset`, in its own order, pass after pass.

    Every worker iterates the dataset in its own process and takes the rows of its own towers: give all of them the same
    items. When the dataset ends it starts again: every batch is full. Nothing is prefetched; for that, wrap the dataset
    in a torch `DataLoader` with batch_size=None, which is an iterable of the same items.

    A dataset cannot be entered in the middle. After a resume or a rollback it starts anew while the positions go on,
    and the log says so: the batches are not those that the run would have had. It cannot be evaluated either.

    Args:
        dataset: its items are dicts of fields, or pairs (image, label), made to batches as by `TorchDataset`.
        batch_size: over all towers.
        epoch_size: examples in an epoch, for ends, intervals and schedules in epochs; None: there are no epochs.
        augment: as for `Loader`.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        batch_size: int,
        epoch_size: int | None = None,
        augment: Augment | Sequence[Augment] | None = None,
        seed: int = 0,
    ) -> None:
        _check_iterable(dataset)
        if epoch_size is not None:
            check_value("epoch_size", epoch_size, PositiveInt)
        self._dataset = dataset
        self._iteration = _IterationReader(dataset, 0)
        order = _AsItComes(epoch_size or 0)
        super().__init__(
            self._iteration, batch_size=batch_size, seed=seed, order=order, augment=augment, num_processes=0
        )
        for each in self.augment:
            _check_no_partners(each)

    def state(self) -> dict[str, Any]:
        """Return the state as `Loader.state` does, marked as not exact."""
        return {**super().state(), "exact": False}

    def load_state(self, state: Mapping[str, Any], *, accept_data_change: bool = False) -> list[str]:
        """Go on at the position where `state` was taken, with the first item of the dataset; as `Loader.load_state`."""
        changed = super().load_state(state, accept_data_change=accept_data_change)
        self._start_anew()
        return changed

    def batches(self, *args: Any, **kwargs: Any) -> Generator[Batch, None, None]:
        """Yield batches as `Loader.batches` does; the dataset starts anew if items were read that no attempt used."""
        if self._iteration.next_number > self.position:
            self._start_anew()
        return super().batches(*args, **kwargs)

    def slices(self, size: int, num_towers: int) -> NoReturn:
        """Raise InputError: an iterable dataset cannot be read in another order than its own."""
        raise InputError(
            "An iterable dataset cannot be leased to workers in slices: it gives its items in turn.",
            given=f"an IterableLoader of {type(self._dataset).__name__} with Backups or Asynchronous",
            expected="a Loader of examples that have an index",
            hint="give a map-style dataset: ls.data.Loader(ls.data.TorchDataset(dataset), batch_size=...); "
            "or use AllReduce()",
        )

    def evaluation_batches(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise InputError: an iterable dataset cannot be evaluated."""
        raise InputError(
            "An iterable dataset cannot be evaluated: each example has to be scored once, whoever scores it.",
            given=f"an IterableLoader of {type(self._dataset).__name__}",
            expected="a Loader of examples that have an index",
            hint="give a map-style dataset: ls.data.Loader(ls.data.TorchDataset(dataset), batch_size=...)",
        )

    def _start_anew(self) -> None:
        """Iterate the dataset from its start, and warn unless the stream is the same as before."""
        if self.position != self._iteration.first_number and join().is_chief:
            log.warning(
                "The stream goes on at position %d with the first item of %s: an iterable dataset cannot be entered in "
                "the middle, so some examples come again and others later, and this is not exactly the run that was "
                "saved. For an exact one give ls.data.Loader a map-style dataset, with __len__ and __getitem__.",
                self.position,
                type(self._dataset).__name__,
            )
        # Generators of batches from before keep their own iteration.
        self._iteration = self.reader = _IterationReader(self._dataset, self.position)


@dataclass(frozen=True)
class _AsItComes:
    """Order of a stream in which each position is the number of an item."""

    size: int
    is_exactly_once: ClassVar[bool] = False

    def epoch_size(self, size: int) -> int:
        return self.size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        return positions


class _IterationReader(ItemReader):
    """Reader of a dataset's items by their numbers in the stream, which must rise."""

    cost: Cost = "memory"

    def __init__(self, dataset: Iterable[Any], first_number: int) -> None:
        super().__init__(Collation(type(dataset).__name__, "__iter__ of the dataset"))
        self._dataset = dataset
        self._items: Iterator[Any] | None = None
        self.first_number = first_number
        """Number of the item that the iteration began with."""
        self.next_number = first_number

    def __len__(self) -> int:
        return sys.maxsize  # the stream has no end

    def example_id(self, index: int) -> str:
        return f"item {index}"

    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self._dataset)

    def item(self, index: int) -> Any:
        """Return the item of this number, passing over those before it."""
        if index < self.next_number:
            raise InputError(
                "An iterable dataset cannot go back.",
                given=f"item {index} asked for after item {self.next_number - 1}",
                expected="one loop over the batches of an IterableLoader at a time",
                hint="close the other one, or give each loop an IterableLoader of its own",
            )
        item = None
        while self.next_number <= index:
            self.next_number += 1
            item = self._following()
        return item

    def _following(self) -> Any:
        """Read the next item; where the dataset ends, the first one of its next pass."""
        try:
            item = _END if self._items is None else next(self._items, _END)
            if item is _END:
                self._items = iter(self._dataset)
                item = next(self._items, _END)
        except LockstepError:
            raise
        except Exception as error:
            raise self.collation.failed(self.next_number - 1, error) from error
        if item is _END:
            raise DataError(
                f"{type(self._dataset).__name__} ends without any item.",
                given=f"nothing where item {self.next_number - 1} was due, at the start of a pass",
                expected="one item or more, each time that it is walked",
                hint="check the path or the pattern of its files, and that __iter__ begins from the start",
            )
        return item


def _check_no_partners(augment: Augment) -> None:
    if num_partners(augment):
        raise InputError(
            f"{type(augment).__name__} needs other examples of the epoch, and an iterable dataset gives them in turn.",
            given=f"{augment} for an IterableLoader",
            expected="augmentations that take each example by itself",
            hint="give a map-style dataset: ls.data.Loader(ls.data.TorchDataset(dataset), augment=...)",
        )


def _check_iterable(dataset: object) -> None:
    hint = "give a dataset whose __iter__ begins anew each time, such as a torch IterableDataset"
    if isinstance(dataset, type) or not hasattr(dataset, "__iter__"):
        raise wrong_type(
            "dataset",
            dataset,
            expected="an iterable; for examples by index there is ls.data.Loader(ls.data.TorchDataset(dataset), ...)",
            hint=hint,
        )
    if isinstance(dataset, Iterator):
        raise InputError(
            f"A {type(dataset).__name__} can be walked only once.",
            given=repr(dataset),
            expected="an iterable that starts again when it has ended",
            hint=hint,
        )
