"""The protocol of metrics that need all examples before they can say anything."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """Takes in examples part by part, and computes its value at the end. A `torchmetrics.Metric` is one."""

    def reset(self) -> object:
        """Forget all examples."""
        ...

    def update(self, *values: Any, **more: Any) -> object:
        """Take in some examples: tensors with the batch first."""
        ...

    def compute(self) -> Any:
        """Return the value over all examples since `reset`: numbers, texts, tensors; lists, tuples, dicts of them."""
        ...
