"""The stream of batches from a dataset that can only be walked: it trains, but is not resumed exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lockstep.checks import check_whole, wrong_type
from lockstep.data.loader import EvaluationBatch, Loader
from lockstep.data.order import Int64s
from lockstep.errors import DataError, InputError, LockstepError
from lockstep.images.augment import Augment
from lockstep.readers.fingerprint import Fingerprint, fingerprint_of
from lockstep.readers.reader import Collation, Cost
from lockstep.screen import log
from lockstep.types import Batch
from lockstep.workers.rank import join

_CPU = torch.device("cpu")
_END = object()


class IterableLoader(Loader):
    """Batches from an iterable dataset, such as torch's `IterableDataset`: in its own order, one pass after the other.

    Every worker walks the dataset in its own process and takes the rows of its own towers, so a dataset that gives the
    same items to each of them trains like one. Where it ends it starts again: every batch is full. Nothing is read
    ahead; a `DataLoader` with batch_size=None around the dataset does that, and is an iterable of its items.

    A dataset cannot be entered in the middle. After a resume or a rollback it starts anew while the positions go on,
    and the log says so: the batches are not those that the run would have had. It cannot be evaluated either.

    Args:
        dataset: its items are dicts of fields, or pairs (image, label), made to batches as by `TorchDataset`.
        batch_size: over all towers.
        epoch_size: examples in an epoch, for ends, intervals and schedules in epochs; None has none.
        augment: as for `Loader`.
        seed: of the augmentations' draws.

    Raises:
        InputError: the dataset cannot be walked again and again, or a parameter is out of range.
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
        _check_walkable(dataset)
        if epoch_size is not None:
            check_whole("epoch_size", epoch_size, least=1)
        self._dataset = dataset
        self._walk = _Walk(dataset, 0)
        order = _AsItComes(epoch_size or 0)
        super().__init__(self._walk, batch_size=batch_size, seed=seed, order=order, augment=augment, num_processes=0)

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, as JSON; it says that the stream is not exact."""
        return {**super().state(), "exact": False}

    def load_state(self, state: Mapping[str, Any], *, accept_data_change: bool = False) -> list[str]:
        """Go on at the position where `state` was taken, with the first item of the dataset; as `Loader.load_state`."""
        changed = super().load_state(state, accept_data_change=accept_data_change)
        self._start_anew()
        return changed

    def batches(
        self,
        towers: range,
        num_towers: int,
        device: torch.device = _CPU,
        stop: Callable[[int], bool] | None = None,
        workers_on_host: int | None = None,
    ) -> Generator[Batch, None, None]:
        """As `Loader.batches`; where items were read that no attempt has used, the dataset starts anew.

        Raises:
            InputError: as `Loader.batches`.
            DataError: an item cannot be used, which is named by its number in the stream, or the dataset has none.
        """
        if self._walk.next_number > self.position:
            self._start_anew()
        return super().batches(towers, num_towers, device, stop, workers_on_host)

    def evaluation_batches(
        self,
        micro_batch: int,
        rank: int = 0,
        num_workers: int = 1,
        device: torch.device = _CPU,
        *,
        drop_last: bool = False,
    ) -> Generator[EvaluationBatch, None, None]:
        """Refuse to evaluate.

        Raises:
            InputError: always.
        """
        raise InputError(
            "An iterable dataset cannot be evaluated: each example has to be scored once, whoever scores it.",
            given=f"an IterableLoader of {type(self._dataset).__name__}",
            expected="a Loader of examples that have an index",
            hint="give a map-style dataset: ls.data.Loader(ls.data.TorchDataset(dataset), batch_size=...)",
        )

    def _start_anew(self) -> None:
        """Walk the dataset from its start; but for a walk that began here too, the stream is then another one."""
        if self.position != self._walk.first_number and join().is_chief:
            log.warning(
                "The stream goes on at position %d with the first item of %s: an iterable dataset cannot be entered in "
                "the middle, so some examples come again and others later, and this is not exactly the run that was "
                "saved. For an exact one give ls.data.Loader a map-style dataset, with __len__ and __getitem__.",
                self.position,
                type(self._dataset).__name__,
            )
        # Batches asked for before keep their own walk.
        self._walk = self.reader = _Walk(self._dataset, self.position)


@dataclass(frozen=True)
class _AsItComes:
    """The order of a stream in which each position is the number of an item."""

    size: int
    is_exactly_once: ClassVar[bool] = False

    def epoch_size(self, size: int) -> int:
        return self.size

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        return positions


class _Walk:
    """A reader of the items of a dataset by their numbers in the stream, which never go back."""

    cost: Cost = "memory"

    def __init__(self, dataset: Iterable[Any], first_number: int) -> None:
        self._dataset = dataset
        self._collation = Collation(type(dataset).__name__, "__iter__ of the dataset")
        self._items: Iterator[Any] | None = None
        self.first_number = first_number
        """Of the item that the walk began with."""
        self.next_number = first_number

    def __len__(self) -> int:
        return sys.maxsize  # the stream has no end

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The items of these numbers, which rise; those in between are passed over."""
        return self._collation.batch_of([self._item(number) for number in indices.tolist()], indices)

    def example_id(self, index: int) -> str:
        return f"item {index}"

    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self._dataset)

    def _item(self, number: int) -> Any:
        if number < self.next_number:
            raise InputError(
                "An iterable dataset cannot go back.",
                given=f"item {number} asked for after item {self.next_number - 1}",
                expected="one loop over the batches of an IterableLoader at a time",
                hint="close the other one, or give each loop an IterableLoader of its own",
            )
        item = None
        while self.next_number <= number:
            self.next_number += 1
            item = self._following()
        return item

    def _following(self) -> Any:
        """The item before `next_number`: where the dataset ends, the first one of its next pass."""
        try:
            item = _END if self._items is None else next(self._items, _END)
            if item is _END:
                self._items = iter(self._dataset)
                item = next(self._items, _END)
        except LockstepError:
            raise
        except Exception as error:
            raise self._collation.failed(self.next_number - 1, error) from error
        if item is _END:
            raise DataError(
                f"{type(self._dataset).__name__} ends without any item.",
                given=f"nothing where item {self.next_number - 1} was due, at the start of a pass",
                expected="one item or more, each time that it is walked",
                hint="check the path or the pattern of its files, and that __iter__ begins from the start",
            )
        return item


def _check_walkable(dataset: object) -> None:
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
