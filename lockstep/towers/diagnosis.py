"""Finding what in a tower was not finite first: an example, an output, a loss or a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from lockstep.ragged import Ragged
from lockstep.tensors import are_finite
from lockstep.towers.tower_outputs import objective
from lockstep.types import Batch

if TYPE_CHECKING:
    from lockstep.types import LossFunction, Scalars


_WITH_NAN = ("keypoints",)
"""Fields in which NaN says that there is none."""


class Finding(NamedTuple):
    """The first thing in a tower that was not finite."""

    words: str
    """Empty where all was finite, up to the losses."""
    tower: int
    positions: range
    """Places of its examples in the stream."""
    rows: list[int] | None = None
    """The examples to blame, by place in the tower, where they are known."""


class Again:
    """A loss function that also runs the backward pass, and records the first loss or gradient that is not finite.

    An error of the loss function is kept and not raised: whoever asks why a step failed must get an answer.
    """

    def __init__(self, losses: LossFunction) -> None:
        self._losses = losses
        self.nonfinite: str | None = None
        """The first loss or gradient that is not finite; empty where all are, None where that is not known."""
        self.error: Exception | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Scalars:
        """Compute losses and gradients; returns no losses."""
        try:
            returned = self._losses(model, batch)
            losses = returned[0] if isinstance(returned, tuple) else returned
            nonfinite = nonfinite_losses({name: loss.item() for name, loss in losses.items()})
            self.nonfinite = nonfinite[0] if nonfinite else _nonfinite_gradient(model, losses)
        except Exception as error:
            self.error = error
        return {}


def nonfinite_losses(losses: Mapping[str, float]) -> list[str]:
    """The losses that are not finite, in words."""
    return [f"loss {name!r} is {value}" for name, value in losses.items() if not math.isfinite(value)]


def first_nonfinite(
    model: nn.Module, batch: Batch, run: Callable[[], object] | None, gradients: Mapping[str, Tensor]
) -> tuple[str, list[int] | None]:
    """Find the first value that is not finite on the way from a tower's examples to its losses.

    Args:
        model: as it was before the attempt; its own values are finite.
        batch: the tower's examples.
        run: computes the tower's losses again; None where it cannot be: then the gradients have to say it.
        gradients: those it had, by parameter, in the order of the model.

    Returns:
        The words, empty where there is nothing, and the rows of the batch that are to blame where they are known.
    """
    for name, value in batch.items():
        rows = _nonfinite_rows(value) if _has_rows(value) and name not in _WITH_NAN else []
        if rows:
            return f"the field {name!r} of the batch is not finite", rows
    return _first_nonfinite_output(model, run, batch) if run else (_last_nonfinite(gradients), None)


def _nonfinite_gradient(model: nn.Module, losses: Mapping[str, Tensor]) -> str:
    """The first gradient of a backward pass that is not finite, in words; empty where there is none."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(objective(losses), [*parameters.values()], allow_unused=True)
    return _last_nonfinite({name: g for name, g in zip(parameters, found, strict=True) if g is not None})


def _last_nonfinite(gradients: Mapping[str, Tensor]) -> str:
    # The backward pass goes from the last parameter to the first: what is not finite last in the model was so first.
    finite = are_finite([*gradients.values()])
    nonfinite = [name for name, is_finite in zip(gradients, finite, strict=True) if not is_finite]
    return f"the gradient of {nonfinite[-1]!r} is not finite" if nonfinite else ""


def _first_nonfinite_output(model: nn.Module, run: Callable[[], object], batch: Batch) -> tuple[str, list[int] | None]:
    """The first module, in the order in which they end, whose output is not finite, and the rows in which it is not."""
    found: list[tuple[str, list[int] | None]] = []
    num_rows = next((len(value) for value in batch.values() if _has_rows(value)), 0)

    def look(name: str, module: nn.Module, arguments: object, output: object) -> None:
        if not found and not all(_are_finite(output)):
            rows = _nonfinite_rows(output) if _has_rows(output) and len(output) == num_rows else []
            called = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
            found.append((f"the output of module {called} is not finite", rows or None))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(look, name)).remove)
        run()
    return found[0] if found else ("", None)


def _nonfinite_rows(value: Any) -> list[int]:
    """The rows of a field that are not finite: of a tensor with the batch first, of a list, or of a Ragged."""
    if isinstance(value, Ragged):
        return sorted({*value.owner[_nonfinite_rows(value.values)].tolist()})
    if not isinstance(value, Tensor) or value.is_nested:
        items = value.unbind() if isinstance(value, Tensor) else value
        return [row for row, item in enumerate(items) if not all(_are_finite(item))]
    values = _values(value)
    nonfinite = _nonfinite(values)
    rows = (nonfinite.flatten(1).any(1) if nonfinite.ndim > 1 else nonfinite).nonzero()[:, 0]
    return rows.tolist() if values is value else sorted({*value.to_sparse().coalesce().indices()[0, rows].tolist()})


def _values(tensor: Tensor) -> Tensor:
    """The tensor itself, or the values that a sparse one holds."""
    return tensor if tensor.layout is torch.strided else tensor.to_sparse().coalesce().values()


def _nonfinite(values: Tensor) -> Tensor:
    """Where values are not finite; a dtype that torch cannot look at is taken for finite."""
    is_float8 = values.is_floating_point() and values.element_size() == 1
    with suppress(RuntimeError):
        return ~(values.float() if is_float8 else values).isfinite()
    return torch.zeros(values.shape, dtype=torch.bool, device=values.device)


def _has_rows(value: Any) -> TypeGuard[list[Any] | Tensor | Ragged]:
    return isinstance(value, list | Ragged) or (isinstance(value, Tensor) and value.ndim > 0)


def _are_finite(tree: Any) -> list[bool]:
    """For each tensor in a tree of tensors, whether it is finite."""
    if isinstance(tree, Tensor) and not tree.is_nested:
        return [not bool(_nonfinite(_values(tree)).any())]
    if isinstance(tree, Tensor):
        tree = tree.unbind()
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [each for item in tree for each in _are_finite(item)] if isinstance(tree, list | tuple) else []
