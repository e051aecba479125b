"""Several images mixed to one: mixup and cutmix of images with one class, mixup and mosaic of images with objects.

Zhang et al., mixup: Beyond empirical risk minimization, 2018. Yun et al., CutMix, 2019. Of images with objects: Zhang
et al., Bag of freebies for training object detection neural networks, 2019; Bochkovskiy et al., YOLOv4, 2020 (mosaic).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch

from lockstep.augmentations.augment import Deferred, drawn_shares
from lockstep.augmentations.joining import Colour, WithPartners, canvas, dtype_of, images_and_objects, join_objects
from lockstep.checks import Hint, NonNegativeFloat, PositiveFloat, PositiveInt, Probability, Range, ordered
from lockstep.errors import InputError
from lockstep.images.fields import decoded, image_tensor, sides_of
from lockstep.images.moves import Float64s, Int64s, Move, Region, move
from lockstep.images.normalisation import as_floats
from lockstep.images.objects import Fields, as_ragged, move_objects
from lockstep.images.resizing import resized
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.images.fields import Image


_Place = Annotated[float, Range(gt=0, lt=2)]
# Whether each of the four lies below and to the right of the point where they meet.
_QUARTERS = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class MixDraws(Deferred):
    """Mixup and cutmix of images that have one class each: numbers float32 (batch, 5) in the field "image.mix".

    Its columns: the share of an image that stays, and the top, left, bottom and right, in pixels, of the part that the
    other image takes all of. Where both alphas are above 0, an even chance decides how an image is mixed.

    The other image stands at the mirrored place of the tower's slice (the last for the first): what a tower mixes
    depends on its own examples, not on who hosts it. In a slice of odd length the middle one is mixed with itself.

    The field holds decoded images: any tensor of shape (batch, channels, height, width).
    """

    mixup: NonNegativeFloat = 0.2
    """The share of an image is drawn from Beta(alpha, alpha) with this alpha; 0 is never."""
    cutmix: NonNegativeFloat = 0.0
    """The share of its area that an image keeps is drawn in the same way; 0 is never."""
    p: Probability = 1.0
    """The probability that an image is mixed."""
    field: str = "image"
    """The images that are mixed; their size alone is read for the draws."""

    ending: ClassVar[str] = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixup == self.cutmix == 0:
            raise InputError(
                "Nothing is mixed.",
                given="mixup=0, cutmix=0",
                expected="one of them above 0",
                hint="give the alpha of one or of both, or leave the augmentation out",
            )

    def numbers(self, batch: Mapping[str, Any], draws: Draws) -> Tensor:
        """Draw the numbers of each image."""
        images = image_tensor(batch, self.field, self)
        is_mixed = draws.uniform(f"{self.into} p") < self.p
        is_cut = draws.uniform(f"{self.into} which") < (0.0 if not self.cutmix else 0.5 if self.mixup else 1.0)
        share = np.where(is_mixed & ~is_cut, self._shares(self.mixup, draws), 1.0)
        area = np.where(is_mixed & is_cut, 1 - self._shares(self.cutmix, draws), 0.0)
        top, bottom = self._span("row", images.shape[2], area, draws)
        left, right = self._span("column", images.shape[3], area, draws)
        return torch.from_numpy(np.stack([share, top, left, bottom, right], axis=1)).float()

    def _shares(self, alpha: float, draws: Draws) -> Float64s:
        """Draw from Beta(alpha, alpha), shape (batch,); 1 if alpha is 0."""
        uniform, angle = draws.uniform(f"{self.into} share"), draws.uniform(f"{self.into} angle")
        return symmetric_beta(uniform, angle, alpha) if alpha else np.ones_like(uniform)

    def _span(self, axis: str, length: int, area: Float64s, draws: Draws) -> tuple[Float64s, Float64s]:
        """Draw where a square of this share of the area begins and ends: about any pixel, and clipped to the image."""
        middle = np.floor(draws.uniform(f"{self.into} {axis}") * length)
        half = np.floor(np.sqrt(area) / 2 * length)
        return np.maximum(middle - half, 0), np.minimum(middle + half, length)

    def apply(self, batch: Mapping[str, Any]) -> Tensor:
        """Mix each image with the mirrored one; float32 of the same shape.

        Args:
            batch: a tower's slice, with images of shape (batch, channels, height, width); uint8, taken as [0, 1], or
                floats.
        """
        images, numbers = batch[self.field], batch.get(self.into)
        if numbers is None:
            return as_floats(images)
        _check_images(images, numbers)
        values = as_floats(images)
        others = values.flip(0)
        share, top, left, bottom, right = numbers[:, :, None, None, None].unbind(1)
        height, width = images.shape[2:]
        row = torch.arange(height, device=images.device)[:, None]
        column = torch.arange(width, device=images.device)
        is_cut = (row >= top) & (row < bottom) & (column >= left) & (column < right)
        return torch.where(is_cut, others, torch.lerp(others, values, share))

    def apply_to_labels(self, batch: Mapping[str, Any], num_classes: int, labels: str = "label") -> Tensor:
        """Mix the labels as the images: probabilities, which cross entropy takes, float32 (batch, num_classes).

        Args:
            batch: as `apply` takes it.
            num_classes: how many classes there are.
            labels: the field of the right classes, whole numbers from 0 to num_classes - 1, shape (batch,).
        """
        images, numbers = batch[self.field], batch.get(self.into)
        classes: Tensor = batch[labels]
        _check_labels(classes, images, num_classes)
        right_ones = (classes[:, None] == torch.arange(num_classes, device=classes.device)).float()
        if numbers is None:
            return right_ones
        _check_images(images, numbers)
        height, width = images.shape[2:]
        share, top, left, bottom, right = numbers.unbind(1)
        kept = share * (1 - (bottom - top) * (right - left) / (height * width))
        return torch.lerp(right_ones.flip(0), right_ones, kept[:, None])


def _check_images(images: Tensor, numbers: Tensor) -> None:
    known = images.dtype == torch.uint8 or images.is_floating_point()
    if not known or images.ndim != 4 or numbers.shape != (len(images), 5):
        raise InputError(
            "These images cannot be mixed by these numbers.",
            given=f"images of {images.dtype} and shape {tuple(images.shape)}, numbers of shape {tuple(numbers.shape)}",
            expected="images of shape (batch, channels, height, width), uint8 or floats; numbers of shape (batch, 5)",
            hint="add MixDraws to the augmentations of the loader that gives the batch",
        )


def _check_labels(labels: Tensor, images: Tensor, num_classes: int) -> None:
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise InputError(
            "These labels cannot be mixed.",
            given=f"labels of {labels.dtype} and shape {tuple(labels.shape)}, for {len(images)} images",
            expected="whole numbers of shape (batch,)",
            hint="give the numbers of the right classes, not probabilities",
        )
    # Elsewhere a look at the labels would have to wait for the device.
    if labels.device.type == "cpu" and ((labels < 0) | (labels >= num_classes)).any():
        raise InputError(
            "A label is not the number of a class.",
            given=f"labels from {int(labels.min())} to {int(labels.max())}",
            expected=f"whole numbers from 0 to {num_classes - 1}: there are {num_classes} classes",
            hint="number the classes from 0, or give num_classes as many as there are",
        )


def symmetric_beta(uniform: Float64s, angle: Float64s, alpha: float) -> Float64s:
    """Turn two arrays of uniform numbers in [0, 1) into one of numbers distributed exactly as Beta(alpha, alpha).

    sqrt(nu * (u ** (-2 / nu) - 1)) * cos(2 pi v) has Student's t distribution with nu degrees of freedom (Bailey,
    Polar generation of random variates with the t-distribution, 1994), and (1 + t / sqrt(nu + t ** 2)) / 2 is then of
    Beta(nu / 2, nu / 2).
    """
    cosine = np.cos(2 * np.pi * angle)
    with np.errstate(over="ignore", divide="ignore"):
        square = np.expm1(-np.log1p(-uniform) / alpha) * cosine**2  # t ** 2 / nu; 1 - u is as uniform as u
        beta: Float64s = 0.5 + 0.5 * np.copysign(np.sqrt(1 / (1 + 1 / square)), cosine)
    return beta


@dataclass(frozen=True)
class MixUp(WithPartners):
    """Mix each image with another one, pixel by pixel; the objects of both stay, each with the weight of its image.

    Both lie at the upper left corner of the result, which is as high and as wide as the larger one; around them is
    black. The field "weights" is multiplied by the share of an object's image; it is added where there is none.
    """

    alpha: PositiveFloat = 1.5
    """The share of an image is drawn from Beta(alpha, alpha)."""
    p: Probability = 1.0
    """The probability that an image is mixed; else it stays as it is."""
    field: str = "image"

    num_partners: ClassVar[int] = 1

    def __call__(self, batch: Fields, draws: Draws, partners: Sequence[Fields] = ()) -> Fields:
        """Return the batch with its images mixed, as a list of images."""
        rows = np.flatnonzero(self.needs_partners(draws))
        images = [*images_and_objects(batch, self.field, self)]
        if not len(rows):
            return _weighted(batch, torch.ones(len(images)))
        self.check_partners(partners)
        (partner,) = partners
        others = images_and_objects(partner, self.field, self)
        sides, their_sides = sides_of(images), sides_of(others)
        larger = sides.copy()
        larger[rows] = np.maximum(sides[rows], their_sides)
        column = f"MixUp {self.field}"
        drawn = symmetric_beta(draws.uniform(f"{column} share"), draws.uniform(f"{column} angle"), self.alpha)
        shares = np.ones(len(images))
        shares[rows] = drawn[rows]
        for row, other in zip(rows.tolist(), others, strict=True):
            images[row] = _mixed(images[row], other, float(shares[row]), larger[row].tolist())
        own, theirs = (
            move_objects(
                fields, (move(each, Region(0, 0, *to)) for each, to in zip(given.tolist(), after.tolist(), strict=True))
            )
            for fields, given, after in ((batch, sides, larger), (partner, their_sides, larger[rows]))
        )
        own = _weighted(own, torch.from_numpy(shares).float())
        theirs = _weighted(theirs, torch.from_numpy(1 - shares[rows]).float())
        return {**join_objects(own, [theirs], torch.from_numpy(rows)), self.field: images}


def _weighted(batch: Fields, shares: Tensor) -> Fields:
    """Multiply the weights of objects by the share of their image, shape (batch,)."""
    boxes = as_ragged(batch["boxes"])
    weights = shares[boxes.owner]
    if "weights" in batch:
        weights = weights * as_ragged(batch["weights"]).values
    return {**batch, "weights": boxes.replaced(weights)}


def _mixed(image: Image, other: Image, share: float, sides: Sequence[int]) -> Tensor:
    """Add up shares of two images at the upper left corner of one of these sides; bytes are rounded."""
    mixed = torch.zeros(*sides, 3).permute(2, 0, 1)
    for pixels, weight in ((decoded(image), share), (decoded(other), 1 - share)):
        mixed[:, : pixels.shape[1], : pixels.shape[2]].add_(pixels, alpha=weight)
    dtype = dtype_of((image, other))
    return mixed if dtype.is_floating_point else mixed.round_().to(dtype)


@dataclass(frozen=True)
class Mosaic(WithPartners):
    """Put each image together with three others: around a point, on a square of twice their size.

    Each is resized so that its long side has `size` pixels; a corner of it lies at the point, and what reaches out of
    the square is cut off, the objects there with it. Half of the square is most often cropped or resized afterwards.
    """

    size: PositiveInt = 640
    """The long side of each image, in pixels; height and width of the result are twice as many."""
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
        shares = drawn_shares(draws, f"Mosaic {self.field}", "row", "column")
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
