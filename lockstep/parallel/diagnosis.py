"""Where in a tower the first thing came up that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.types import Batch


class Finding(NamedTuple):
    """The first thing in a tower that was not finite."""

    words: str
    tower: int
    positions: range
    """Of its examples in the stream."""
    rows: list[int] | None = None
    """Which of them are to blame, where that is known."""


def first_unfit(
    model: nn.Module, batch: Batch, run: Callable[[], object] | None, gradients: Mapping[str, Tensor]
) -> tuple[str, list[int] | None]:
    """What is not finite first on the way of a tower: a value of the model, the examples, an output, a gradient.

    Args:
        model: as it was before the attempt.
        batch: the tower's examples.
        run: computes the tower's losses again; None where it cannot be.
        gradients: those it had, by parameter, in the order of the model.

    Returns:
        The words, and the rows of the batch that are to blame where they are known.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.isnan().any():
            return f"{name!r} of the model holds values that are not numbers", None
    for name, value in batch.items():
        rows = _unfit_rows(value)
        if rows:
            return f"the field {name!r} of the batch is not finite", rows
    module = _first_unfit_output(model, run) if run else None
    if module:
        return f"the output of module {module} is not finite", None
    # The backward pass goes from the last parameter to the first: what is unfit last in the model was so first.
    unfit = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    return (f"the gradient of {unfit[-1]!r} is the first that is not finite" if unfit else "the loss itself"), None


def _unfit_rows(value: object) -> list[int]:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return []
    good = value.isfinite().reshape(len(value), -1).all(1)
    rows: list[int] = (~good).nonzero()[:, 0].tolist()
    return rows


def _first_unfit_output(model: nn.Module, run: Callable[[], object]) -> str | None:
    """The first module, in the order in which they end, whose output is not finite."""
    found: list[str] = []

    def look(name: str, module: nn.Module, arguments: object, output: object) -> None:
        if not found and not all(tensor.isfinite().all() for tensor in _tensors(output)):
            found.append(f"{name!r} ({type(module).__name__})" if name else type(module).__name__)

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(look, name)).remove)
        run()
    return found[0] if found else None


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, Sequence | tuple) else []
