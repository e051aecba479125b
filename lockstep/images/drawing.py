"""Draw onto an image what is known of it, for people to look at: boxes with names, masks, keypoints, crops.

All places are shares of an image's height and width, so it may be shrunk first: lines and names do not shrink with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, count, cycle, repeat
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import interpolate

from lockstep.errors import InputError

Colour = tuple[int, int, int]
_Rectangle = tuple[int, int, int, int]  # left, top, right, bottom in pixels, all of them inside

COLOURS: tuple[Colour, ...] = (
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (86, 180, 233),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
)
"""Red, green and blue of the classes in turn: those of Okabe and Ito, which the colour-blind can tell apart."""
YELLOW, RED, GREEN, GREY = COLOURS[0], COLOURS[2], COLOURS[4], (170, 170, 170)

TEXT_PIXELS = 12
"""The size of names."""

_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
_LUMA = (0.299, 0.587, 0.114)
_BRIGHT = 100  # of 255: on what is brighter to the eye, black text is read more easily than white
_PIXELS_PER_LINE_WIDTH = 150  # of the image's short side
_GAP = 4  # pixels between images
_LINES_PER_DASH = 4  # a dash, and the gap behind it, are so many times as long as the line is wide


@dataclass(frozen=True, eq=False)
class Marks:
    """All that can be drawn onto an image with n objects on it."""

    boxes: Tensor | None = None
    """Float (n, 4) of top, left, bottom and right as shares of height and width; one that is not finite is left out."""
    names: Sequence[str] = ()
    """The objects' names; empty or missing ones are not drawn."""
    colours: Sequence[Colour] = ()
    """The boxes' colours; () gives each box the colour of its class."""
    labels: Sequence[int] = ()
    """The objects' classes: each class has one colour, on all images; an object without one has a colour of its own."""
    dashed: Sequence[bool] = ()
    """Whether each box has broken lines; () for none."""
    masks: Tensor | None = None
    """uint8 (n, any, any) of 0 and 1, each over the whole image."""
    keypoints: Tensor | None = None
    """Float (n, keypoints, 2) of y and x as shares of height and width; NaN where there is none."""
    windows: Tensor | None = None
    """Float (windows, 4) as the boxes: the parts that crops have taken. Around a single one the image is darkened;
    several are numbered from 1 on."""


class _Outline(NamedTuple):
    rectangle: _Rectangle
    name: str
    colour: Colour
    dashed: bool = False


def draw_marks(image: Tensor, marks: Marks) -> Tensor:
    """Draw marks onto a copy of an image, uint8 of shape (3, height, width), each object in the colour of its class."""
    if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
        raise InputError(
            "Nothing can be drawn onto this image.",
            given=f"a tensor of shape {tuple(image.shape)}, {image.dtype}",
            expected="uint8 of shape (3, height, width)",
            hint="bring its values to 0 to 255, and give one image of three channels",
        )
    height, width = image.shape[1:]
    numbers = map(str, count(1)) if marks.windows is not None and len(marks.windows) > 1 else repeat("")
    windows = list(_outlines(marks.windows, numbers, repeat(_WHITE), repeat(False), height, width))
    names, dashed = chain(marks.names, repeat("")), chain(marks.dashed, repeat(False))
    outlines = [*_outlines(marks.boxes, names, marks.colours or _colours(marks), dashed, height, width), *windows]
    pixels = _overlaid(_darkened_around(windows, image), marks)
    canvas = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    pen = ImageDraw.Draw(canvas)
    line = max(1, min(height, width) // _PIXELS_PER_LINE_WIDTH)
    for outline in outlines:
        _draw_outline(pen, outline, line)
    _draw_keypoints(pen, marks, height, width, radius=line + 1)
    for outline in outlines:
        _draw_name(pen, outline, width)
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1)


def side_by_side(images: Sequence[Tensor]) -> Tensor:
    """Put images of one height, uint8 of shape (3, height, width), into a row with a gap of white between them."""
    gap = torch.full((3, images[0].shape[1], _GAP), 255, dtype=torch.uint8)
    return torch.cat([part for image in images for part in (gap, image)][1:], dim=2)


@cache
def built_in_font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Load the font that comes with Pillow: the same on all machines."""
    return ImageFont.load_default(TEXT_PIXELS)


def printable(text: str) -> str:
    """Put a text on one line, with a question mark for each character that no font has."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _colours(marks: Marks) -> Iterable[Colour]:
    return chain((COLOURS[(label - 1) % len(COLOURS)] for label in marks.labels), cycle(COLOURS))


