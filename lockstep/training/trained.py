"""Which parameters are trained: chosen once, by name, before anything is bound to them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import InputError
from lockstep.selection import Patterns, selected


def choose_trained(model: nn.Module, frozen: Patterns, train_only: Patterns, *, freeze_statistics: bool) -> list[str]:
    """Switch requires_grad off for what is not to be trained, and return the names of those frozen here.

    Args:
        model: parameters that do not require a gradient already stay as they are.
        frozen: patterns of parameters that are not trained.
        train_only: patterns of those that are; all, if empty.
        freeze_statistics: batch norm whose parameters are all frozen also keeps its statistics, and normalises with
            them in training.

    Raises:
        InputError: a pattern matches nothing, or nothing is left to train.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    kept = set(selected("train_only", train_only, names) if train_only else names)
    kept -= set(selected("frozen", frozen, names) if frozen else [])
    if not kept:
        raise InputError(
            "The model has no parameter to train.",
            given=f"{type(model).__name__} with {len(list(model.parameters()))} parameters, none to train",
            expected="at least one parameter with requires_grad that is not frozen",
            mend="pass the model that is to be trained, and leave requires_grad on for what is to change",
        )
    left_out = [name for name in names if name not in kept]
    for name in left_out:
        model.get_parameter(name).requires_grad_(False)
    if freeze_statistics:
        for module in _frozen_batch_norms(model):
            module.eval()
    return left_out


def _frozen_batch_norms(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and parameters and not any(p.requires_grad for p in parameters):
            yield module
