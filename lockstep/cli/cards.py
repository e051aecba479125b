"""Cards that show examples to people, all of them on an HTML page or on one image, a contact sheet."""

from __future__ import annotations

import base64
import html
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image, ImageDraw

from lockstep.images.drawing import TEXT_PIXELS, built_in_font, draw_marks, printable
from lockstep.images.pillow import png_bytes
from lockstep.images.resizing import resized
from lockstep.runs.showing import Picture, ShownExample

if TYPE_CHECKING:
    from torch import Tensor

_WIDTH_PIXELS = 2000
_GAP, _LINE = 8, TEXT_PIXELS + 4
_LINES_ABOVE, _LINES_BELOW = 2, 1
_PIXELS_PER_CHARACTER = 6.5  # of the built-in font, on average
_GROUND, _TEXT, _QUIET, _ALARM, _ALARMED = "white", "black", "dimgrey", "firebrick", "mistyrose"

_STYLE = """
:root { color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }
body { margin: 1.5rem; }
article { border-top: 1px solid #8886; padding: .5rem 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 0; } p { margin: .1rem 0 .5rem; overflow-wrap: anywhere; }
div { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure { margin: 0; } img { display: block; image-rendering: pixelated; } figcaption { font-size: .85rem; }
.problem { color: #c00; border: 1px solid; padding: .5rem; max-width: 40rem; white-space: pre-wrap; }
"""


class Tile(NamedTuple):
    """A picture with its marks drawn, in the size in which it is shown."""

    image: Image.Image
    caption: str


@dataclass(frozen=True)
class Card:
    """An example as it is shown."""

    position: int
    example_id: str
    details: str
    """Label, class and size, as far as known."""
    tiles: tuple[Tile, ...]
    """Tiles, of which the first is the original."""
    problem: str
    """Why pictures are missing, or ""."""


def card(example: ShownExample, side_pixels: int) -> Card:
    """Make the card of an example. Its pictures are enlarged or shrunk to at most `side_pixels` each way."""
    several = len({picture.position for picture in example.augmented}) > 1
    tiles = [*_as_stored(example, side_pixels)]
    for number, picture in enumerate(example.augmented, 1):
        name = f"{number}: as at position {picture.position}" if several else picture.stage
        tiles.append(Tile(_image(picture, side_pixels), f"{name}, {_size(picture)}"))
    return Card(
        example.position, printable(example.example_id), _details(example), tuple(tiles), printable(example.problem)
    )


def _as_stored(example: ShownExample, side_pixels: int) -> Iterator[Tile]:
    if example.original:
        yield Tile(_image(example.original, side_pixels), "original")
        if example.compared:
            detected = replace(example.original, marks=example.compared.marks)
            yield Tile(_image(detected, side_pixels), f"detections: {example.compared}")


