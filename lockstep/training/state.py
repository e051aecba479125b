"""The state of a model under training; only `apply`, `adopt` and `load` change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar, NamedTuple, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lockstep.checks import NonNegativeInt, check_all, check_one_of, check_type, check_value
from lockstep.description import described
from lockstep.errors import InputError
from lockstep.listing import shorten
from lockstep.losses.regularization import L1, L2, Penalties
from lockstep.optim.averages import MovingAverage
from lockstep.optim.by_name import ByName, optimizer_of
from lockstep.optim.gradients import Gradients
from lockstep.optim.rules import Optimizer
from lockstep.optim.transforms import BoundTransform, GradientTransform, bound_transforms
from lockstep.selection import Patterns
from lockstep.spans import span
from lockstep.tensors import copy_all, to_channels_last, write_values
from lockstep.towers.statistics import changeable_buffers
from lockstep.towers.tower_outputs import sparse_parameters
from lockstep.training.attempt import Attempt, LossAverage, Nonfinite, Outcome, Proposal, Readings, describe_nonfinite
from lockstep.training.freezing import freeze, matches
from lockstep.training.saved_state import Stateful, check_compatible, checked_stateful, extra_state, set_extra_state

_UPDATES_HINT = 'return {"name.of.a.buffer": tensor}'
_AVERAGE_HINT = "write average=ls.optim.MovingAverage(0.999), loss_average=ls.LossAverage(0.9)"
_TRANSFORMS_HINT = "write a list: gradient_transforms=[ls.optim.ClipGlobalNorm(10.0)]"
Transforms = Sequence[GradientTransform | BoundTransform]
Update = Callable[[nn.Module, int], Mapping[str, Tensor]]
"""`update(model, step)` returns new values of buffers by name, before the update that follows `step` completed ones."""
before_change: list[Callable[[], None]] = []
"""Called before any state of this process changes a tensor: a saver whose checkpoint could not be written raises its
error there."""
_states: WeakSet[TrainState] = WeakSet()
"""All states of this process: a loss function may use the model of another one, whose buffers are to stay."""


_LARGEST_SCALE, _LEAST_SCALE = 2.0**24, 1.0
_GROWTH_INTERVAL_STEPS = 2000
_DESCRIBED = (
    *("optimizer", "frozen", "train_only", "freeze_statistics", "regularization", "tower_gradient_transforms"),
    *("gradient_transforms", "average", "updates", "name"),
)
"""Arguments that change the update of an attempt that is finite."""


class Resumed(NamedTuple):
    """A checkpoint with which the first step after it is still to be compared."""

    checkpoint: str
    name: str
    """The name of the state; empty where there is only one."""
    changed: Sequence[str]
    """What may differ."""


class TrainState:
    """Step, parameters, slots, averages and statistics of one model under training.

    Parameters that do not require a gradient are left alone. Updates are made by `apply`, in one call or in its parts;
    every other change comes through `adopt` or `load`.

    Args:
        model: the module to train, on its device, in the memory format and dtype it is to have.
        optimizer: what updates the parameters; or optimizers by pattern, of which each parameter matches exactly one.
        frozen: patterns of parameters that are not trained: no gradient, no slot, no average.
        train_only: patterns of the parameters that are; all by default.
        freeze_statistics: batch norm whose own parameters are frozen normalises with its running statistics, which
            stay. By default they still move, as in the reference trainers.
        regularization: losses of the parameters themselves, part of the objective, counted once a step.
        tower_gradient_transforms: applied in order to each tower's gradients, once a tower, before they are added up.
        gradient_transforms: applied in order to the averaged gradients.
        average: a moving average of the parameters to keep.
        loss_average: how the losses that are reported beside the raw ones are smoothed.
        updates: functions `(model, step)` that return new values of buffers by name; committed with the update.
        nonfinite: what a loss or gradient that is not finite does: "stop" ends the run; "skip" refuses that attempt
            alone; "rollback" ends the loop with an error that `rollback` handles; "off" does not look. Where the model
            itself is not finite any more, no batch is to blame: all but "off" end the run at once, and none saves it.
        nonfinite_budget: so many attempts may be skipped, or rolled back from, before the run ends after all.
        stateful: what your loop keeps beside (the best score, a teacher), an object with torch's `state_dict` and
            `load_state_dict` of tensors and JSON. It is saved and resumed with this state, and handed to a worker that
            joins where others go on without a lost one.
        name: tells the random streams of several states in one run apart.

    Raises:
        CheckpointError: `stateful` keeps what cannot be saved.
        InputError: an argument cannot be as it is, a pattern matches nothing, or there is nothing to train.
    """

    trained_with: dict[str, Any]
    """What checkpoints say of the arguments, and from the first step on of towers, exchange and threads."""
    _num_changes: ClassVar[int] = 0  # of all states: a loss function may use the model of any
    _num_own_changes = 0
    compare_steps = 100
    """Updates between two comparisons of the workers' copies of this state, the same on all of them; 0: never."""
    replay_steps = 0
    """Updates between two of which a tower is computed again on all workers, the same on all of them; 0: never."""
    resumed: Resumed | None = None
    """The checkpoint that the first step after a resume is compared with."""
    steps: dict[tuple[Any, ...], Any]
    """The steps that were bound to this state, by their kind, towers and exchange; see `step.bind`."""
    is_settled = True
    """No attempt is half done: this state and its loader stand at the same place."""
    is_served = False
    """The chief alone has the whole state, as it makes the updates for the other workers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        frozen: Patterns = (),
        train_only: Patterns = (),
        freeze_statistics: bool = False,
        regularization: Sequence[L1 | L2] = (),
        tower_gradient_transforms: Transforms = (),
        gradient_transforms: Transforms = (),
        average: MovingAverage | None = None,
        loss_average: LossAverage | None = None,
        updates: Sequence[Update] = (),
        nonfinite: Nonfinite = "stop",
        nonfinite_budget: int = 10,
        stateful: Stateful | None = None,
        name: str = "model",
    ) -> None:
        check_type("model", model, nn.Module, expected="a torch.nn.Module", hint="pass the module to train")
        check_type("average", average, (MovingAverage, NoneType), expected="a MovingAverage", hint=_AVERAGE_HINT)
        check_type("loss_average", loss_average, (LossAverage, NoneType), expected="a LossAverage", hint=_AVERAGE_HINT)
        check_all("regularization", regularization, (L1, L2), hint="write regularization=[ls.losses.L2(4e-5)]")
        check_all("updates", updates, Callable, hint="write updates=[function], each called as function(model, step)")
        check_all("gradient_transforms", gradient_transforms, object, hint=_TRANSFORMS_HINT)
        check_all("tower_gradient_transforms", tower_gradient_transforms, object, hint=_TRANSFORMS_HINT)
        check_one_of("nonfinite", nonfinite, get_args(Nonfinite))
        check_value("nonfinite_budget", nonfinite_budget, NonNegativeInt)
        self.trained_with = _describe_arguments(locals())
        self.step = 0
        self.first_step = 0
        """The optimizer, and the schedule of its learning rate, count their steps from this one on."""
        self.model, self.name, self.stateful = model.train(), name, checked_stateful(stateful)
        self.frozen = freeze(model, frozen, train_only, freeze_statistics=freeze_statistics)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names = list(self.parameters)
        self.layouts = self.parameter_layouts()
        changeable = set(map(id, changeable_buffers(model)))
        self.buffers = {n: b for n, b in model.named_buffers() if id(b) in changeable}
        self._held = [held for module in model.modules() for held in (module._parameters, module._buffers)]
        self._optimizer = optimizer_of(optimizer).bind(self.parameters)
        self._average = average.bind(self.parameters, self.buffers) if average else None
        self.matches = matches(
            self.parameters,
            self.frozen.parameters,
            self._optimizer.matched(),
            [*regularization, *tower_gradient_transforms, *gradient_transforms],
        )
        """The parameters that each pattern matched, a line each."""
        self._penalties = Penalties(regularization, self.parameters) if regularization else None
        self.penalised = self._penalties.parameter_names if self._penalties else []
        """The parameters that a regularization is on."""
        self._transforms = bound_transforms(gradient_transforms, self.parameters)
        self.tower_transforms = bound_transforms(tower_gradient_transforms, self.parameters)
        self._updates = BufferUpdates(updates, model, self.buffers) if updates else None
        self.nonfinite, self.nonfinite_budget = nonfinite, nonfinite_budget
        self.num_skipped = 0
        """Attempts that were not finite and changed nothing; overflows of the fp16 loss scale do not count."""
        self.loss_scale = LossScale()
        self.smoothed = SmoothedLosses(loss_average or LossAverage())
        self.gradient_hooks: list[Callable[[Gradients], None]] = []
        """Called with the gradients of each update as the optimizer gets them; read late, they may not be finite."""
        self.steps = {}
        _states.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gradient_hooks": [], "steps": {}}  # nobody watches a copy, or has bound it

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        _states.add(self)

    def apply(self, attempt: Attempt) -> Outcome:
        """Make one update of everything, or none at all where a loss or a gradient is not finite."""
        proposal = self.propose(attempt)
        return self.decide(proposal, proposal.read())

    def propose(self, attempt: Attempt) -> Proposal:
        """Compute what an update is made of, and what decides whether it is made; nothing changes."""
        gradients = Gradients(
            self._names, attempt.gradients, divisor=attempt.loss_scale or 1.0, rows=attempt.rows, owned=attempt.owned
        )
        if self._penalties is None:
            return Proposal(attempt, attempt.losses, gradients)
        tensors = self._penalties.add_gradients(gradients.tensors, owned=attempt.owned)
        losses = self._penalties.add_losses(attempt.losses)
        return Proposal(attempt, losses, Gradients(self._names, tensors, rows=attempt.rows, owned=attempt.owned))

    @torch.no_grad()
    def decide(self, proposal: Proposal, readings: Readings) -> Outcome:
        """Make a proposed update, or refuse it, by what was read of it."""
        self.is_settled = False
        loss_scale = proposal.attempt.loss_scale
        if self.refuses(readings, loss_scale):
            return self._skipped(proposal, readings)
        self.update(proposal)
        return self.settle(readings, loss_scale)

    def refuses(self, readings: Readings, loss_scale: float | None) -> bool:
        """Whether an attempt changes nothing, as it is not finite."""
        return not readings.is_finite and (self.nonfinite != "off" or self._has_overflowed(readings, loss_scale))

    def found_inf(self, proposal: Proposal) -> Tensor | None:
        """Say on the device what `refuses` does, before the host has read anything; None: it refuses nothing."""
        if self.nonfinite != "off":
            return proposal.found_inf("nonfinite")
        if proposal.attempt.loss_scale is not None and self.loss_scale.can_shrink:
            return proposal.found_inf("overflow")
        return None if proposal.attempt.withheld is None else proposal.found_inf("nothing")

    def update(self, proposal: Proposal, *, found_inf: Tensor | None = None) -> None:
        """Update parameters, slots and buffers. Where `found_inf` is not 0 nothing changes, which the device decides.

        `settle` follows, once the host knows that it was made. Both are called with `torch.no_grad`.
        """
        self.is_settled = False
        gradients, step = proposal.gradients, self.step - self.first_step
        self._rates = self._optimizer.learning_rates(step)
        gradients.found_inf = found_inf
        changes = self._updates(self.step) if self._updates else ()
        if self._transforms is not None:
            self._transforms(gradients, self.step)
        for hook in self.gradient_hooks:
            hook(gradients)
        self._prepare_change()
        with span("update", on_device=True):
            self._optimizer.update(gradients, step)
            if proposal.attempt.statistics:
                copy_all([*self.buffers.values()], proposal.attempt.statistics)
            for buffer, new in changes:
                buffer.copy_(new)

    def settle(self, readings: Readings, loss_scale: float | None) -> Outcome:
        """Complete an update that was made: step, moving averages, loss scale."""
        self.step += 1
        if self._average:
            with span("moving average", on_device=True):
                self._average.update(self.step)
        self.smoothed.update(readings.losses)
        if loss_scale is not None:
            self.loss_scale.grow()
        return Outcome(self._rates, readings.norm, readings.losses)

    def end_attempt(self) -> None:
        """Say that an attempt is over as a whole, with its batch: the loader has moved, too."""
        self.is_settled = True

    def _has_overflowed(self, readings: Readings, loss_scale: float | None) -> bool:
        """Whether the loss scale may be why something is not finite: never where a loss is not."""
        return loss_scale is not None and readings.has_finite_losses and self.loss_scale.can_shrink

    def _skipped(self, proposal: Proposal, readings: Readings) -> Outcome:
        """Count the attempt: against the loss scale, where a smaller one may help, else against the budget.

        Raises:
            NonFiniteError: the penalty alone is not finite, for which no batch is to blame.
        """
        attempt = proposal.attempt
        if self._penalties and readings.has_finite_statistics and attempt.is_finite():
            raise self._penalties.nonfinite_error()
        overflowed = self._has_overflowed(readings, attempt.loss_scale)
        if overflowed:
            self.loss_scale.shrink()
        else:
            self.num_skipped += 1
        rates = self._optimizer.learning_rates(self.step - self.first_step)
        words = describe_nonfinite(readings, proposal.gradients)
        return Outcome(rates, readings.norm, readings.losses, tuple(words), overflowed)

    def reads_first(self) -> list[str]:
        """Say why the host reads an attempt before it enqueues the update: no flag on the device holds that back."""
        bound = filter(None, (self.tower_transforms, self._transforms))
        reasons = [f"{name} reads the gradients" for name in dict.fromkeys(n for each in bound for n in each.readers)]
        if not self._optimizer.takes_found_inf:
            reasons.append(f"no flag on the device holds back {self._optimizer.kernels} kernels")
        if self._updates:
            reasons.append("updates are functions of your own")
        if sparse_parameters(self.model):
            reasons.append("sparse gradients are looked through for their rows")
        return reasons

    def versions(self) -> list[int]:
        """Numbers that grow with each change in place of a parameter or buffer, but for those through `.data`."""
        return [tensor._version for held in self._held for tensor in held.values() if tensor is not None]

    @property
    def changes_of_others(self) -> int:
        """How often another state of this process was updated or loaded."""
        return TrainState._num_changes - self._num_own_changes

    def _prepare_change(self) -> None:
        for check in before_change.copy():
            check()
        TrainState._num_changes += 1
        self._num_own_changes += 1

    def is_first_to_train(self) -> bool:
        """Whether no step was bound yet to any state that this process has."""
        return not any(state.steps for state in _states)

    def other_buffers(self) -> list[Tensor]:
        """The buffers of the models of all other states: no step of this state may change them."""
        if len(_states) == 1:
            return []
        return [b for other in _states if other.model is not self.model for b in other.buffers.values()]

    def check_rows(self, names: Sequence[str]) -> None:
        """Refuse parameters with sparse gradients that the optimizer cannot take; see `BoundOptimizer`."""
        self._optimizer.check_rows(names)

    @property
    def kernels(self) -> str:
        """The kind of kernels that compute the optimizer's update: "fused" or "foreach"."""
        return self._optimizer.kernels

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn the optimizer's lengths in epochs into steps, once the stream is known; returns a line for each."""
        return self._optimizer.resolve(epoch_size, batch_size)

    def to_channels_last(self) -> None:
        """Convert convolution weights, their slots and averages to the channels_last memory format."""
        # Not those of buffers, which stay as they are: an average is laid out like its source.
        averages = [self._average.tensors[name] for name in self.parameters] if self._average else ()
        to_channels_last([*self.model.parameters(), *self._optimizer.slots().values(), *averages])
        self.layouts = self.parameter_layouts()

    def parameter_layouts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Strides and dtype of each trained parameter, as they are now."""
        return [(parameter.stride(), parameter.dtype) for parameter in self.parameters.values()]

    def averaged(self) -> dict[str, Tensor]:
        """The moving averages by name; an error where the state keeps none."""
        if self._average is None:
            raise InputError(
                "This state keeps no moving average.",
                given="average=None",
                expected="a TrainState with average=MovingAverage(...)",
                hint="train with an average, or use the raw weights",
            )
        return self.averages()

    def averages(self) -> dict[str, Tensor]:
        """The moving averages, by name; none where the state keeps none."""
        return dict(self._average.tensors) if self._average else {}

    def untrained(self) -> list[str]:
        """The parameters that are not trained: frozen by a pattern, or without requires_grad from the start."""
        return [name for name, _ in self.model.named_parameters() if name not in self.parameters]

    def sections(self) -> dict[str, dict[str, Tensor]]:
        """All tensors to save, by section and name: the state's own, not copies."""
        sections: dict[str, Mapping[str, Tensor]] = {
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "slots": self._optimizer.slots(),
            "average": self.averages(),
        }
        return {section: {n: t.detach() for n, t in tensors.items()} for section, tensors in sections.items()}

    def values(self) -> dict[str, Any]:
        """All other values to save, as JSON."""
        return {
            "step": self.step,
            "smoothed": self.smoothed.values(),
            "num_refused": self.num_skipped,
            "loss_scale": self.loss_scale.values(),
            "optimizer": self._optimizer.values(),
        }

    def published(self) -> list[Tensor]:
        """The tensors that a chief publishes, where it alone makes the updates, and the other workers adopt."""
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        return [*parameters, *self.buffers.values(), *self.averages().values()]

    @torch.no_grad()
    def adopt(self, changes: Iterable[tuple[Tensor, Tensor]], *, step: int | None = None) -> None:
        """Take values from outside: what a chief has published, weights of a file, another state's.

        They are given with the tensors of this state that they are for, and are none of these. `step` is the number of
        completed updates from now on.
        """
        self._prepare_change()
        for tensor, values in changes:
            write_values(tensor, values)
        if step is not None:
            self.step = step

    def serve(self) -> None:
        """Have the chief alone make the updates: the other workers `adopt` what is `published` until the next load."""
        self.is_served = True

    def train_with(self, **parts: Any) -> None:
        """Note what the steps are made with, for checkpoints to say."""
        self.trained_with |= parts

    def resume_as(self, trained_with: dict[str, Any], resumed: Resumed | None) -> None:
        """Note what the state is trained with after a resume, and the checkpoint to compare the first step with."""
        self.trained_with, self.resumed = trained_with, resumed

    def continue_from(self, before: TrainState) -> None:
        """Go on from where another state stands, with a model of the same kind: the next stage of a run.

        Parameters, buffers, extra state, averages, the step, smoothed losses, the number of skipped attempts and the
        loss scale go on. The slots of the optimizer stay fresh, and it counts its steps from here. A parameter that had
        no average begins it at its present value; one that is no longer trained has none.

        The other state stays as it is, and shares no tensor with this one; it may train other parameters.
        """
        old, new = before.sections(), self.sections()
        present = {**old["parameters"], **old["buffers"]}
        changes = [(tensor, present[name]) for name, tensor in {**new["parameters"], **new["buffers"]}.items()]
        averages = [(tensor, old["average"].get(name, present[name])) for name, tensor in new["average"].items()]
        self.adopt([*changes, *averages], step=before.step)
        set_extra_state(self.model, extra_state(before.model))
        self.first_step = before.step
        self.num_skipped = before.num_skipped
        self.loss_scale = LossScale(**before.loss_scale.values())
        self.smoothed.load(before.smoothed.values())

    def count_steps_from(self, first_step: int) -> None:
        """Have the optimizer and its schedules count their steps from this one: the first of a stage."""
        self.first_step = first_step

    def load(self, sections: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
        """Load saved tensors and values; everything is checked before anything changes.

        Raises:
            CheckpointError: a tensor is missing, left over, or of another shape or dtype.
        """
        own, slots = self.sections(), sections.get("slots", {})
        check_compatible({**own, "slots": self._optimizer.expects(slots)}, sections)
        self._optimizer.check_values(values["optimizer"])
        self._prepare_change()
        with torch.no_grad():
            for section in ("parameters", "buffers", "average"):
                for name, tensor in own[section].items():
                    write_values(tensor, sections[section][name])
            self._optimizer.load(slots, values["optimizer"])
        self.step, self.num_skipped = int(values["step"]), int(values["num_refused"])
        self.is_settled, self.is_served = True, False
        self.loss_scale = LossScale(values["loss_scale"]["value"], values["loss_scale"]["good_steps"])
        self.smoothed.load(values["smoothed"])


class BufferUpdates:
    """Updates of the user's own: functions that give buffers new values, such as centres of classes."""

    def __init__(self, updates: Sequence[Update], model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        self._updates, self._model, self._buffers = tuple(updates), model, buffers

    def __call__(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Call all of them; returns the buffers that they change, with their new values.

        Raises:
            InputError: one names something else than a buffer, or gives a value of another shape.
        """
        changes: list[tuple[Tensor, Tensor]] = []
        for update in self._updates:
            returned = update(self._model, step)
            check_type("what an update of your own returns", returned, Mapping, expected="a dict", hint=_UPDATES_HINT)
            changes += [(self._buffer(name, value), value.detach().clone()) for name, value in returned.items()]
        return changes

    def _buffer(self, name: str, value: Any) -> Tensor:
        buffer = self._buffers.get(name)
        fits = buffer is not None and isinstance(value, torch.Tensor) and value.shape == buffer.shape
        if buffer is None or not fits or value.isnan().any():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise InputError(
                f"An update of your own cannot change {name!r}.",
                given=f"{name!r}: {'values that are not numbers' if fits else shape}",
                expected="buffers by name, with new values of their shape: "
                + shorten([f"{name!r} {tuple(buffer.shape)}" for name, buffer in self._buffers.items()], 8),
                hint="register what it changes with register_buffer in the model",
            )
        return buffer


def _describe_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that checkpoints name and a resume compares, as JSON."""
    given = {name: arguments[name] for name in _DESCRIBED}
    for patterns in ("frozen", "train_only"):
        given[patterns] = [given[patterns]] if isinstance(given[patterns], str) else given[patterns]
    if isinstance(given["optimizer"], ByName) and given["optimizer"].rest is None:
        given["optimizer"] = given["optimizer"].optimizers
    return {name: described(value) for name, value in given.items()}


class LossScale:
    """The factor of fp16 losses: halved when gradients overflow, doubled after 2,000 good updates.

    It keeps small gradients from becoming 0 (Micikevicius et al.: Mixed Precision Training, 2018). It is a power of
    two, which changes no bits but the exponent.
    """

    def __init__(self, value: float = 2.0**16, good_steps: int = 0) -> None:
        self.value = value
        self._good_steps = good_steps

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale is possible."""
        return self.value > _LEAST_SCALE

    def shrink(self) -> None:
        """The gradients overflowed."""
        self.value, self._good_steps = max(_LEAST_SCALE, self.value / 2), 0

    def grow(self) -> None:
        """An update was made at this scale."""
        self._good_steps += 1
        if self._good_steps >= _GROWTH_INTERVAL_STEPS:
            self.value, self._good_steps = min(_LARGEST_SCALE, self.value * 2), 0

    def values(self) -> dict[str, Any]:
        """What has to be saved, as JSON."""
        return {"value": self.value, "good_steps": self._good_steps}


class SmoothedLosses:
    """The moving averages of the losses of one run."""

    def __init__(self, value: LossAverage) -> None:
        self._value = value
        self._averages: dict[str, float] = {}
        self._weight = 0.0

    def update(self, losses: Mapping[str, float]) -> None:
        """Add the losses of one update."""
        averages, decay = self._averages, self._value.decay
        for name, loss in losses.items():
            averages[name] = decay * averages.get(name, 0.0) + (1 - decay) * loss
        averages["total"] = decay * averages.get("total", 0.0) + (1 - decay) * sum(losses.values())
        self._weight = decay * self._weight + (1 - decay)

    def now(self) -> dict[str, float]:
        """The averages by name, and that of `total`."""
        if not self._value.bias_correction:
            return dict(self._averages)
        return {name: average / self._weight for name, average in self._averages.items()}

    def values(self) -> dict[str, Any]:
        """What has to be saved, as JSON."""
        return {"averages": dict(self._averages), "weight": self._weight}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from averages that were saved."""
        self._averages, self._weight = dict(saved["averages"]), saved["weight"]
