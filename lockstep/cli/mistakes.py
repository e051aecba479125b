"""The worst mistakes of an evaluation as one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from PIL import Image

from lockstep.cli.page import Card, Tile, card
from lockstep.cli.sheet import contact_sheet
from lockstep.data.showing import ShownExample, examples
from lockstep.images.drawing import printable
from lockstep.metrics.classification import ClassNames, class_name
from lockstep.metrics.worst_mistakes import Mistake

if TYPE_CHECKING:
    from lockstep.readers.reader import Reader

_SIDE_PIXELS = 300


def mistakes_sheet(mistakes: Sequence[Mistake], reader: Reader, names: ClassNames = ()) -> Image.Image:
    """A contact sheet of the examples, each with its index, its loss, what was predicted and what it is.

    Args:
        mistakes: as `lockstep.metrics.WorstMistakes` computes them.
        reader: that was scored; one that it cannot read any more says so in its place.
        names: of the classes; one without a name appears as its number.

    Raises:
        InputError: the examples have no images.
    """
    shown = examples(reader, [mistake.example_index for mistake in mistakes], order="sequential")
    cards = [_card(mistake, example, names) for mistake, example in zip(mistakes, shown, strict=True)]
    title = f"the {len(cards)} worst mistakes" if len(cards) > 1 else "the worst mistake" if cards else "no mistakes"
    return contact_sheet(title, cards, _SIDE_PIXELS)


def _card(mistake: Mistake, example: ShownExample, names: ClassNames) -> Card:
    shown = card(example, _SIDE_PIXELS)
    predicted, right = (printable(class_name(names, label)) for label in (mistake.predicted, mistake.label))
    said = f"predicted {predicted}, is {right}"
    details = f"loss {mistake.loss:.4g}" + ("" if shown.tiles else f", {said}")
    return replace(shown, details=details, tiles=tuple(Tile(tile.image, said) for tile in shown.tiles))
