"""Clips: gradients that are too large are made as large as is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.checks import check_type
from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients
from lockstep.optim.transforms import BoundTransform
from lockstep.selection import Patterns, selected


@dataclass(frozen=True)
class ClipGlobalNorm:
    """Scale all gradients by max_norm / norm where their global norm exceeds it (Pascanu et al., 2013).

    The rule of tf.clip_by_global_norm; torch's clip_grad_norm_ divides by norm + 1e-6.
    """

    max_norm: float

    def __post_init__(self) -> None:
        check_limit("max_norm", self.max_norm)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """The same for any parameters."""
        return self._clip

    def _clip(self, gradients: Gradients, step: int) -> None:
        norm = gradients.norm
        if norm > self.max_norm:
            gradients.divide(norm / self.max_norm)


@dataclass(frozen=True)
class ClipNorm:
    """Scale each gradient by max_norm / norm where its own norm exceeds it: a limit for each parameter alone.

    The rule of tf.clip_by_norm, and of `clip_gradient_norm` in TF-Slim.
    """

    max_norm: float
    pattern: Patterns | None = None
    """The parameters it is for, by regular expression or exact name; None: all."""

    def __post_init__(self) -> None:
        check_limit("max_norm", self.max_norm)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """The clip of those that the pattern matches.

        Raises:
            InputError: it matches none.
        """
        return partial(self._clip, _indices("ClipNorm", self.pattern, parameters))

    def _clip(self, indices: Sequence[int], gradients: Gradients, step: int) -> None:
        norms, limit = gradients.norms, self.max_norm
        gradients.multiply({i: limit / norms[i] for i in indices if norms[i] > limit})


@dataclass(frozen=True)
class ClipValue:
    """Hold every element of every gradient within -max_value and max_value, as torch's clip_grad_value_ does."""

    max_value: float

    def __post_init__(self) -> None:
        check_limit("max_value", self.max_value)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """The same for any parameters."""
        return self._clip

    def _clip(self, gradients: Gradients, step: int) -> None:
        # No element is larger than the norm, which is rounded.
        large = [i for i, norm in enumerate(gradients.norms) if not norm <= 0.99 * self.max_value]
        if large:
            clipped = torch._foreach_clamp_min(_present(gradients, large), -self.max_value)
            torch._foreach_clamp_max_(clipped, self.max_value)
            gradients.put(dict(zip(large, clipped, strict=True)), owned=True)


@dataclass(frozen=True)
class AdaptiveClip:
    """Scale each output unit's gradient to clip_factor * max(norm of its weights, eps) where its norm exceeds that.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021, with the units of the
    authors' code: what is a scalar or vector but for dimensions of 1, such as a bias or a gain, is one unit; of all
    else each index of the first dimension is one, as in the weights of torch's linear layers and convolutions (of a
    transposed convolution these are the inputs). The paper does not clip the last linear layer: the pattern
    "^(?!head[.])" leaves out what is called head.
    """

    clip_factor: float = 0.01
    """The paper has 0.01 for batches of 4096 examples, and more for smaller ones."""
    eps: float = 1e-3
    """The least norm of weights to go by: those that start at 0 could not leave it otherwise."""
    pattern: Patterns | None = None
    """The parameters it is for, by regular expression or exact name; None: all."""

    def __post_init__(self) -> None:
        check_limit("clip_factor", self.clip_factor)
        check_limit("eps", self.eps, mend="give a small norm, such as 1e-3")

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundTransform:
        """The clip of those that the pattern matches, by their weights as they are at each update.

        Raises:
            InputError: it matches none.
        """
        tensors = list(parameters.values())
        return partial(self._clip, {i: tensors[i] for i in _indices("AdaptiveClip", self.pattern, parameters)})

    @torch.no_grad()
    def _clip(self, weights: Mapping[int, Tensor], gradients: Gradients, step: int) -> None:
        _refuse_rows([gradients.names[i] for i in gradients.rows if i in weights])
        given = [i for i in weights if (g := gradients.tensors[i]) is not None and g.numel()]
        if not given:
            return
        limits = torch._foreach_clamp_min([unit_norms(weights[i]) for i in given], self.eps)
        torch._foreach_mul_(limits, self.clip_factor)
        ratios = torch._foreach_div([unit_norms(g) for g in _present(gradients, given)], limits)
        largest = torch.stack(torch._foreach_max(ratios)).tolist()
        divisors = {i: ratio.clamp_(min=1.0) for i, ratio, most in zip(given, ratios, largest, strict=True) if most > 1}
        if divisors:
            before = _present(gradients, divisors)
            clipped = torch._foreach_div(before, list(divisors.values()))
            new = {i: c.to(b.dtype) for i, c, b in zip(divisors, clipped, before, strict=True)}
            gradients.put(new, owned=True)


def unit_norms(tensor: Tensor) -> Tensor:
    """The 2-norm of each unit of `AdaptiveClip`, in float32 or wider, shape (units, 1, ...), or () where all is one."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if sum(size != 1 for size in tensor.shape) <= 1:
        norms: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    else:
        norms = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True, dtype=dtype)
    return norms


def check_limit(name: str, limit: float, *, mend: str = "give the largest allowed, or leave the transform out") -> None:
    """Refuse a limit that would clip everything away.

    Raises:
        InputError: it is not above 0, or no number.
    """
    check_type(name, limit, (int, float), expected="a number above 0", mend=mend)
    if not limit > 0:
        raise InputError(
            "Gradients cannot be clipped to this.", given=f"{name}={limit}", expected="a number above 0", mend=mend
        )


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
            mend="give AdaptiveClip a pattern without them, or build the embedding with sparse=False",
        )
