"""Prepare rows where they were scored; update metrics with those of all workers in one process, in their order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

# The stores are torch.distributed's, by the name under which they have types.
from torch._C._distributed_c10d import PrefixStore

from lockstep.errors import InputError, LockstepError
from lockstep.evaluation.scores import Column, Rows, checked_columns
from lockstep.metrics.metric import Metric, PreparedMetric, check_metrics
from lockstep.ragged import Ragged, tensors_of
from lockstep.workers.group import JSON
from lockstep.workers.rank import Worker
from lockstep.workers.store_server import MAX_VALUE_BYTES

_Prepared: TypeAlias = "Mapping[str, tuple[Tensor | Ragged, ...]]"

_PART_BYTES = MAX_VALUE_BYTES // 4  # of a text too, which JSON may make twice as long
_ASKED = "distributed_available_fn"  # a metric of torchmetrics asks it whether to wait for other processes


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
    """Name the metric in its error."""
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
