"""Freezing by pattern: which parameters are trained, and a log of what every pattern matched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import InputError
from lockstep.inline_toml import inline_toml
from lockstep.listing import shorten
from lockstep.losses.regularization import Regularizer
from lockstep.selection import Patterns, selected
from lockstep.towers.batch_norm import keeps_batch_statistics


class Frozen(NamedTuple):
    """The parameters and norms that were frozen by pattern."""

    parameters: list[str]
    norms: list[nn.Module]
    """Batch norm that is to normalise with its running statistics, which stay."""


def freeze(model: nn.Module, frozen: Patterns, train_only: Patterns, *, freeze_statistics: bool) -> Frozen:
    """Switch requires_grad off for what is not to be trained; the arguments are those of `TrainState`.

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
    """Switch batch norm without a trained parameter to evaluation mode, and return it."""
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


_MAX_NAMES_SHOWN = 6

Match = tuple[str, Sequence[str]]
"""A pattern with what it belongs to, and the names that it matches."""


def matches(
    parameters: Mapping[str, Tensor], frozen: Sequence[str], of_optimizer: Iterable[Match], values: Sequence[object]
) -> list[str]:
    """Describe what each pattern matched, a line each, after a line for trained and one for frozen parameters.

    No line where there is no pattern and no penalty: then there is nothing that could have missed. `frozen` are those
    frozen by pattern, `of_optimizer` is what the optimizer's own patterns have matched, and `values` are penalties and
    transforms: patterns are the keys of their mappings, and fields called `pattern`.
    """
    matched = list(chain(of_optimizer, *(_matched(value, parameters) for value in values)))
    if not frozen and not matched:
        return []
    numbers = sum(parameter.numel() for parameter in parameters.values())
    lines = [f"trained: {len(parameters)} parameters, {numbers} numbers"]
    if frozen:
        lines.append(f"frozen: {_named(frozen)}")
    return lines + [f"{label}: {_named(names)}" for label, names in matched]


def _matched(value: Any, parameters: Mapping[str, Tensor]) -> Iterator[Match]:
    kind = type(value).__name__
    if isinstance(value, Regularizer):
        yield f"{kind} {value.weight:g}", list(value.chosen(parameters))
    elif is_dataclass(value):
        for field in fields(value):
            content = getattr(value, field.name)
            if field.name == "pattern" and content:
                yield f"{kind} {content!r}", selected(kind, content, parameters)
            elif isinstance(content, Mapping):
                for pattern, entry in content.items():
                    yield f"{kind} {field.name} {pattern!r} = {inline_toml(entry)}", selected(kind, pattern, parameters)


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} parameter{'s' if len(names) > 1 else ''} ({shorten(names, _MAX_NAMES_SHOWN)})"
