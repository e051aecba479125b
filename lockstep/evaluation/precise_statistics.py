"""Recompute batch-norm statistics with the weights that are scored, instead of averaging while they change."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor, nn

from lockstep.checks import Checked, Hint, NonNegativeInt, PositiveInt
from lockstep.data.loader import Loader
from lockstep.errors import InputError
from lockstep.towers.batch_norm import BatchNormCall, BatchNormMode, keeps_batch_statistics, moments
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.types import ScoreFunction


@dataclass(frozen=True)
class PreciseStatistics(Checked):
    """Statistics of batch norm as means over some training batches, instead of moving averages.

    They are the mean of the batches' means, and of their variances with Bessel's correction: the moving averages of
    weights that stand still ("precise BN": Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021).
    """

    loader: Annotated[Loader, Hint("give the loader of the training examples")]
    """Gives the batches, with its augmentation and batch size; its position does not move."""
    num_batches: PositiveInt = 200
    position: NonNegativeInt = 0
    """Position of the first batch in the loader's stream."""


@torch.no_grad()
def recompute_statistics(model: nn.Module, score: ScoreFunction, statistics: PreciseStatistics, worker: Worker) -> None:
    """Replace the running statistics of every batch norm that takes part in a model's score.

    Batch norm that is in evaluation mode keeps its statistics: training did not move them. All else runs in evaluation
    mode, and the model is in it afterwards. Every worker runs all batches: their number does not show in any bit. What
    the score function returns is not used.
    """
    measured = [module for module in model.modules() if keeps_batch_statistics(module) and module.training]
    model.eval()
    for module in measured:
        module.training = True
    stream = copy.copy(statistics.loader)
    stream.position = statistics.position
    batches = stream.batches(range(1), 1, worker.device, workers_on_host=worker.num_local_workers)
    means = _Means()
    with closing(batches), means:
        for batch in islice(batches, statistics.num_batches):
            score(model, batch)
    model.eval()
    means.commit()


class _Means(BatchNormMode):
    """A context that adds up, in float64, the statistics of every batch that passes a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, _Sum] = {}

    def normalise(self, call: BatchNormCall) -> Tensor:
        """Normalise with the statistics of the batch, and add them up in the place of moving the running ones."""
        output = call._replace(running_mean=None, running_var=None).normalised()
        if call.running_mean is not None and call.running_var is not None:
            total = self._sums.setdefault(id(call.running_mean), _Sum(call.running_mean, call.running_var))
            total.add(call)
        return output

    def commit(self) -> None:
        if not self._sums:
            raise InputError(
                "There are no batch-norm statistics to compute afresh.",
                given="a model whose score runs no batch norm that keeps statistics and is in training mode",
                expected="batch norm with running statistics",
                hint="leave the statistics out, or call model.train() first",
            )
        for total in self._sums.values():
            total.commit()


class _Sum:
    """The statistics of the batches that passed one batch norm: each call counts as a batch."""

    def __init__(self, running_mean: Tensor, running_var: Tensor) -> None:
        self._running = running_mean, running_var
        self._mean = torch.zeros_like(running_mean, dtype=torch.float64)
        self._variance = torch.zeros_like(running_var, dtype=torch.float64)
        self._count = 0

    def add(self, call: BatchNormCall) -> None:
        mean, variance = moments(call.input)
        num_values = call.values_per_channel
        self._mean += mean
        self._variance += variance.double() * (num_values / (num_values - 1))
        self._count += 1

    def commit(self) -> None:
        for running, total in zip(self._running, (self._mean, self._variance), strict=True):
            running.copy_(total / self._count)
