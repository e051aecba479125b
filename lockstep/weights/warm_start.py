"""Warm starts: what a user asks for, what a model takes, and the report of what was loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from lockstep.checks import Checked, Hint, Probability, check_type
from lockstep.listing import shorten
from lockstep.screen import one_line
from lockstep.selection import Patterns
from lockstep.weights.layouts import Shape, System
from lockstep.weights.name_maps import get_name_map
from lockstep.weights.names import NameMap, Rename

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["kernel", "table", "other"]
"""The role of a tensor in its module.

The kernel of a convolution or linear layer has another layout in TensorFlow; the table of an embedding has torch's. For
all others the shapes decide.
"""


Takes = Literal["classifier", "features", "detector"]
"""What a detector takes of weights: a classifier as its backbone, the backbone of another detector, or all of one."""


class Flattening(NamedTuple):
    """Features that a linear layer takes as one vector: TensorFlow has their channels last, torch first."""

    num_channels: int
    num_places: int
    """Height times width, more than 1."""
    num_dimensions: int
    """1, 2 or 3, without the channels."""
    is_certain: bool = False
    """Refuse the layer's weights from TensorFlow until their order is given; otherwise warn."""

    @property
    def is_square(self) -> bool:
        """Whether the places can be those of a square image."""
        return self.num_dimensions == 2 and math.isqrt(self.num_places) ** 2 == self.num_places


@dataclass(frozen=True)
class Target:
    """A parameter or buffer of the model, before it gets a tensor."""

    shape: Shape
    dtype: str
    """As torch calls it: "float32"."""
    kind: Literal["parameter", "buffer"] = "parameter"
    role: Role = "other"
    other_names: tuple[str, ...] = ()
    """Further names of a tied parameter; its tensor may have any of them."""
    flattening: Flattening | None = None
    """The features that a linear layer takes, or may take, by the modules around it."""


@dataclass(frozen=True)
class WarmStart(Checked):
    """The tensors of a file that are loaded into a model, and their names there.

    A name loses `strip_prefix`, goes through the name map and then through `rename`, in order, and gets `add_prefix`.
    Steps and slots are never loaded; a moving average only instead of its weight.
    """

    rename: Annotated[tuple[Rename, ...], Hint(r'write rename=(Rename(r"^net\.", "backbone."),)')] = ()
    """Replacements in the names, by regular expressions, in this order."""
    strip_prefix: str = ""
    """What names of the file lose at their start."""
    add_prefix: str = ""
    """What is put before the names, last of all."""
    include: Patterns = ()
    """Load only what these regular expressions or exact names match, in the file or in the model."""
    skip: Patterns = ()
    """Load nothing that these match; they win over `include`."""
    ignore_missing: bool = False
    """Leave parameters that the file has no tensor for as they are."""
    reshape: bool = False
    """Take a tensor of another shape with as many values, in order."""
    mismatch: Literal["error", "skip"] = "error"
    """What to do with a parameter whose tensor does not fit."""
    prefer_average: bool = False
    """Take the moving average of a variable where the file has one."""
    name_map: str | NameMap | None = None
    """A map of `lockstep.weights.name_maps`, or one of your own."""
    system: System | None = None
    """The system whose layouts the tensors have, "torch" or "tensorflow"; None: that of the name map, or else torch."""
    require_loaded: Annotated[Probability | None, Hint("write require_loaded=0.95 for 95 %")] = None
    """The least share of the parameters' values that must be loaded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = 'write name_map="mnist"'
        check_type("name_map", self.name_map, (str, NameMap, type(None)), expected="a name", hint=hint)
        if isinstance(self.name_map, str):
            get_name_map(self.name_map)

    @property
    def resolved_map(self) -> NameMap:
        """The name map; without renames if none is given."""
        found = get_name_map(self.name_map) if isinstance(self.name_map, str) else self.name_map
        return found or NameMap((), system="torch")


@dataclass(frozen=True)
class Loaded:
    """A parameter or buffer that gets a tensor of the file."""

    target: str
    source: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    layout: str | None
    """The pattern by which its axes move; None leaves them as they lie."""
    reshaped: bool
    """Whether the values, in that layout, go in order into another shape of the same size."""
    converted: str | None
    """The two dtypes, "float32 -> float16"; None where they are the same."""
    averaged: bool
    """Whether it is a moving average."""
    padded: bool = False
    """Whether it is a smaller kernel, in that layout, which goes in the middle of zeros."""
    subtracted: str | None = None
    """The tensor that is subtracted from it: the bias of a convolution, from the mean of the norm behind it."""
    doubt: str | None = None
    """Why its values may be in another order than the model's, and what to give if they are."""


