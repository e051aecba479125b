"""Batch norm over the rows of all workers: one exchange on the way forward, one on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.parallel.batch_norm_calls import BatchNormCall, BatchNormMode, moments
from lockstep.parallel.collective import process_group, together
from lockstep.workers.rank import Worker


class SyncedBatchNorm(BatchNormMode):
    """A context in which batch norm normalises with the statistics of the whole batch, over all workers.

    They may have different numbers of rows, or none, and make the same calls in the same order. Each worker's loss is
    to be its share of the mean over all rows.

    Args:
        worker: this one; all of them make the context together.
        biased: the running variance takes that of the batch as it is, without Bessel's correction.
    """

    def __init__(self, worker: Worker, *, biased: bool) -> None:
        super().__init__()
        self._worker = worker
        self._biased = biased
        self._group = process_group(worker, "gloo" if worker.device.type == "cpu" else "nccl")

    def normalise(self, call: BatchNormCall) -> Tensor:
        """Normalise this worker's rows, and move the running statistics.

        Raises:
            PeerLostError: another worker is gone.
        """
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
        together(self._worker, lambda: dist.all_gather(list(everyone), mine, group=self._group))
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
        together(self._worker, lambda: dist.all_reduce(mine, group=self._group))
        return mine


class Moments(NamedTuple):
    """Mean and biased variance of each channel, shape (channels,), and over how many values, shape (1,)."""

    mean: Tensor
    variance: Tensor
    num_values: Tensor


def pooled(means: Tensor, variances: Tensor, counts: Tensor) -> Moments:
    """The moments of several samples taken together: Chan, Golub and LeVeque, "Updating formulae" (1979).

    Args:
        means: of each sample, shape (samples, channels).
        variances: biased, shape (samples, channels).
        counts: shape (samples, 1).
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
