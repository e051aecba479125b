"""A contact sheet: the cards of many examples as one image."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate

from PIL import Image, ImageDraw

from lockstep.cli.page import Card
from lockstep.images.drawing import TEXT_PIXELS, built_in_font

_WIDTH_PIXELS = 2000
_GAP, _LINE = 8, TEXT_PIXELS + 4
_LINES_ABOVE, _LINES_BELOW = 2, 1
_PIXELS_PER_CHARACTER = 6.5  # of the built-in font, on average
_GROUND, _TEXT, _QUIET, _ALARM, _ALARMED = "white", "black", "dimgrey", "firebrick", "mistyrose"


def contact_sheet(title: str, cards: Sequence[Card], side_pixels: int) -> Image.Image:
    """One image with the cards side by side and below one another; no tile is larger than so many pixels each way."""
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
    """One line of text, cut to the width."""
    pen, font = ImageDraw.Draw(sheet), built_in_font()
    shown, length = text, len(text)
    while pen.textlength(shown, font) > width and length:
        length -= 1
        shown = "..." + text[len(text) - length :] if keep_end else text[:length] + "..."
    pen.text((left, top), shown, fill=colour, font=font)
