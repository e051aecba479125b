"""Every call of torch's batch norm in training, seen where it is made: by torch's modules and the user's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class BatchNormCall(NamedTuple):
    """The arguments of `torch.nn.functional.batch_norm`, in its order."""

    input: Tensor
    """Shape (batch, channels, ...)."""
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def values_per_channel(self) -> int:
        """How many values the mean of a channel is taken over."""
        return self.input.numel() // self.input.shape[1]

    def normalised(self) -> Tensor:
        """What torch returns for it."""
        return F.batch_norm(*self)


class BatchNormMode(TorchFunctionMode):
    """A context that answers the calls which normalise with the statistics of the batch; it may be entered again."""

    @abstractmethod
    def normalise(self, call: BatchNormCall) -> Tensor:
        """The output of a call, with whatever is to become of the running statistics."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass everything on to torch but for those calls."""
        if func is F.batch_norm:
            call = BatchNormCall(*args, **(kwargs or {}))
            if call.training:
                return self.normalise(call)
        return func(*args, **(kwargs or {}))


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of (batch, channels, ...), in float32 or wider; 0 where there are none.

    They are taken about the mean (Welford, or two passes), not from the difference of two large squares.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    zeros = values.new_zeros((2, values.shape[1]), dtype=dtype)
    if not values.numel():
        return zeros[0], zeros[1]
    # The zeros stand for running statistics and say which dtype is wanted; a momentum of 0 would leave them.
    return torch.batch_norm_update_stats(values.detach(), zeros[0], zeros[1], 0.0)
