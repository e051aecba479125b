"""Batch norm while towers run: per tower, frozen, with a biased variance, or synchronised over all workers.

Every call of torch's batch norm in training is intercepted, whether torch's modules or the user's own make it.
Synchronised, it takes one exchange on the way forward and one on the way back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from lockstep.exchange.collectives import collectives
from lockstep.towers.towers import Towers
from lockstep.workers.rank import Worker


def around_towers(
    model: nn.Module, towers: Towers, worker: Worker, still: Sequence[nn.Module] = ()
) -> AbstractContextManager[object]:
    """Return a reusable context for a tower's two passes, in which batch norm follows the towers' policy.

    The norms in `still` keep their statistics in any case. All workers make the context together; entering it costs
    nothing where the policy is torch's own batch norm.
    """
    if towers.batch_norm == "frozen":
        return FrozenStatistics([module for module in model.modules() if keeps_batch_statistics(module)])
    biased = towers.variance == "biased"
    policy: AbstractContextManager[object] = nullcontext()
    if towers.batch_norm == "sync" and worker.num_workers > 1:
        policy = SyncedBatchNorm(worker, biased=biased)
    elif biased and towers.batch_norm != "none":
        policy = BiasedVariance()
    return _Both(FrozenStatistics(still), policy) if still else policy


def keeps_batch_statistics(module: nn.Module) -> bool:
    """Whether a module is batch norm with running statistics: torch's, or one that names its buffers as torch does."""
    own = dict(module.named_buffers(recurse=False))
    return {"running_mean", "running_var"} <= own.keys() and not isinstance(module, _InstanceNorm)


class _Both:
    """Two reusable contexts, one inside the other, as one."""

    def __init__(self, outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *reason: object) -> None:
        self._inner.__exit__(None, None, None)
        self._outer.__exit__(None, None, None)


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
        """The number of values in the mean of a channel."""
        return self.input.numel() // self.input.shape[1]

    def normalised(self) -> Tensor:
        """Make the call."""
        return F.batch_norm(*self)


class BatchNormMode(TorchFunctionMode):
    """A context that intercepts the calls which normalise with the statistics of the batch; it may be entered again."""

    @abstractmethod
    def normalise(self, call: BatchNormCall) -> Tensor:
        """Return the output of a call, and update its running statistics."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Intercept those calls, and pass everything else on to torch."""
        if func is F.batch_norm:
            call = BatchNormCall(*args, **(kwargs or {}))
            if call.training:
                return self.normalise(call)
        return func(*args, **(kwargs or {}))


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of (batch, channels, ...), in float32 or wider; 0 for an empty batch.

    The variance is taken about the mean (Welford, or two passes), not from the difference of two large squares.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    zeros = values.new_zeros((2, values.shape[1]), dtype=dtype)
    if not values.numel():
        return zeros[0], zeros[1]
    # The zeros stand for running statistics, whose dtype is that of the result; a momentum of 0 leaves them.
    return torch.batch_norm_update_stats(values.detach(), zeros[0], zeros[1], 0.0)


