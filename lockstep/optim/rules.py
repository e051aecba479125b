"""What an optimizer is, and update rules: arithmetic on lists of tensors.

`BoundRule` groups the parameters, and keeps slots and schedule.

16-bit parameters are updated in 32 bits, from slots of 32 bits: in 16 bits an epsilon of 1e-8 is 0, the square of a
small gradient is 0 and that of a large one infinite, and a mean that decays by a thousandth at a time stands still.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

import torch

from lockstep.checks import Checked, NonNegativeFloat, check_value, plain
from lockstep.errors import CheckpointError, InputError
from lockstep.optim.gradients import Gradients
from lockstep.optim.schedules import Constant, LearningRate, Schedule, describe_schedule, rate_at, resolve_schedule
from lockstep.selection import assigned, selected
from lockstep.tensors import all_widened, by_dtype, copy_all, map_all, quotients, reading_waits

if TYPE_CHECKING:
    from torch import Tensor

_CACHED_ELEMENTS = 1 << 18
"""A group of parameters of so many elements stays in a CPU's cache."""
_COPIED_ELEMENTS = 1 << 24
"""On an accelerator, what an update of so many elements makes beside them is small, and each launch is full."""


def _check_weight_decay(name: str, decay: object) -> None:
    for pattern, each in decay.items() if isinstance(decay, Mapping) else [("", decay)]:
        check_value(f"{name} of {pattern!r}" if pattern else name, each, NonNegativeFloat)


WeightDecay = Annotated[float | Mapping[str, float], _check_weight_decay]
"""One number for all parameters, or one a pattern: those that no pattern matches have none.

Unless an optimizer says otherwise, weight_decay * parameter is added to the gradient, after the gradient transforms."""


