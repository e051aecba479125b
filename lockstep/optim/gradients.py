"""Gradients of one attempt on their way through the transforms to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lockstep.errors import InputError
from lockstep.tensors import norms_of, norms_on_device, quotients, reading_waits, with_strides_of

if TYPE_CHECKING:
    from torch import Tensor


class Gradients:
    """The aggregated gradients of one attempt, in the order of the parameters.

    The tensors may be anybody's: the exchange's, of which other workers read, or what the backward pass has kept. A
    transform puts new ones in their place and changes none. A division of all of them alike is kept back, for a fused
    update makes it on the way. After the update they are used up: to keep one, clone it.

    Args:
        tensors: one a parameter, None where no tower had a gradient. That of a parameter in `rows` has values for
            these rows alone, shape (rows, ...).
        divisor: what all of them are still to be divided by: the scale of a mixed precision loss, or a tensor without
            dimensions.
        rows: the rows of the parameters with sparse gradients, by index, shape (rows,), each row once.
        owned: nobody else holds the tensors, and no two share memory: they may be used up.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor | None],
        *,
        divisor: float | Tensor = 1.0,
        rows: Mapping[int, Tensor] | None = None,
        owned: bool = False,
    ) -> None:
        self.names = names
        self.rows: Mapping[int, Tensor] = rows or {}
        self.found_inf: Tensor | None = None
        """Float32, on the device, without dimensions: where it is not 0 the update changes nothing. None: it does."""
        self._tensors = tuple(tensors)
        self._divisor = divisor
        self._owned = owned
        self._norms: list[float] | None = None
        """As the host knows them, before the division."""
        self._unread_norms: Tensor | None = None
        """The same of the gradients that are not None, on a device that reading waits for."""
        self._is_watched = False
        self._read: list[tuple[tuple[Tensor | None, ...], list[int]]] = []

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """The gradients as they are now; to change one, `put` another in its place."""
        tensors = self._divided()
        if self._is_watched and (not self._read or self._read[-1][0] is not tensors):
            self._read.append((tensors, _versions(tensors)))
        return tensors

    @property
    def norms(self) -> list[float]:
        """The 2-norm of each gradient as it is now; 0 for those that are None. On an accelerator this may wait."""
        if self._norms is None:
            self._norms = norms_of(self._tensors)
        divisor = float(self._divisor)
        return [norm / divisor for norm in self._norms] if divisor != 1.0 else self._norms

    @property
    def norm(self) -> float:
        """The global norm: that of all gradients together; 0 where there are none. On an accelerator this may wait."""
        if self._norms is None:
            self._norms = norms_of(self._tensors)
        return math.sqrt(sum([norm * norm for norm in self._norms])) / float(self._divisor)

    @property
    def reading_waits(self) -> bool:
        """Whether the host waits where it reads a number of these gradients."""
        for gradient in self._tensors:
            if gradient is not None:
                return reading_waits(gradient.device)
        return False

    def unread_norms(self) -> tuple[Tensor, Tensor]:
        """Compute the global norm, and the norm of each gradient that is not None, and leave them on the device.

        Returns:
            The first without dimensions, the second of shape (gradients,), before the division that is kept back; both
            float64.
        """
        if self._unread_norms is None:
            self._unread_norms = norms_on_device([g for g in self._tensors if g is not None])
        return torch.linalg.vector_norm(self._unread_norms) / self._divisor, self._unread_norms

    def tell_norms(self, norms: Sequence[float]) -> None:
        """Take the norms of `unread_norms` as the host has read them."""
        values = iter(norms)
        self._norms = [0.0 if g is None else next(values) for g in self._tensors]

    def divide(self, divisor: float | Tensor) -> None:
        """Divide every gradient by a number above 0, or by a tensor without dimensions."""
        self._divisor = self._divisor * divisor

    def put(self, tensors: Mapping[int, Tensor], *, owned: bool = False) -> None:
        """Replace some gradients, by index, by tensors that are left as they are.

        If they are `owned`, by nobody else and with no memory shared, they may be used up instead.
        """
        current = self._divided()
        self._replace({i: _in_place_of(current[i], g, self.names[i]) for i, g in tensors.items()}, owned=owned)
        self._norms = self._unread_norms = None

    def multiply(self, factors: Mapping[int, float]) -> None:
        """Multiply some gradients, each by a number of its own; an index without a gradient is passed over."""
        some = {i: f for i, f in factors.items() if self._tensors[i] is not None}
        if not some:
            return
        current = self._divided()
        scaled = torch._foreach_mul([g for i in some if (g := current[i]) is not None], list(some.values()))
        self._replace(dict(zip(some, scaled, strict=True)), owned=True)
        if self._norms is not None:
            self._norms = [norm * abs(some.get(index, 1.0)) for index, norm in enumerate(self._norms)]
        self._unread_norms = None

    def subset(self, indices: Sequence[int]) -> Gradients:
        """Select the gradients of some parameters, in this order."""
        some = Gradients(
            [self.names[i] for i in indices],
            [self._tensors[i] for i in indices],
            divisor=self._divisor,
            rows={place: self.rows[index] for place, index in enumerate(indices) if index in self.rows},
            owned=self._owned,
        )
        some.found_inf = self.found_inf
        return some

    def to_divide(self) -> tuple[Sequence[Tensor | None], float | Tensor, bool]:
        """The gradients before the division that is kept back, what to divide them by, and whether they may be used up.

        Where they may not, others read them: the quotients must be new tensors.
        """
        return self._tensors, self._divisor, self._owned

    def watch(self) -> None:
        """Note from now on which tensors are read, for `changed`."""
        self._is_watched = True

    def changed(self) -> list[str]:
        """Return the parameters whose gradients were changed in place after they were read; the watch ends."""
        changed = [
            name
            for tensors, versions in self._read
            for name, before, now in zip(self.names, versions, _versions(tensors), strict=True)
            if before != now
        ]
        self._is_watched, self._read = False, []
        return changed

    def _divided(self) -> tuple[Tensor | None, ...]:
        """Make the pending division, and return the gradients."""
        divisor = self._divisor
        if not isinstance(divisor, float | int) or divisor != 1.0:
            present = {i: g for i, g in enumerate(self._tensors) if g is not None}
            divided = quotients(list(present.values()), divisor)
            self._replace(dict(zip(present, divided, strict=True)), owned=True)
            plain = divisor if isinstance(divisor, float | int) else None
            self._norms = [norm / plain for norm in self._norms] if plain and self._norms is not None else None
            self._unread_norms = None
            self._divisor = 1.0
        return self._tensors

    def _replace(self, tensors: Mapping[int, Tensor], *, owned: bool) -> None:
        kept = [g for i, g in enumerate(self._tensors) if i not in tensors and g is not None]
        self._tensors = tuple([tensors.get(i, g) for i, g in enumerate(self._tensors)])
        self._owned = owned and (self._owned or not kept)


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return torch's counts of in-place changes; tensors made in inference mode have none."""
    return [0 if g is None or g.is_inference() else g._version for g in tensors]


def _in_place_of(old: Tensor | None, new: Tensor, name: str) -> Tensor:
    if old is None or _kind(old) != _kind(new):
        raise InputError(
            f"A transform put what does not fit in the place of the gradient of {name!r}.",
            given=_described(new),
            expected="nothing, for it has no gradient in this update" if old is None else _described(old),
            hint="put a tensor of the same shape, dtype and device, and none where there is none",
        )
    # The fused kernels walk memory, not indices: a gradient keeps the strides of its parameter.
    return with_strides_of(new, old)


def _kind(gradient: Tensor) -> tuple[object, ...]:
    return gradient.shape, gradient.dtype, gradient.device, gradient.layout


def _described(gradient: Tensor) -> str:
    return f"shape {tuple(gradient.shape)}, {gradient.dtype}, {gradient.layout}, on {gradient.device}"
