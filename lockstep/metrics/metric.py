"""The protocols of metrics that need all examples before they can say anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.ragged import Ragged


@runtime_checkable
class Metric(Protocol):
    """Takes in examples part by part, and computes its value at the end. A `torchmetrics.Metric` is one.

    If its value is a number, this is a score under the metric's name. Of a mapping, each number is a score NAME/KEY.
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
