"""Resize images: by torch's antialiased kernel, or by the four methods of TensorFlow 1, which alias.

Those four sample the image at i * (from / to), without half a pixel's offset; bicubic has a = -0.75 and weights at
1/1024 of a pixel. They are what `tf.compat.v1.image.resize_images` computes, and so are those with `align_corners`,
which sample at i * (from - 1) / (to - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

ANTIALIASED = "antialiased"

_ALL = slice(None)

# The places to read, and their weights.
_Taps: TypeAlias = "tuple[Tensor, Tensor]"


def resized(
    image: Tensor,
    height: int,
    width: int,
    method: str = ANTIALIASED,
    rows: slice = _ALL,
    columns: slice = _ALL,
    *,
    align_corners: bool = False,
) -> Tensor:
    """Resize an image without regard to its aspect, or only a part of the result.

    Args:
        image: uint8 of shape (3, any, any), or float32 of any channels: then nothing is rounded or clipped.
        height: of the result, in pixels.
        width: of the result, in pixels.
        method: "antialiased" (bilinear, over all pixels that a pixel of the result covers), or one of
            `LEGACY_METHODS`, whose results are rounded and clipped to 0 to 255.
        rows: those wanted of the result; the rest is not computed where it need not be.
        columns: likewise.
        align_corners: of the legacy methods: sample the corners of the image for those of the result.
    """
    if image.shape[1:] == (height, width):
        return image[:, rows, columns]
    if method == ANTIALIASED:
        # For images that are not contiguous torch has a slower kernel of the same bits.
        pixels = image[None].contiguous(memory_format=torch.channels_last)
        resampled_all = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
        return resampled_all[0, :, rows, columns]
    values = resampled(image, height, width, method, rows, columns, align_corners=align_corners)
    return values if image.is_floating_point() else values.round_().clamp_(0, 255).to(torch.uint8)


def resampled(
    values: Tensor,
    height: int,
    width: int,
    method: str,
    rows: slice = _ALL,
    columns: slice = _ALL,
    *,
    align_corners: bool = False,
) -> Tensor:
    """Resize images of shape (..., channels, any, any) to floats, by one of `LEGACY_METHODS`; bicubic overshoots."""
    lines = values.movedim(-3, -1).contiguous()  # whole pixels stand together: they are read several times as fast
    channels = values.shape[-3]
    place, weight = (taps[:, rows] for taps in _taps_of_line(method, values.shape[-2], height, align_corners))
    lines = _weighed(lines.flatten(-2), -2, place, weight[..., None])
    place, weight = (taps[:, columns] for taps in _taps_of_line(method, values.shape[-1], width, align_corners))
    place = (place[..., None] * channels + torch.arange(channels)).flatten(1)
    lines = _weighed(lines, -1, place, weight.repeat_interleave(channels, 1))
    return lines.view(*lines.shape[:-1], -1, channels).movedim(-1, -3)


def _weighed(values: Tensor, axis: int, places: Tensor, weights: Tensor) -> Tensor:
    """Add up what is read at each of several places, weighed; both of shape (taps, to, ...)."""
    total = values.index_select(axis, places[0]).float().mul_(weights[0])
    for tap in range(1, len(places)):  # an empty rest of a tensor is nothing that a graph can be loaded with
        total.addcmul_(values.index_select(axis, places[tap]).float(), weights[tap])
    return total


def taps_of(
    method: str, at: Tensor, scale: Tensor, length: Tensor | int, most: int, *, align_corners: bool = False
) -> _Taps:
    """Return which pixels of a line some pixels of the result are made of, and their weights.

    Args:
        method: one of `LEGACY_METHODS`.
        at: pixels of the result, float32 of shape (..., to).
        scale: from / to, in 32 bits, as TensorFlow: in 64 some samples fall on the other side of a pixel's edge.
        length: of the line, in pixels.
        most: how many pixels of the line a pixel of the result touches, at most.
        align_corners: sample the corners of the line for those of the result.

    Returns:
        places, int64, and weights, float32, both of shape (taps, ..., to).
    """
    return _TAPS[method](at, scale, length, most, align_corners)


def _taps_of_line(method: str, length: int, to: int, align_corners: bool) -> _Taps:
    between = int(align_corners and to > 1)
    scale = torch.scalar_tensor(length - between, dtype=torch.float32) / (to - between)  # in graphs, too
    at = torch.arange(to, dtype=torch.float32)
    return taps_of(method, at, scale, length, -(-length // to) + 1, align_corners=align_corners)


def _bilinear(at: Tensor, scale: Tensor, length: Tensor | int, most: int, align_corners: bool) -> _Taps:
    low, beyond = _sampled(at, scale)
    return torch.stack([low, low + 1]).clamp_(max=length - 1), torch.stack([1 - beyond, beyond])


def _nearest(at: Tensor, scale: Tensor, length: Tensor | int, most: int, align_corners: bool) -> _Taps:
    low, beyond = _sampled(at, scale)
    low = low + (beyond >= 0.5) if align_corners else low
    return low[None].clamp(max=length - 1), torch.ones_like(beyond)[None]


def _bicubic(at: Tensor, scale: Tensor, length: Tensor | int, most: int, align_corners: bool) -> _Taps:
    low, beyond = _sampled(at, scale)
    places = torch.stack([low + tap for tap in range(-1, 3)])
    near = (beyond * 1024).round() / 1024
    distances = torch.stack([1 + near, near, 1 - near, 2 - near])
    inner = (1.25 * distances - 2.25) * distances**2 + 1
    outer = ((-0.75 * distances + 3.75) * distances - 6) * distances + 3
    return places.clamp_(min=0).clamp_(max=length - 1), torch.where(distances <= 1, inner, outer)


def _area(at: Tensor, scale: Tensor, length: Tensor | int, most: int, align_corners: bool) -> _Taps:
    """Weigh each pixel of the image by the share of a pixel of the result that it covers."""
    start, end = at * scale, (at + 1) * scale
    places = torch.stack([start.floor() + tap for tap in range(most)])
    covered = (torch.minimum(places + 1, end) - torch.maximum(places, start)).clamp_(min=0)
    return places.long().clamp_(max=length - 1), covered / scale


def _sampled(at: Tensor, scale: Tensor) -> _Taps:
    """Return for each pixel of the result the pixel to read from, and how far beyond it to read, in pixels."""
    sampled = at * scale
    low = sampled.floor()
    return low.long(), sampled - low


_TAPS: dict[str, Callable[[Tensor, Tensor, Tensor | int, int, bool], _Taps]] = {
    "bilinear": _bilinear,
    "nearest": _nearest,
    "bicubic": _bicubic,
    "area": _area,
}

LEGACY_METHODS = tuple(_TAPS)
"""As TensorFlow numbers them."""

METHODS = (ANTIALIASED, *LEGACY_METHODS)
