"""The stream of batches: what stands at position p is a pure function of the seed and p."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, filterfalse, islice, takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from lockstep.checks import check_type, wrong_type
from lockstep.data.order import Int64s, Order, order_of
from lockstep.data.processes import Fields, check_num_processes, default_num_processes, map_leaves, read_in_order
from lockstep.data.reading import read_examples
from lockstep.errors import DataError, InputError
from lockstep.images.augment import Augment
from lockstep.randomness import Draws
from lockstep.types import Batch

if TYPE_CHECKING:
    from lockstep.data.readers import Reader

_CPU = torch.device("cpu")
# The order of this many rows is computed at once: numpy's price per call is then spread over many batches.
_ROWS_AT_ONCE = 8192

AnyBatch = TypeVar("AnyBatch", bound=Batch)


class EvaluationBatch(Batch):
    """One micro-batch of an evaluation, always of the full shape."""

    valid = 0
    """The first so many rows count; the rest repeat the last example."""


class Loader:
    """Batches from a reader, in an order, augmented; its whole state is seed, position, and what is to be skipped.

    The stream has no end and every batch is full: it crosses from one epoch to the next. It is the same for any number
    of loader processes and of workers. A reader that has to decode is read ahead by `num_processes` loader processes
    (chosen from the cores if None), `prefetch` batches each; one that reads from memory is read in the trainer's own.

    Raises:
        InputError: a parameter is out of range, there is no such order, or it is that of another number of examples.
        DataError: the reader holds no examples.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        batch_size: int,
        seed: int = 0,
        order: Order | str = "shuffled",
        augment: Augment | Sequence[Augment] | None = None,
        num_processes: int | None = None,
        prefetch: int = 2,
    ) -> None:
        if isinstance(reader, type) or not (hasattr(reader, "read_batch") and hasattr(reader, "cost")):
            raise wrong_type(
                "reader",
                reader,
                expected="a reader: it has read_batch, example_id, cost and a length",
                mend="wrap tensors in ls.data.Arrays({...}), a torch Dataset in ls.data.TorchDataset(dataset)",
            )
        _check_positive(batch_size=batch_size, prefetch=prefetch)
        check_num_processes(num_processes)
        if not len(reader):
            raise DataError(
                "The reader holds no examples.",
                given=f"{reader} of length 0",
                expected="one example or more",
                mend="check the path or the pattern of its files",
            )
        self.reader = reader
        self.batch_size = batch_size
        self.seed = seed
        self.order = order_of(order)
        self.augment: Sequence[Augment] = augment if isinstance(augment, Sequence) else [augment] if augment else []
        self.epoch_size = self.order.epoch_size(len(reader))
        """Positions in an epoch: as many as the reader has examples, or as an order that repeats some says."""
        self.num_processes = num_processes
        self.prefetch = prefetch
        self._moves = 0
        self.position = 0
        """The next example due: everything before it was attempted, whatever has been read ahead."""
        self.skipped: list[int] = []
        """Where the batches start that are left out of the stream, ascending; see `skip`."""

    def skip(self, position: int) -> None:
        """Leave the batch that starts at a position out of the stream; on all workers alike.

        `batches` called from now on jump over it, and everything else stays as it is. After a change of the batch size
        no batch may start there: then none is left out, and what was bad in it comes again.

        Raises:
            InputError: no batch of the stream starts there.
        """
        check_type("position", position, int, expected="a place in the stream", mend="give the position of a batch")
        if position < 0 or (position - self.position) % self.batch_size:
            raise InputError(
                f"No batch starts at position {position}.",
                given=f"position {position}, batches of {self.batch_size}, one of them from {self.position} on",
                expected="the place of a batch's first example, from 0 on",
                mend="give the position of the batch as its report names it",
            )
        self.skipped = sorted({*self.skipped, position})

    def state(self) -> dict[str, Any]:
        """What `load_state` needs to go on from here, as JSON."""
        state: dict[str, Any] = {"seed": self.seed, "position": self.position, "epoch_size": self.epoch_size}
        return {**state, "skipped": self.skipped} if self.skipped else state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, and skip what was skipped then too; batches asked for before are refused.

        Raises:
            InputError: it belongs to a stream of another seed or another number of examples.
        """
        here = self.state()
        for name in ("seed", "epoch_size"):
            if state[name] != here[name]:
                raise InputError(
                    f"The saved stream had another {name}.",
                    given=f"{name} {here[name]}",
                    expected=f"{name} {state[name]}, as it was saved at position {state['position']}",
                    mend="resume with the seed and the examples that the run began with, or start a new run",
                )
        self.position = state["position"]
        self._moves += 1
        self.skipped = sorted({*self.skipped, *state.get("skipped", ())})

    def batches(
        self,
        towers: range,
        num_towers: int,
        device: torch.device = _CPU,
        stop: Callable[[int], bool] | None = None,
        workers_on_host: int | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield this worker's rows of every batch from `position` on but the skipped ones, without end.

        A batch is cut into `num_towers` equal slices in stream order; the rows are those of `towers`. Close the
        generator to end its loader processes. `position` moves when `batch.attempted()` is called, never before.

        Args:
            towers: the towers of this worker.
            num_towers: all towers of the run.
            device: where the tensors go.
            stop: asked with the position of the next batch; true ends the generator before it.
            workers_on_host: workers that share this host's cores; by default as many as share the towers.

        Raises:
            InputError: the batch size does not divide by the towers.
            LockstepError: an example cannot be read; or as `read_in_order` says.
        """
        offsets = _offsets(self.batch_size, towers, num_towers)
        rows = self._training_rows(offsets, self._starts())
        source = self._source(rows, workers_on_host or -(-num_towers // len(towers)))
        positions = self._starts()
        if stop is not None:
            positions = takewhile(lambda position: not stop(position), positions)
        delivered = _delivered(source, positions, device, partial(self._training_batch, towers))
        return self._while_current(delivered)

    def _while_current(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """The batches, until the loader is set to another place: what comes then is not what is due."""
        moves = self._moves
        with closing(batches):
            for batch in batches:
                if self._moves != moves:
                    raise InputError(
                        "The stream was set to another place while its batches were used.",
                        given=f"the batch at position {batch.position}, asked for before",
                        expected="batches asked for after resume, rollback or load_state",
                        mend="begin the loop anew after each of them",
                    )
                yield batch

    def evaluation_batches(
        self, micro_batch: int, rank: int = 0, num_workers: int = 1, device: torch.device = _CPU
    ) -> Generator[EvaluationBatch, None, None]:
        """Yield worker `rank`'s micro-batches (rank, rank + num_workers, ...) of one pass in the order of the reader.

        Micro-batch k holds the examples from k * micro_batch on, whatever the number of workers; `position` of a batch
        is that index. The last is padded to the full shape by its last example. Draws of augmentations are those of
        position = index, alike in every pass. The stream's own position does not move.
        """
        _check_positive(micro_batch=micro_batch, num_workers=num_workers)
        starts = range(rank * micro_batch, len(self.reader), num_workers * micro_batch)
        source = self._source(map(partial(self._evaluation_rows, micro_batch), starts), num_workers)
        return _delivered(source, starts, device, partial(self._evaluation_batch, micro_batch))

    def example_ids(self, position: int, count: int) -> list[str]:
        """Names of the `count` examples from `position` of the stream on."""
        indices = self.order.indices(np.arange(position, position + count), len(self.reader), self.seed)
        return [self.reader.example_id(int(index)) for index in indices]

    def _training_batch(self, towers: range, fields: Fields, position: int) -> Batch:
        batch = self._batch(Batch, fields, position, self.batch_size, towers)
        batch.example_ids = self.example_ids
        batch.attempted = partial(setattr, self, "position", position + self.batch_size)
        return batch

    def _evaluation_batch(self, micro_batch: int, fields: Fields, position: int) -> EvaluationBatch:
        batch = self._batch(EvaluationBatch, fields, position, micro_batch, range(1))
        batch.valid = min(micro_batch, len(self.reader) - position)
        return batch

    def _batch(self, kind: type[AnyBatch], fields: Fields, position: int, batch_size: int, towers: range) -> AnyBatch:
        return kind(
            fields,
            position=position,
            batch_size=batch_size,
            towers=towers,
            seed=self.seed,
            epoch_size=self.epoch_size,
        )

    def _starts(self) -> Iterator[int]:
        """Where the batches start that are due."""
        return filterfalse(frozenset(self.skipped).__contains__, count(self.position, self.batch_size))

    def _training_rows(self, offsets: Int64s, starts: Iterator[int]) -> Iterator[_Rows]:
        batches_at_once = max(1, _ROWS_AT_ONCE // len(offsets))
        while True:
            some = np.fromiter(islice(starts, batches_at_once), np.int64)
            positions = some[:, None] + offsets
            indices = self.order.indices(positions.ravel(), len(self.reader), self.seed).reshape(positions.shape)
            yield from map(_Rows, positions, indices)

    def _evaluation_rows(self, micro_batch: int, start: int) -> _Rows:
        indices = np.minimum(np.arange(start, start + micro_batch), len(self.reader) - 1)
        return _Rows(indices, indices)

    def _source(self, rows: Iterator[_Rows], num_workers: int) -> Generator[Fields, None, None]:
        num_processes = 0
        if self.reader.cost == "decode":
            num_processes = default_num_processes(num_workers) if self.num_processes is None else self.num_processes
        return read_in_order(self._read, rows, num_processes, self.prefetch)

    def _read(self, rows: _Rows) -> Fields:
        fields = read_examples(self.reader, rows.indices)
        if self.augment:
            draws = Draws(self.seed, rows.positions)
            for augment in self.augment:
                fields = augment(fields, draws)
        return fields


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one batch: their positions in the stream, and the examples that stand there."""

    positions: Int64s
    indices: Int64s

    def __str__(self) -> str:
        return f"positions {self.positions[0]} to {self.positions[-1]} of the stream"


def _delivered(
    source: Generator[Fields, None, None],
    positions: Iterable[int],
    device: torch.device,
    batch_of: Callable[[Fields, int], AnyBatch],
) -> Generator[AnyBatch, None, None]:
    """Yield a batch for each position, on the device, and close the source in the end."""
    with closing(source):
        for position in positions:
            started = time.perf_counter()
            batch = batch_of(_moved(next(source), device), position)
            batch.wait_seconds = time.perf_counter() - started
            yield batch


def _moved(fields: Fields, device: torch.device) -> Fields:
    if device.type == "cpu":
        return fields
    moved: Fields = map_leaves(fields, torch.Tensor, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
    return moved


def _offsets(batch_size: int, towers: range, num_towers: int) -> Int64s:
    """Places within a batch of the rows of `towers`."""
    if batch_size % num_towers:
        below = batch_size // num_towers * num_towers
        near = f"{below} or {below + num_towers}" if below else f"{num_towers}"
        raise InputError(
            f"A batch of {batch_size} examples cannot be cut into {num_towers} equal parts.",
            given=f"batch size {batch_size}, {num_towers} towers",
            expected="a batch size that divides by the number of towers",
            mend=f"use a batch size of {near}, or another number of towers",
        )
    share = batch_size // num_towers
    return (np.asarray(towers, dtype=np.int64)[:, None] * share + np.arange(share)).ravel()


def _check_positive(**given: int) -> None:
    for name, value in given.items():
        if value < 1:
            raise InputError(
                f"{name} is {value}.",
                given=f"{name}={value}",
                expected="a whole number above 0",
                mend=f"give a {name} of 1 or more",
            )
