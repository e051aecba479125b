"""What a loss function returned: checked, and put together to the objective of one tower."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checks import plain
from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.types import Scalars


class ScalarNames(NamedTuple):
    """What the numbers mean that travel with the gradients, in their order."""

    losses: tuple[str, ...]
    metrics: tuple[str, ...]


class TowerLosses:
    """Losses and metrics of the towers of one state, always under the names of the first time."""

    def __init__(self) -> None:
        self.names: ScalarNames | None = None

    def checked(self, returned: Any, factors: Mapping[str, float]) -> tuple[Scalars, Scalars]:
        """Losses, each times its factor, and metrics, as scalar tensors; a plain number becomes one.

        Raises:
            InputError: what was returned are no named scalars, or not under the names of the first time; or a factor
                belongs to no loss.
        """
        losses, metrics = _losses_and_metrics(returned)
        names = self.names
        if names is None:
            _check_factors(losses, factors)
            names = self.names = ScalarNames(tuple(losses), tuple(metrics))
        if tuple(losses) != names.losses or tuple(metrics) != names.metrics:
            raise InputError(
                "The loss function returned other names than before.",
                given=f"losses {tuple(losses)}, metrics {tuple(metrics)}",
                expected=f"losses {names.losses}, metrics {names.metrics}, as at the start",
                hint="return the same names for every batch, with a value of 0 where one does not apply",
            )
        if factors:
            losses = {name: value * factors.get(name, 1.0) for name, value in losses.items()}
        return losses, metrics


def objective(losses: Scalars) -> Tensor:
    """The sum of the losses.

    Raises:
        InputError: it is not connected with any trained parameter.
    """
    total: Any = reduce(add, losses.values())
    if not isinstance(total, Tensor) or not total.requires_grad:
        raise InputError(
            "The losses do not depend on any trained parameter.",
            given=f"losses whose sum is {total!r}",
            expected="at least one loss computed from the model that is trained",
            hint="return the losses with their graph: no detach(), no item(), no torch.no_grad()",
        )
    return total


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
            hint='return {"cross_entropy": loss}',
        )
    if "total" in losses:
        raise InputError(
            "No loss may be called 'total': that is the name of their sum.",
            given=f"losses {tuple(losses)}",
            expected="names of the single losses",
            hint="call it by what it measures, such as cross_entropy",
        )
    return (
        {name: _scalar(name, value) for name, value in losses.items()},
        {name: _scalar(name, value) for name, value in metrics.items()},
    )


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and not value.ndim and not value.is_complex():
        return value
    number = plain(value)
    if isinstance(number, int | float):
        return torch.tensor(float(number))
    raise InputError(
        f"{name!r} is not a scalar.",
        given=f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
        if isinstance(value, Tensor)
        else repr(value)[:200],
        expected="a real tensor without dimensions, the mean over the tower's examples",
        hint=f"reduce it: {name} = value.mean()",
    )


def _check_factors(losses: Scalars, factors: Mapping[str, float]) -> None:
    unknown = [name for name in factors if name not in losses]
    if unknown:
        raise InputError(
            "Something is counted that is no loss.",
            given=f"counts of {', '.join(unknown)}; losses {tuple(losses)}",
            expected="counts by the names of losses, each of which is a sum over what is counted",
            hint="use the names that the loss function returns",
        )


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
    """The rows that are meant, and the gradient's values there."""
    rows = marks.nonzero()[:, 0]
    return rows, gradient[rows]
