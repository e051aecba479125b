"""The images in a field of a batch, whatever their form: encoded or decoded, of one size or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from lockstep.errors import InputError
from lockstep.images.decode import EncodedImage
from lockstep.images.moves import Int64s, Move, Region, Turn
from lockstep.images.objects import Fields
from lockstep.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

Image: TypeAlias = "EncodedImage | Tensor"
"""An image file that is not decoded yet, or a raster of shape (channels, height, width)."""


def images_of(batch: Fields, field: str, wanted_by: object, *, colour: bool = False) -> Sequence[Image]:
    """Look up the images of a field: encoded or decoded, of one size or of several.

    With `colour` rasters have to be uint8 of three channels, as encoded images are once they are decoded.
    """
    images: Any = batch.get(field)
    if isinstance(images, torch.Tensor) and images.ndim == 4:
        if not len(images) or _is_raster(images[0], colour=colour):
            return images  # type: ignore[return-value]
    elif isinstance(images, list) and all(
        isinstance(image, EncodedImage) or _is_raster(image, colour=colour) for image in images
    ):
        return images
    name = type(wanted_by).__name__
    rasters = "uint8 rasters of shape (3, height, width)" if colour else "rasters of shape (channels, height, width)"
    raise InputError(
        f"{name} finds no images in the field {field!r}.",
        given=describe_field(batch, field),
        expected=f"encoded images, as ImageFolder reads them, or {rasters}",
        hint=f"name their field: {name}(..., field=...)",
    )


def sides_of(images: Sequence[Image] | Tensor) -> Int64s:
    """Return heights and widths in pixels, shape (batch, 2), by the headers of encoded images alone."""
    if isinstance(images, torch.Tensor):
        return np.tile(images.shape[-2:], (len(images), 1))
    sides = [image.size[::-1] if isinstance(image, EncodedImage) else image.shape[-2:] for image in images]
    return np.array(sides, dtype=np.int64).reshape(-1, 2)


def decoded(image: Image, region: Region | None = None) -> Tensor:
    """Decode an image, or a region of it, if it is not decoded yet."""
    if isinstance(image, EncodedImage):
        return image.decode(region)
    return image if region is None else region.cut(image)


def cropped_image(image: Image, by: Move) -> Image:
    """Cut out the part that a move leaves, within the image; of one that is not decoded yet, no more is when it is."""
    if by.stays_whole:
        return image
    return image.cropped(by.region) if isinstance(image, EncodedImage) else by.region.cut(image)


def draw_moved(image: Image, by: Move, canvas: Tensor) -> None:
    """Draw what a move leaves of an image, at its scale, on a canvas of the move's result."""
    top, left, height, width = by.region
    first, last = max(top, 0), min(top + height, by.height)
    start, end = max(left, 0), min(left + width, by.width)
    if first < last and start < end:  # else nothing is left of it
        pixels = decoded(image, Region(first, start, last - first, end - start))
        canvas[:, first - top : last - top, start - left : end - left] = pixels


def turned_image(image: Image, turn: Turn) -> Image:
    """Turn an image; one that is not decoded yet is turned when it is."""
    return image.turned(turn) if isinstance(image, EncodedImage) else turn(image)


def name_of(image: Image) -> str:
    """Name an image in an error."""
    return image.source if isinstance(image, EncodedImage) else "An image"


def _is_raster(image: object, *, colour: bool) -> bool:
    return isinstance(image, torch.Tensor) and image.ndim == 3 and (not colour or _is_coloured(image))


def _is_coloured(pixels: Tensor) -> bool:
    return pixels.dtype == torch.uint8 and pixels.shape[-3] == 3


def image_tensor(batch: Mapping[str, Any], field: str, wanted_by: object, *, colour: bool = False) -> Tensor:
    """Look up the decoded images in a field of a batch: shape (batch, channels, height, width).

    They may have any dtype and any channels; with `colour` they are uint8 of three channels.
    """
    images = batch.get(field)
    if isinstance(images, torch.Tensor) and images.ndim == 4 and (not colour or _is_coloured(images)):
        return images
    name = type(wanted_by).__name__
    raise InputError(
        f"{name} finds no decoded images in the field {field!r}.",
        given=describe_field(batch, field),
        expected="a uint8 tensor of shape (batch, 3, height, width)"
        if colour
        else "a tensor of shape (batch, channels, height, width)",
        hint=f"crop or resize encoded images first, or name their field: {name}(..., field=...)",
    )


def describe_field(batch: Mapping[str, Any], field: str) -> str:
    """Say for an error what a field of a batch holds, and which fields there are."""
    value = batch.get(field)
    if isinstance(value, torch.Tensor):
        found = f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    elif isinstance(value, Ragged):
        found = f"a Ragged of values of shape {tuple(value.values.shape)}, {value.values.dtype}"
    elif isinstance(value, list) and value:
        found = f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    else:
        found = type(value).__name__ if field in batch else "missing"
    return f"{field!r} is {found}; the fields are {', '.join(batch)}"
