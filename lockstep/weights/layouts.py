"""The order of a tensor's axes: how weights of TensorFlow become those of torch.

TensorFlow lays a convolution out as height, width, in, out, and a dense layer as in, out; torch has out and in first.
The axes are written as einops writes them (Rogozhnikov, "Einops", ICLR 2022).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from lockstep.checks import Checked, Hint
from lockstep.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
System = Literal["torch", "tensorflow"]
"""The system whose habit the axes follow."""

_AXIS = re.compile(r"([a-z])(?:=([1-9][0-9]*))?")
_GROUP = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclass(frozen=True)
class Layout(Checked):
    """An order of axes and the one to bring them into, such as "h w i o -> o i h w".

    An axis is a letter, and 1 an axis of length 1. Axes in parentheses lie in one, the last of them fastest; the length
    of all but one of these is given on the left: "(h=7 w=7 i) o -> o (i h w)" is the dense layer after the flattening
    of 7x7 features, whose channels come last in TensorFlow and first in torch.
    """

    pattern: Annotated[str, Hint('write Layout("h w i o -> o i h w")')]
    """The axes before and after, such as "h w i o -> o i h w"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        left, right = self._sides
        axes, again = _axes(left), _axes(right)
        known = [sum(axis not in self._lengths for axis in group) <= 1 for group in left]
        if len({*axes}) < len(axes) or sorted(axes) != sorted(again) or not all(known):
            raise self._malformed()

    def shape(self, given: Shape) -> Shape | None:
        """The shape that a tensor of shape `given` gets; None where it has not the axes on the left."""
        lengths = self._measured(given)
        return None if lengths is None else tuple(_product(group, lengths) for group in self._sides[1])

    def apply(self, tensor: Tensor) -> Tensor:
        """The tensor with its axes in the new order, contiguous; a copy, unless nothing moves."""
        lengths = self._measured(tuple(tensor.shape))
        if lengths is None:
            raise InputError(
                f"A tensor cannot be laid out as {self.pattern!r}.",
                given=f"shape {tuple(tensor.shape)}",
                expected=f"axes {self.pattern.partition('->')[0].strip()}",
                hint="choose the layout that the tensor has",
            )
        left, right = self._sides
        axes = _axes(left)
        split = tensor.reshape([lengths[axis] for axis in axes])
        moved = split.permute([axes.index(axis) for axis in _axes(right)])
        return moved.reshape([_product(group, lengths) for group in right]).contiguous()

    def _measured(self, given: Shape) -> Mapping[str, int] | None:
        """The length of every axis in a tensor of this shape; None where they do not fit."""
        left = self._sides[0]
        lengths = dict(self._lengths)
        if len(given) != len(left):
            return None
        for group, length in zip(left, given, strict=True):
            known = _product([axis for axis in group if axis in lengths], lengths)
            for axis in group:
                lengths.setdefault(axis, length // known)
            if _product(group, lengths) != length:
                return None
        return lengths

    @cached_property
    def _sides(self) -> tuple[list[list[str]], list[list[str]]]:
        """The letters of the axes, by group, on both sides of the arrow."""
        left, arrow, right = self.pattern.partition("->")
        if not arrow:
            raise self._malformed()
        return self._groups(left), self._groups(right)

    @cached_property
    def _lengths(self) -> Mapping[str, int]:
        return {axis: int(length) for axis, length in _AXIS.findall(self.pattern) if length}

    def _groups(self, side: str) -> list[list[str]]:
        groups = [(inside or alone).split() for inside, alone in _GROUP.findall(side)]
        groups = [[] if group == ["1"] else group for group in groups]
        if _GROUP.sub("", side).strip() or not all(_AXIS.fullmatch(axis) for group in groups for axis in group):
            raise self._malformed()
        return [[axis[0] for axis in group] for group in groups]

    def _malformed(self) -> InputError:
        return InputError(
            "This is no layout.",
            given=repr(self.pattern),
            expected="the same letters on both sides of an arrow, and in parentheses the lengths of all but one",
            hint='write it as in "h w i o -> o i h w" or "(h=7 w=7 i) o -> o (i h w)"',
        )


def _axes(groups: Sequence[Sequence[str]]) -> list[str]:
    return [axis for group in groups for axis in group]


def _product(axes: Sequence[str], lengths: Mapping[str, int]) -> int:
    return math.prod(lengths[axis] for axis in axes)


CONVOLUTION = Layout("h w i o -> o i h w")
CONVOLUTION_1D = Layout("k i o -> o i k")
CONVOLUTION_3D = Layout("d h w i o -> o i d h w")
DEPTHWISE = Layout("h w i m -> (i m) 1 h w")
"""A convolution of each channel alone, with m outputs a channel."""
CONVOLUTION_AS_DENSE = Layout("h w i o -> o (i h w)")
"""A convolution over all there is, which torch has as a dense layer after a flattening."""
DENSE = Layout("i o -> o i")

_OF_TENSORFLOW = (CONVOLUTION, DEPTHWISE, CONVOLUTION_AS_DENSE, DENSE, CONVOLUTION_1D, CONVOLUTION_3D)


def flattened_layout(num_places: int, num_dimensions: int) -> str:
    """The pattern of a dense layer of TensorFlow's after a flattening of so many places, in 1, 2 or 3 dimensions.

    These are taken as equally long; where they cannot be, capitals are in the place of their lengths, such as in
    "(h=H w=W i) o -> o (i h w)".
    """
    axes = "dhw"[-num_dimensions:]
    side = round(num_places ** (1 / num_dimensions))
    lengths = {axis: side if side**num_dimensions == num_places else axis.upper() for axis in axes}
    return f"({' '.join(f'{axis}={length}' for axis, length in lengths.items())} i) o -> o (i {' '.join(axes)})"


def infer_layout(system: System, given: Shape, wanted: Shape) -> Layout | None:
    """The layout that brings a tensor of `system` from one shape into the other; None where it fits as it lies, or not.

    The shapes decide between the layouts of a system, never whose layouts they are: a square matrix has the same shape
    in both. Nor do they tell that a dense layer follows a flattening; there, name its layout (`flattened_layout`).
    """
    layouts = _OF_TENSORFLOW if system == "tensorflow" else ()
    return next((layout for layout in layouts if layout.shape(given) == wanted), None)
