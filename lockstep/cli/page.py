"""Examples for people to look at: a card for each, and a page of cards as one file of HTML."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from lockstep.data.showing import Picture, ShownExample
from lockstep.images.drawing import draw_marks, printable
from lockstep.images.pillow import png_bytes
from lockstep.images.resizing import resized

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
    """A picture with its marks, as large as it is shown."""

    image: Image.Image
    caption: str


@dataclass(frozen=True)
class Card:
    """What a page shows of one example."""

    position: int
    example_id: str
    details: str
    """Its label, its class and its size, as far as they are known."""
    tiles: tuple[Tile, ...]
    """The original first."""
    problem: str
    """Why it is not there, or not whole."""


def card(example: ShownExample, side_pixels: int) -> Card:
    """The card of an example, its pictures of at most so many pixels each way; tiny ones become as large as that."""
    several = len({picture.position for picture in example.augmented}) > 1
    tiles = [Tile(_image(example.original, side_pixels), "original")] if example.original else []
    for number, picture in enumerate(example.augmented, 1):
        name = f"{number}: as at position {picture.position}" if several else picture.stage
        tiles.append(Tile(_image(picture, side_pixels), f"{name}, {_size(picture)}"))
    return Card(
        example.position, printable(example.example_id), _details(example), tuple(tiles), printable(example.problem)
    )


def html_page(title: str, cards: Iterable[Card]) -> bytes:
    """One file of HTML with everything in it; it loads nothing and runs nothing."""
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
    """Smaller, or whole times as large, so that each pixel is seen."""
    height, width = pixels.shape[1:]
    longest = max(height, width)
    if longest <= side_pixels:
        times = side_pixels // longest
        return pixels.repeat_interleave(times, 1).repeat_interleave(times, 2)
    height, width = (max(1, round(side * side_pixels / longest)) for side in (height, width))
    return resized(pixels, height, width)
