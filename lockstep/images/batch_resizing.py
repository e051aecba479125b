"""Resize many images of different sizes at once, on the device that they are on: the same pixels as one by one.

torch's antialiased resize of bytes on a CPU weighs pixels by whole numbers of 16 bits, along the columns, then along
the rows, and rounds after each. So does this, with the same numbers: nothing depends on the device, or on the other
images. The methods of TensorFlow 1 weigh in 32 bits along the rows, then along the columns, and round at the end.

Images lie one after another in one buffer. A line of pixels is looked up by its place in it, so that no image is padded
for another. The host knows all sizes, and never waits for the device.
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import torch

from lockstep.images.resizing import ANTIALIASED, METHODS, taps_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_MOST_VALUES = 1 << 22  # of the pixels that one group of images has between the two passes
_MOST_IMAGES = 64
_MOST_BITS = 22


class Resizes(NamedTuple):
    """How each image of a batch is resized, and which part of the result is wanted; each int64 of shape (batch,)."""

    height: Tensor
    """Height of the image, in pixels."""
    width: Tensor
    to_height: Tensor
    """Height of the image once it is resized."""
    to_width: Tensor
    top: Tensor
    """First row of the part in the resized image."""
    left: Tensor
    method: Tensor
    """The place of the method in `METHODS`."""


def resized_batch(pixels: Tensor, resizes: Resizes, here: Resizes, size: int) -> Tensor:
    """Resize images, and take a part of `size` pixels a side of each: uint8 of shape (batch, 3, size, size).

    `pixels`, uint8 of shape (bytes,), are the images one after another, each (height, width, 3). `resizes` are on their
    device, and `here` on the CPU.
    """
    result = pixels.new_empty(len(here.height), 3, size, size)
    counts = resizes.height * resizes.width
    starts = counts.cumsum(0) - counts
    # Images of a kind together; both sort alike.
    order, order_here = (_kinds(each).argsort(stable=True) for each in (resizes, here))
    ordered = Resizes(*(column[order_here] for column in here))
    for first, last in pairwise([0, *_group_ends(ordered, size)]):
        rows = order[first:last]
        group = Resizes(*(column[rows] for column in resizes))
        part = _resized_group(
            pixels.view(-1, 3), starts[rows], group, Resizes(*(column[first:last] for column in ordered)), size
        )
        result[rows] = part.to(torch.uint8)
    return result


def _kinds(resizes: Resizes) -> Tensor:
    """Number images by their method, and by how many pixels of them a pixel of the result covers."""
    covered = torch.maximum(resizes.height // resizes.to_height, resizes.width // resizes.to_width)
    return resizes.method * (1 << 32) + covered


def _group_ends(ordered: Resizes, size: int) -> list[int]:
    """Cut images into groups of one method, few enough for the memory that is taken at once."""
    values = (torch.maximum(ordered.height, ordered.width) * size).cumsum(0) // _MOST_VALUES
    of_group = torch.stack([ordered.method, values, torch.arange(len(values)) // _MOST_IMAGES], dim=1)
    _, lengths = torch.unique_consecutive(of_group, dim=0, return_counts=True)
    ends: list[int] = lengths.cumsum(0).tolist()
    return ends


class _Axis(NamedTuple):
    """One axis of the images of a group: tensors of shape (images,), and what the host knows of all of them."""

    length: Tensor
    to: Tensor
    start: Tensor
    """The first pixel that is wanted."""
    step: Tensor
    """Steps in the buffer from one pixel of the axis to the next, in pixels."""
    total: int
    """The sum of all lengths."""
    longest: int
    covered: int
    """The most pixels that a pixel of a result covers, rounded up."""


def _axes(resizes: Resizes, here: Resizes) -> tuple[_Axis, _Axis]:
    """Return the rows and the columns."""

    def known(length: Tensor, to: Tensor) -> tuple[int, int, int]:
        return int(length.sum()), int(to.max()), int((-(-length // to)).max())

    height, width, to_height, to_width, top, left, _ = resizes
    rows = _Axis(height, to_height, top, width, *known(here.height, here.to_height))
    return rows, _Axis(width, to_width, left, torch.ones_like(width), *known(here.width, here.to_width))


class _Taps(NamedTuple):
    """The pixels of an axis that each pixel of the result is made of, and how they are weighed."""

    places: Tensor
    """int64 of shape (taps, images, size)."""
    weights: Tensor
    """Whole numbers, or float32, of the same shape."""
    shift: Tensor | None
    """Bits by which a sum of whole numbers is too large: shape (images,)."""


def _resized_group(pixels: Tensor, starts: Tensor, resizes: Resizes, here: Resizes, size: int) -> Tensor:
    """Resize images by one method: of shape (images, 3, size, size); `pixels` are of shape (all, 3)."""
    rows, columns = _axes(resizes, here)
    method = METHODS[int(here.method[0])]
    if method == ANTIALIASED:
        lines, firsts = _along_one_axis(pixels, starts, columns, rows, _antialiased(columns, size))
        return _across(lines, firsts, _antialiased(rows, size)).permute(0, 3, 1, 2)
    lines, firsts = _along_one_axis(pixels, starts, rows, columns, _legacy(rows, method, size))
    values = _across(lines, firsts, _legacy(columns, method, size))
    return values.permute(0, 3, 2, 1).round().clamp_(0, 255)


def _along_one_axis(pixels: Tensor, starts: Tensor, axis: _Axis, lines: _Axis, taps: _Taps) -> tuple[Tensor, Tensor]:
    """Weigh the pixels of every line of the images: (all lines, size, 3); and the number of each image's first line."""
    images = torch.arange(len(starts), device=starts.device)
    owner = torch.repeat_interleave(images, lines.length, output_size=lines.total)
    firsts = lines.length.cumsum(0) - lines.length
    number = torch.arange(lines.total, device=starts.device) - firsts[owner]
    begin = (starts[owner] + number * lines.step[owner])[:, None]
    places = taps.places * axis.step[:, None]
    read = (pixels.index_select(0, (begin + at[owner]).flatten()) for at in places)
    weighed = _weighed(read, (weight[owner].view(-1, 1) for weight in taps.weights))
    return _shifted(weighed.view(lines.total, -1, 3), None if taps.shift is None else taps.shift[owner]), firsts


