"""Check the scores that a score function returns for a micro-batch, drop the padding, and sum them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from lockstep.errors import InputError
from lockstep.metrics.metric import Metric, PreparedMetric, score_name
from lockstep.ragged import Ragged
from lockstep.tensors import reading_waits

if TYPE_CHECKING:
    from torch import Tensor

Weights = Literal["raw", "average"]
"""The weights that are scored: the parameters as they are, or their moving averages."""
Column: TypeAlias = "Tensor | Ragged | list[Any]"
"""A value for each example; only the `prepare` of a metric takes a list."""
Rows: TypeAlias = "Mapping[str, tuple[Column, ...]]"
"""The arguments of a metric's `prepare` or `update`, by the metric's name."""


class Scores(NamedTuple):
    """The scores of a micro-batch of `size` rows, padding included."""

    averaged: Mapping[str, Tensor]
    """One number an example, shape (size,)."""
    rows: Rows


def checked(returned: object, metrics: Mapping[str, Metric], size: int) -> Scores:
    """Split what a score function returned for `size` rows into scores to average and rows for the metrics named."""
    if not isinstance(returned, Mapping) or not returned:
        raise InputError(
            "The score function returned no named scores.",
            given=repr(returned)[:200],
            expected="a dict of named tensors of shape (batch,)",
            hint='return {"top1": ls.metrics.in_top_k(logits, labels)}',
        )
    averaged, rows = {}, {}
    for name, value in returned.items():
        if name in metrics or isinstance(value, tuple):
            rows[name] = _checked_rows(name, value, metrics, size)
        else:
            averaged[name] = _checked_score(name, value, size)
    if missing := sorted(set(metrics) - set(rows)):
        raise InputError(
            f"The score function returned nothing for the metric {missing[0]!r}.",
            given=", ".join(map(repr, returned)),
            expected=f"{missing[0]!r} too: the tuple of what its update takes",
            hint=f'return {{..., "{missing[0]}": (logits, labels)}}, or leave the metric out',
        )
    return Scores(averaged, rows)


def counted(scores: Scores, valid: int) -> tuple[dict[str, Tensor], CopiedRows]:
    """Sum the scores in float64, and copy the rows to the CPU: of the first `valid` examples, the rest is padding.

    The sums stay where they are, and nothing waits for the device. Where all of it is padding, there are no rows.
    """
    sums = {name: values[:valid].double().sum() for name, values in scores.averaged.items()}
    return sums, CopiedRows(scores.rows if valid else {}, valid)


class CopiedRows:
    """Rows of a micro-batch on their way to the CPU; an accelerator computes what it is given next meanwhile.

    They are copies: a metric may keep them, and must not keep the memory of the whole batch with them. What autocast
    has left in half precision becomes float32, the same numbers: NumPy has no bfloat16.
    """

    def __init__(self, rows: Rows, valid: int) -> None:
        self._events: dict[torch.device, torch.Event] = {}
        self._rows = {name: tuple(self._copied(each[:valid]) for each in columns) for name, columns in rows.items()}
        for event in self._events.values():
            event.record()

    def read(self) -> Rows:
        """Return the rows, once they have arrived."""
        for event in self._events.values():
            event.synchronize()
        return self._rows

    def _copied(self, column: Column) -> Column:
        if isinstance(column, Ragged):
            return Ragged(self._copied_tensor(column.values), column.lengths.clone())
        return column if isinstance(column, list) else self._copied_tensor(column)

    def _copied_tensor(self, values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            self._events.setdefault(values.device, torch.Event(values.device))
        wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        return wide.to("cpu", copy=True, non_blocking=reading_waits(values.device))


def read_sums(sums: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Read the sums of many micro-batches at once, so that the host waits once for their device."""
    totals = [total for each in sums for total in each.values()]
    numbers = iter(torch.stack([total.to(totals[0].device) for total in totals]).tolist() if totals else ())
    return [{name: next(numbers) for name in each} for each in sums]


def summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the sums of all micro-batches, rounded once; NaN where infinities of both signs are among them."""
    names = list(parts[0])
    for part in parts:
        if sorted(part) != sorted(names):
            raise InputError(
                "The score function returned other scores for one micro-batch than for another.",
                given=f"{', '.join(map(repr, names))}; {', '.join(map(repr, part))}",
                expected="the same names each time",
                hint="return every score for every batch",
            )
    return {name: _sum([part[name] for part in parts]) for name in names}


def scores_of(computed: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the scores among the values of metrics; see `Metric` for their names."""
    for name, value in computed.items():
        is_mapping = isinstance(value, Mapping)
        named = {score_name(name, key): each for key, each in value.items()} if is_mapping else {name: value}
        for score, number in named.items():
            if type(number) in (int, float):
                yield score, float(number)


def _sum(values: Sequence[float]) -> float:
    """Add exactly but for one rounding: the order does not matter."""
    infinite = {value for value in values if math.isinf(value)}
    return math.nan if len(infinite) > 1 else math.fsum(values)


def _checked_score(name: str, values: object, size: int) -> Tensor:
    if isinstance(values, torch.Tensor) and values.shape == (size,):
        return values
    raise InputError(
        f"The score {name!r} is not one number an example.",
        given=_kind(values),
        expected=f"shape ({size},)",
        hint="return a value for each example of the batch, unreduced: padding cannot count then",
    )


def _checked_rows(name: str, value: object, metrics: Mapping[str, Metric], size: int) -> tuple[Column, ...]:
    if name not in metrics:
        raise InputError(
            f"The score function returned a tuple under {name!r}, which is no metric.",
            given=f"the metrics {', '.join(map(repr, metrics))}" if metrics else "no metrics",
            expected=f"a tensor of shape ({size},), or the name of a metric",
            hint=f'give the metric that takes it: evaluate(..., metrics={{"{name}": metric}})',
        )
    return checked_columns(
        value,
        size,
        f"The metric {name!r} cannot be given what the score function returned for it.",
        hint=f'return {{"{name}": (logits, labels)}}, unreduced: padding must not count',
        may_be_lists=isinstance(metrics[name], PreparedMetric),
    )


def checked_columns(value: object, size: int, what: str, *, hint: str, may_be_lists: bool = False) -> tuple[Any, ...]:
    """Return a tuple of columns of `size` examples; anything else is an InputError of these words."""
    columns = value if isinstance(value, tuple) else ()
    wrong = [each for each in columns if not _has_rows(each, size, may_be_lists)]
    if wrong or not columns:
        lists = ", or lists" if may_be_lists else ""
        raise InputError(
            what,
            given=_kind(wrong[0]) if wrong else _kind(value),
            expected=f"a tuple of tensors with the batch first: shape ({size}, ...); Raggeds{lists} of {size} examples",
            hint=hint,
        )
    return columns


def _has_rows(column: object, size: int, may_be_list: bool) -> bool:
    if isinstance(column, torch.Tensor):
        return column.shape[:1] == (size,)
    return isinstance(column, (Ragged, list) if may_be_list else Ragged) and len(column) == size


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Ragged):
        return f"a Ragged of {len(value)} examples"
    return f"an empty {type(value).__name__}" if value == () else f"a {type(value).__name__}"
