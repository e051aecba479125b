"""Running the towers of one worker: losses, gradients and new statistics of each, added up in the order of the tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients
from lockstep.optim.transforms import BoundTransform
from lockstep.parallel.backward import gradients, is_reentrant, own_gradients, reentrant_gradients
from lockstep.parallel.batch_norm import around_towers
from lockstep.parallel.diagnosis import Finding, first_unfit
from lockstep.parallel.random_streams import RandomStreams
from lockstep.parallel.sparse import densified, sparse_parameters
from lockstep.parallel.statistics import Statistics
from lockstep.parallel.tower_losses import TowerLosses, objective
from lockstep.parallel.towers import Towers
from lockstep.parallel.tree import PartialSum, TreeSum, assign_towers
from lockstep.randomness import key_of, mix
from lockstep.types import Batch
from lockstep.workers.rank import Worker
from lockstep.workers.signals import interruptible

if TYPE_CHECKING:
    from lockstep.types import LossFunction

OWNING_PAYS_FROM_ELEMENTS = 2**16
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepInputs:
    """What of a step its towers have to know, besides their examples."""

    step: int = 0
    """Completed updates."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Of the losses that are sums: what they are divided by, over all towers."""
    loss_scale: float | None = None
    """What the losses are multiplied by before the backward pass, if they are."""
    extras: Sequence[float] = ()
    """Numbers that the worker adds to the sum once."""