def _across(lines: Tensor, firsts: Tensor, taps: _Taps) -> Tensor:
    """Weigh the lines of each image: (images, size, size, 3), the axis across the lines first."""
    size = taps.places.shape[2]
    flat = lines.flatten(1)
    read = (flat.index_select(0, (firsts[:, None] + at).flatten()) for at in taps.places)
    weighed = _weighed(read, (weight.reshape(-1, 1) for weight in taps.weights))
    return _shifted(weighed.view(len(firsts), -1, 3), taps.shift).view(len(firsts), size, -1, 3)


def _weighed(read: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """Add up what is read, each time weighed, in 32 bits: in the order of `lockstep.images.resizing`."""
    total: Tensor | None = None
    for values, weight in zip(read, weights, strict=True):
        values = values.to(weight.dtype)
        total = values.mul(weight) if total is None else total.addcmul_(values, weight)
    assert total is not None, "there is a pixel to read"
    return total


def _shifted(total: Tensor, shift: Tensor | None) -> Tensor:
    """Round sums of whole numbers, shape (rows, ..., 3), to bytes by the shift of their row; floats stay floats."""
    if shift is None:
        return total
    shift = shift[:, None, None]
    return total.add_((1 << shift) >> 1).bitwise_right_shift_(shift).clamp_(0, 255).to(torch.uint8)


def _antialiased(axis: _Axis, size: int) -> _Taps:
    """Compute what torch weighs bytes by, as Pillow does: triangles, rounded to 16 bits."""
    length, to = axis.length[:, None], axis.to[:, None]
    # The largest weight of the whole result says how finely all are rounded.
    at = torch.arange(axis.longest, dtype=torch.float64, device=length.device)
    scale = length.double() / to
    reach = scale.clamp(min=1)
    middle = scale * (at + 0.5)
    first = (middle - reach + 0.5).long().clamp_(min=0)
    stop = torch.minimum((middle + reach + 0.5).long(), length)
    places = torch.stack([first + tap for tap in range(2 * axis.covered + 1)])
    triangles = (1 - ((places - middle + 0.5) * (1 / reach)).abs()).clamp_(min=0) * (places < stop)
    # One after another: a sum over an axis might be rounded in another order in another batch.
    shares = triangles / reduce(add, triangles)
    most = torch.where(at < to, shares, 0).amax((0, 2))
    powers = 1 << torch.arange(1, _MOST_BITS + 1, device=length.device)
    shift = ((0.5 + most[:, None] * powers).long() < 1 << 15).sum(1, dtype=torch.int32)
    weights = (0.5 + shares * (1 << shift)[:, None]).int()
    wanted = (axis.start[:, None] + torch.arange(size, device=length.device)).expand(len(places), -1, -1)
    return _Taps(torch.minimum(places, length - 1).gather(2, wanted), weights.gather(2, wanted), shift)


def _legacy(axis: _Axis, method: str, size: int) -> _Taps:
    at = axis.start[:, None] + torch.arange(size, device=axis.length.device)
    length = axis.length[:, None]
    scale = length.float() / axis.to[:, None]
    return _Taps(*taps_of(method, at.float(), scale, length, axis.covered + 1), None)
