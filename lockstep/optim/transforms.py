"""Gradient transforms between backward pass and optimizer, as values: gradient clipping, and multipliers by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Protocol, cast

import torch

from lockstep.checks import Checked, Hint, Range, check_type
from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients
from lockstep.optim.schedules import Schedule, rate_at
from lockstep.selection import Patterns, pattern_of_each, selected
from lockstep.tensors import all_narrowed, all_widened, norms_of, norms_on_device

if TYPE_CHECKING:
    from torch import Tensor

BoundTransform = Callable[[Gradients, int], None]
"""`transform(gradients, step)` changes the gradients of the update that follows `step` completed ones."""


class GradientTransform(Protocol):
    """One stage between the backward pass and the optimizer, as a value."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """Bind the transform to these parameters; gradients come in their order."""
        ...


class BoundTransforms:
    """Gradient transforms bound to their parameters, one after the other."""

    def __init__(
        self, transforms: Sequence[GradientTransform | BoundTransform], parameters: Mapping[str, Tensor]
    ) -> None:
        self._transforms = [bind_transform(each, parameters) for each in transforms]
        self.readers = [getattr(each, "__qualname__", type(each).__name__) for each in transforms if not _is_ours(each)]
        """Transforms of the user's own, which may read numbers of the gradients: on an accelerator they wait, and they
        are called for finite gradients alone."""

    def __call__(self, gradients: Gradients, step: int) -> None:
        """Transform the gradients of the update that follows `step` completed ones."""
        for transform in self._transforms:
            transform(gradients, step)


def bound_transforms(
    transforms: Sequence[GradientTransform | BoundTransform], parameters: Mapping[str, Tensor]
) -> BoundTransforms | None:
    """Bind gradient transforms to their parameters; None where there are none."""
    return BoundTransforms(transforms, parameters) if transforms else None


def bind_transform(transform: GradientTransform | BoundTransform, parameters: Mapping[str, Tensor]) -> BoundTransform:
    """Bind a transform that is a value; a function `(gradients, step)` is used as it is.

    It raises an InputError where it has changed a gradient in place instead of putting another one.
    """
    bind: Callable[[Mapping[str, Tensor]], BoundTransform] | None = getattr(transform, "bind", None)
    if isinstance(transform, type) or not (bind or callable(transform)):
        raise InputError(
            "This is no gradient transform.",
            given=repr(transform),
            expected="a value such as ls.optim.ClipGlobalNorm(10.0), or a function (gradients, step)",
            hint="write the value with its arguments",
        )
    function = bind(parameters) if bind else cast("BoundTransform", transform)
    if _is_ours(transform):  # ours put new gradients in place: there is nothing to watch
        return function
    return partial(_watched, function, getattr(transform, "__qualname__", repr(transform)))


def _is_ours(transform: GradientTransform | BoundTransform) -> bool:
    return type(transform).__module__ == __name__


def _watched(function: BoundTransform, name: str, gradients: Gradients, step: int) -> None:
    gradients.watch()
    function(gradients, step)
    changed = gradients.changed()
    if changed:
        raise InputError(
            f"A gradient transform has changed the gradient of {changed[0]!r} in place.",
            given=name,
            expected="a transform that puts new tensors in the place of gradients: others may hold these",
            hint="write gradients.put({index: gradient * 10}), with a tensor of its own",
        )


_Limit = Annotated[float, Range(gt=0, finite=False), Hint("give the largest allowed, or leave the transform out")]
_SMALL = 4096
"""The elements up to which tensors are faster joined and measured at once than measured one by one."""


@dataclass(frozen=True)
class ClipGlobalNorm(Checked):
    """Scale all gradients by max_norm / norm where their global norm exceeds it (Pascanu et al., 2013).

    The rule of tf.clip_by_global_norm; torch's clip_grad_norm_ divides by norm + 1e-6.
    """

    max_norm: _Limit
    """The largest 2-norm that gradients keep; larger ones are scaled down to it."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """Return the clip, which is the same for any parameters."""
        return self._clip

    def _clip(self, gradients: Gradients, step: int) -> None:
        if gradients.reading_waits:
            gradients.divide((gradients.unread_norms()[0] / self.max_norm).clamp(min=1.0))
        elif (norm := gradients.norm) > self.max_norm:
            gradients.divide(norm / self.max_norm)


@dataclass(frozen=True)
class ClipNorm(Checked):
    """Scale each gradient by max_norm / norm where its own norm exceeds it: a limit for each parameter alone.

    The rule of tf.clip_by_norm, and of `clip_gradient_norm` in TF-Slim.
    """

    max_norm: _Limit
    """The largest 2-norm that gradients keep; larger ones are scaled down to it."""
    pattern: Patterns | None = None
    """The parameters it is for, by regular expression or exact name; None: all."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """Bind the clip to the parameters that the pattern matches."""
        return partial(self._clip, _indices("ClipNorm", self.pattern, parameters))

    def _clip(self, indices: Sequence[int], gradients: Gradients, step: int) -> None:
        if gradients.reading_waits:
            _clip_on_device(indices, self.max_norm, gradients)
            return
        norms, limit = gradients.norms, self.max_norm
        gradients.multiply({i: limit / norms[i] for i in indices if norms[i] > limit})


@dataclass(frozen=True)
class ClipValue(Checked):
    """Hold every element of every gradient within -max_value and max_value, as torch's clip_grad_value_ does."""

    max_value: _Limit
    """Each value of a gradient is clipped to between minus this and this."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """Return the clip, which is the same for any parameters."""
        return self._clip

    def _clip(self, gradients: Gradients, step: int) -> None:
        if gradients.reading_waits:
            large = [i for i, gradient in enumerate(gradients.tensors) if gradient is not None]
        else:  # no element is larger than the norm, which is rounded
            large = [i for i, norm in enumerate(gradients.norms) if not norm <= 0.99 * self.max_value]
        if large:
            clipped = torch._foreach_clamp_min(_present(gradients, large), -self.max_value)
            torch._foreach_clamp_max_(clipped, self.max_value)
            gradients.put(dict(zip(large, clipped, strict=True)), owned=True)


@dataclass(frozen=True)
class AdaptiveClip(Checked):
    """Scale each output unit's gradient to clip_factor * max(norm of its weights, eps) where its norm exceeds that.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021, with the units of the
    authors' code: what is a scalar or vector but for dimensions of 1, such as a bias or a gain, is one unit; of all
    else each index of the first dimension is one, as in the weights of torch's linear layers and convolutions (of a
    transposed convolution these are the inputs). The paper does not clip the last linear layer: the pattern
    "^(?!head[.])" leaves out what is called head.
    """

    clip_factor: _Limit = 0.01
    """The paper has 0.01 for batches of 4096 examples, and more for smaller ones."""
    eps: Annotated[float, Range(gt=0, finite=False), Hint("give a small norm, such as 1e-3")] = 1e-3
    """The least norm of weights to go by: those that start at 0 could not leave it otherwise."""
    pattern: Patterns | None = None
    """The parameters it is for, by regular expression or exact name; None: all."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """Bind the clip to the parameters that the pattern matches, and to their weights as they are at each update."""
        tensors = list(parameters.values())
        return _UnitClip(self, {i: tensors[i] for i in _indices("AdaptiveClip", self.pattern, parameters)})


class _UnitClip:
    """`AdaptiveClip` of some parameters, by index: as few calls as torch allows, for each has a cost."""

    def __init__(self, value: AdaptiveClip, weights: Mapping[int, Tensor]) -> None:
        self._value = value
        self._weights = weights
        self._one_unit = {i for i, w in weights.items() if sum(size != 1 for size in w.shape) <= 1}
        self._num_units = {i: len(w) for i, w in weights.items() if i not in self._one_unit}
        self._runs = _runs({i: weights[i] for i in self._num_units})

    def __call__(self, gradients: Gradients, step: int) -> None:
        """Clip the units whose norms are above their limits."""
        with torch.no_grad():
            _refuse_rows([gradients.names[i] for i in gradients.rows if i in self._weights])
            if gradients.reading_waits:
                present = {i for i, gradient in enumerate(gradients.tensors) if gradient is not None}
                wholes = sorted(self._one_unit & present)
                self._clip_units(self._runs_of(present), gradients)
                if wholes:
                    sizes = norms_on_device([self._weights[i] for i in wholes])
                    _clip_on_device(wholes, self._value.clip_factor * sizes.clamp(min=self._value.eps), gradients)
                return
            norms = gradients.norms
            # No limit is lower than this, and no norm of a unit higher than that of the whole.
            suspects = {i for i in self._weights if norms[i] > self._value.clip_factor * self._value.eps}
            self._clip_units(self._runs_of(suspects), gradients)
            self._clip_wholes(sorted(self._one_unit & suspects), norms, gradients)

    def _runs_of(self, indices: Collection[int]) -> list[list[int]]:
        return [kept for run in self._runs if (kept := [i for i in run if i in indices])]

    def _clip_wholes(self, indices: Sequence[int], norms: Sequence[float], gradients: Gradients) -> None:
        sizes = norms_of([self._weights[i] for i in indices])
        limits = {i: self._value.clip_factor * max(n, self._value.eps) for i, n in zip(indices, sizes, strict=True)}
        gradients.multiply({i: limit / norms[i] for i, limit in limits.items() if norms[i] > limit})

    def _clip_units(self, runs: Sequence[Sequence[int]], gradients: Gradients) -> None:
        if not runs:
            return
        order = [i for run in runs for i in run]
        before = dict(zip(order, _present(gradients, order), strict=True))
        limits = _unit_norms(self._weights, runs).clamp_(min=self._value.eps).mul_(self._value.clip_factor)
        divisors = _unit_norms(before, runs).div_(limits).clamp_(min=1.0)
        num_units = [self._num_units[i] for i in order]
        exceeding = set(order)
        if not gradients.reading_waits:
            owners = torch.repeat_interleave(torch.tensor(order), torch.tensor(num_units))
            exceeding = set(owners[divisors > 1.0].tolist())
        if exceeding:
            divisors_of = dict(zip(order, divisors.split_with_sizes(num_units), strict=True))
            gradients.put(_divided({i: before[i] for i in exceeding}, divisors_of), owned=True)


def _clip_on_device(indices: Sequence[int], limits: float | Tensor, gradients: Gradients) -> None:
    """Scale the gradients of these parameters to their limits where their norms exceed them; the host reads nothing.

    Those without a gradient are passed over. The limit is one for all, or of shape (indices,), where each has a
    gradient.
    """
    tensors = gradients.tensors
    chosen = {i: g for i in indices if (g := tensors[i]) is not None}
    if not chosen:
        return
    own = list(chosen.values())
    norms = norms_on_device(own)
    factors = torch.where(norms > limits, limits / norms, 1.0)
    wide = all_widened(own)  # torch would round a factor to the 16 bits of a gradient
    factors_of = {dtype: factors.to(dtype).unbind() for dtype in {gradient.dtype for gradient in wide}}
    scaled = torch._foreach_mul(wide, [factors_of[gradient.dtype][place] for place, gradient in enumerate(wide)])
    gradients.put(dict(zip(chosen, all_narrowed(list(scaled), own), strict=True)), owned=True)


def _runs(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Group the indices of small tensors with units of one shape, to be joined; large tensors stay alone."""
    runs: dict[object, list[int]] = {}
    for index, tensor in tensors.items():
        runs.setdefault(tensor.shape[1:] if tensor.numel() <= _SMALL else index, []).append(index)
    return list(runs.values())


