"""Histograms of tensors, as TensorFlow's: buckets that grow by a tenth from 1e-12 to 1e20, on both sides of zero.

They are counted where the tensor lies, a piece at a time: besides the tensor it takes some 30 MB, and a copy of the
tensor where it has gaps in memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_PIECE = 1 << 20


def _limits() -> tuple[float, ...]:
    positive, limit = [], 1.0e-12
    while limit < 1.0e20:
        positive.append(limit)
        limit *= 1.1
    positive.append(sys.float_info.max)
    return (*[-limit for limit in reversed(positive)], 0.0, *positive)


BUCKET_LIMITS = _limits()
"""A number is in the first bucket whose limit is above it (tensorflow/core/lib/histogram/histogram.cc)."""


@dataclass(frozen=True)
class Histogram:
    """A histogram with its sums. Numbers that are not finite are in no bucket and no sum."""

    counts: tuple[int, ...]
    """How many numbers are in each of the buckets of `BUCKET_LIMITS`."""
    smallest: float
    largest: float
    total: float
    total_of_squares: float
    num_zeros: int
    num_nonfinite: int

    @property
    def num_finite(self) -> int:
        """Number of finite values, which are in the buckets."""
        return sum(self.counts)

    @property
    def norm(self) -> float:
        """The 2-norm; NaN where a number is not finite."""
        return math.nan if self.num_nonfinite else math.sqrt(self.total_of_squares)

    @property
    def sparsity(self) -> float:
        """The share of zeros among all numbers, 0 to 1."""
        return self.num_zeros / (self.num_finite + self.num_nonfinite)


def compute_histograms(tensors: Mapping[str, Tensor]) -> dict[str, Histogram]:
    """Compute the histograms of floating tensors by name; those without a number, or of another type, are left out."""
    shown = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    return {name: _histogram(tensor) for name, tensor in shown.items()}


@torch.no_grad()
def _histogram(tensor: Tensor) -> Histogram:
    pieces = [_summed(piece) for piece in _pieces(tensor)]
    counts = torch.stack([counts for counts, _ in pieces]).sum(0).tolist()
    extremes_and_sums = torch.stack([numbers for _, numbers in pieces])
    smallest, largest = extremes_and_sums[:, 0].min().item(), extremes_and_sums[:, 1].max().item()
    total, total_of_squares, num_zeros = extremes_and_sums[:, 2:].sum(0).tolist()
    # -inf is below all limits, inf and NaN are above.
    num_nonfinite = counts[0] + counts[-1]
    return Histogram((0, *counts[1:-1]), smallest, largest, total, total_of_squares, int(num_zeros), num_nonfinite)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the numbers in the order of memory, in float32 or wider."""
    # Any other order would copy a tensor that is dense in another memory format.
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    for piece in torch.split(tensor.permute(order).reshape(-1), _PIECE):
        yield (piece.float() if piece.dtype.itemsize < 4 else piece).contiguous()


def _summed(piece: Tensor) -> tuple[Tensor, Tensor]:
    """Counts, with one more at the end; smallest, largest, sum, sum of squares and the number of zeros, in float64."""
    bucket = torch.bucketize(piece, _search_limits(piece.dtype, piece.device), right=True, out_int32=True)
    counts = torch.bincount(bucket, minlength=len(BUCKET_LIMITS) + 1)
    is_finite = piece.isfinite()
    finite = torch.where(is_finite, piece, 0).double()
    numbers = (
        torch.where(is_finite, piece, math.inf).amin().double(),
        torch.where(is_finite, piece, -math.inf).amax().double(),
        finite.sum(),
        torch.dot(finite, finite),
        (piece == 0).sum().double(),
    )
    return counts, torch.stack(numbers)


@cache
def _search_limits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The limits in this dtype, rounded up: a number of the dtype is below the one just where it is below the other."""
    exact = torch.tensor(BUCKET_LIMITS, dtype=torch.float64)
    limits = exact.to(dtype)
    above = torch.nextafter(limits, torch.tensor(math.inf, dtype=dtype))
    limits = torch.where(limits.double() < exact, above, limits)
    limits[-1] = math.inf  # so that the largest number of float64 has a bucket too
    return limits.to(device)
