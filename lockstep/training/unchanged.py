"""What is trained of a model stays what it was when its state was made: the same tensors, all with a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.training.state import TrainState

Layouts = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Strides and dtype of each trained parameter."""


def layouts_of(parameters: Mapping[str, Tensor]) -> Layouts:
    """How parameters lie in memory now."""
    return [(parameter.stride(), parameter.dtype) for parameter in parameters.values()]


def check_parameters(state: TrainState) -> None:
    """Refuse to train a model whose parameters have changed since its state was made; their values may.

    Raises:
        InputError: one was replaced, frozen, unfrozen or added, or lies otherwise in memory; it is named.
    """
    parameters = dict(state.model.named_parameters())
    _refuse(
        [name for name, parameter in state.parameters.items() if parameters.get(name) is not parameter],
        "Parameters were replaced in the model after the state was made, and the new ones would not be trained.",
        "the parameters that TrainState took, with new values only",
        "make a new TrainState after the change, or write into what is there: parameter.data.copy_(values)",
    )
    _refuse(
        [name for name, parameter in parameters.items() if parameter.requires_grad != (name in state.parameters)],
        "Parameters were frozen, unfrozen or added after the state was made.",
        "the parameters that TrainState took, with requires_grad as it was",
        "make a new TrainState after the change; where several share parameters, no other may freeze them",
    )
    pairs = zip(state.parameters, layouts_of(state.parameters), state.layouts, strict=True)
    _refuse(
        [name for name, now, before in pairs if now != before],
        "Parameters have another memory format or dtype than when their state was made.",
        "parameters as they were: slots and gradients are laid out like them",
        "change the model before TrainState, or use Towers(channels_last=True)",
    )


def check_buffers(state: TrainState) -> None:
    """Refuse to train a model in which a buffer has been replaced since its state was made.

    Raises:
        InputError: naming it.
    """
    buffers = dict(state.model.named_buffers())
    _refuse(
        [name for name, buffer in state.buffers.items() if buffers.get(name) is not buffer],
        "Buffers were replaced in the model after the state was made.",
        "the buffers that TrainState took, with new values only",
        "make a new TrainState after the change, or write into what is there: buffer.copy_(values)",
    )


def check_training_mode(state: TrainState) -> None:
    """Refuse a step of a model that is in evaluation mode; its submodules may be.

    Raises:
        InputError: it is, most often after an evaluation of the user's own.
    """
    if not state.model.training:
        raise InputError(
            "The model is in evaluation mode: it would train without dropout, and without new batch-norm statistics.",
            given=f"{type(state.model).__name__} after model.eval()",
            expected="a model in training mode, as TrainState has set it",
            hint="call model.train() after an evaluation of your own (ls.evaluate leaves the model alone); to train so "
            "on purpose, put its submodules alone in evaluation mode, or use Towers(batch_norm='frozen')",
        )


def _refuse(names: Sequence[str], what: str, expected: str, hint: str) -> None:
    if names:
        raise InputError(what, given=", ".join(names), expected=expected, hint=hint)
