"""Checks the losses that a tower returns, lays out its gradients, and packs all of it as one operand of the sum.

The tensors of an operand are the gradients, in the order of the parameters, then a mark for each row of the sparse
ones, among several workers a mark for each parameter without a gradient, then the statistics. The numbers are the
losses, the metrics, then the extras. An exchange adds them up without knowing what they mean.

A sparse gradient (of an embedding) travels dense, with a 1 at each row that has values. So the order of addition stays
that of the tree, and the update sees again the rows alone: the others keep their slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checks import plain
from lockstep.errors import InputError
from lockstep.exchange.tree import PartialSum
from lockstep.screen import log
from lockstep.tensors import numbers_on, with_strides_of

if TYPE_CHECKING:
    from lockstep.types import Scalars

MAX_SURPRISES = 8
"""Attempts of a run that may be made again as other parameters miss gradients than before; then each waits instead."""


class ScalarNames(NamedTuple):
    """The names of the losses and metrics, in the order in which their numbers travel."""

    losses: tuple[str, ...]
    metrics: tuple[str, ...]


class Packed(NamedTuple):
    """What one tower returned, ready for the sum."""

    tensors: list[Tensor]
    """Gradients and marks; statistics follow."""
    numbers: list[float] | Tensor
    """A tensor where the host would wait for it."""
    values: list[float] | Tensor
    """The losses and metrics of this tower alone."""
    absent: list[int]
    """The indices of the parameters without a gradient."""


class Totals(NamedTuple):
    """The sum over all towers, taken apart."""

    gradients: list[Tensor | None]
    """Sums in the order of the parameters; of the sparse ones the rows that have values."""
    rows: dict[int, Tensor]
    """For the index of each sparse gradient: which rows it has."""
    absent: Tensor | None
    """For each parameter, how many leaves of the tree had no gradient for it; None for a worker that is alone."""
    statistics: list[Tensor]
    losses: dict[str, float] | dict[str, Tensor]
    others: list[float] | Tensor
    """Metrics and extras."""


class TowerOutputs:
    """Packs what the towers of one state return, always under the names and in the order of the first time.

    A worker that `is_alone` has no others, which may lack other gradients. The parameters are those that are trained.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], *, is_alone: bool = True) -> None:
        self.names: ScalarNames | None = None
        """Known once a tower has run."""
        self._parameter_names = list(parameters)
        self._parameters = tuple(parameters.values())
        self._strides = [p.stride() for p in self._parameters]
        self._sparse = [self._parameter_names.index(name) for name in sparse_parameters(model)]
        self._device = self._parameters[0].device
        self._marks = None if is_alone else torch.zeros(len(self._parameters), device=self._device)
        self._marked: list[int] = []
        """The parameters without a gradient that the marks are of: as a rule the same for each tower and step."""

    def like_packed(self) -> list[Tensor]:
        """Tensors of the shapes, strides and kinds that `packed` returns, for a worker that is alone."""
        return [*self._parameters, *(self._parameters[i].new_empty(len(self._parameters[i])) for i in self._sparse)]

    def checked(self, returned: Any, factors: Mapping[str, float | Tensor]) -> tuple[Scalars, Scalars]:
        """The losses, each times its factor, and the metrics of a loss function, as scalar tensors."""
        losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(losses, Mapping) or not isinstance(metrics, Mapping) or not losses:
            raise InputError(
                "The loss function returned no named losses.",
                given=repr(returned)[:200],
                expected="a dict of named scalar tensors, or a pair of them: (losses, metrics)",
                hint='return {"cross_entropy": loss}',
            )
        losses = {name: self._scalar(name, value) for name, value in losses.items()}
        metrics = {name: self._scalar(name, value) for name, value in metrics.items()}
        names = ScalarNames(tuple(losses), tuple(metrics))
        if self.names is None:
            _check_names(losses, factors)
            self.names = names
        if names != self.names:
            raise InputError(
                "The loss function returned other names than before.",
                given=f"losses {names.losses}, metrics {names.metrics}",
                expected=f"losses {self.names.losses}, metrics {self.names.metrics}, as at the start",
                hint="return the same names for every batch, with a value of 0 where one does not apply",
            )
        if factors:
            losses = {name: (value * factors.get(name, 1.0)).to(value.dtype) for name, value in losses.items()}
        return losses, metrics

    def _scalar(self, name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor) and not value.ndim and not value.is_complex():
            return value
        number = plain(value)
        if isinstance(number, int | float):
            return torch.full((), float(number), device=self._device)  # no copy, which would wait
        raise InputError(
            f"{name!r} is not a scalar.",
            given=f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
            if isinstance(value, Tensor)
            else repr(value)[:200],
            expected="a real tensor without dimensions, the mean over the tower's examples",
            hint=f"reduce it: {name} = value.mean()",
        )

    def packed(
        self,
        losses: Scalars,
        metrics: Scalars,
        gradients: Sequence[Tensor | None],
        share: float,
        extras: Sequence[float] | Tensor,
    ) -> Packed:
        """Pack what a tower returned, which is a `share` of the mean; the gradients are multiplied by it already."""
        values, numbers = self._numbers([*losses.values(), *metrics.values()], share, extras)
        absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        tensors = self._laid_out(gradients)
        if self._marks is not None:
            if absent != self._marked:
                sent = numbers_on(self._device, [float(gradient is None) for gradient in gradients])
                self._marks, self._marked = torch.as_tensor(sent, dtype=torch.float32), absent
            tensors.append(self._marks)
        return Packed(tensors, numbers, values, absent)

    def _numbers(
        self, scalars: Sequence[Tensor], share: float, extras: Sequence[float] | Tensor
    ) -> tuple[list[float] | Tensor, list[float] | Tensor]:
        """A tower's losses and metrics, and its numbers in the sum."""
        if not isinstance(extras, Tensor):
            read = [scalar.item() for scalar in scalars]
            return read, [*[value * share for value in read], *extras]
        with torch.no_grad():
            here = [s if s.device == self._device else torch.full((), s.item(), device=self._device) for s in scalars]
            values = torch.stack(here).double()
            return values, torch.cat([values * share, extras])

    def unpacked(self, total: PartialSum, *, mean_over_rows_of: int | None = None) -> Totals:
        """The sum over all towers of their shares of the mean, taken apart.

        With `mean_over_rows_of` so many towers, a row of a sparse gradient is the mean over those that have it, not
        over all.
        """
        assert self.names is not None, "a tower ran"
        num_losses, num_gradients = len(self.names.losses), len(self._parameters)
        tensors = total.tensors
        gradients: list[Tensor | None] = list(tensors[:num_gradients])
        rest = iter(tensors[num_gradients:])
        rows = {}
        for index, mark in zip(self._sparse, rest, strict=False):
            rows[index], values = rows_of(tensors[index], mark)
            if mean_over_rows_of is not None:
                values *= (mean_over_rows_of / mark[rows[index]])[:, None]
            gradients[index] = values
        numbers: Any = total.numbers
        return Totals(
            gradients,
            rows,
            None if self._marks is None else next(rest),
            list(rest),
            dict(zip(self.names.losses, numbers[:num_losses], strict=True)),
            numbers[num_losses:],
        )

    def metrics(self, others: Sequence[float]) -> dict[str, float]:
        """The metrics among the numbers behind the losses, as the host has read them."""
        assert self.names is not None, "a tower ran"
        return dict(zip(self.names.metrics, others, strict=False))

    def _laid_out(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Dense gradients in the memory layout of their parameters, zeros for those absent; then the marks."""
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, self._parameters, strict=True)]
        marks: list[Tensor] = []
        for index in self._sparse:
            filled[index], mark = densified(filled[index])
            marks.append(mark if gradients[index] is not None else torch.zeros_like(mark))
        try:
            if [g.stride() for g in filled] != self._strides:
                # The fused kernels walk memory, not indices: a gradient must have the strides of its parameter.
                filled = [with_strides_of(g, p) for g, p in zip(filled, self._parameters, strict=True)]
        except RuntimeError:
            self._check_dense(filled)
            raise
        return filled + marks if marks else filled

    def _check_dense(self, gradients: Sequence[Tensor]) -> None:
        sparse = [n for n, g in zip(self._parameter_names, gradients, strict=True) if g.layout != torch.strided]
        if sparse:
            raise InputError(
                "A parameter has a sparse gradient, and is not the weight of an embedding.",
                given=", ".join(sparse),
                expected="dense gradients, or those of nn.Embedding and nn.EmbeddingBag with sparse=True",
                hint="build the module with sparse=False",
            ) from None


def objective(losses: Scalars) -> Tensor:
    """The sum of the losses, which has to depend on a trained parameter."""
    total: Any = reduce(add, losses.values())
    if not isinstance(total, Tensor) or not total.requires_grad:
        raise InputError(
            "The losses do not depend on any trained parameter.",
            given=f"losses whose sum is {total!r}",
            expected="at least one loss computed from the model that is trained",
            hint="return the losses with their graph: no detach(), no item(), no torch.no_grad()",
        )
    return total


def sparse_parameters(model: nn.Module) -> list[str]:
    """The trained parameters whose gradients are sparse: weights of embeddings that were built with sparse=True."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) in sparse]


def densified(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient as a dense tensor, and 1 at each of its rows that it has values for, shape (rows,)."""
    if gradient.layout == torch.strided:
        return gradient, torch.ones(len(gradient), dtype=gradient.dtype, device=gradient.device)
    rows = gradient.coalesce()
    marks = torch.zeros(len(gradient), dtype=gradient.dtype, device=gradient.device)
    marks[rows.indices()[0]] = 1.0
    return rows.to_dense(), marks


def rows_of(gradient: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are marked, and the gradient's values there."""
    rows = marks.nonzero()[:, 0]
    return rows, gradient[rows]


def _check_names(losses: Scalars, factors: Collection[str]) -> None:
    if "total" in losses:
        raise InputError(
            "No loss may be called 'total': that is the name of their sum.",
            given=f"losses {tuple(losses)}",
            expected="names of the single losses",
            hint="call it by what it measures, such as cross_entropy",
        )
    unknown = [name for name in factors if name not in losses]
    if unknown:
        raise InputError(
            "Something is counted that is no loss.",
            given=f"counts of {', '.join(unknown)}; losses {tuple(losses)}",
            expected="counts by the names of losses, each of which is a sum over what is counted",
            hint="use the names that the loss function returns",
        )


class MissingGradients:
    """Finds the parameters that no tower of any worker has a gradient for, and names each of them once in the log.

    An update leaves them, and their slots, as they are.

    What other workers lack comes with the sum, and to read it a host waits for its device. So an attempt that is read
    late takes those of the last one that was read, and a number on the device says whether that is wrong. Then it
    changes nothing, and is made again.

    Args:
        names: of all parameters that are trained, in their order.
        penalised: the names of those that a penalty moves all the same.
        num_leaves: of the tree.
        is_chief: this worker writes the log.
        check: called before any is named for the first time; refuses a model whose parameters were replaced.
    """

    def __init__(
        self,
        names: Sequence[str],
        penalised: Collection[str],
        num_leaves: int,
        *,
        is_chief: bool,
        check: Callable[[], None],
    ) -> None:
        self._names, self._penalised, self._num_leaves = names, penalised, num_leaves
        self._is_chief, self._check = is_chief, check
        self.told: set[str] = set()
        self._expected: list[bool] | None = None
        """For each parameter, whether no leaf had a gradient for it in the last attempt that was read."""
        self._expected_there: Tensor | None = None
        """The same on the device, where it has been needed."""
        self._num_surprises = 0

    def left_out(self, totals: Totals, absent: Mapping[int, int]) -> list[Tensor | None]:
        """The gradients of the sum, None for each parameter that no leaf of the tree had one for.

        `absent` has, by the index of the parameter, how many of this worker's leaves lack a gradient, where any does.
        """
        indices = range(len(totals.gradients))
        self._expected_there = None
        if not absent:  # what this worker has is not missing everywhere
            self._expected = [False for _ in indices]
            return totals.gradients
        of_all = [absent.get(i, 0) for i in indices] if totals.absent is None else totals.absent.tolist()
        self._expected = is_missing = [count == self._num_leaves for count in of_all]
        self._tell([name for name, nowhere in zip(self._names, is_missing, strict=True) if nowhere])
        return _without(totals.gradients, is_missing)

    def expected(self, totals: Totals, absent: Mapping[int, int]) -> tuple[list[Tensor | None], Tensor | None]:
        """What `left_out` returns if they are those of the last attempt that was read; the host reads nothing.

        Returns:
            The gradients, and a number on the device: of how many parameters that is wrong. None where it is right.
        """
        if self._expected is None or totals.absent is None:
            return self.left_out(totals, absent), None
        if not absent and not any(self._expected):
            return totals.gradients, None
        if self._expected_there is None:
            sent = numbers_on(totals.absent.device, [float(nowhere) for nowhere in self._expected])
            self._expected_there = torch.as_tensor(sent).bool()
        wrong = (totals.absent == self._num_leaves) != self._expected_there
        return _without(totals.gradients, self._expected), wrong.sum(dtype=torch.float64)

    def forget(self) -> bool:
        """Expect nothing of the next attempt, which is then read; false if that has been so too often."""
        self._expected = None
        self._num_surprises += 1
        return self._num_surprises < MAX_SURPRISES

    def _tell(self, missing: Sequence[str]) -> None:
        new = [name for name in missing if name not in self.told]
        if not new:
            return
        self.told.update(new)
        self._check()
        penalised = [name for name in new if name in self._penalised]
        untouched = [name for name in new if name not in penalised]
        for some, what_happens in ((untouched, "left untouched"), (penalised, "moved by the penalty alone")):
            if some and self._is_chief:
                log.warning("no tower has a gradient for %s: %s", ", ".join(some), what_happens)


def _without(gradients: Sequence[Tensor | None], is_missing: Sequence[bool]) -> list[Tensor | None]:
    return [None if nowhere else g for g, nowhere in zip(gradients, is_missing, strict=True)]