def _outlines(
    boxes: Tensor | None,
    names: Iterable[str],
    colours: Iterable[Colour],
    dashed: Iterable[bool],
    height: int,
    width: int,
) -> Iterator[_Outline]:
    """Yield the outlines of the boxes that are finite."""
    rows = [] if boxes is None else boxes.tolist()
    for box, name, colour, is_dashed in zip(rows, names, colours, dashed, strict=False):
        if np.isfinite(box).all():
            yield _Outline(_rectangle(box, height, width), printable(name), colour, is_dashed)


def _rectangle(box: Sequence[float], height: int, width: int) -> _Rectangle:
    """Convert to pixels: at least one pixel large, and within the image."""
    top, left, bottom, right = (min(max(share, 0.0), 1.0) for share in box)
    x, y = min(round(left * width), width - 1), min(round(top * height), height - 1)
    return x, y, max(round(right * width) - 1, x), max(round(bottom * height) - 1, y)


def _darkened_around(windows: Sequence[_Outline], image: Tensor) -> Tensor:
    if len(windows) != 1:
        return image
    left, top, right, bottom = windows[0].rectangle
    inside = slice(None), slice(top, bottom + 1), slice(left, right + 1)
    darkened = image // 8 * 5
    darkened[inside] = image[inside]
    return darkened


def _overlaid(pixels: Tensor, marks: Marks) -> Tensor:
    """Mix the image and the object's colour half and half, wherever an object is."""
    masks = marks.masks
    if masks is None or not masks.numel():
        return pixels
    sized = interpolate(masks[:, None], pixels.shape[1:], mode="nearest")  # (n, 1, height, width)
    for mask, colour in zip(sized, _colours(marks), strict=False):
        half = torch.tensor(colour, dtype=torch.uint8)[:, None, None] // 2
        pixels = torch.where(mask > 0, pixels // 2 + half, pixels)
    return pixels


def _draw_outline(pen: ImageDraw.ImageDraw, outline: _Outline, line: int) -> None:
    """Draw a rectangle with a dark line in it, so that it is seen on any ground."""
    left, top, right, bottom = outline.rectangle
    if right - left > 2 * line and bottom - top > 2 * line:
        pen.rectangle((left + line, top + line, right - line, bottom - line), outline=_BLACK)
    if not outline.dashed:
        pen.rectangle(outline.rectangle, outline=outline.colour, width=line)
        return
    dash = _LINES_PER_DASH * line
    for start in range(left, right + 1, 2 * dash):
        stop = min(start + dash - 1, right)
        for first, last in ((top, min(top + line - 1, bottom)), (max(bottom - line + 1, top), bottom)):
            pen.rectangle((start, first, stop, last), fill=outline.colour)
    for start in range(top, bottom + 1, 2 * dash):
        stop = min(start + dash - 1, bottom)
        for first, last in ((left, min(left + line - 1, right)), (max(right - line + 1, left), right)):
            pen.rectangle((first, start, last, stop), fill=outline.colour)


def _draw_name(pen: ImageDraw.ImageDraw, outline: _Outline, width: int) -> None:
    """Write a name above its outline, or in it where there is no room above; within the image if it is short enough."""
    if not outline.name:
        return
    left, top, _, _ = outline.rectangle
    font, height = built_in_font(), TEXT_PIXELS + 2
    length = int(pen.textlength(outline.name, font)) + 4
    x = max(0, min(left, width - length))
    y = top - height if top >= height else top
    pen.rectangle((x, y, x + length - 1, y + height - 1), fill=outline.colour)
    ink = _BLACK if np.dot(_LUMA, outline.colour) > _BRIGHT else _WHITE
    pen.text((x + 2, y), outline.name, fill=ink, font=font)


def _draw_keypoints(pen: ImageDraw.ImageDraw, marks: Marks, height: int, width: int, *, radius: int) -> None:
    objects = [] if marks.keypoints is None else (marks.keypoints * torch.tensor([height, width])).tolist()
    for points, colour in zip(objects, _colours(marks), strict=False):
        for y, x in points:
            if 0 <= y <= height and 0 <= x <= width:  # NaN is not
                pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour, outline=_BLACK)