def _unit_norms(tensors: Mapping[int, Tensor], runs: Sequence[Sequence[int]]) -> Tensor:
    """Compute the 2-norms of all units in the order of the runs, in float32 or wider, shape (units,)."""
    norms = []
    for run in runs:
        joined = torch.cat([tensors[i] for i in run]) if len(run) > 1 else tensors[run[0]]
        dtype = torch.float32 if joined.dtype.itemsize < 4 else None
        norms.append(torch.linalg.vector_norm(joined, 2, list(range(1, joined.ndim)), dtype=dtype))
    return torch.cat(norms)


def _divided(tensors: Mapping[int, Tensor], divisors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Divide tensors by a number for each unit."""
    shaped = [divisors[i].view(-1, *[1] * (t.ndim - 1)) for i, t in tensors.items()]
    divided = torch._foreach_div(list(tensors.values()), shaped)
    return {i: new.to(old.dtype) for (i, old), new in zip(tensors.items(), divided, strict=True)}


def _indices(field: str, pattern: Patterns | None, parameters: Mapping[str, Tensor]) -> list[int]:
    chosen = parameters if pattern is None else set(selected(field, pattern, parameters))
    return [index for index, name in enumerate(parameters) if name in chosen]


def _present(gradients: Gradients, indices: Iterable[int]) -> list[Tensor]:
    tensors = gradients.tensors
    return [g for i in indices if (g := tensors[i]) is not None]


def _refuse_rows(names: Sequence[str]) -> None:
    if names:
        raise InputError(
            "A sparse gradient cannot be clipped by the norm of its parameter.",
            given=f"AdaptiveClip for {', '.join(map(repr, names))}",
            expected="parameters with dense gradients",
            hint="give AdaptiveClip a pattern without them, or build the embedding with sparse=False",
        )


Multiplier = float | Schedule
"""A number, or a function of the completed updates that returns one."""

_SCALE_HINT = 'write ScaleGradients({r"bias$": 2.0})'


@dataclass(frozen=True)
class ScaleGradients(Checked):
    """Multiply the gradients of some parameters: `ScaleGradients({r"bias$": 2.0, "scale": lambda step: 0.1})`.

    A pattern is a regular expression that is searched for in the name, or the exact name; parameters that none of them
    matches keep their gradients, and one without a gradient in this update is passed over. Times 0 a gradient is zero,
    and not absent: momentum and weight decay still move the parameter. What is not to move at all is frozen.
    """

    multipliers: Mapping[str, Multiplier]
    """Factors by pattern of the parameters' names."""

    def __post_init__(self) -> None:
        check_type("multipliers", self.multipliers, Mapping, expected="numbers by pattern", hint=_SCALE_HINT)
        if not self.multipliers:
            raise InputError(
                "There is nothing to multiply gradients by.",
                given="multipliers={}",
                expected="at least one pattern with its number",
                hint="give one, or leave the transform out",
            )
        for pattern, multiplier in self.multipliers.items():
            if not callable(multiplier) or isinstance(multiplier, type):
                _check_multiplier(pattern, multiplier)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """Look up the pattern of each parameter."""
        pattern_of = pattern_of_each("ScaleGradients", self.multipliers, parameters)
        return partial(
            self._scale,
            {p: [i for i, name in enumerate(parameters) if pattern_of.get(name) == p] for p in self.multipliers},
        )

    def _scale(self, indices_of: Mapping[str, Sequence[int]], gradients: Gradients, step: int) -> None:
        factors: dict[int, float] = {}
        for pattern, multiplier in self.multipliers.items():
            factor = rate_at(multiplier, step, name=_called(pattern), low=-math.inf)
            if factor != 1:
                factors.update(dict.fromkeys(indices_of[pattern], factor))
        gradients.multiply(factors)


def _check_multiplier(pattern: str, factor: object) -> None:
    name = _called(pattern)
    check_type(
        name, factor, (int, float), expected="a number, or a function of the step that returns one", hint=_SCALE_HINT
    )
    if isinstance(factor, int | float) and not math.isfinite(factor):
        raise InputError(f"{name} is not finite.", given=str(factor), expected="a finite number", hint="correct it")


def _called(pattern: str) -> str:
    return f"The multiplier of {pattern!r}"