class TowerHost:
    """Runs a worker's towers in turn through one module.

    Args:
        model: the module.
        parameters: those that are trained, by name.
        towers: how they run.
        worker: this one.
        name: of the state; keys the towers' random streams.
        transforms: of each tower's own gradients.
        still: batch norm that keeps its statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        towers: Towers,
        worker: Worker,
        name: str,
        transforms: Sequence[BoundTransform] = (),
        still: Sequence[nn.Module] = (),
    ) -> None:
        self.losses = TowerLosses()
        self.absent: dict[int, int] = {}
        """How many of the towers just run had no gradient for the parameter of an index; those of none are left out."""
        self.values: dict[int, list[float]] = {}
        """The losses and metrics of each tower just run, by its index."""
        self.places: dict[int, int] = {}
        """The place of each tower just run in the tree."""
        self.statistics = Statistics(model, towers.batch_norm, towers.count)
        self.sparse = [list(parameters).index(name) for name in sparse_parameters(model)]
        """The indices of the parameters with sparse gradients."""
        self._plain_model = model
        self._model: nn.Module = torch.compile(model) if towers.compile else model  # type: ignore[assignment]
        self._names = list(parameters)
        self._parameters = tuple(parameters.values())
        self._strides = [p.stride() for p in self._parameters]
        self._towers = towers
        self._transforms = transforms
        self._stream_key = key_of(name)
        device = self._parameters[0].device
        self._streams = RandomStreams(device)
        dtype = _AUTOCAST.get(towers.precision)
        self._precision: AbstractContextManager[object] = torch.autocast(device.type, dtype) if dtype else nullcontext()
        self._batch_norm = around_towers(model, towers, worker, still)
        hosted = len(assign_towers(towers.count, worker.num_workers)[worker.rank]) if towers.joined else 1
        self._share = hosted / towers.count
        # With nothing to add to it, the update gets what the backward pass made, and may use it up once what is held
        # elsewhere is copied: to look for that costs more than it saves where there is little to use up.
        num_elements = sum(p.numel() for p in self._parameters)
        self._owns = hosted == towers.count and num_elements >= OWNING_PAYS_FROM_ELEMENTS
        self._rank, self._num_workers = worker.rank, worker.num_workers
        self._is_reentrant: bool | None = None
        """Whether parts of the model are under reentrant checkpointing: looked up in the graph of the first tower, and
        of those that miss a gradient or have none: then the tower runs again, since its graph is used up."""
        self._seed_gradients: dict[tuple[torch.dtype, float], Tensor] = {}

    def run(self, losses: LossFunction, batch: Batch, inputs: StepInputs) -> TreeSum:
        """The sum over this worker's towers of their shares of the mean.

        The tensors are the gradients, a mark for each row of the sparse ones, then the statistics; the numbers are
        the losses, the metrics, the number of gradients missing, then the extras. The caller's random streams and
        the model's buffers are put back.
        """
        sums = TreeSum()
        self.absent.clear()
        self.values.clear()
        self.places.clear()
        factors = {name: 1.0 / (count * self._share) if count else 0.0 for name, count in inputs.counts.items()}
        extras = inputs.extras
        with self._as_it_was():
            for place, tower, part in self.parts(batch):
                self._seed(part, tower)
                try:
                    partial = self._tower(losses, part, place, tower, inputs, factors)
                except _NowReentrant:
                    self._expect_reentrant()
                    self.statistics.put_back()
                    self._seed(part, tower)
                    partial = self._tower(losses, part, place, tower, inputs, factors)
                self.statistics.put_back()
                partial.numbers.extend(extras)
                sums.add(place, partial)
                extras = (0.0,) * len(extras)
        self.statistics.check()
        return sums

    def explain(self, losses: LossFunction, batch: Batch, tower: int, sums: TreeSum) -> Finding:
        """What was not finite first in a tower that has just run into these sums; its forward pass is run again."""
        part = next(part for _, first, part in self.parts(batch) if first == tower)
        place = self.places[tower]
        partial = next(partial for node, partial in sums.nodes if node.start <= place < node.start + node.span)
        found = dict(zip(self._names, partial.tensors, strict=False))

        def run_again() -> None:
            self._seed(part, tower)
            with self._batch_norm, self._precision:
                losses(self._plain_model, part)

        with self._as_it_was():
            # Joined towers sum over the workers as they run, and the others do not run again.
            run = None if self._towers.joined else run_again
            words, rows = first_unfit(self._plain_model, part, run, found)
        size = batch.batch_size // self._towers.count
        first = batch.position + tower * size
        return Finding(words, tower, range(first, first + size * len(part.towers)), rows)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The caller's random streams and the model's buffers are put back in the end."""
        self.statistics.keep()
        self._streams.set_aside()
        try:
            yield
        finally:
            self._streams.put_back()
            self.statistics.put_back()

    def _tower(
        self,
        losses: LossFunction,
        batch: Batch,
        place: int,
        tower: int,
        inputs: StepInputs,
        factors: Mapping[str, float],
    ) -> PartialSum:
        with self._batch_norm:  # around the backward pass too: checkpointing runs parts of the model again in it
            with self._precision, interruptible():
                returned = losses(self._model, batch)
            named, metrics = self.losses.checked(returned, factors)
            total = objective(named)
            found, owned = self._backward(total, inputs.loss_scale or 1.0)
        absent = [index for index, gradient in enumerate(found) if gradient is None]
        if absent and not self._is_reentrant and is_reentrant(total):
            raise _NowReentrant
        laid_out, marks = self._laid_out(found, absent)
        if self._transforms:
            laid_out = self._transformed(laid_out, inputs)
        self.places[tower] = place
        values = self.values[tower] = _read((*named.values(), *metrics.values()))
        numbers = [*[value * self._share for value in values], float(len(absent))]
        tensors = [*laid_out, *marks, *self.statistics.shares(place, self._share)]
        return PartialSum(tensors, numbers, owned=owned and not self._transforms)

    def _backward(self, total: Tensor, loss_scale: float) -> tuple[Sequence[Tensor | None], bool]:
        """This tower's share of the mean's gradients, times the loss scale; with transforms, its own gradients.

        And whether nobody else holds them.
        """
        start = loss_scale if self._transforms else loss_scale * self._share
        seed = self._seed_gradients.get((total.dtype, start))
        if seed is None:
            seed = torch.full_like(total, start, requires_grad=False)
            self._seed_gradients[total.dtype, start] = seed
        if self._is_reentrant is None:
            self._is_reentrant = is_reentrant(total)
        if self._is_reentrant:
            return reentrant_gradients(total, self._parameters, seed), False
        try:
            if self._owns:
                return own_gradients(total, self._parameters, seed)
            return gradients(total, self._parameters, seed), False
        except RuntimeError:  # torch refuses what is reentrant and lies on the way to a parameter
            if is_reentrant(total):
                raise _NowReentrant from None
            raise

    def _expect_reentrant(self) -> None:
        """From now on gradients are computed as reentrant checkpointing, which began after the first tower, needs it.

        Raises:
            InputError: the towers of other workers wait for this one, which would have to run again alone.
        """
        if self._towers.joined and self._num_workers > 1:
            raise InputError(
                "Reentrant checkpointing begins after the first step, and batch norm is synchronised.",
                given="torch.utils.checkpoint.checkpoint(..., use_reentrant=True)",
                expected="the same in each step, from the first one on",
                hint="write use_reentrant=False, as torch recommends",
            )
        self._is_reentrant = True

    def _laid_out(self, found: Sequence[Tensor | None], absent: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Dense gradients in the memory layout of their parameters, zeros for those absent; marks."""
        for index in absent:
            self.absent[index] = self.absent.get(index, 0) + 1
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, self._parameters, strict=True)]
        marks: list[Tensor] = []
        for index in self.sparse:
            filled[index], mark = densified(filled[index])
            marks.append(mark if found[index] is not None else torch.zeros_like(mark))
        return self._with_strides(filled), marks

    def _with_strides(self, found: Sequence[Tensor]) -> list[Tensor]:
        # The fused kernels walk memory, not indices: a gradient must have the strides of its parameter.
        try:
            return [
                g if g.stride() == strides else torch.empty_like(p).copy_(g)
                for g, strides, p in zip(found, self._strides, self._parameters, strict=True)
            ]
        except RuntimeError:
            sparse = [n for n, g in zip(self._names, found, strict=True) if g.layout != torch.strided]
            if not sparse:
                raise
            raise InputError(
                "A parameter has a sparse gradient, and is not the weight of an embedding.",
                given=", ".join(sparse),
                expected="dense gradients, or those of nn.Embedding and nn.EmbeddingBag with sparse=True",
                hint="build the module with sparse=False",
            ) from None

    def _transformed(self, found: list[Tensor], inputs: StepInputs) -> list[Tensor]:
        """The share of the mean that a tower's gradients are after its transforms; as they are where not finite."""
        scale = inputs.loss_scale or 1.0
        own = Gradients(self._names, found, divisor=scale)
        if own.norm < float("inf"):  # not where it is NaN: a transform might hide what is wrong
            for transform in self._transforms:
                transform(own, inputs.step)
        own.divide(1.0 / (self._share * scale))
        return [g for g in own.tensors if g is not None]

    def parts(self, batch: Batch) -> Iterator[tuple[int, int, Batch]]:
        """Each slice that runs at once: its place in the tree, its first tower, its examples."""
        size = batch.batch_size // self._towers.count
        if self._towers.channels_last:
            _to_channels_last(batch)
        for index, tower in enumerate(batch.towers):
            place, part = tower, batch
            if self._towers.joined:
                place = self._rank
            elif len(batch.towers) > 1:
                part = batch.rows(slice(index * size, (index + 1) * size), range(tower, tower + 1))
            yield place, tower, part
            if self._towers.joined:
                return

    def _seed(self, batch: Batch, tower: int) -> None:
        self._streams.seed(mix(batch.seed, self._stream_key, batch.position, tower))


class _NowReentrant(Exception):  # noqa: N818 (no error)
    """A tower has met reentrant checkpointing, which those before it have not used."""


def _read(scalars: Sequence[Tensor]) -> list[float]:
    # On a CPU a read costs nothing; elsewhere it waits for the device, so it is one read.
    if scalars[0].device.type == "cpu":
        return [scalar.item() for scalar in scalars]
    values: list[float] = torch.stack(list(scalars)).tolist()
    return values


def _to_channels_last(batch: Batch) -> None:
    """Lay image tensors (batch, channels, height, width) out in channels_last, once for all towers."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim == 4:
            batch[name] = value.contiguous(memory_format=torch.channels_last)
