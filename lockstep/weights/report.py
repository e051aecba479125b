"""What became of every tensor of a file and of every parameter of the model, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from lockstep.listing import shorten
from lockstep.screen import one_line


@dataclass(frozen=True)
class Loaded:
    """A parameter or buffer that gets a tensor of the file."""

    target: str
    source: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    """Of the tensor in the file."""
    layout: str | None
    """The pattern by which its axes move; None leaves them as they lie."""
    reshaped: bool
    """The values, once in that layout, are read off in order into another shape of the same size."""
    converted: str | None
    """From which dtype to which; None where they are the same."""
    averaged: bool
    """It is the moving average of the variable."""
    doubt: str | None = None
    """Why its values may be in another order than the model has them, and what to give if they are."""


@dataclass(frozen=True)
class Mismatch:
    """A parameter or buffer whose tensor in the file does not fit."""

    target: str
    source: str
    reason: str
    rename: str | None = None
    """The `Rename(...)` with which it would be loaded, if that is known."""


@dataclass(frozen=True)
class Left:
    """What was left alone on purpose."""

    name: str
    reason: str


@dataclass(frozen=True)
class NonFinite:
    """A parameter or buffer that was loaded with values that are no finite numbers."""

    target: str
    num_nan: int
    num_infinite: int

    def __str__(self) -> str:
        counts = {"NaN": self.num_nan, "infinite": self.num_infinite}
        return f"{self.target} ({', '.join(f'{count:,} {what}' for what, count in counts.items() if count)})"


@dataclass(frozen=True)
class Report:
    """Each parameter and buffer of the model is in one of loaded, missing, skipped and mismatched.

    Each tensor of the file is a source of some that are loaded or mismatched, or else it is unexpected or ignored.
    """

    origin: str
    """The file and what it is."""
    loaded: tuple[Loaded, ...]
    missing: tuple[str, ...]
    """Parameters and buffers that the file has no tensor for."""
    skipped: tuple[Left, ...]
    """Parameters and buffers that were not to be loaded."""
    mismatched: tuple[Mismatch, ...]
    unexpected: tuple[str, ...]
    """Tensors of the file that nothing in the model is called like."""
    ignored: tuple[Left, ...]
    """Tensors of the file that were not to be loaded: steps, slots, averages, and what was skipped."""
    num_values: int
    """Of all parameters of the model, without its buffers."""
    num_values_loaded: int
    nonfinite: tuple[NonFinite, ...] | None = None
    """What was loaded with values that are not finite; None as long as nothing has been read."""

    def after(self, tensors: Mapping[str, Tensor]) -> Report:
        """The report once these tensors have been read for the parameters and buffers of these names."""
        return replace(self, nonfinite=tuple(filter(None, (_nonfinite(name, each) for name, each in tensors.items()))))

    @property
    def share(self) -> float:
        """The share of the parameters' values that is loaded, from 0 to 1."""
        return self.num_values_loaded / self.num_values if self.num_values else 0.0

    @property
    def num_targets(self) -> int:
        """Parameters and buffers of the model."""
        return len(self.loaded) + len(self.missing) + len(self.skipped) + len(self.mismatched)

    def as_json(self) -> dict[str, Any]:
        """Everything, as values that JSON has."""
        return {"share": self.share, "counts": self._counts(), **asdict(self)}

    def __str__(self) -> str:
        """A few lines for the screen; long lists are cut."""
        head = (
            f"Weights from {self.origin}: {len(self.loaded):,} of {self.num_targets:,} tensors of the model, "
            f"{100 * self.share:.1f} % of its parameters"
        )
        lines = {
            "loaded": self._how(),
            "missing": shorten(self.missing),
            "mismatched": shorten([f"{each.target} ({each.reason})" for each in self.mismatched]),
            "skipped": _by_reason(self.skipped),
            "unexpected": shorten(self.unexpected),
            "ignored": _by_reason(self.ignored),
            "nonfinite": shorten([str(each) for each in self.nonfinite or ()]),
        }
        counts = self._counts()
        rows = (f"  {name:10} {counts[name]:6,}  {lines[name]}".rstrip() for name in counts)
        return "\n".join(map(one_line, [head, *rows]))

    def _counts(self) -> dict[str, int]:
        fields = ("loaded", "missing", "mismatched", "skipped", "unexpected", "ignored")
        found = {field: getattr(self, field) for field in (*fields, "nonfinite")}
        return {field: len(each) for field, each in found.items() if each is not None}

    def _how(self) -> str:
        ways = {
            "renamed": [each.target != each.source for each in self.loaded],
            "transposed": [each.layout is not None for each in self.loaded],
            "reshaped": [each.reshaped for each in self.loaded],
            "converted": [each.converted is not None for each in self.loaded],
            "averages": [each.averaged for each in self.loaded],
        }
        return ", ".join(f"{sum(which):,} {way}" for way, which in ways.items() if any(which))


def _nonfinite(name: str, tensor: Tensor) -> NonFinite | None:
    if tensor.is_floating_point() and tensor.itemsize < 4:
        tensor = tensor.float()  # torch cannot tell for all of the narrow dtypes
    num_nan, num_infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return NonFinite(name, num_nan, num_infinite) if num_nan or num_infinite else None


def _by_reason(left: Sequence[Left]) -> str:
    counts = Counter(each.reason for each in left)
    return "; ".join(f"{reason}: {shorten([each.name for each in left if each.reason == reason])}" for reason in counts)
