"""Any optimizer class of torch's kind, as a value."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch

from lockstep.checks import Checked, Hint, check_type, plain, wrong_type
from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients
from lockstep.optim.rules import Scheduled, of_another
from lockstep.optim.schedules import LearningRate, check_schedule

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

_SCALARS = (bool, int, float, str, type(None))
_UNUSED_RATE = 1e-3  # torch's classes want a number; each update sets the schedule's


@dataclass(frozen=True, init=False, repr=False)
class FromTorch:
    """A subclass of torch.optim.Optimizer with its arguments: FromTorch(torch.optim.Muon, lr=0.02, momentum=0.95).

    `lr` may be a schedule; each update sets it. A class of another package gets copies of the gradients, which it may
    change, and so does torch's SGD, which changes them too. All that the class keeps as `state` and in its parameter
    group is saved: tensors and plain values.

    Args:
        cls: the class; its `step` must work without a closure, on dense gradients.
        arguments: those of the class, without the parameters.
    """

    cls: type[TorchOptimizer]
    arguments: Mapping[str, Any]

    def __init__(self, cls: type[TorchOptimizer], /, **arguments: Any) -> None:
        object.__setattr__(self, "cls", cls)
        object.__setattr__(self, "arguments", arguments)
        _check_class(cls)
        if "lr" in arguments:
            arguments["lr"] = plain(arguments["lr"])
            check_schedule("lr", arguments["lr"])
        trial = self._built([torch.nn.Parameter(torch.zeros(1, 1))], hint="correct the arguments")
        if not isinstance(trial.defaults.get("lr"), float | int):
            raise InputError(
                f"{cls.__name__} has no learning rate.",
                given=f"{self}",
                expected="a class whose parameter group has a number `lr`",
                hint="use another optimizer",
            )

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"FromTorch({self.cls.__name__}{arguments})"

    @property
    def lr(self) -> LearningRate:
        """The learning rate, that of the class where none is given."""
        trial = self._built([torch.nn.Parameter(torch.zeros(1, 1))], hint="correct the arguments")
        given: LearningRate = self.arguments.get("lr", trial.defaults["lr"])
        return given

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundFromTorch:
        """Build the optimizer of these parameters."""
        hint = "give it those it takes, and the others another optimizer: ls.optim.ByName({pattern: optimizer, ...})"
        return BoundFromTorch(self._built(list(parameters.values()), hint=hint), self.lr, parameters)

    def _built(self, parameters: list[Tensor], *, hint: str) -> TorchOptimizer:
        rate = {"lr": _UNUSED_RATE} if callable(self.arguments.get("lr")) else {}
        make: Any = self.cls
        try:
            built: TorchOptimizer = make(parameters, **{**self.arguments, **rate})
        except Exception as error:
            raise InputError(
                f"{self.cls.__name__} cannot be built: {error}",
                given=f"{self}",
                expected=f"{self.cls.__name__}{inspect.signature(make)}",
                hint=hint,
            ) from error
        return built


Argument = bool | int | float | str | tuple[float, ...]


@dataclass(frozen=True)
class TorchOptimizerByName(Checked):
    """An optimizer of `torch.optim` by the name of its class, as a recipe has it: what `FromTorch` is in a script."""

    name: Annotated[str, Hint('write name="NAdam"')]
    """Name of the class in `torch.optim`, such as "NAdam"."""
    lr: LearningRate
    """The learning rate: a number, or a schedule of the step."""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    """The others of the class: {"momentum_decay": 0.004}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = 'write arguments={"momentum_decay": 0.004}'
        check_type("arguments", self.arguments, Mapping, expected="a table", hint=hint)
        if "lr" in self.arguments:
            raise InputError(
                "The learning rate is no argument beside the others.",
                given=f"arguments={dict(self.arguments)}",
                expected="arguments without lr",
                hint="give it as lr, which may be a schedule",
            )

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundFromTorch:
        """Build the optimizer of these parameters.

        Raises:
            InputError: torch has no such optimizer, or it takes other arguments.
        """
        classes = {
            n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
        }
        if self.name not in classes:
            close = difflib.get_close_matches(self.name, classes, n=1)
            raise InputError(
                f"torch {torch.__version__} has no optimizer {self.name!r}.",
                given=f"name={self.name!r}",
                expected=f"one of {', '.join(sorted(classes.keys() - {'Optimizer'}))}",
                hint=f"did you mean {close[0]!r}?" if close else "name one of these",
            )
        return FromTorch(classes[self.name], lr=self.lr, **self.arguments).bind(parameters)


