"""Which parameters are trained: chosen once, by name, before anything is bound to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.errors import InputError
from lockstep.parallel.batch_norm import keeps_batch_statistics
from lockstep.selection import Patterns, selected


class Frozen(NamedTuple):
    """What was frozen by pattern."""

    parameters: list[str]
    norms: list[nn.Module]
    """Batch norm that is to normalise with its running statistics, which stay."""


def freeze(model: nn.Module, frozen: Patterns, train_only: Patterns, *, freeze_statistics: bool) -> Frozen:
    """Switch requires_grad off for what is not to be trained.

    Args:
        model: parameters that do not require a gradient already stay as they are.
        frozen: patterns of parameters that are not trained.
        train_only: patterns of those that are; all, if empty.
        freeze_statistics: also of batch norm of which no parameter is trained.

    Raises:
        InputError: a pattern matches nothing, nothing is left to train, or there is no such batch norm.
    """
    _refuse_lazy(model)
    names = [name for name, _ in model.named_parameters()]
    kept = set(selected("train_only", train_only, names) if train_only else names)
    kept -= set(selected("frozen", frozen, names) if frozen else [])
    trained = [name for name, parameter in model.named_parameters() if name in kept and parameter.requires_grad]
    if not trained:
        raise InputError(
            "The model has no parameter to train.",
            given=f"{type(model).__name__} with {len(names)} parameters, none to train",
            expected="at least one parameter with requires_grad that is not frozen",
            hint="pass the model that is to be trained, and leave requires_grad on for what is to change",
        )
    left_out = [name for name in names if name not in kept]
    for name in left_out:
        model.get_parameter(name).requires_grad_(False)
    return Frozen(left_out, _still_norms(model) if freeze_statistics else [])


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"{name!r} cannot be trained.",
                given="not initialised (a lazy module)",
                expected="parameters with values",
                hint="run one batch through the model before TrainState",
            )


def _still_norms(model: nn.Module) -> list[nn.Module]:
    """Batch norm of which no parameter is trained, in evaluation mode."""
    norms = [
        module.eval()
        for module in model.modules()
        if keeps_batch_statistics(module) and not any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if not norms:
        raise InputError(
            "There is no batch norm whose statistics could be frozen.",
            given="freeze_statistics=True",
            expected="a batch norm of which no parameter is trained",
            hint="freeze its weight and bias too, or leave freeze_statistics out",
        )
    return norms
