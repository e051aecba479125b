"""What a user says of a warm start, and what is known of a model before it gets its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from lockstep.checks import Checked, Hint, Probability, check_type
from lockstep.selection import Patterns
from lockstep.weights.layouts import Shape, System
from lockstep.weights.name_maps import NameMap, named
from lockstep.weights.names import Rename

Role = Literal["kernel", "table", "other"]
"""What a tensor is to its module, which decides its layout where the shapes do not.

The kernel of a convolution or a linear layer lies otherwise in TensorFlow, the table of an embedding as in torch; of
all others the shapes decide.
"""


class Flattening(NamedTuple):
    """Features with channels that a linear layer takes as one vector: TensorFlow has the channels last, torch first."""

    num_channels: int
    num_places: int
    """Height times width, of which there is more than one."""
    num_dimensions: int
    """1, 2 or 3: those of the places."""
    is_certain: bool = False
    """The layer's weights are not loaded from TensorFlow until their order is given; else there is a warning."""

    @property
    def is_square(self) -> bool:
        """Whether the places can be those of an image as high as it is wide."""
        return self.num_dimensions == 2 and math.isqrt(self.num_places) ** 2 == self.num_places


@dataclass(frozen=True)
class Target:
    """What is known of a parameter or buffer that may get a tensor."""

    shape: Shape
    dtype: str
    """As torch calls it: "float32"."""
    kind: Literal["parameter", "buffer"] = "parameter"
    role: Role = "other"
    other_names: tuple[str, ...] = ()
    """Of the same tensor: a tied one may come under any of its names."""
    flattening: Flattening | None = None
    """What a linear layer takes, or may take, by the modules around it."""


@dataclass(frozen=True)
class WarmStart(Checked):
    """How the tensors of a file find their places in a model.

    A name loses `strip_prefix`, goes through the name map and then through `rename`, in order, and gets `add_prefix`.
    Steps, slots and the like are never loaded, moving averages only instead of what they are averages of.

    Raises:
        InputError: a field cannot be as given.
    """

    rename: Annotated[tuple[Rename, ...], Hint(r'write rename=(Rename(r"^net\.", "backbone."),)')] = ()
    strip_prefix: str = ""
    add_prefix: str = ""
    include: Patterns = ()
    """Regular expressions, or exact names: only what they match, by its name in the file or in the model, is loaded."""
    skip: Patterns = ()
    """The same for what is not loaded; it wins over `include`."""
    ignore_missing: bool = False
    """Leave parameters that the file has no tensor for as they are."""
    reshape: bool = False
    """Read the values of a tensor of another shape off in order, where there are as many."""
    mismatch: Literal["error", "skip"] = "error"
    """What becomes of a parameter whose tensor does not fit."""
    prefer_average: bool = False
    """Take the moving average of a variable where the file has one."""
    name_map: str | NameMap | None = None
    """A map of `lockstep.weights.name_maps`, or one of your own."""
    system: System | None = None
    """Whose layouts the tensors have, "torch" or "tensorflow"; None: those of the name map, or else torch's."""
    require_loaded: Annotated[Probability | None, Hint("write require_loaded=0.95 for 95 %")] = None
    """The least share of the parameters' values that must be loaded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = 'write name_map="mnist"'
        check_type("name_map", self.name_map, (str, NameMap, type(None)), expected="a name", hint=hint)
        if isinstance(self.name_map, str):
            named(self.name_map)

    @property
    def resolved_map(self) -> NameMap:
        """The name map, which has no renames where none is given."""
        found = named(self.name_map) if isinstance(self.name_map, str) else self.name_map
        return found or NameMap((), system="torch")