class BoundFromTorch(Scheduled):
    """An optimizer of torch's kind; see `BoundOptimizer` for what each method does."""

    def __init__(self, optimizer: TorchOptimizer, lr: LearningRate, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(lr)
        self._optimizer = optimizer
        self._parameters = dict(parameters)
        self._kind = type(optimizer).__name__
        self._package = type(optimizer).__module__.partition(".")[0]
        self._copies = self._package != "torch" or isinstance(optimizer, torch.optim.SGD)
        self._groups = [dict(group) for group in optimizer.param_groups]
        """As they were built."""
        self._updated: set[str] = set()
        """Parameters with their state, which most classes make in the first update of each."""
        self._slots_at_first = list(self.slots())

    @property
    def kernels(self) -> str:
        """Name the class and its package."""
        return f"{self._kind} of {self._package}"

    @property
    def takes_found_inf(self) -> bool:
        """True if the class looks at a flag on the device, as torch's gradient scaler would ask it to: fused=True."""
        takes_attribute = "grad_scaler" not in inspect.signature(self._optimizer.step).parameters
        return takes_attribute and getattr(self._optimizer, "_step_supports_amp_scaling", False) is True

    def check_rows(self, names: Collection[str]) -> None:
        """Refuse sparse gradients of any of its parameters."""
        refused = [name for name in self._parameters if name in names]
        if refused:
            raise InputError(
                f"{self._kind} cannot update {', '.join(map(repr, refused))} from a sparse gradient.",
                given=f"FromTorch({self._kind}, ...)",
                expected="dense gradients",
                hint="build the embedding with sparse=False, or give it ls.optim.SGD or ls.optim.Adagrad of its own",
            )

    def update(self, gradients: Gradients, step: int) -> None:
        """Make the update that follows `step` completed ones, in place."""
        rate = self.rate(step)
        self.check_rows([gradients.names[index] for index in gradients.rows])
        present = {n for n, gradient in zip(self._parameters, gradients.tensors, strict=True) if gradient is not None}
        found_inf = gradients.found_inf
        # A first update that is held back would leave its state behind, of torch's SGD with any numbers in it.
        if found_inf is not None and not present <= self._updated:
            if found_inf:
                return
            found_inf = None
        self._updated |= present
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(self._parameters.values(), gradients.tensors, strict=True):
            parameter.grad = gradient.clone() if self._copies and gradient is not None else gradient
        optimizer: Any = self._optimizer
        if found_inf is not None:
            optimizer.found_inf = found_inf
        try:
            optimizer.step()
        finally:
            if found_inf is not None:
                del optimizer.found_inf
            for parameter in self._parameters.values():
                parameter.grad = None

    def slots(self) -> dict[str, Tensor]:
        """Return the tensors of its state, by `class.key/parameter`: most classes have none before the first update."""
        return {
            f"{self._kind}.{key}/{name}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def values(self) -> dict[str, Any]:
        """Return the state that is no tensor, and the changes of the parameter groups; refuse all but plain values."""
        states = {
            name: {k: v for k, v in self._optimizer.state.get(parameter, {}).items() if not isinstance(v, torch.Tensor)}
            for name, parameter in self._parameters.items()
        }
        groups = [_changed(*pair) for pair in zip(self._optimizer.param_groups, self._groups, strict=True)]
        self._check_saveable([*groups, *states.values()])
        return {"groups": groups, "state": {name: state for name, state in states.items() if state}}

    def expects(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the saved slots of this class for these parameters: it alone knows their shapes."""
        now = self.slots()
        expected = {name: now[name] for name in self._slots_at_first}
        return expected | {f"{self._kind}.{key}/{name}": tensor for key, name, tensor in self._own(saved)}

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse values that are not this class's, for some of these parameters."""
        own = values.keys() == {"groups", "state"} and len(values["groups"]) == len(self._groups)
        if not own or not values["state"].keys() <= self._parameters.keys():
            raise of_another(", ".join(values) or "none", f"values of FromTorch({self._kind}, ...)")

    def load(self, saved: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore slots that are as expected, and values."""
        self.check_values(values)
        states: dict[str, dict[str, Any]] = {name: dict(state) for name, state in values["state"].items()}
        for key, name, tensor in self._own(saved):
            states.setdefault(name, {})[key] = self._restored(key, tensor, self._parameters[name])
        self._optimizer.state.clear()
        self._updated.clear()
        for name, state in states.items():
            self._optimizer.state[self._parameters[name]] = state
        for group, before, changed in zip(self._optimizer.param_groups, self._groups, values["groups"], strict=True):
            group.clear()
            group.update({**before, **changed})

    def _own(self, saved: Mapping[str, Tensor]) -> list[tuple[str, str, Tensor]]:
        """List the slots that this class has saved for these parameters, as key, name and tensor."""
        split = [(*key.partition("/")[::2], tensor) for key, tensor in saved.items()]
        prefix = f"{self._kind}."
        return [
            (slot.removeprefix(prefix), name, tensor)
            for slot, name, tensor in split
            if slot.startswith(prefix) and name in self._parameters
        ]

    def _restored(self, key: str, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Copy a slot to the strides and device of its parameter; numbers stay where torch keeps them, on the CPU."""
        group = self._optimizer.param_groups[0]
        is_number = not tensor.ndim and (key == "step" or parameter.ndim)
        if is_number and not (group.get("capturable") or group.get("fused")):
            return tensor.to("cpu", copy=True)
        if tensor.shape == parameter.shape:
            return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        return tensor.to(parameter.device, copy=True)

    def _check_saveable(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Refuse values that are not plain, state of something else, and keys that are no part of a slot's name."""
        for key, value in [item for values in kept for item in values.items()]:
            if not isinstance(value, _SCALARS):
                raise self._cannot_be_saved(f"{key!r}, which is {type(value).__name__}")
        ids = {id(parameter) for parameter in self._parameters.values()}
        for owner, state in self._optimizer.state.items():
            if id(owner) not in ids:
                raise self._cannot_be_saved(f"state of {owner!r}, which is no parameter")
            for key in state:
                if not isinstance(key, str) or "/" in key:
                    raise self._cannot_be_saved(f"state with the key {key!r}")

    def _cannot_be_saved(self, what: str) -> InputError:
        return InputError(
            f"What {self._kind} keeps cannot be saved.",
            given=what,
            expected="tensors, numbers, truth values, text and None, kept for each parameter by text without slashes",
            hint="use another optimizer, or train without checkpoints",
        )


def _changed(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that the class has changed since it was built."""
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "lr") and (key not in before or _differ(value, before[key]))
    }


def _differ(value: Any, before: Any) -> bool:
    return bool(value != before) if isinstance(value, _SCALARS) else value is not before


def _check_class(cls: object) -> None:
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        hint = "write FromTorch(torch.optim.NAdam, lr=0.002): the class, then its arguments"
        raise wrong_type("cls", cls, expected="a subclass of torch.optim.Optimizer", hint=hint)
    wanted = [p for p in list(inspect.signature(cls.step).parameters.values())[1:] if p.default is p.empty]
    if wanted or issubclass(cls, torch.optim.SparseAdam):
        needs = "sparse gradients" if not wanted else f"its step given {wanted[0].name!r}"
        raise InputError(
            f"{cls.__name__} needs {needs}.",
            given=cls.__name__,
            expected="a class that makes one update from gradients alone, dense ones",
            hint="use another optimizer, such as ls.optim.AdamW",
        )