class BoundOptimizer(Protocol):
    """An optimizer with its parameters and its slots: the tensors that it keeps for them.

    One that inherits from this class has slots alone, and no patterns, as long as it does not say otherwise.
    """

    @property
    def kernels(self) -> str:
        """Name the implementation of the update, for the run's choices: another one rounds otherwise."""
        ...

    @property
    def takes_found_inf(self) -> bool:
        """True if `update` changes nothing, on the device, where the `found_inf` of the gradients is not 0."""
        return False

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn lengths in epochs into steps, once the stream is known; return a line about each.

        A stream of other sizes may be next: lengths are resolved anew, from what the optimizer was given.
        """
        ...

    def matched(self) -> Iterator[tuple[str, list[str]]]:
        """Describe each pattern, with the names of the parameters that it matches."""
        return iter(())

    def check_rows(self, names: Collection[str]) -> None:
        """Refuse sparse gradients of those of these parameters that it cannot update by rows."""
        ...

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the rates of the update that follows `step` completed ones: by pattern, or that of all under ""."""
        ...

    def update(self, gradients: Gradients, step: int) -> None:
        """Make the update that follows `step` completed ones, in place.

        Parameters whose gradient is None stay untouched, slots included. The gradients are used up.
        It refuses what `learning_rates` and `check_rows` refuse.
        """
        ...

    def slots(self) -> dict[str, Tensor]:
        """Return the tensors to save, by `slot/parameter`: the optimizer's own, not copies."""
        ...

    def values(self) -> dict[str, Any]:
        """Return what else has to be saved, as JSON."""
        return {}

    def expects(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of the names, shapes and dtypes that saved slots must have for `load`."""
        return self.slots()

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse values that another optimizer has saved, or this one for other parameters."""
        ...

    def load(self, saved: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore slots that are as expected, and values; `check_values` is called before anything changes."""
        ...


class Optimizer(Protocol):
    """An optimizer as `TrainState` takes it."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundOptimizer:
        """Bind the optimizer to these parameters, which it updates in place."""
        ...


class Scheduled(BoundOptimizer):
    """Base of bound optimizers that follow one schedule.

    `check_rate` refuses a rate that the update that makes a step cannot use: it is called with both.
    """

    def __init__(self, lr: LearningRate, check_rate: Callable[[float, int], None] = lambda lr, step: None) -> None:
        self._given: Schedule = Constant(lr) if isinstance(lr, int | float) else lr
        self._schedule = self._given
        self._is_constant = isinstance(self._given, Constant)
        self._check_rate = check_rate
        self._latest: tuple[int, float] | None = None
        """The last step that was asked for, and its rate: both the report and the update ask for it."""

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn lengths in epochs into steps; return a line about each."""
        lines = describe_schedule(self._given, epoch_size, batch_size)
        self._schedule = resolve_schedule(self._given, epoch_size, batch_size)
        self._latest = None
        return lines

    def rate(self, step: int) -> float:
        """Return the rate of the update that follows `step` completed ones."""
        if self._latest is None or (self._latest[0] != step and not self._is_constant):
            rate = rate_at(self._schedule, step)
            self._check_rate(rate, step + 1)
            self._latest = (step, rate)
        return self._latest[1]

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the rate of the update that follows `step` completed ones, under ""."""
        return {"": self.rate(step)}


def of_another(given: str, expected: str) -> CheckpointError:
    """Make the error for values that another optimizer has saved."""
    return CheckpointError(
        "The checkpoint holds values of another optimizer.",
        given=given,
        expected=expected,
        hint="resume with the optimizer of the run, or train in another workdir",
    )


class Chunk(NamedTuple):
    """Parameters of one weight decay, each with its gradient: lists in one order."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    slots: Mapping[str, list[Tensor]]
    weight_decay: float
    fused: bool
    """Whether torch's fused kernel may update them."""
    divisor: float | Tensor = 1.0
    """Divides the gradients on the way; other than 1 only where the rule is fused."""
    found_inf: Tensor | None = None
    """Without dimensions, float32, 0 or 1: where it is 1 nothing changes. A rule that is fused sees to it."""

    def decayed(self) -> list[Tensor]:
        """Add weight_decay * parameter to the gradients: new tensors, if there is a decay."""
        if not self.weight_decay:
            return self.gradients
        return list(torch._foreach_add(self.gradients, self.parameters, alpha=self.weight_decay))


class Rule(Checked, ABC):
    """An optimizer whose update is a function of parameter, gradient, slots, learning rate and step."""

    lr: LearningRate
    """The learning rate: a number, or a schedule of the step."""
    weight_decay: WeightDecay
    """Times the parameter, added to its gradient; one number, or by pattern."""
    kernel: ClassVar[str | None] = None
    """The name of torch's fused kernel, if `apply` can use one."""
    takes_complex: ClassVar[bool] = False
    """True if the rule is right for complex parameters too: it takes no squares of gradients."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", plain(self.lr))
        super().__post_init__()

    @property
    def takes_rows(self) -> bool:
        """True if the rule takes sparse gradients: rows without a gradient stay as they are, and so do their slots."""
        return False

    @abstractmethod
    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the slots of a parameter before the first update."""

    @abstractmethod
    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place; `step` counts this update too, so the first is 1."""

    def check_rate(self, lr: float, step: int) -> None:
        """Refuse a rate that the update that makes `step` cannot use, though it is finite and 0 or more."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundRule:
        """Bind the rule to these parameters, and make their slots."""
        found = [] if self.takes_complex else [name for name, each in parameters.items() if each.dtype.is_complex]
        if found:
            raise InputError(
                f"{type(self).__name__} cannot update complex parameters.",
                given=", ".join(map(repr, found)),
                expected="real parameters: it squares gradients, and those of complex ones have no sign",
                hint="give them ls.optim.SGD by name, or hold their real and imaginary parts as a real parameter",
            )
        return BoundRule(self, parameters)


class _Group(NamedTuple):
    """Parameters of one weight decay that are updated together, by their indices."""

    indices: Sequence[int]
    whole: Chunk

    def chunk(self, tensors: Sequence[Tensor | None], divisor: float | Tensor, gradients: Gradients) -> Chunk:
        """Select the parameters that have a dense gradient."""
        whole, rows, found_inf = self.whole, gradients.rows, gradients.found_inf
        mine = [tensors[i] for i in self.indices]
        given = [g for g in mine if g is not None]
        if len(given) == len(mine) and not rows:
            return Chunk(whole.parameters, given, whole.slots, whole.weight_decay, whole.fused, divisor, found_inf)
        kept = [k for k, i in enumerate(self.indices) if tensors[i] is not None and i not in rows]
        return whole._replace(
            parameters=[whole.parameters[k] for k in kept],
            gradients=[g for k in kept if (g := mine[k]) is not None],
            slots={slot: [tensors[k] for k in kept] for slot, tensors in whole.slots.items()},
            divisor=divisor,
            found_inf=found_inf,
        )


class BoundRule(Scheduled):
    """A rule with its parameters, in groups that are updated together, and their slots."""

    def __init__(self, rule: Rule, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(rule.lr, rule.check_rate)
        self._rule = rule
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        starts = [rule.start(parameter) for parameter in self._parameters]
        self._slots = {slot: [start[slot] for start in starts] for slot in starts[0]}
        self._decays = _decay_of_each(rule.weight_decay, self._names)
        self._fused = rule.kernel is not None and can_fuse(self._parameters, rule.kernel)
        self._divides = self._fused and all(p.dtype == torch.float32 for p in self._parameters)
        self._puts_back = can_put_back(self._parameters)
        full = _COPIED_ELEMENTS if reading_waits(self._parameters[0].device) else _CACHED_ELEMENTS
        self._small_groups = [self._group(block) for block in self._blocks(full)]
        self._groups = [self._group(block) for block in self._blocks(math.inf)] if self._fused else self._small_groups

    @property
    def kernels(self) -> str:
        """Return "fused" for torch's kernel, else "foreach"."""
        return "fused" if self._fused else "foreach"

    def matched(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the patterns of the weight decay."""
        decays = self._rule.weight_decay
        for pattern, decay in decays.items() if isinstance(decays, Mapping) else ():
            label = f"{type(self._rule).__name__} weight_decay {pattern!r} = {decay}"
            yield label, selected("weight_decay", pattern, self._names)

    def check_rows(self, names: Collection[str]) -> None:
        """Refuse sparse gradients of these parameters if the rule, or a weight decay, would move the other rows."""
        decay_of = dict(zip(self._names, self._decays, strict=True))
        refused = [n for n in decay_of if n in names and (decay_of[n] or not self._rule.takes_rows)]
        if refused:
            raise InputError(
                f"{type(self._rule).__name__} cannot update {', '.join(map(repr, refused))} from a sparse gradient.",
                given=f"{self._rule}",
                expected="SGD without momentum, or Adagrad, and no weight decay",
                hint="build the embedding with sparse=False, or give it such an optimizer of its own",
            )

    @property
    def takes_found_inf(self) -> bool:
        """True if torch's fused kernel makes the update, or one can undo it."""
        return self._fused or self._puts_back

    def update(self, gradients: Gradients, step: int) -> None:
        """Make the update that follows `step` completed ones, in place."""
        lr = self.rate(step)
        if gradients.rows:
            self.check_rows([self._names[index] for index in gradients.rows])
        tensors, divisor, owned = (gradients.tensors, 1.0, False) if gradients.rows else gradients.to_divide()
        is_divided = not isinstance(divisor, float | int) or divisor != 1.0
        # In small groups: on a CPU they stay in the cache, and elsewhere they are those of a part of the model.
        needs_quotients = is_divided and not (owned and self._divides)
        for group in self._small_groups if needs_quotients else self._groups:
            chunk = group.chunk(tensors, divisor, gradients)
            if needs_quotients:
                chunk = chunk._replace(gradients=quotients(chunk.gradients, divisor), divisor=1.0)
            if chunk.gradients:
                self._apply(chunk, lr, step + 1)
        for index, rows in gradients.rows.items():
            self._update_rows(index, rows, gradients.tensors[index], lr, step + 1)

    def _apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update a chunk; where its `found_inf` is 1, and the rule is not fused, what changed is put back."""
        if chunk.found_inf is None or chunk.fused:
            self._rule.apply(chunk, lr, step)
            return
        tensors = [*chunk.parameters, *(tensor for tensors in chunk.slots.values() for tensor in tensors)]
        copies = map_all(lambda some: torch._foreach_mul(some, 1.0), tensors)
        self._rule.apply(chunk, lr, step)
        put_back(tensors, copies, chunk.found_inf)

    def slots(self) -> dict[str, Tensor]:
        """Return the tensors to save, by `slot/parameter`."""
        return {
            f"{slot}/{name}": tensor
            for slot, tensors in self._slots.items()
            for name, tensor in zip(self._names, tensors, strict=True)
        }

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse any values: a rule has none."""
        if values:
            raise of_another(", ".join(values), f"those of {type(self._rule).__name__}, which has slots alone")

    def load(self, saved: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore slots that are as expected."""
        self.check_values(values)
        for name, tensor in self.slots().items():
            tensor.copy_(saved[name])

    def _blocks(self, full: float) -> list[list[int]]:
        """The indices of the parameters that are updated together: of one weight decay, about `full` elements.

        An update of several operations takes few parameters at a time: on a CPU they stay in the cache in between, and
        elsewhere its copies are those of a part of the model.
        """
        blocks: list[list[int]] = []
        for decay in dict.fromkeys(self._decays):
            size = full
            for index in [i for i, each in enumerate(self._decays) if each == decay]:
                if size >= full:
                    blocks.append([])
                    size = 0
                blocks[-1].append(index)
                size += self._parameters[index].numel()
        return blocks

    def _group(self, indices: list[int]) -> _Group:
        slots = {slot: [tensors[i] for i in indices] for slot, tensors in self._slots.items()}
        whole = Chunk([self._parameters[i] for i in indices], [], slots, self._decays[indices[0]], self._fused)
        return _Group(indices, whole)

    def _update_rows(self, index: int, rows: Tensor, values: Tensor | None, lr: float, step: int) -> None:
        """Update `rows` (rows,) of a parameter and of its slots, from gradients `values` (rows, ...)."""
        if values is None:
            return
        whole = [self._parameters[index], *[tensors[index] for tensors in self._slots.values()]]
        parts = [tensor[rows] for tensor in whole]
        slots = {slot: [part] for slot, part in zip(self._slots, parts[1:], strict=True)}
        self._rule.apply(Chunk(parts[:1], [values], slots, 0.0, fused=False), lr, step)
        for tensor, part in zip(whole, parts, strict=True):
            tensor.index_copy_(0, rows, part)


def _decay_of_each(weight_decay: WeightDecay, names: Sequence[str]) -> list[float]:
    if not isinstance(weight_decay, Mapping):
        return [weight_decay] * len(names)
    decays = assigned("weight_decay", weight_decay, names)
    return [decays.get(name, 0.0) for name in names]


def slot(parameter: Tensor, value: float = 0.0) -> Tensor:
    """Make a slot of the parameter's shape and memory format, float32 or wider, filled with a value."""
    return torch.full_like(parameter, value, dtype=torch.promote_types(parameter.dtype, torch.float32))


@contextmanager
def in_float32(chunk: Chunk) -> Iterator[Chunk]:
    """Yield a chunk with float32 copies of 16-bit tensors; the parameters are rounded back at the end."""
    if all(p.dtype.itemsize >= 4 for p in chunk.parameters):
        yield chunk
        return
    wide = all_widened(chunk.parameters)
    yield chunk._replace(parameters=wide, gradients=all_widened(chunk.gradients))
    copy_all(chunk.parameters, wide)


# Torch's fused kernels ------------------------------------------------------------------------------------------------
#
# Private names of torch, stable over many releases; only this module knows them. Each makes one update in place of a
# chunk's dense parameters, of one device; gradients are divided on the way, and used up. Where `found_inf` is 1,
# nothing changes: so the host need not know whether an update is to be made when it enqueues it.

_DEVICES = {"sgd": {"cpu", "cuda"}, "adam": {"cpu", "cuda"}, "adamw": {"cpu", "cuda"}, "adagrad": {"cpu"}}
"""Devices for which torch 2.11, the oldest supported, has each fused kernel."""


def can_fuse(parameters: Sequence[Tensor], kernel: str = "sgd") -> bool:
    """Check that torch has a fused kernel that is right for these parameters: by device, dtype and memory."""
    if not hasattr(torch, f"_fused_{kernel}_") or len({(p.device, p.dtype) for p in parameters}) != 1:
        return False
    device, dtype = parameters[0].device.type, parameters[0].dtype
    # The kernels want slots of the parameters' dtype, for which 16 bits are too few.
    if dtype not in (torch.float32, torch.float64) or device not in _DEVICES[kernel]:
        return False
    return all(map(_is_dense, parameters))


def _is_dense(tensor: Tensor) -> bool:
    """Check that the elements fill a stretch of memory: the kernels walk memory, not indices."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def can_put_back(parameters: Sequence[Tensor]) -> bool:
    """Check that `put_back` is right for these parameters, and slots of their memory format."""
    kinds = {parameter.dtype for parameter in parameters}
    if not kinds <= {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        return False
    devices = {parameter.device for parameter in parameters}
    return len(devices) == 1 and devices.pop().type in _DEVICES["sgd"] and all(map(_is_dense, parameters))


def put_back(tensors: list[Tensor], copies: list[Tensor], found_inf: Tensor) -> None:
    """Write copies back to their tensors where `found_inf` is 1; they are used up.

    It is torch's fused SGD, at a rate of 0: its first step sets the momentum buffers to the gradients. In a good update
    its launches see its flag, and end at once.
    """
    for some, theirs in by_dtype(tensors, copies):
        torch._fused_sgd_(
            theirs,
            theirs,
            some,
            weight_decay=0.0,
            momentum=1.0,
            lr=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
            found_inf=1.0 - found_inf,
        )


def can_fuse_lerp(tensors: Sequence[Tensor]) -> bool:
    """Check that `fused_lerp` is right for these tensors, and for others of their memory format, and saves time."""
    return not reading_waits(tensors[0].device) and can_fuse(tensors)


def fused_lerp(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move each tensor towards another by a weight below 0.5: `_foreach_lerp_` to the bit, in half the time if small.

    It is torch's fused SGD, which takes a list of a CPU in one call, where foreach operations take its tensors one by
    one: with the ends as gradients, to be maximized, and a decay of 1, tensor -= weight * (tensor - end).
    """
    torch._fused_sgd_(
        tensors,
        ends,
        [],
        weight_decay=1.0,
        momentum=0.0,
        lr=weight,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
    )


def fused_sgd(chunk: Chunk, lr: float, momentum: float, nesterov: bool) -> None:
    """Update as torch's SGD does; there are momentum buffers unless momentum is 0."""
    torch._fused_sgd_(
        chunk.parameters,
        chunk.gradients,
        chunk.slots.get("momentum_buffer", []),
        weight_decay=chunk.weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=_scale(chunk),
        found_inf=chunk.found_inf,
    )


def fused_adam(chunk: Chunk, lr: float, step: int, *, betas: tuple[float, float], eps: float, decoupled: bool) -> None:
    """Update as torch's Adam does, or AdamW where the weight decay is decoupled; `step` counts this update too."""
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        chunk.parameters,
        chunk.gradients,
        chunk.slots["exp_avg"],
        chunk.slots["exp_avg_sq"],
        [],
        _steps(step, chunk),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=chunk.weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=_scale(chunk),
        found_inf=chunk.found_inf,
    )


def fused_adagrad(chunk: Chunk, lr: float, eps: float) -> None:
    """Update as torch's Adagrad does, without a decay of the learning rate."""
    torch._fused_adagrad_(
        chunk.parameters,
        chunk.gradients,
        chunk.slots["sum"],
        _steps(1, chunk),
        lr=lr,
        lr_decay=0.0,
        weight_decay=chunk.weight_decay,
        eps=eps,
        maximize=False,
        grad_scale=_scale(chunk),
        found_inf=chunk.found_inf,
    )


def _steps(step: int, chunk: Chunk) -> list[Tensor]:
    """Make one tensor of the step for all parameters: the kernels only read it."""
    return [torch.full((), step, dtype=torch.float32, device=chunk.parameters[0].device)] * len(chunk.parameters)


def _scale(chunk: Chunk) -> Tensor | None:
    if not isinstance(chunk.divisor, float | int):
        return chunk.divisor.float()
    # Filled on the device: a copy from the host would wait for all that the device still has to do.
    if chunk.divisor == 1.0:
        return None
    return torch.full((), chunk.divisor, dtype=torch.float32, device=chunk.parameters[0].device)
