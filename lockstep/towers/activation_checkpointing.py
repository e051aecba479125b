"""Activation checkpointing: parts of a model whose activations are not kept, but computed again on the way back.

A step takes less memory, and these parts run forward twice (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost"). Losses, gradients and buffers have the same bits as without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.selection import selected
from lockstep.towers.statistics import changeable_buffers, restored


class ActivationCheckpointing:
    """A context in which the chosen modules keep their inputs alone; it may be entered again.

    Modules are chosen by exact names, or by regular expressions that are searched for in the names. Torch's generators
    are set back for the second pass, and buffers, such as running statistics, keep what the first one gave them. A
    module inside of a chosen one is part of it.

    Raises:
        InputError: a pattern matches no module.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        names = [name for name, _ in model.named_modules() if name]
        chosen = set(selected("activation_checkpointing", patterns, names, kind="module"))
        outermost = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
        self._modules = [model.get_submodule(name) for name in outermost]
        self._buffers = [changeable_buffers(module) for module in self._modules]
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [module.__dict__.get("forward") for module in self._modules]  # a script may have set its own
        for module, buffers in zip(self._modules, self._buffers, strict=True):
            again = partial(_of_both_passes, buffers)
            forward: Any = partial(checkpoint, module.forward, use_reentrant=False, context_fn=again)
            module.__dict__["forward"] = forward

    def __exit__(self, *reason: object) -> None:
        for module, before in zip(self._modules, self._before, strict=True):
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before


def _of_both_passes(buffers: list[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first pass and of the second."""
    return nullcontext(), _SecondPass(buffers)


class _SecondPass(AbstractContextManager[None]):
    """A context that buffers leave as they have come; a gradient of a gradient enters it again."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    def __enter__(self) -> None:
        self._restored = restored(self._buffers)
        self._restored.__enter__()

    def __exit__(self, *reason: object) -> None:
        self._restored.__exit__(None, None, None)
