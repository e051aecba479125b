"""Updates of the user's own: functions that give buffers new values, such as centres of classes, with each update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.checks import check_type
from lockstep.errors import InputError
from lockstep.listing import shorten

if TYPE_CHECKING:
    from torch import Tensor, nn

Update = Callable[["nn.Module", int], Mapping[str, "Tensor"]]
"""`update(model, step)` returns new values of buffers by name, before the update that follows `step` completed ones."""

_HINT = 'return {"name.of.a.buffer": tensor}'


class BufferUpdates:
    """The functions, and the buffers that they may change."""

    def __init__(self, updates: Sequence[Update], model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        self._updates, self._model, self._buffers = tuple(updates), model, buffers

    def __len__(self) -> int:
        return len(self._updates)

    def __call__(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Call all of them: the buffers that they change, with their new values.

        Raises:
            InputError: one names something else than a buffer, or gives a value of another shape.
        """
        changes: list[tuple[Tensor, Tensor]] = []
        for update in self._updates:
            returned = update(self._model, step)
            check_type("what an update of your own returns", returned, Mapping, expected="a dict", hint=_HINT)
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
