"""Score a model on a data set: each example once, the same bits for every number of workers.

Metrics get the rows of all workers in one process, in their order; each worker prepares the rows that it has scored.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

# The stores are torch.distributed's, by the name under which they have types.
from torch._C._distributed_c10d import PrefixStore

from lockstep.checks import check_one_of
from lockstep.data.bad_examples import check_budget
from lockstep.data.loader import EvaluationBatch, Loader
from lockstep.errors import InputError, LockstepError
from lockstep.evaluation.precise_statistics import PreciseStatistics, recompute_statistics
from lockstep.evaluation.scores import (
    Column,
    CopiedRows,
    Rows,
    Weights,
    checked,
    checked_columns,
    counted,
    read_sums,
    scores_of,
    summed,
)
from lockstep.metrics.metric import NO_METRICS, Metric, PreparedMetric, check_metrics
from lockstep.ragged import Ragged, tensors_of
from lockstep.screen import log
from lockstep.tensors import to_channels_last
from lockstep.towers.backends import backends_of_scores
from lockstep.towers.hosting import autocast
from lockstep.towers.towers import Precision
from lockstep.training.state import TrainState
from lockstep.types import BadExample, Batch
from lockstep.workers.group import JSON
from lockstep.workers.rank import Worker, join, repeated
from lockstep.workers.store_server import MAX_VALUE_BYTES

if TYPE_CHECKING:
    from lockstep.types import ProgressFunction, ScoreFunction

_Prepared: TypeAlias = "Mapping[str, tuple[Tensor | Ragged, ...]]"

_MOST_NAMED, _MOST_SHOWN = 10, 12
_PART_BYTES = MAX_VALUE_BYTES // 4  # of a text too, which JSON may make twice as long
_ASKED = "distributed_available_fn"  # a metric of torchmetrics asks it whether to wait for other processes


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: sums of scores over all examples, and values of metrics; `[name]` is a score."""

    sums: Mapping[str, float]
    num_examples: int
    bad: tuple[BadExample, ...] = ()
    """Examples that could not be read, and do not count."""
    weights: Weights = "raw"
    precision: Precision = "fp32"
    step: int = 0
    """The number of updates that these weights have had."""
    computed: Mapping[str, Any] = field(default_factory=dict)
    """The values of the metrics as JSON: tensors are nested lists, named tuples are dicts."""

    @property
    def means(self) -> dict[str, float]:
        """Each score averaged over the examples."""
        return {name: total / self.num_examples for name, total in self.sums.items()}

    @property
    def scores(self) -> dict[str, float]:
        """All scores by name: the means over the examples, and the numbers that the metrics have computed."""
        scores = self.means
        for name, score in scores_of(self.computed):
            if name in scores:
                raise InputError(
                    f"Two scores have the name {name!r}.",
                    given=f"the scores {', '.join(map(repr, scores))}",
                    expected="a name of its own for each, NAME/KEY for each number of a metric that computes several",
                    hint="give the metric another name",
                )
            scores[name] = score
        return scores

    @property
    def facts(self) -> dict[str, Any]:
        """Weights, precision, counts and scores, by the names that all files of scores have."""
        return {
            "weights": self.weights,
            "precision": self.precision,
            "num_examples": self.num_examples,
            "num_bad_examples": len(self.bad),
            "scores": self.scores,
        }

    def __getitem__(self, name: str) -> float:
        scores = self.scores
        check_one_of("score", name, tuple(scores))
        return scores[name]

    def __str__(self) -> str:
        shown = [f"{name} {value:.4f}" for name, value in self.scores.items()]
        num_more = len(shown) - _MOST_SHOWN
        scores = ", ".join(shown[:_MOST_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "")
        weights = " with averaged weights" if self.weights == "average" else ""
        precision = f" in {self.precision}" if self.precision != "fp32" else ""
        left_out = f", {len(self.bad)} bad ones left out" if self.bad else ""
        return f"{scores or 'no scores'} over {self.num_examples} examples{weights}{precision}{left_out}"


def evaluate(
    state: TrainState,
    score: ScoreFunction,
    loader: Loader,
    *,
    weights: Weights = "raw",
    precision: Precision | None = None,
    micro_batch: int | None = None,
    statistics: PreciseStatistics | None = None,
    drop_last: bool = False,
    metrics: Mapping[str, Metric] = NO_METRICS,
    progress: ProgressFunction | None = None,
) -> Evaluation:
    """Score a copy of the state's model, in evaluation mode, on every example of the loader's reader once.

    All workers call it together and get the same result. The examples are cut into micro-batches by their index,
    assigned to the workers, and padded to one shape; the padding is dropped before anything is summed, and the sums are
    added up in the order of the micro-batches: the number of workers does not show in any bit.

    Metrics that cannot be averaged over examples see all of them in one process, the chief's, on its CPU, and in the
    same order: they are reset, updated once a micro-batch and asked once for their value, which all workers get.
    The chief's metrics keep what they have seen, those of other workers have seen nothing. What a `PreparedMetric`
    does with single examples is done before, by the worker that has scored them.

    Args:
        state: whose model is scored; nothing in it changes.
        score: `score(model, batch)`, returning named tensors of shape (batch,); under the name of a metric, a tuple of
            tensors with the batch first or `Ragged`s, which its `update` takes; or `prepare`, which takes lists, too.
        loader: its reader is read in order, without augmentation.
        weights: the parameters as they are, or their moving averages.
        precision: in which `score` computes: bf16 and fp16 under autocast, as `Towers.precision` says of losses. None:
            that of the towers that the state was last trained with, also before a resume; fp32 if it never was.
        micro_batch: examples a forward pass; the loader's batch size by default.
        statistics: the batch norm of the copy gets statistics computed afresh from these training batches.
        drop_last: leave out the last micro-batch if it is not full, as the reference trainers did.
        metrics: by name; the same names on all workers.
        progress: called before and after each of this worker's micro-batches with the number of examples up to there,
            and of all.

    Raises:
        InputError: a score is not one number an example, or is missing in a micro-batch; the state keeps no average;
            there is no batch norm whose statistics could be computed; every micro-batch is dropped; or a metric fails
            or gets nothing.
        DataError: an example cannot be read; where the loader skips bad examples, they are left out and named.
    """

    def made() -> Evaluation:
        with join().pulse.during(state.step, "evaluate"):
            model, chosen = _scored_copy(state, weights), _precision_of(state, precision)
            computed = _computed_as(state, chosen, score)
            if statistics is not None:
                recompute_statistics(model, computed, statistics, join())
            size = micro_batch or loader.batch_size
            result = _evaluate(model, computed, loader, size, drop_last, metrics, progress, stoppable=False)
        assert result is not None, "nothing stops it"
        return replace(result, weights=weights, precision=chosen, step=state.step)

    return repeated(made)


def evaluate_unless_stopped(
    state: TrainState,
    score: ScoreFunction,
    loader: Loader,
    *,
    weights: Weights = "raw",
    precision: Precision | None = None,
    micro_batch: int | None = None,
    drop_last: bool = False,
    metrics: Mapping[str, Metric] = NO_METRICS,
    progress: ProgressFunction | None = None,
) -> Evaluation | None:
    """Do what `evaluate` does; return None on all workers if one is asked to stop before it has scored its part.

    That one waits for the others, as long as in any call of the group.
    """
    with join().pulse.during(state.step, "evaluate"):
        model, precision = _scored_copy(state, weights), _precision_of(state, precision)
        computed, size = _computed_as(state, precision, score), micro_batch or loader.batch_size
        result = _evaluate(model, computed, loader, size, drop_last, metrics, progress, stoppable=True)
    return result and replace(result, weights=weights, precision=precision, step=state.step)


def _evaluate(
    model: nn.Module,
    score: ScoreFunction,
    loader: Loader,
    size: int,
    drop_last: bool,
    metrics: Mapping[str, Metric],
    progress: ProgressFunction | None,
    *,
    stoppable: bool,
) -> Evaluation | None:
    worker = join()
    model.eval()
    feed = GatheredMetrics(metrics, worker)
    mine: list[list[JSON]] = []
    sums: list[Mapping[str, Tensor]] = []
    coming: CopiedRows | None = None
    stopped = False
    num_examples = len(loader.reader) // size * size if drop_last else len(loader.reader)
    batches = loader.evaluation_batches(size, worker.rank, worker.num_workers, worker.device, drop_last=drop_last)
    with closing(batches):
        if progress:
            progress(0, num_examples)
        for batch in batches:
            worker.pulse.at(worker.pulse.step, worker.pulse.phase)  # It advances.
            stopped = stoppable and worker.pulse.stop_requested is not None
            if stopped:
                break
            with torch.inference_mode():
                scores = checked(score(model, batch), metrics, size)
            own, rows = counted(scores, batch.valid)
            sums.append(own)
            mine.append([batch.position, batch.valid, [list(bad) for bad in batch.bad]])
            if coming:  # those of the micro-batch before: an accelerator computes this one meanwhile
                feed.add(coming.read())
            coming = rows
            if progress:
                progress(min(batch.position + size, num_examples), num_examples)
    if coming and not stopped:
        feed.add(coming.read())
    feed.finish()
    scored = [[*row, own_sums] for row, own_sums in zip(mine, read_sums(sums), strict=True)]
    gathered = worker.group.gather([stopped, scored])
    if any(stopped for stopped, _ in gathered):
        return None
    result = _added_up([row for _, rows in gathered for row in rows], loader, size)
    _report_bad(result.bad, loader, is_chief=worker.is_chief)
    return replace(result, computed=feed.computed())


def _added_up(rows: Sequence[Any], loader: Loader, size: int) -> Evaluation:
    """Add up all micro-batches, in their order."""
    if not rows:
        raise InputError(
            "There is no full micro-batch to score.",
            given=f"{len(loader.reader)} examples, micro-batches of {size}, the last one dropped",
            expected="one full micro-batch or more",
            hint="lower the micro-batch, or keep the last one (drop_last=False, or evaluate.drop_last=false)",
        )
    rows = sorted(rows, key=itemgetter(0))
    sums = summed([row[3] for row in rows])
    bad = tuple(BadExample(*example) for row in rows for example in row[2])
    return Evaluation(sums, sum(row[1] for row in rows), bad)


def _report_bad(bad: Sequence[BadExample], loader: Loader, *, is_chief: bool) -> None:
    """Name the bad examples in the log; refuse more than the loader's budget allows."""
    some = bad[:_MOST_NAMED]
    for example in some if is_chief else ():
        log.warning("%s cannot be read, and does not count. %s", example.example_id, example.reason)
    if len(bad) > len(some) and is_chief:
        log.warning("and %d more", len(bad) - len(some))
    check_budget(len(bad), loader.quarantine.budget, {each.example_id: each.reason for each in bad[:3]})


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
    if state.trained_with.get("towers", {}).get("channels_last"):
        # The layout decides the order of sums, and a state that has just been loaded gets its own at its first step.
        to_channels_last(model.parameters())
    return model


def _precision_of(state: TrainState, precision: Precision | None) -> Precision:
    """Return the precision that is asked for, else that of the state's towers."""
    if precision is None:
        precision = state.trained_with.get("towers", {}).get("precision", "fp32")
    check_one_of("precision", precision, get_args(Precision))
    return precision


def _computed_as(state: TrainState, precision: Precision, score: ScoreFunction) -> ScoreFunction:
    """Make of a score function one that computes as the state's towers do: under autocast, with their flags of TF32."""
    context, flags = autocast(join().device, precision), backends_of_scores(state.trained_with, join().device)

    def computed(model: nn.Module, batch: Batch) -> Any:
        with context, flags:
            return score(model, batch)

    return computed


def example_indices(batch: Batch) -> Tensor:
    """Return the index in the reader of each row of an evaluation's batch: int64 of shape (batch,), on the CPU.

    Examples that could not be read are no rows, and are skipped; padding has the index of the last row that counts.
    Of a training batch, such as batch-norm statistics are computed from, these are the places in the stream.
    """
    places = torch.arange(batch.position, batch.position + batch.batch_size)
    if not isinstance(batch, EvaluationBatch):
        return places
    left_out = torch.tensor([bad.position for bad in batch.bad], dtype=torch.int64)
    rows = places[~torch.isin(places, left_out)][: batch.valid]
    last = rows[-1] if batch.valid else places[0]
    return torch.cat([rows, last.expand(batch.batch_size - batch.valid)])


class GatheredMetrics:
    """The metrics of one evaluation, reset. All workers make the same calls; only the chief's metrics see examples.

    The micro-batches pass in rounds, one of each worker, through the store of the run: it never holds more than those
    of two rounds.
    """

    def __init__(self, metrics: Mapping[str, Metric], worker: Worker) -> None:
        self._metrics, self._worker = metrics, worker
        self._store = PrefixStore("evaluation", worker.group.store)
        self._round_number = 0
        check_metrics(metrics)
        for metric in metrics.values():
            metric.reset()
        if metrics:
            worker.group.agree("the metrics of an evaluation", sorted(metrics))

    def add(self, rows: Rows) -> None:
        """Prepare the rows of this worker's next micro-batch and pass them on; waits for the other workers to do so."""
        self._round({name: self._prepared(name, columns) for name, columns in rows.items()})

    def finish(self) -> None:
        """Wait until all workers have passed on all their rows."""
        while self._round(None):
            pass

    def computed(self) -> Mapping[str, Any]:
        """Return the value of each metric as JSON, on all workers."""
        values: dict[str, JSON] = {}
        for name, metric in self._metrics.items() if self._worker.is_chief else ():
            with _naming(name, "compute its value"), _by_itself(metric):
                values[name] = _plain(metric.compute())
        return self._passed_on(values) if self._metrics else {}

    def _passed_on(self, values: Mapping[str, JSON]) -> Mapping[str, Any]:
        """Broadcast the chief's values: in parts, for the confusion matrix of some thousand classes is long."""
        group, text = self._worker.group, json.dumps(values)
        starts = group.broadcast(list(range(0, len(text), _PART_BYTES)))
        passed_on: Mapping[str, Any] = json.loads(
            "".join(group.broadcast(text[start : start + _PART_BYTES]) for start in starts)
        )
        return passed_on

    def _prepared(self, name: str, columns: tuple[Column, ...]) -> tuple[Tensor | Ragged, ...]:
        """Have the metric prepare the rows of a micro-batch, if it does so; what it returns is on the CPU."""
        metric = self._metrics[name]
        with _naming(name, "prepare what the score function returned"), torch.no_grad():
            prepared = metric.prepare(*columns) if isinstance(metric, PreparedMetric) else columns
        what, hint = f"What `prepare` of the metric {name!r} returned cannot travel.", "return what `update` takes"
        return tuple(column.to("cpu") for column in checked_columns(prepared, len(columns[0]), what, hint=hint))

    def _round(self, rows: _Prepared | None) -> bool:
        """Pass on the rows of one micro-batch of each worker; say whether any worker had some."""
        if not self._metrics:
            return False
        sent = None if rows is None else self._send(rows)
        arrived = self._worker.group.gather(sent)
        for rank, sizes in enumerate(arrived) if self._worker.is_chief else ():
            if sizes is not None:
                self._update(rows if rows is not None and rank == self._worker.rank else self._receive(rank, *sizes))
        self._round_number += 1
        return any(sizes is not None for sizes in arrived)

    def _update(self, rows: _Prepared) -> None:
        for name, columns in rows.items():
            with _naming(name, f"be updated with tensors of {', '.join(map(_kind, columns))}"), torch.no_grad():
                self._metrics[name].update(*columns)

    def _send(self, rows: _Prepared) -> list[JSON]:
        """Put rows into the store, unless this is the chief; return the number of parts, and of columns by name."""
        num_columns = {name: len(columns) for name, columns in rows.items()}
        if self._worker.is_chief:
            return [0, num_columns]
        # Copies: what a metric has prepared may share memory, which safetensors refuses.
        tensors = tensors_of({f"{name}/{at}": column for name, some in rows.items() for at, column in enumerate(some)})
        whole = save({key: each.clone(memory_format=torch.contiguous_format) for key, each in tensors.items()})
        parts = [whole[start : start + _PART_BYTES] for start in range(0, len(whole), _PART_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(self._key(self._worker.rank, number), part)  # type: ignore[arg-type]  # bytes too
        return [len(parts), num_columns]

    def _receive(self, rank: int, num_parts: int, num_columns: Mapping[str, int]) -> _Prepared:
        keys = [self._key(rank, number) for number in range(num_parts)]
        tensors = load(b"".join(self._store.get(key) for key in keys))
        for key in keys:
            self._store.delete_key(key)
        return {
            name: tuple(_column(tensors, f"{name}/{at}") for at in range(count)) for name, count in num_columns.items()
        }

    def _key(self, rank: int, part: int) -> str:
        return f"{self._round_number}/{rank}/{part}"


def _column(tensors: Mapping[str, Tensor], key: str) -> Tensor | Ragged:
    return tensors[key] if key in tensors else Ragged(tensors[f"{key}.values"], tensors[f"{key}.lengths"])


def _kind(column: Tensor | Ragged) -> str:
    if isinstance(column, Ragged):
        return f"ragged {_kind(column.values)}"
    return f"{tuple(column.shape)} {column.dtype}"


@contextmanager
def _naming(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise InputError(
            f"The metric {name!r} could not {what}.",
            given=f"{type(error).__name__}: {error}",
            expected="a metric that takes what the score function returns under its name",
            hint="fix the metric, or the tuple that the score function returns for it",
        ) from error


@contextmanager
def _by_itself(metric: Metric) -> Iterator[None]:
    """Keep a metric of torchmetrics from waiting for other processes: it has seen the examples of all of them."""
    modules = metric.modules() if isinstance(metric, nn.Module) else ()
    asking = [module for module in modules if hasattr(module, _ASKED)]
    before = [getattr(module, _ASKED) for module in asking]
    try:
        for module in asking:
            setattr(module, _ASKED, lambda: False)
        yield
    finally:
        for module, function in zip(asking, before, strict=True):
            setattr(module, _ASKED, function)


def _plain(value: Any) -> JSON:
    """Convert to JSON: tensors and arrays become nested lists, named tuples become dicts."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is no number, text or tensor, nor a list, tuple or dict of them")