class FrozenStatistics:
    """A context in which batch norm normalises with its running statistics and keeps them; it may be entered again."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._switched: list[nn.Module] = []

    def __enter__(self) -> None:
        self._switched = [module for module in self._modules if module.training]
        for module in self._switched:
            module.training = False

    def __exit__(self, *reason: object) -> None:
        for module in self._switched:
            module.training = True


class BiasedVariance(BatchNormMode):
    """A context in which the running variance takes the batch's as it is, without Bessel's correction."""

    def normalise(self, call: BatchNormCall) -> Tensor:
        """Normalise as torch does, and undo its correction of the running variance."""
        variance = call.running_var
        if variance is None:
            return call.normalised()
        # Autograd keeps the copy: it would take a change of it, between forward and backward, for an error.
        corrected = variance.clone()
        output = call._replace(running_var=corrected).normalised()
        # corrected = (1 - momentum) * variance + momentum * biased * n / (n - 1); now the same without n / (n - 1)
        share = 1 / call.values_per_channel
        variance.mul_((1 - call.momentum) * share).add_(corrected, alpha=1 - share)
        return output


class SyncedBatchNorm(BatchNormMode):
    """A context in which batch norm normalises with the statistics of the whole batch, over all workers.

    The workers may have different numbers of rows, or none, and make the same calls in the same order. The loss of each
    is its share of the mean over all rows. All workers make the context together. With `biased` the running variance
    takes the batch's as it is, without Bessel's correction.
    """

    def __init__(self, worker: Worker, *, biased: bool) -> None:
        super().__init__()
        self._worker = worker
        self._biased = biased
        self._collectives = collectives(worker, worker.backend)

    def normalise(self, call: BatchNormCall) -> Tensor:
        """Normalise this worker's rows, and move the running statistics."""
        with torch.no_grad():
            whole = self._whole_batch(call)
            self._move_running_statistics(call, whole)
        ones = torch.ones_like(whole.mean)
        weight = ones if call.weight is None else call.weight.to(ones.dtype)
        bias = torch.zeros_like(ones) if call.bias is None else call.bias.to(ones.dtype)
        output: Tensor = _Normalisation.apply(call.input, weight, bias, whole, call.eps, self._summed)  # type: ignore[no-untyped-call]
        return output

    def _whole_batch(self, call: BatchNormCall) -> Moments:
        mean, variance = moments(call.input)
        mine = torch.cat([mean, variance, mean.new_full((1,), call.values_per_channel)])
        everyone = mine.new_empty(self._worker.num_workers, len(mine))
        self._collectives.all_gather(list(everyone), mine)
        means, variances, counts = torch.split(everyone, [len(mean), len(mean), 1], dim=1)
        return pooled(means, variances, counts)

    def _move_running_statistics(self, call: BatchNormCall, whole: Moments) -> None:
        variance = whole.variance
        if not self._biased:
            variance = variance * (whole.num_values / (whole.num_values - 1).clamp(min=1))
        for running, new in ((call.running_mean, whole.mean), (call.running_var, variance)):
            if running is not None:
                running.mul_(1 - call.momentum).add_(new, alpha=call.momentum)

    def _summed(self, mine: Tensor) -> Tensor:
        self._collectives.all_reduce([mine])
        return mine


class Moments(NamedTuple):
    """Mean and biased variance of each channel, shape (channels,), and the number of values, shape (1,)."""

    mean: Tensor
    variance: Tensor
    num_values: Tensor


def pooled(means: Tensor, variances: Tensor, counts: Tensor) -> Moments:
    """Pool the moments of several samples: Chan, Golub and LeVeque, "Updating formulae" (1979).

    Means and biased variances are (samples, channels), counts (samples, 1).
    """
    num_values = counts.sum(0)
    mean = (counts * means).sum(0) / num_values
    return Moments(mean, (counts * (variances + (means - mean).square())).sum(0) / num_values, num_values)


class _Normalisation(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, with moments that depend on the inputs of all workers."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor,
        whole: Moments,
        eps: float,
        summed: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(values, weight, *whole)
        ctx.eps, ctx.summed = eps, summed
        return _affine(values, weight, bias, whole.mean, whole.variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, variance, num_values = ctx.saved_tensors
        scale = (variance + ctx.eps).rsqrt()
        sums = _sums(gradient, values, weight, mean, scale)
        by_bias, by_weight = sums.clone()
        if not ctx.needs_input_grad[0]:
            return None, by_weight, by_bias, None, None, None
        slope = weight * scale
        mean_gradient, mean_product = ctx.summed(sums) / num_values
        # slope * (gradient - mean_gradient - normalised * mean_product), the latter two by the kernel that normalises.
        rest = _affine(values, -slope * mean_product, -slope * mean_gradient, mean, variance, ctx.eps)
        slope = slope.view(-1, *[1] * (values.ndim - 2))
        return torch.addcmul(rest, gradient, slope).to(values.dtype), by_weight, by_bias, None, None, None


def _affine(values: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    return torch.native_batch_norm(values, weight, bias, mean, variance, False, 0.0, eps)[0]


def _sums(gradient: Tensor, values: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The gradient, and the gradient times the normalised values, each summed over this worker's rows, stacked."""
    if not values.numel():
        return torch.stack([torch.zeros_like(mean)] * 2)
    _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, values, weight, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return torch.stack([by_bias, by_weight])
