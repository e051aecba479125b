"""The extra state that modules keep beside parameters and buffers, by torch's `get_extra_state` and `set_extra_state`.

It is saved as JSON, with the tensors in it in a section of their own: nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lockstep.checkpoints.encoding import JSON, is_json
from lockstep.checks import wrong_type
from lockstep.errors import CheckpointError
from lockstep.listing import shorten
from lockstep.screen import log
from lockstep.workers.rank import join

EXTRA, STATEFUL = "extra", "stateful"
_TENSOR = "__tensor__"
"""The only key of the object that stands in the JSON for a tensor; its value is the tensor's name."""
_KINDS = "tensors, None, bool, int, finite float, str, and lists and dicts (with str as keys) of these"


class ExtraState(NamedTuple):
    """The extra state of all modules that have one."""

    tensors: Mapping[str, Tensor]
    """Tensors by `module/number`: the modules' own, not copies."""
    values: Mapping[str, JSON]
    """Values by the name of the module, with the names of tensors in their places."""


def extra_state(model: nn.Module) -> ExtraState:
    """What the modules of a model give as their extra state: tensors and JSON, or lists and dicts of these."""
    tensors: dict[str, Tensor] = {}
    return ExtraState(tensors, {name: _given_by(name, module, tensors) for name, module in _modules(model).items()})


def check_extra_state(model: nn.Module, saved: ExtraState) -> None:
    """Refuse the extra state of other modules than the model has; none at all, as older versions saved it, will do."""
    own, found = set(_modules(model)), set(saved.values)
    if own and not found:
        if join().is_chief:
            names = shorten([_called(name) for name in sorted(own)])
            log.warning("the checkpoint holds no extra state of %s: it stays as the model has it", names)
    elif own != found:
        lines = [f"that of {_called(name)} is missing" for name in sorted(own - found)]
        lines += [f"{_called(name)} has none in the model" for name in sorted(found - own)]
        raise CheckpointError(
            "The checkpoint does not have the extra state of this model's modules.",
            given="; ".join(lines),
            expected="one for each module with a get_extra_state",
            hint="resume with the model of the run, or train in another workdir",
        )


def set_extra_state(model: nn.Module, saved: ExtraState) -> None:
    """Hand each module its extra state; tensors are copies, on the device of the one that they take the place of."""
    present = extra_state(model).tensors
    with torch.no_grad():
        tensors = {
            name: tensor.detach().to(present[name].device if name in present else "cpu", copy=True)
            for name, tensor in saved.tensors.items()
        }
        for name, module in _modules(model).items():
            if name in saved.values:
                module.set_extra_state(_whole(saved.values[name], tensors))


class Stateful(Protocol):
    """What a script keeps beside a model: any `torch.distributed.checkpoint.stateful.Stateful`, such as a module."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is to be saved and handed on: tensors and JSON, or lists and dicts of these."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over what another one has returned; its tensors are on the CPU."""


def checked_stateful(stateful: Stateful | None) -> Stateful | None:
    """Return it; an error where it is no stateful object, or keeps what cannot be saved."""
    if stateful is None:
        return None
    if not all(callable(getattr(stateful, name, None)) for name in ("state_dict", "load_state_dict")):
        raise wrong_type(
            "stateful",
            stateful,
            expected="an object with state_dict and load_state_dict",
            hint="give its class these two methods, as torch's modules and schedulers have them",
        )
    state_of(stateful)
    return stateful


def state_of(stateful: Stateful) -> ExtraState:
    """What a stateful object gives to be saved and handed on.

    Raises:
        CheckpointError: it is something else than tensors and JSON.
    """
    tensors: dict[str, Tensor] = {}
    state = stateful.state_dict()
    values = _parted(state, "", tensors)
    if not isinstance(state, dict) or not is_json(values):
        raise CheckpointError(
            "What stateful keeps cannot be saved and taken back.",
            given=f"{type(stateful).__name__}.state_dict() gives {repr(state)[:200]}",
            expected=f"a dict of {_KINDS}",
            hint="save tuples and arrays as lists or tensors",
        )
    return ExtraState(tensors, values)


def set_stateful(stateful: Stateful, saved: ExtraState) -> None:
    """Have a stateful object take over what was saved; where a checkpoint holds nothing for it, say so."""
    if saved.values:
        stateful.load_state_dict(_whole(saved.values, saved.tensors))
    elif join().is_chief:
        log.warning("the checkpoint holds nothing for stateful (%s): it stays as it is", type(stateful).__name__)


def check_compatible(wanted: Mapping[str, Mapping[str, Tensor]], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse sections that have other tensors than are wanted, or tensors of another shape or dtype."""
    problems = [line for name, tensors in wanted.items() for line in _compare(name, tensors, saved.get(name, {}))]
    if problems:
        raise CheckpointError(
            "The checkpoint does not fit this model and optimizer.",
            given=shorten(problems, 10, separator="; "),
            expected="the same names, shapes and dtypes",
            hint="go on with the model, optimizer, average and quantization of the run; or begin another run, with its "
            "weights alone: --set warm_start.path=RUN, and no --fork-from",
        )


def _compare(section: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    lines = [f"{section}: {name!r} is missing" for name in own.keys() - saved.keys()]
    lines += [f"{section}: {name!r} is not in the model" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        wanted, found = own[name], saved[name]
        if wanted.shape != found.shape or wanted.dtype != found.dtype:
            lines.append(
                f"{section}: {name!r} is {tuple(found.shape)} {found.dtype}, not {tuple(wanted.shape)} {wanted.dtype}"
            )
    return sorted(lines)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _called(name: str) -> str:
    return repr(name) if name else "the model"


def _given_by(name: str, module: nn.Module, tensors: dict[str, Tensor]) -> JSON:
    """The extra state of a module, whose tensors go to `tensors`."""
    state = module.get_extra_state()
    values: JSON = _parted(state, name, tensors)
    if type(module).set_extra_state is nn.Module.set_extra_state or not is_json(values):
        raise CheckpointError(
            f"The extra state of {f'the module {name!r}' if name else 'the model'} cannot be saved and taken back.",
            given=f"{type(module).__name__}.get_extra_state() gives {repr(state)[:200]}",
            expected=f"{_KINDS}, which its set_extra_state takes",
            hint="save tuples and arrays as lists or tensors, define set_extra_state, or leave the extra state out",
        )
    return values


def _parted(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value, whose tensors go to `tensors`, as `name/number`."""
    if isinstance(value, Tensor):
        place = f"{name}/{len(tensors)}"
        tensors[place] = value.detach()
        return {_TENSOR: place}
    if isinstance(value, dict):
        # One that has our key would be taken for a tensor: a set is refused as no JSON.
        return {*value} if _TENSOR in value else {key: _parted(entry, name, tensors) for key, entry in value.items()}
    return [_parted(entry, name, tensors) for entry in value] if isinstance(value, list) else value


def _whole(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The extra state as the module has given it."""
    if isinstance(values, dict):
        if values.keys() == {_TENSOR}:
            return tensors[values[_TENSOR]]
        return {key: _whole(entry, tensors) for key, entry in values.items()}
    return [_whole(entry, tensors) for entry in values] if isinstance(values, list) else values
