"""The gradients of one attempt on their way through the transforms to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from lockstep.errors import InputError


class Gradients:
    """The aggregated gradients of one attempt, in the order of the parameters.

    The tensors may belong to the exchange, and other workers may be reading them: a transform puts new tensors in their
    place and changes none. A division of all of them alike is kept back, for a fused update makes it on the way.

    Args:
        names: of the parameters.
        tensors: one a parameter, None where no tower had a gradient. That of a parameter in `rows` has values for
            these rows alone, shape (rows, ...).
        divisor: what all of them are still to be divided by: the scale of a mixed precision loss.
        rows: the rows of the parameters with sparse gradients, by index, shape (rows,), each row once.
        shared: another worker reads these tensors too.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor | None],
        *,
        divisor: float = 1.0,
        rows: Mapping[int, Tensor] | None = None,
        shared: bool = False,
    ) -> None:
        self.names = names
        self.rows: Mapping[int, Tensor] = rows or {}
        self._tensors = list(tensors)
        self._divisor = divisor
        self._shared = shared
        self._norms: list[float] | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        """The gradients as they are now; to change one, `put` another in its place."""
        if self._divisor != 1.0:
            present = {i: g for i, g in enumerate(self._tensors) if g is not None}
            divided = torch._foreach_div(list(present.values()), self._divisor) if present else ()
            for index, gradient in zip(present, divided, strict=True):
                self._tensors[index] = gradient
            if self._norms is not None:
                self._norms = [norm / self._divisor for norm in self._norms]
            self._divisor, self._shared = 1.0, False
        return self._tensors

    @property
    def norms(self) -> list[float]:
        """The 2-norm of each gradient as it is now; 0 for those that are None."""
        if self._norms is None:
            self._norms = _norms(self._tensors)
        return [norm / self._divisor for norm in self._norms] if self._divisor != 1.0 else self._norms

    @property
    def norm(self) -> float:
        """The global norm: that of all gradients together; 0 where there are none."""
        if self._norms is None:
            self._norms = _norms(self._tensors)
        return math.sqrt(sum([norm * norm for norm in self._norms])) / self._divisor

    def divide(self, divisor: float) -> None:
        """Divide every gradient by a number above 0."""
        self._divisor *= divisor

    def put(self, tensors: Mapping[int, Tensor]) -> None:
        """Put other gradients in the place of some, by index; they are used up like those they replace.

        Raises:
            InputError: there is no gradient in a place, or one of another shape, dtype or device.
        """
        current = self.tensors
        for index, gradient in tensors.items():
            current[index] = _in_place_of(current[index], gradient, self.names[index])
        self._norms = None
        self._shared = True  # what comes from outside may be a part of anything

    def multiply(self, factors: Mapping[int, float]) -> None:
        """Multiply some gradients, each by a number of its own; an index without a gradient is passed over."""
        some = {i: f for i, f in factors.items() if self._tensors[i] is not None}
        if not some:
            return
        current = self.tensors
        scaled = torch._foreach_mul([g for i in some if (g := current[i]) is not None], list(some.values()))
        for index, gradient in zip(some, scaled, strict=True):
            current[index] = gradient
        if self._norms is not None:
            self._norms = [norm * abs(some.get(index, 1.0)) for index, norm in enumerate(self._norms)]

    def subset(self, indices: Sequence[int]) -> Gradients:
        """Those of some parameters, in this order."""
        rows = {place: self.rows[index] for place, index in enumerate(indices) if index in self.rows}
        return Gradients(
            [self.names[i] for i in indices],
            [self._tensors[i] for i in indices],
            divisor=self._divisor,
            rows=rows,
            shared=self._shared or self._overlap(),  # of two that are one tensor, each may go to another subset
        )

    def to_divide(self) -> tuple[list[Tensor | None], float]:
        """The gradients as they lie there, to be used up, and what they are still to be divided by.

        Where they may not be changed in place (another worker reads them, or two are one tensor), nothing is left to
        divide by.
        """
        if self._divisor != 1.0 and (self._shared or self._overlap()):
            return self.tensors, 1.0
        return self._tensors, self._divisor

    def _overlap(self) -> bool:
        places = [g.data_ptr() for g in self._tensors if g is not None]
        return len(set(places)) < len(places)


def _in_place_of(old: Tensor | None, new: Tensor, name: str) -> Tensor:
    if old is None or _kind(old) != _kind(new):
        raise InputError(
            f"A transform put what does not fit in the place of the gradient of {name!r}.",
            given=_described(new),
            expected="nothing, for it has no gradient in this update" if old is None else _described(old),
            mend="put a tensor of the same shape, dtype and device, and none where there is none",
        )
    # The fused kernels walk memory, not indices: a gradient keeps the strides of its parameter.
    return new if new.stride() == old.stride() else torch.empty_like(old).copy_(new)


def _kind(gradient: Tensor) -> tuple[object, ...]:
    return gradient.shape, gradient.dtype, gradient.device, gradient.layout


def _described(gradient: Tensor) -> str:
    return f"shape {tuple(gradient.shape)}, {gradient.dtype}, {gradient.layout}, on {gradient.device}"


def _norms(gradients: Sequence[Tensor | None]) -> list[float]:
    present = [g for g in gradients if g is not None]
    if not present:
        return [0.0] * len(gradients)
    dtypes = {g.dtype for g in present}
    # In 16 bits a norm has two or three digits, or overflows.
    wide = reduce(torch.promote_types, dtypes, torch.float32) if any(d.itemsize < 4 for d in dtypes) else None
    norms = torch._foreach_norm(present, 2, wide)
    if present[0].device.type == "cpu":  # reading a number costs less here than one more operation
        values = iter([norm.item() for norm in norms])
    else:
        values = iter(torch.stack(norms).tolist())
    return [0.0 if g is None else next(values) for g in gradients]
