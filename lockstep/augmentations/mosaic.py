"""Mosaic: four images around a point (Bochkovskiy et al., YOLOv4, 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import numpy as np
import torch

from lockstep.augmentations.joining import Colour, WithPartners, canvas, dtype_of, images_and_objects, join_objects
from lockstep.checks import Hint, PositiveInt, Probability, Range, ordered
from lockstep.images.augment import Int64s, decoded, sides_of
from lockstep.images.moves import Move, Region, move
from lockstep.images.objects import Fields, move_objects
from lockstep.images.resizing import resized

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.images.augment import Image
    from lockstep.randomness import Draws

_Place = Annotated[float, Range(gt=0, lt=2)]
# Whether each of the four lies below and to the right of the point where they meet.
_QUARTERS = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class Mosaic(WithPartners):
    """Put each image together with three others: around a point, on a square of twice their size.

    Each is resized so that its long side has `size` pixels; a corner of it lies at the point, and what reaches out of
    the square is cut off, the objects there with it. Half of the square is most often cropped or resized afterwards.
    """

    size: PositiveInt = 640
    """Of the long side of each image, in pixels; height and width of the result are twice as many."""
    center: Annotated[tuple[_Place, _Place], ordered, Hint("write [0.5, 1.5]")] = (0.5, 1.5)
    """The least and the most of where the images meet, down and to the right, in sizes."""
    fill: Colour = 114
    """Red, green and blue of what no image covers."""
    min_overlap: Probability = 0.1
    """Objects of whose boxes a smaller share is left are dropped."""
    p: Probability = 1.0
    """The probability that others are put around an image; else it stays as it is."""
    field: str = "image"

    num_partners: ClassVar[int] = 3

    def __call__(self, batch: Fields, draws: Draws, partners: Sequence[Fields] = ()) -> Fields:
        """Return the batch with its images put together, as a list of images; the others are the partners."""
        rows = np.flatnonzero(self.needs_partners(draws))
        images = [*images_and_objects(batch, self.field, self)]
        if not len(rows):
            return batch
        self.check_partners(partners)
        centers = self._centers(draws)[rows].tolist()
        four = [images_and_objects(fields, self.field, self) for fields in (batch, *partners)]
        moved = []
        squares = [
            canvas(2 * self.size, 2 * self.size, self.fill, dtype_of(together))
            for together in zip([four[0][row] for row in rows.tolist()], *four[1:], strict=True)
        ]
        for fields, theirs, quarter in zip((batch, *partners), four, _QUARTERS, strict=True):
            places = rows.tolist() if fields is batch else [*range(len(rows))]
            tiles = [self._tile(theirs[place], quarter, center) for place, center in zip(places, centers, strict=True)]
            for square, tile, place in zip(squares, tiles, places, strict=True):
                tile.draw(theirs[place], square)
            moved.append(self._moved(fields, tiles, places, sides_of(theirs)))
        for row, square in zip(rows.tolist(), squares, strict=True):
            images[row] = square
        own, *others = moved
        return {**join_objects(own, others, torch.from_numpy(rows)), self.field: images}

    def _centers(self, draws: Draws) -> Int64s:
        """Draw where the images meet, in pixels, shape (batch, 2)."""
        least, most = self.center
        shares = np.stack([draws.uniform(f"Mosaic {self.field} {axis}") for axis in ("row", "column")], axis=1)
        centers: Int64s = np.floor((least + (most - least) * shares) * self.size).astype(np.int64)
        return centers.clip(1, 2 * self.size - 1)

    def _tile(self, image: Image, quarter: tuple[bool, bool], center: Sequence[int]) -> _Tile:
        """Place an image in a quarter of the square."""
        ((height, width),) = sides_of([image]).tolist()
        scale = self.size / max(height, width)
        rows, columns = (
            _span(side, max(1, round(side * scale)), middle, 2 * self.size, is_beyond)
            for side, middle, is_beyond in zip((height, width), center, quarter, strict=True)
        )
        cut = move((height, width), Region(rows[0], columns[0], rows[1], columns[1]), to=(rows[2], columns[2]))
        square = Region(-rows[3], -columns[3], 2 * self.size, 2 * self.size)
        return _Tile(cut, move((rows[2], columns[2]), square))

    def _moved(self, fields: Fields, tiles: Sequence[_Tile], places: Sequence[int], sides: Int64s) -> Fields:
        """Move the objects of a batch of which some images are tiles."""
        cuts = [move(each) for each in sides.tolist()]
        onto = [*cuts]
        for place, tile in zip(places, tiles, strict=True):
            cuts[place], onto[place] = tile
        return move_objects(move_objects(fields, cuts, min_overlap=self.min_overlap), onto)


class _Tile(NamedTuple):
    """How an image is cut and resized, and how that is put on the square."""

    cut: Move
    onto: Move

    def draw(self, image: Image, square: Tensor) -> None:
        """Decode what is seen of an image, and draw it."""
        top, left = -self.onto.region.top, -self.onto.region.left
        height, width = self.cut.to_height, self.cut.to_width
        pixels = resized(decoded(image, self.cut.region), height, width)
        square[:, top : top + height, left : left + width] = pixels


def _span(side: int, scaled: int, middle: int, length: int, is_beyond: bool) -> tuple[int, int, int, int]:
    """Place a side of an image, which has `scaled` pixels once it is resized, before or beyond the middle of a length.

    Returns:
        Where the part that is seen starts on the side, and its length; its length once it is resized, and where it
        starts on the square.
    """
    seen = min(scaled, length - middle if is_beyond else middle)
    part = max(1, round(side * seen / scaled))
    return (0, part, seen, middle) if is_beyond else (side - part, part, seen, middle - seen)
