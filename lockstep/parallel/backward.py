"""Gradients of a scalar, by the shortest way into torch's engine.

`torch.autograd.grad` checks its arguments and makes its own seed at every call, 20 to 30 us of a tiny step. What it
checks is known here, so the engine is called as it would call it. The entry point is a private name, stable over many
releases; where it is missing the public function is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_run: Callable[..., Any] | None = getattr(_engine, "run_backward", None)


def gradients(total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor | None, ...]:
    """The derivative of a scalar by each parameter, times the seed; None where it does not depend on one."""
    if _run is None:
        return torch.autograd.grad(total, parameters, seed, allow_unused=True)
    # Outputs, their gradients, keep the graph, build a graph of the gradients, inputs, some may be unreachable.
    found: tuple[Tensor | None, ...] = _run((total,), (seed,), False, False, parameters, True, accumulate_grad=False)
    return found


def own_gradients(total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor | None, ...]:
    """The same, as tensors that nobody else holds: torch copies what is held elsewhere when it accumulates a gradient.

    What the parameters have as their `grad` is dropped.
    """
    for parameter in parameters:
        parameter.grad = None
    if _run is None:
        torch.autograd.backward(total, seed, inputs=list(parameters))
    else:
        _run((total,), (seed,), False, False, parameters, True, accumulate_grad=True)
    found = tuple(parameter.grad for parameter in parameters)
    for parameter in parameters:
        parameter.grad = None
    return found
