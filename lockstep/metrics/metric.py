"""The protocols of metrics that need all examples before they can say anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lockstep.checks import check_type
from lockstep.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.ragged import Ragged


@runtime_checkable
class Metric(Protocol):
    """Takes in examples part by part, and computes its value at the end. A `torchmetrics.Metric` is one.

    If its value is a number, this is a score under the metric's name. Of a mapping, each number is a score NAME/KEY, or
    KEY alone where that has a group of its own, such as "DetectionBoxes_Precision/mAP".
    A metric may also have `score_names`, the keys that this mapping will have: a run then knows before it starts
    whether the score is there by which it is to keep the best checkpoints.
    """

    def reset(self) -> object:
        """Forget all examples."""
        ...

    def update(self, *values: Any, **more: Any) -> object:
        """Take in some examples: tensors with the batch first, or `Ragged`s."""
        ...

    def compute(self) -> Any:
        """Return the value over all examples since `reset`: numbers, texts, tensors; lists, tuples, dicts of them."""
        ...


@runtime_checkable
class PreparedMetric(Metric, Protocol):
    """A metric most of whose work is done by the worker that has scored the examples, before anything travels."""

    def prepare(self, *values: Any) -> tuple[Tensor | Ragged, ...]:
        """Return what `update` takes of some examples; the metric itself does not change.

        Args:
            values: what the score function returned for these examples: tensors and `Ragged`s on the CPU, or lists.
        """
        ...


def score_name(metric: str, key: str) -> str:
    """Name the score that a metric computes under a key: see `Metric`."""
    return key if "/" in key else f"{metric}/{key}"


NO_METRICS: Mapping[str, Metric] = MappingProxyType({})


def check_metrics(metrics: Mapping[str, Metric], taken: Collection[str] = ()) -> None:
    """Refuse what is no metric by name, and a metric that has the name of a score."""
    check_type(
        "metrics", metrics, Mapping, expected="metrics by name", hint='write metrics={"f1": metric}; {} for none'
    )
    for name, metric in metrics.items():
        check_type(
            f"metrics[{name!r}]",
            metric,
            Metric,
            expected="a value with the methods reset, update and compute",
            hint="give a metric such as ls.metrics.ConfusionMatrix(10), or one of torchmetrics",
        )
        if name in taken:
            raise InputError(
                f"There is a score {name!r} already.",
                given=f"a metric of the name {name!r}",
                expected=f"another name than {', '.join(map(repr, taken))}",
                hint="give the metric another name",
            )