def html_page(title: str, cards: Iterable[Card]) -> bytes:
    """Make one HTML file with everything in it; it loads nothing and runs nothing."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    lines = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    for card in cards:
        lines += _article(card)
    return "\n".join([*lines, "</html>", ""]).encode()


def _article(card: Card) -> Iterator[str]:
    yield f'<article id="position-{card.position}"><h2>position {card.position}: {html.escape(card.example_id)}</h2>'
    yield f"<p>{html.escape(card.details)}</p><div>"
    yield from map(_figure, card.tiles)
    if card.problem:
        yield f'<p class="problem">{html.escape(card.problem)}</p>'
    yield "</div></article>"


def _figure(tile: Tile) -> str:
    data = base64.b64encode(png_bytes(tile.image)).decode()
    width, height = tile.image.size
    caption = html.escape(tile.caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _details(example: ShownExample) -> str:
    label = "" if example.label is None else f"label {example.label}"
    named = ": ".join(part for part in (label, printable(example.class_name)) if part)
    size = f"{_size(example.original)} pixels" if example.original else ""
    return ", ".join(part for part in (named, size) if part)


def _size(picture: Picture) -> str:
    height, width = picture.pixels.shape[1:]
    return f"{width} x {height}"


def _image(picture: Picture, side_pixels: int) -> Image.Image:
    drawn = draw_marks(_fitted(picture.pixels, side_pixels), picture.marks)
    return Image.fromarray(drawn.permute(1, 2, 0).contiguous().numpy())


def _fitted(pixels: Tensor, side_pixels: int) -> Tensor:
    """Shrink the pixels, or enlarge them by a whole factor so that each pixel is seen."""
    height, width = pixels.shape[1:]
    longest = max(height, width)
    if longest <= side_pixels:
        times = side_pixels // longest
        return pixels.repeat_interleave(times, 1).repeat_interleave(times, 2)
    height, width = (max(1, round(side * side_pixels / longest)) for side in (height, width))
    return resized(pixels, height, width)


def contact_sheet(title: str, cards: Sequence[Card], side_pixels: int) -> Image.Image:
    """Draw the cards in rows on one image. No tile may be larger than `side_pixels` each way."""
    cells = max((len(card.tiles) + bool(card.problem) for card in cards), default=1)
    width = cells * (side_pixels + _GAP) + _GAP
    columns = max(1, min(len(cards), _WIDTH_PIXELS // width))
    rows = [cards[start : start + columns] for start in range(0, len(cards), columns)]
    heights = [max(_height(card, side_pixels) for card in row) for row in rows]
    tops = [*accumulate(heights, initial=_LINE + 2 * _GAP)]
    sheet = Image.new("RGB", (columns * width, tops[-1]), _GROUND)
    _write(sheet, _GAP, _GAP, title, columns * width - 2 * _GAP, _TEXT)
    for top, row in zip(tops, rows, strict=False):
        for column, card in enumerate(row):
            _draw_card(sheet, column * width + _GAP, top, card, width - 2 * _GAP, side_pixels)
    return sheet


def _height(card: Card, side: int) -> int:
    tallest = max([tile.image.height for tile in card.tiles] + [side] * bool(card.problem))
    return tallest + (_LINES_ABOVE + _LINES_BELOW) * _LINE + 2 * _GAP


def _draw_card(sheet: Image.Image, left: int, top: int, card: Card, width: int, side: int) -> None:
    place = f"position {card.position}" + (f", {card.details}" if card.details else "")
    _write(sheet, left, top, place, width, _TEXT)
    _write(sheet, left, top + _LINE, card.example_id, width, _QUIET, keep_end=True)
    top += _LINES_ABOVE * _LINE
    for tile in card.tiles:
        sheet.paste(tile.image, (left, top))
        _write(sheet, left, top + tile.image.height + 2, tile.caption, side, _QUIET)
        left += side + _GAP
    if card.problem:
        _draw_problem(sheet, left, top, card.problem, side)


def _draw_problem(sheet: Image.Image, left: int, top: int, problem: str, side: int) -> None:
    pen = ImageDraw.Draw(sheet)
    pen.rectangle((left, top, left + side - 1, top + side - 1), fill=_ALARMED, outline=_ALARM)
    most = (side - 2 * _GAP) // _LINE
    lines = textwrap.wrap(problem, int((side - 2 * _GAP) / _PIXELS_PER_CHARACTER), max_lines=most, placeholder=" ...")
    for number, line in enumerate(lines):
        _write(sheet, left + _GAP, top + _GAP + number * _LINE, line, side - 2 * _GAP, _ALARM)


def _write(
    sheet: Image.Image, left: int, top: int, text: str, width: int, colour: str, *, keep_end: bool = False
) -> None:
    pen, font = ImageDraw.Draw(sheet), built_in_font()
    shown, length = text, len(text)
    while pen.textlength(shown, font) > width and length:
        length -= 1
        shown = "..." + text[len(text) - length :] if keep_end else text[:length] + "..."
    pen.text((left, top), shown, fill=colour, font=font)