@dataclass(frozen=True)
class Mismatch:
    """A parameter or buffer whose tensor in the file does not fit."""

    target: str
    source: str
    reason: str
    rename: str | None = None
    """The `Rename(...)` that would load it, if known."""


@dataclass(frozen=True)
class NotLoaded:
    """A tensor or parameter that was left out on purpose."""

    name: str
    reason: str


@dataclass(frozen=True)
class NonFinite:
    """A parameter or buffer that was loaded with values that are not finite."""

    target: str
    num_nan: int
    num_infinite: int

    def __str__(self) -> str:
        counts = {"NaN": self.num_nan, "infinite": self.num_infinite}
        return f"{self.target} ({', '.join(f'{count:,} {what}' for what, count in counts.items() if count)})"


@dataclass(frozen=True)
class WarmStartReport:
    """Each parameter and buffer of the model is in one of loaded, missing, skipped and mismatched.

    Each tensor of the file is a source of some that are loaded or mismatched, or else it is unexpected or ignored.
    """

    origin: str
    """The file and what it is."""
    loaded: tuple[Loaded, ...]
    missing: tuple[str, ...]
    """Parameters and buffers without a tensor in the file."""
    skipped: tuple[NotLoaded, ...]
    """Parameters and buffers that were not to be loaded."""
    mismatched: tuple[Mismatch, ...]
    unexpected: tuple[str, ...]
    """Tensors of the file whose names nothing in the model has."""
    ignored: tuple[NotLoaded, ...]
    """Tensors of the file that were not to be loaded: steps, slots, averages, and what was skipped."""
    num_values: int
    """Number of values of all parameters of the model, without its buffers."""
    num_values_loaded: int
    nonfinite: tuple[NonFinite, ...] | None = None
    """None as long as nothing has been read."""
    not_averaged: tuple[str, ...] = ()
    """Parameters that get raw weights beside others that get averages: the file has no average of them."""

    def after(self, tensors: Mapping[str, Tensor]) -> WarmStartReport:
        """The report once these tensors have been read, by the names of their parameters and buffers."""
        return replace(self, nonfinite=tuple(filter(None, (_nonfinite(name, each) for name, each in tensors.items()))))

    @property
    def share(self) -> float:
        """The share of the parameters' values that is loaded, 0 to 1."""
        return self.num_values_loaded / self.num_values if self.num_values else 0.0

    @property
    def num_targets(self) -> int:
        """Parameters and buffers of the model."""
        return len(self.loaded) + len(self.missing) + len(self.skipped) + len(self.mismatched)

    def as_json(self) -> dict[str, Any]:
        """The report as values that JSON has."""
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
            "not averaged": shorten(self.not_averaged),
            "nonfinite": shorten([str(each) for each in self.nonfinite or ()]),
        }
        counts = self._counts()
        rows = (f"  {name:{max(map(len, counts))}} {counts[name]:6,}  {lines[name]}".rstrip() for name in counts)
        return "\n".join(map(one_line, [head, *rows]))

    def _counts(self) -> dict[str, int]:
        fields = ("loaded", "missing", "mismatched", "skipped", "unexpected", "ignored")
        counts = {field: len(getattr(self, field)) for field in fields}
        if self.not_averaged:
            counts["not averaged"] = len(self.not_averaged)
        if self.nonfinite is not None:
            counts["nonfinite"] = len(self.nonfinite)
        return counts

    def _how(self) -> str:
        ways = {
            "renamed": [each.target != each.source for each in self.loaded],
            "transposed": [each.layout is not None for each in self.loaded],
            "reshaped": [each.reshaped for each in self.loaded],
            "put in the middle of zeros": [each.padded for each in self.loaded],
            "converted": [each.converted is not None for each in self.loaded],
            "less a bias": [each.subtracted is not None for each in self.loaded],
            "averages": [each.averaged for each in self.loaded],
        }
        return ", ".join(f"{sum(which):,} {way}" for way, which in ways.items() if any(which))


def _nonfinite(name: str, tensor: Tensor) -> NonFinite | None:
    if tensor.is_floating_point() and tensor.itemsize < 4:
        tensor = tensor.float()  # torch cannot tell for all of the narrow dtypes
    num_nan, num_infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return NonFinite(name, num_nan, num_infinite) if num_nan or num_infinite else None


def _by_reason(left: Sequence[NotLoaded]) -> str:
    counts = Counter(each.reason for each in left)
    return "; ".join(f"{reason}: {shorten([each.name for each in left if each.reason == reason])}" for reason in counts)
