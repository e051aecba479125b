"""How batch norm behaves while towers run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from lockstep.parallel.batch_norm_calls import BatchNormCall, BatchNormMode
from lockstep.parallel.synced_batch_norm import SyncedBatchNorm
from lockstep.parallel.towers import Towers
from lockstep.workers.rank import Worker


def around_towers(
    model: nn.Module, towers: Towers, worker: Worker, still: Sequence[nn.Module] = ()
) -> AbstractContextManager[object]:
    """A reusable context for the forward and backward pass of a tower: batch norm does in it what the towers ask for.

    The norms in `still` keep their statistics in any case. All workers make it together; entering it costs nothing
    where torch's own batch norm is what is asked for.
    """
    if towers.batch_norm == "frozen":
        return FrozenStatistics([module for module in model.modules() if keeps_batch_statistics(module)])
    policy = _policy(towers, worker)
    return _Both(FrozenStatistics(still), policy) if still else policy


def _policy(towers: Towers, worker: Worker) -> AbstractContextManager[object]:
    biased = towers.variance == "biased"
    if towers.batch_norm == "sync" and worker.num_workers > 1:
        return SyncedBatchNorm(worker, biased=biased)
    return BiasedVariance() if biased and towers.batch_norm != "none" else nullcontext()


def keeps_batch_statistics(module: nn.Module) -> bool:
    """Whether a module is batch norm with running statistics: torch's, or one that names its buffers as torch does."""
    own = dict(module.named_buffers(recurse=False))
    return {"running_mean", "running_var"} <= own.keys() and not isinstance(module, _InstanceNorm)


class _Both:
    """Two reusable contexts, one in the other, as a reusable one."""

    def __init__(self, outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *reason: object) -> None:
        self._inner.__exit__(None, None, None)
        self._outer.__exit__(None, None, None)


class FrozenStatistics:
    """A context in which batch norm normalises with its running statistics, which stay; it may be entered again."""

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
    """A context in which the running variance takes that of the batch as it is, without Bessel's correction."""

    def normalise(self, call: BatchNormCall) -> Tensor:
        """Normalise as torch does, and take its correction back."""
        variance = call.running_var
        if variance is None:
            return call.normalised()
        # The copy is what autograd keeps: it would take a change of it, between forward and backward, for an error.
        corrected = variance.clone()
        output = call._replace(running_var=corrected).normalised()
        # corrected = (1 - momentum) * variance + momentum * biased * n / (n - 1), to be the same without n / (n - 1)
        share = 1 / call.values_per_channel
        variance.mul_((1 - call.momentum) * share).add_(corrected, alpha=1 - share)
        return output
