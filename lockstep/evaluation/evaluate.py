"""Scoring a model on a data set: each example once, the same bits for every number of workers."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lockstep.checks import check_one_of
from lockstep.data.bad_examples import check_budget
from lockstep.data.loader import EvaluationBatch, Loader
from lockstep.errors import InputError
from lockstep.evaluation.precise_statistics import PreciseStatistics, recompute_statistics
from lockstep.training.state import TrainState
from lockstep.types import BadExample
from lockstep.workers.group import JSON
from lockstep.workers.rank import join

if TYPE_CHECKING:
    from lockstep.types import ScoreFunction

log = logging.getLogger("lockstep")

_MOST_NAMED = 10

Weights = Literal["raw", "average"]


@dataclass(frozen=True)
class Evaluation:
    """The sums of the scores over all examples."""

    sums: Mapping[str, float]
    num_examples: int
    bad: tuple[BadExample, ...] = ()
    """Examples that could not be read, and do not count."""

    @property
    def means(self) -> dict[str, float]:
        """Each score averaged over the examples."""
        return {name: total / self.num_examples for name, total in self.sums.items()}

    def __getitem__(self, name: str) -> float:
        check_one_of("score", name, tuple(self.sums))
        return self.sums[name] / self.num_examples

    def __str__(self) -> str:
        left_out = f", {len(self.bad)} bad ones left out" if self.bad else ""
        return f"{', '.join(f'{n} {v:.4f}' for n, v in self.means.items())} over {self.num_examples} examples{left_out}"


def evaluate(
    state: TrainState,
    score: ScoreFunction,
    loader: Loader,
    *,
    weights: Weights = "raw",
    micro_batch: int | None = None,
    statistics: PreciseStatistics | None = None,
    drop_last: bool = False,
) -> Evaluation:
    """Score a copy of the state's model, in evaluation mode, on every example of the loader's reader once.

    All workers call it together and get the same result. The examples are cut into micro-batches by their index,
    dealt to the workers, and padded to one shape; the padding is dropped before anything is summed, and the sums are
    added up in the order of the micro-batches: the number of workers does not show in any bit.

    Args:
        state: whose model is scored; nothing in it changes.
        score: `score(model, batch)`, returning named tensors of shape (batch,).
        loader: its reader is read in order, without augmentation.
        weights: the parameters as they are, or their moving averages.
        micro_batch: examples a forward pass; the loader's batch size by default.
        statistics: the batch norm of the copy gets statistics computed afresh from these training batches.
        drop_last: leave out what does not fill a micro-batch at the end, as the reference trainers did.

    Raises:
        InputError: a score is not one number an example, the state keeps no average, or there is no batch norm whose
            statistics could be computed, or every micro-batch is dropped.
        DataError: an example cannot be read; where the loader skips bad examples, they are left out and named.
    """
    with _evaluating(state.step):
        model = _scored_copy(state, weights)
        if statistics is not None:
            recompute_statistics(model, score, statistics, join())
        result = _evaluate(model, score, loader, micro_batch or loader.batch_size, drop_last, stoppable=False)
    assert result is not None, "nothing stops it"
    return result


def evaluate_unless_stopped(
    state: TrainState,
    score: ScoreFunction,
    loader: Loader,
    *,
    weights: Weights = "raw",
    micro_batch: int | None = None,
    drop_last: bool = False,
) -> Evaluation | None:
    """What `evaluate` does; as soon as some worker is asked to stop, None on all of them."""
    with _evaluating(state.step):
        model = _scored_copy(state, weights)
        return _evaluate(model, score, loader, micro_batch or loader.batch_size, drop_last, stoppable=True)


@contextmanager
def _evaluating(step: int) -> Iterator[None]:
    """Tell the launcher what this worker is at."""
    pulse = join().pulse
    before = pulse.phase
    pulse.at(step, "evaluate")
    yield
    pulse.at(step, before)


def _evaluate(
    model: nn.Module, score: ScoreFunction, loader: Loader, size: int, drop_last: bool, *, stoppable: bool
) -> Evaluation | None:
    worker = join()
    model.eval()
    mine: list[JSON] = []
    stopped = False
    batches = loader.evaluation_batches(size, worker.rank, worker.num_workers, worker.device, drop_last=drop_last)
    with closing(batches):
        for batch in batches:
            stopped = stoppable and worker.pulse.stop_requested is not None
            if stopped:
                break
            mine.append(_scored(model, score, batch, size))
    gathered = worker.group.gather([stopped, mine])
    if any(stopped for stopped, _ in gathered):
        return None
    rows = sorted((row for _, rows in gathered for row in rows), key=itemgetter(0))
    if not rows:
        raise _all_dropped(loader, size)
    sums = {name: math.fsum(row[2][name] for row in rows) for name in rows[0][2]}
    bad = tuple(BadExample(*example) for row in rows for example in row[3])
    _tell_of_bad(bad, loader, is_chief=worker.is_chief)
    return Evaluation(sums, sum(row[1] for row in rows), bad)


def _scored(model: nn.Module, score: ScoreFunction, batch: EvaluationBatch, size: int) -> list[Any]:
    with torch.inference_mode():
        sums = _sums(score(model, batch), batch.valid, size)
    return [batch.position, batch.valid, sums, [list(bad) for bad in batch.bad]]


def _tell_of_bad(bad: Sequence[BadExample], loader: Loader, *, is_chief: bool) -> None:
    """Name those that do not count; refuse more than the loader's budget allows."""
    some = bad[:_MOST_NAMED]
    for example in some if is_chief else ():
        log.warning("%s cannot be read, and does not count. %s", example.example_id, example.reason)
    if len(bad) > len(some) and is_chief:
        log.warning("and %d more", len(bad) - len(some))
    check_budget(len(bad), loader.quarantine.budget, {each.example_id: each.reason for each in bad[:3]})


def _all_dropped(loader: Loader, size: int) -> InputError:
    return InputError(
        "There is no full micro-batch to score.",
        given=f"{len(loader.reader)} examples, micro-batches of {size}, the last one dropped",
        expected="one full micro-batch or more",
        mend="lower the micro-batch, or keep the last one (drop_last=False)",
    )


def _scored_copy(state: TrainState, weights: Weights) -> nn.Module:
    check_one_of("weights", weights, ("raw", "average"))
    # An activation that the model has kept belongs to a graph, and cannot be copied as it is.
    kept = [v for m in state.model.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
    model = copy.deepcopy(state.model, {id(value): value.detach().clone() for value in kept})
    if weights == "average":
        parameters: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in state.averaged().items():
                parameters[name].copy_(value)
    return model


def _sums(scores: Mapping[str, Tensor], valid: int, size: int) -> dict[str, float]:
    """Each score summed over the rows that count, in float64.

    Raises:
        InputError: a score is not one number an example.
    """
    if not isinstance(scores, Mapping) or not scores:
        raise InputError(
            "The score function returned no named scores.",
            given=repr(scores)[:200],
            expected="a dict of named tensors of shape (batch,)",
            mend='return {"top1": ls.metrics.in_top_k(logits, labels)}',
        )
    for name, values in scores.items():
        if values.shape != (size,):
            raise InputError(
                f"The score {name!r} is not one number an example.",
                given=f"a tensor of shape {tuple(values.shape)}",
                expected=f"shape ({size},)",
                mend="return a value for each example of the batch, unreduced: padding cannot count then",
            )
    return {name: float(values[:valid].double().sum()) for name, values in scores.items()}
