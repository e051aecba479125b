"""Update metrics with the rows of all workers, in one process and in the order of the micro-batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn

# The stores are torch.distributed's, by the name under which they have types.
from torch._C._distributed_c10d import PrefixStore

from lockstep.checks import check_type
from lockstep.errors import InputError, LockstepError
from lockstep.evaluation.scores import Rows
from lockstep.metrics.metric import Metric
from lockstep.workers.group import JSON
from lockstep.workers.rank import Worker
from lockstep.workers.store_server import MAX_VALUE_BYTES

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
        for name, metric in metrics.items():
            check_type(
                f"metrics[{name!r}]",
                metric,
                Metric,
                expected="a value with the methods reset, update and compute",
                hint="give a metric such as ls.metrics.ConfusionMatrix(10), or one of torchmetrics",
            )
            metric.reset()
        if metrics:
            worker.group.agree("the metrics of an evaluation", sorted(metrics))

    def add(self, rows: Rows) -> None:
        """Pass the rows of this worker's next micro-batch on; waits for the other workers to do so."""
        self._round(rows)

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

    def _round(self, rows: Rows | None) -> bool:
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

    def _update(self, rows: Rows) -> None:
        """Update the metrics; a micro-batch without valid examples is passed over."""
        for name, columns in rows.items():
            shapes = ", ".join(f"{tuple(column.shape)} {column.dtype}" for column in columns)
            with _naming(name, f"be updated with tensors of {shapes}"), torch.no_grad():
                if len(columns[0]):
                    self._metrics[name].update(*columns)

    def _send(self, rows: Rows) -> list[JSON]:
        """Put rows into the store, unless this is the chief; return the number of parts, and of columns by name."""
        num_columns = {name: len(columns) for name, columns in rows.items()}
        if self._worker.is_chief:
            return [0, num_columns]
        numbered = ((f"{name}/{at}", column) for name, columns in rows.items() for at, column in enumerate(columns))
        whole = save({key: column.contiguous() for key, column in numbered})
        parts = [whole[start : start + _PART_BYTES] for start in range(0, len(whole), _PART_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(self._key(self._worker.rank, number), part)  # type: ignore[arg-type]  # bytes too
        return [len(parts), num_columns]

    def _receive(self, rank: int, num_parts: int, num_columns: Mapping[str, int]) -> Rows:
        keys = [self._key(rank, number) for number in range(num_parts)]
        tensors = load(b"".join(self._store.get(key) for key in keys))
        for key in keys:
            self._store.delete_key(key)
        return {name: tuple(tensors[f"{name}/{at}"] for at in range(count)) for name, count in num_columns.items()}

    def _key(self, rank: int, part: int) -> str:
        return f"{self._round_number}/{rank}/{part}"


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
