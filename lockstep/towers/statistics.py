"""The buffers of a model, such as batch-norm statistics: restored around each tower, combined over all towers.

Buffers hold their values of the step's start before each tower and again at the end. What a tower has changed is part
of what it returns, goes through the exchange, and is committed by the update alone. All of it is computed and sent as
one tensor a dtype: a model has hundreds of buffers, each far smaller than the cost of touching it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.exchange.transports import FlatLayout
from lockstep.tensors import addable, copy_all, reading_waits
from lockstep.towers.towers import BatchNorm


class Statistics:
    """Saves and restores the buffers of a model, and combines what each tower changed in them, by a policy.

    With `any_order` nobody knows yet which towers are the first and last of a sum: each sends what one of them is to
    give, and `leave_to_one` chooses.
    """

    def __init__(self, model: nn.Module, policy: BatchNorm, num_towers: int, *, any_order: bool = False) -> None:
        self._modules = dict(model.named_modules())
        self._held = [module._buffers for module in self._modules.values()]
        self._ids = _ids(self._held)
        self._policy = policy
        self._last, self._any_order = num_towers - 1, any_order
        self._buffers = changeable_buffers(model)
        self._starts, self._values = _Block(self._buffers), _Block(self._buffers)

    def save(self) -> None:
        """Keep the values: this is the start of a step."""
        if self._buffers:
            copy_all(self._starts.views, self._buffers)

    def restore(self) -> None:
        """Give the buffers the values of the step's start again."""
        if self._buffers:
            copy_all(self._buffers, self._starts.views)

    def shares(self, tower: int, share: float) -> list[Tensor]:
        """The contribution of the tower that has just run to the sum over all towers: one tensor a dtype.

        Nothing, where nothing is to be committed.
        """
        if not self._buffers or not self.like_shares():
            return []
        copy_all(self._values.views, self._buffers)
        shares: list[Tensor] = []
        for values, starts in zip(self._values.segments, self._starts.segments, strict=True):
            if self._is_averaged(values):
                # Not the plain difference: a mask that holds infinities would become NaN.
                change = (values - starts).masked_fill_(values == starts, 0.0)
                shares.append(change.mul_(share) if share != 1.0 else change)
            elif self._any_order or tower == (self._last if self._is_of_last(values) else 0):
                shares.append(values - starts if _is_counted(values) else values.clone())
            else:
                shares.append(torch.zeros_like(values))
        return shares

    def leave_to_one(self, shares: Sequence[Tensor], *, is_first: bool, is_last: bool) -> None:
        """Zero the buffers that the first or last tower alone contributes, in the shares of any other tower."""
        for values in shares:
            if not self._is_averaged(values) and not (is_last if self._is_of_last(values) else is_first):
                values.zero_()

    def combined(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The new values of the buffers, from the sums over all towers; what no tower has changed keeps its bits.

        Nothing, where nothing is to be committed; else valid until the next step.
        """
        if not sums:
            return []
        for values, starts, total in zip(self._values.segments, self._starts.segments, sums, strict=True):
            if self._is_averaged(values) or _is_counted(values):
                torch.add(starts, total, out=values)
            else:
                values.copy_(total)
        return self._values.views

    def hold_back(self, found_inf: Tensor) -> None:
        """Turn new values into the old ones where `found_inf` is not 0, which the device decides."""
        is_held = found_inf > 0
        for values, starts in zip(self._values.segments, self._starts.segments, strict=True):
            torch.where(is_held, starts, values, out=values)

    def check_sums(self, sums: Sequence[Tensor]) -> float | Tensor:
        """NaN if the changes are not finite where they are averaged, else 0: a mask may well hold infinities.

        On a device that the host would wait for it is a tensor (float64, without dimensions).
        """
        averaged = [total for total in sums if self._is_averaged(total)]
        if not averaged:
            return 0.0
        if reading_waits(averaged[0].device):
            return reduce(torch.add, [(total * 0.0).sum().double() for total in averaged])  # NaN for what is not finite
        return 0.0 if all(bool(total.isfinite().all()) for total in averaged) else math.nan

    def check(self) -> None:
        """Refuse a model that has replaced a buffer, or made one, while it ran."""
        if _ids(self._held) == self._ids:
            return
        known = set(self._ids)
        new = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self._modules.items()
            for name, buffer in module._buffers.items()
            if id(buffer) not in known
        ]
        raise InputError(
            "The model has replaced a buffer, or made one, while it ran.",
            given=", ".join(new) or "a buffer that was there at the start is gone",
            expected="buffers that are there from the start and change in place",
            hint="register it in __init__, and write its values: "
            f"self.{(new or ['buffer'])[0].rpartition('.')[2]}.copy_(...)",
        )

    def like_shares(self) -> list[Tensor]:
        """Tensors of the shapes and kinds that `shares` returns."""
        return [] if self._policy in ("none", "frozen") else list(self._starts.segments)

    def _is_of_last(self, values: Tensor) -> bool:
        return values.is_floating_point() and self._policy == "last"

    def _is_averaged(self, values: Tensor) -> bool:
        return values.is_floating_point() and self._policy in ("mean", "sync")


class _Block:
    """Memory for the values of some tensors: a view for each tensor, and one flat tensor a dtype."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        layout = FlatLayout([torch.empty_like(tensor) for tensor in tensors])  # without the gaps that a slice has
        device = tensors[0].device if tensors else "cpu"
        block = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        self.views = layout.views(block)
        self.segments = [_as_numbers(segment.of(block)) for segment in layout.segments]


@contextmanager
def restored(buffers: list[Tensor]) -> Iterator[None]:
    """Whatever happens inside, the buffers have the same values at the end as at the start."""
    kept = [torch.empty_like(buffer) for buffer in buffers]
    copy_all(kept, buffers)
    try:
        yield
    finally:
        with torch.no_grad():
            copy_all(buffers, kept)


def changeable_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a step may change: all but those that are expanded, and so cannot be written."""
    return [b for b in model.buffers() if not any(n > 1 and s == 0 for n, s in zip(b.shape, b.stride(), strict=True))]


def _ids(held: Sequence[Mapping[str, Tensor | None]]) -> list[int]:
    return list(map(id, chain.from_iterable([buffers.values() for buffers in held])))


def _is_counted(values: Tensor) -> bool:
    """Whether they are counters: a change that comes late is added to what they are by then."""
    return values.dtype in (torch.int32, torch.int64)


def _as_numbers(values: Tensor) -> Tensor:
    """The values as they are, or as bytes where nobody adds values of their kind.

    Torch does not add float8 and uint16 to uint64; gloo and NCCL do not add int16.
    """
    return values if values.dtype in addable() - {torch.int16} else values.view(torch.uint8)
