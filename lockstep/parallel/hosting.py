"""Running the towers of one worker: losses, gradients and new statistics of each, added up in the order of the tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.parallel.backward import gradients
from lockstep.parallel.towers import Towers
from lockstep.parallel.tree import Summand, TreeSum
from lockstep.randomness import key_of, mix
from lockstep.types import Batch
from lockstep.workers.devices import generators

if TYPE_CHECKING:
    from lockstep.types import LossFunction, Scalars


class ScalarNames(NamedTuple):
    """What the numbers mean that travel with the gradients, in their order."""

    losses: tuple[str, ...]
    metrics: tuple[str, ...]


class TowerHost:
    """Runs a worker's towers in turn through one module.

    Buffers hold their values of the step's start before each tower and again at the end: new statistics are part of
    what a tower returns, and are committed by the update alone.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], towers: Towers, name: str) -> None:
        self.scalar_names: ScalarNames | None = None
        self.absent: dict[int, int] = {}
        """How many of the towers just run had no gradient for the parameter of an index; those of none are left out."""
        self.losses: dict[int, list[float]] = {}
        """The losses and metrics of each tower just run, by its index."""
        self._model = model
        self._parameter_names = list(parameters)
        self._parameters = tuple(parameters.values())
        self._strides = [p.stride() for p in self._parameters]
        self._held_buffers = list(model.buffers())
        self._buffers = changeable_buffers(model)
        self._ran = False
        self._starts = [torch.empty_like(b) for b in self._buffers]
        self._towers = towers
        self._stream_key = key_of(name)
        device = self._parameters[0].device
        self._generators = generators(device)
        bf16 = towers.precision == "bf16"
        self._precision = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
        # A mean over T towers: the backward pass of each starts from 1 / T instead of 1.
        self._share = 1.0 / towers.count
        self._seed_gradients: dict[torch.dtype, Tensor] = {}

    def run(self, losses: LossFunction, batch: Batch, extras: Sequence[float]) -> TreeSum:
        """The sum over this worker's towers of their shares of the mean.

        The tensors are the gradients, then the statistics; the numbers are the losses, the metrics, the number of
        gradients missing, then `extras`, which the worker contributes once. The caller's random stream and the
        model's buffers are put back.
        """
        sums = TreeSum()
        self.absent.clear()
        self.losses.clear()
        states = [generator.get_state() for generator in self._generators]
        _copy(self._starts, self._buffers)
        try:
            for tower, part in self._parts(batch):
                self._seed(part, tower)
                try:
                    summand = self._tower(losses, part, tower, extras)
                finally:
                    _copy(self._buffers, self._starts)
                sums.add(tower, summand)
                extras = (0.0,) * len(extras)
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
        self._check_buffers()
        return sums

    def _tower(self, losses: LossFunction, batch: Batch, tower: int, extras: Sequence[float]) -> Summand:
        with self._precision:
            returned = losses(self._model, batch)
        named, metrics = self._checked(returned)
        gradients, missing = self._gradients(reduce(add, named.values()))
        values = self.losses[tower] = _read((*named.values(), *metrics.values()))
        numbers = [*[value * self._share for value in values], float(missing), *extras]
        return Summand([*gradients, *self._statistics(tower)], numbers)

    def _gradients(self, total: Any) -> tuple[list[Tensor], int]:
        """Gradients in the memory layout of their parameters, zeros for those missing, and how many are missing."""
        if not isinstance(total, Tensor) or not total.requires_grad:
            raise InputError(
                "The losses do not depend on any trained parameter.",
                given=f"losses whose sum is {total!r}",
                expected="at least one loss computed from the model that is trained",
                mend="return the losses with their graph: no detach(), no item(), no torch.no_grad()",
            )
        seed = self._seed_gradients.get(total.dtype)
        if seed is None:
            seed = self._seed_gradients[total.dtype] = torch.full_like(total, self._share, requires_grad=False)
        found = gradients(total, self._parameters, seed)
        absent = [index for index, gradient in enumerate(found) if gradient is None]
        for index in absent:
            self.absent[index] = self.absent.get(index, 0) + 1
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, self._parameters, strict=True)]
        return self._laid_out(filled), len(absent)

    def _laid_out(self, found: Sequence[Tensor]) -> list[Tensor]:
        # The fused kernels walk memory, not indices: a gradient must have the strides of its parameter.
        try:
            return [
                g if g.stride() == strides else torch.empty_like(p).copy_(g)
                for g, strides, p in zip(found, self._strides, self._parameters, strict=True)
            ]
        except RuntimeError:
            sparse = [n for n, g in zip(self._parameter_names, found, strict=True) if g.layout != torch.strided]
            if not sparse:
                raise
            raise InputError(
                "A parameter has a sparse gradient, which cannot be exchanged.",
                given=", ".join(sparse),
                expected="dense gradients",
                mend="build the embedding with sparse=False",
            ) from None

    def _statistics(self, tower: int) -> list[Tensor]:
        """This tower's share of what changes in the buffers."""
        policy, last = self._towers.batch_norm, self._towers.count - 1
        shares: list[Tensor] = []
        for buffer, start in zip(self._buffers, self._starts, strict=True):
            if buffer.is_floating_point() and policy == "mean":
                shares.append(torch.where(buffer == start, 0.0, buffer - start) * self._share)
            elif tower == (last if buffer.is_floating_point() and policy == "last" else 0):
                shares.append(buffer.clone())
            else:
                shares.append(torch.zeros_like(buffer))
        return shares

    def statistics(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The new values of the buffers, from the sums over all towers; what no tower has changed keeps its bits."""
        if self._towers.batch_norm != "mean":
            return list(sums)
        pairs = zip(self._buffers, sums, strict=True)
        return [buffer + change if buffer.is_floating_point() else change for buffer, change in pairs]

    def _check_buffers(self) -> None:
        if not self._buffers and self._ran:
            return
        self._ran = True
        held = set(map(id, self._held_buffers))
        replaced = [name for name, buffer in self._model.named_buffers() if id(buffer) not in held]
        if replaced:
            raise InputError(
                "The model has replaced a buffer, or made one, while it ran.",
                given=", ".join(replaced),
                expected="buffers that are there from the start and change in place",
                mend=f"register it in __init__, and write its values: self.{replaced[0].rpartition('.')[2]}.copy_(...)",
            )

    def _parts(self, batch: Batch) -> Iterator[tuple[int, Batch]]:
        """The slice of each hosted tower."""
        size = batch.batch_size // self._towers.count
        for index, tower in enumerate(batch.towers):
            rows = slice(index * size, (index + 1) * size)
            part = batch if len(batch.towers) == 1 else batch.rows(rows, range(tower, tower + 1))
            if self._towers.channels_last:
                part = _channels_last(part)
            yield tower, part

    def _seed(self, batch: Batch, tower: int) -> None:
        seed = mix(batch.seed, self._stream_key, batch.position, tower)
        for generator in self._generators:
            generator.manual_seed(seed)

    def _checked(self, returned: Any) -> tuple[Scalars, Scalars]:
        """Losses and metrics; looked at closely the first time, afterwards their names alone.

        Raises:
            InputError: the names are not those of the first time; or as `_losses_and_metrics` says.
        """
        names = self.scalar_names
        if names is None:
            losses, metrics = _losses_and_metrics(returned)
            self.scalar_names = ScalarNames(tuple(losses), tuple(metrics))
            return losses, metrics
        losses, metrics = returned if isinstance(returned, tuple) else (returned, {})
        if tuple(losses) != names.losses or tuple(metrics) != names.metrics:
            raise InputError(
                "The loss function returned other names than before.",
                given=f"losses {tuple(losses)}, metrics {tuple(metrics)}",
                expected=f"losses {names.losses}, metrics {names.metrics}, as at the start",
                mend="return the same names for every batch, with a value of 0 where one does not apply",
            )
        return losses, metrics


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:  # torch refuses empty lists
        torch._foreach_copy_(to, values)


def _read(scalars: Sequence[Tensor]) -> list[float]:
    # On a CPU a read costs nothing; elsewhere it waits for the device, so it is one read.
    if scalars[0].device.type == "cpu":
        return [scalar.item() for scalar in scalars]
    values: list[float] = torch.stack(list(scalars)).tolist()
    return values


def changeable_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a step may change: all but those that are expanded, and so cannot be written."""
    return [b for b in model.buffers() if not any(n > 1 and s == 0 for n, s in zip(b.shape, b.stride(), strict=True))]


def _channels_last(batch: Batch) -> Batch:
    """The same batch, its image tensors (batch, channels, height, width) in the channels_last memory format."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim == 4:
            batch[name] = value.contiguous(memory_format=torch.channels_last)
    return batch


def _losses_and_metrics(returned: object) -> tuple[Scalars, Scalars]:
    """What a loss function returned, checked.

    Raises:
        InputError: it is neither a mapping nor a pair of mappings, there is no loss, or a value is no scalar tensor.
    """
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(losses, Mapping) or not isinstance(metrics, Mapping) or not losses:
        raise InputError(
            "The loss function returned no named losses.",
            given=repr(returned)[:200],
            expected="a dict of named scalar tensors, or a pair of them: (losses, metrics)",
            mend='return {"cross_entropy": loss}',
        )
    if "total" in losses:
        raise InputError(
            "No loss may be called 'total': that is the name of their sum.",
            given=f"losses {tuple(losses)}",
            expected="names of the single losses",
            mend="call it by what it measures, such as cross_entropy",
        )
    for name, value in (*losses.items(), *metrics.items()):
        if not isinstance(value, Tensor) or value.dim():
            raise InputError(
                f"{name!r} is not a scalar.",
                given=f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:200],
                expected="a tensor without dimensions, the mean over the tower's examples",
                mend=f"reduce it: {name} = value.mean()",
            )
    return losses, metrics
