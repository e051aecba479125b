"""Gradients of a scalar, by a direct call of torch's autograd engine: in one pass, as they come, or reentrant.

`torch.autograd.grad` checks its arguments and makes its own seed at every call, 20 to 30 us of a tiny step. What it
checks is known here, so the engine is called as it would call it. The entry point is a private name, stable over many
releases; where it is missing the public function is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_run: Callable[..., Any] | None = getattr(_engine, "run_backward", None)
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def gradients(total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of a scalar for each parameter, times the seed; None for parameters it does not depend on."""
    if _run is None:
        return torch.autograd.grad(total, parameters, seed, allow_unused=True)
    # Outputs, their gradients, keep the graph, build a graph of the gradients, inputs, some may be unreachable.
    found: tuple[Tensor | None, ...] = _run((total,), (seed,), False, False, parameters, True, accumulate_grad=False)
    return found


def watched_gradients(
    total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor
) -> tuple[tuple[Tensor | None, ...], bool]:
    """Gradients; and whether the pass has run others inside it, which have added to the `grad` of a parameter.

    The backward of an `autograd.Function` may, as in a reversible net. What they have added is in no gradient here, nor
    is it left in the parameters: `reentrant_gradients` adds all up.
    """
    with _grads_put_aside(parameters):
        return gradients(total, parameters, seed), any(parameter.grad is not None for parameter in parameters)


def own_gradients(
    total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor
) -> tuple[tuple[Tensor | None, ...], bool]:
    """Gradients that nobody else holds, where possible: those held elsewhere are copied. Also says whether it was.

    Torch copies a gradient that is held as a tensor when it accumulates it, but not one whose memory is: a view, or
    what a hook has detached. The parameters keep what they have as their `grad`.
    """
    if not _can_accumulate(parameters):
        return gradients(total, parameters, seed), False
    found = _accumulated(total, parameters, seed)
    alone = _alone()
    return tuple(g.clone() if g is not None and _holders(g) > alone else g for g in found), True


def hooked_gradients(
    total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor, hooks: Mapping[int, Callable[[Tensor], None]]
) -> tuple[Tensor | None, ...]:
    """Gradients, of which some are given to hooks, by the index of the parameter, as soon as each is known.

    No hook is called where a parameter has hooks of the script's own: they would see what they do not see else.
    """
    if not _can_accumulate(parameters):
        return gradients(total, parameters, seed)
    with _hooked(parameters, hooks):
        return _accumulated(total, parameters, seed)


@contextmanager
def _hooked(parameters: tuple[Tensor, ...], hooks: Mapping[int, Callable[[Tensor], None]]) -> Iterator[None]:
    """Have the gradients given to the hooks in the block; no other hook is there.

    Written into the dict that torch keeps for each parameter. Its public method and the handle that this returns do the
    same in ten times the time, 0.7 ms for the 161 parameters of a ResNet-50.
    """
    filled: list[dict[str, Callable[[Any], None]]] = []
    try:
        for index, hook in hooks.items():
            parameter: Any = parameters[index]  # its methods have no types
            if parameter._post_accumulate_grad_hooks is None:
                parameter.register_post_accumulate_grad_hook(id).remove()  # any function does
            filled.append(parameter._post_accumulate_grad_hooks)
            filled[-1]["lockstep"] = partial(_give_gradient, hook)
        yield
    finally:
        for each in filled:
            each.pop("lockstep", None)


def _give_gradient(hook: Callable[[Tensor], None], parameter: Any) -> None:
    hook(parameter.grad)


def _can_accumulate(parameters: tuple[Tensor, ...]) -> bool:
    return _run is not None and _use_count is not None and not any(p._post_accumulate_grad_hooks for p in parameters)


def _accumulated(total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor | None, ...]:
    assert _run is not None, "asked by _can_accumulate"
    with _grads_put_aside(parameters):
        _run((total,), (seed,), False, False, parameters, True, accumulate_grad=True)
        return tuple(parameter.grad for parameter in parameters)


def reentrant_gradients(total: Tensor, parameters: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients from a backward pass that runs others inside it (see `is_reentrant`).

    Torch allows these only in a pass to all leaves of the graph, which adds to the `grad` of each. The leaves that the
    graph shows keep what they have; those of other models inside of a checkpointed part do not.
    """
    leaves = {node.variable for node in nodes(total) if hasattr(node, "variable")}
    with _grads_put_aside({*parameters, *leaves}):
        torch.autograd.backward(total, seed)
        return tuple(parameter.grad for parameter in parameters)


def is_reentrant(total: Tensor) -> bool:
    """Whether a backward pass from here runs others inside it: `torch.utils.checkpoint` with use_reentrant=True."""
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes(total))


def nodes(total: Tensor) -> set[Any]:
    """The nodes of the graph that a scalar was computed by."""
    found: set[Any] = set()
    ahead: list[Any] = [total.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions]
    return found


@contextmanager
def _grads_put_aside(leaves: Collection[Tensor]) -> Iterator[None]:
    """Take the `grad` of the leaves away, and give it back at the end."""
    kept = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


@cache
def _alone() -> int:
    return _holders(torch.empty(1))


def _holders(tensor: Tensor) -> int:
    """The number of tensors that share the memory of this one, itself included; 0 for a sparse tensor."""
    if tensor.layout != torch.strided or _use_count is None:
        return 0
    return _use_count(tensor.untyped_storage()._cdata)
