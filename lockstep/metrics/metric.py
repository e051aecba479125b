"""What a metric is that needs all examples before it can say anything."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """It is shown the examples part by part, and computes its value at the end. A `torchmetrics.Metric` is one."""

    def reset(self) -> object:
        """Forget all examples."""
        ...

    def update(self, *values: Any, **more: Any) -> object:
        """Take in some examples: tensors with the batch first."""
        ...

    def compute(self) -> Any:
        """The value over all examples since `reset`: numbers, texts or tensors; or lists, tuples and dicts of them."""
        ...
