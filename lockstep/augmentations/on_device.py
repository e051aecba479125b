"""Crops, resizes and turns that are left for the device of a batch: the host decodes, and draws the numbers.

Of each image the part that its crop takes is decoded, and put behind those of the others in one buffer. How it is
resized and turned, a few whole numbers, goes with it. The result has the pixels that the host would have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.augmentations.augment import Augment, Deferred, check_no_locations, turns
from lockstep.augmentations.crops import ResizedPart, ResizingCrop
from lockstep.augmentations.turns import RandomTurn
from lockstep.errors import InputError
from lockstep.images.batch_resizing import Resizes, resized_batch
from lockstep.images.fields import Image, decoded, images_of
from lockstep.images.moves import Turn
from lockstep.images.resizing import ANTIALIASED, METHODS
from lockstep.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.randomness import Draws

# More is resized on the host, lest a few large images take the memory or the time of a batch.
_MOST_PIXELS = 1 << 20  # of a part: 3 MiB
_MOST_COVERED = 16  # pixels of a line that a pixel of the result covers
_LONGEST = 4096  # side of a resized part


@dataclass(frozen=True)
class OnDevice:
    """A crop, and what follows it, of which the device of the batch computes all but the crop and the draws.

    A loader gives batches as if the augmentations had followed one another: images are uint8 of shape (batch, 3, size,
    size), pixel by pixel the same. A part that is larger than a megapixel is resized on the host.
    """

    crop: ResizingCrop
    turns: tuple[RandomTurn, ...] = ()
    """They follow the crop."""
    deferred: tuple[Deferred, ...] = ()
    """They follow the turns."""

    @classmethod
    def of(cls, augmentations: Sequence[Augment]) -> OnDevice:
        """Leave all augmentations of a list for the device; an InputError names those that cannot be."""
        crop, rest = next(iter(augmentations), None), augmentations[1:]
        field = crop.field if isinstance(crop, ResizingCrop) else "image"
        turning = [*takewhile(lambda each: isinstance(each, RandomTurn) and _field_of(each) == field, rest)]
        deferred = rest[len(turning) :]
        wrong = [each for each in deferred if not isinstance(each, Deferred)]
        if wrong or not isinstance(crop, ResizingCrop):
            wrong = [*([crop] if crop and not isinstance(crop, ResizingCrop) else []), *wrong]
            names = dict.fromkeys(type(each).__name__ for each in wrong)
            raise InputError(
                f"{', '.join(names) or 'A list without a crop'} cannot be left for the device.",
                given=", ".join(type(each).__name__ for each in augmentations) or "no augmentations",
                expected="a crop that resizes, then flips and quarter turns of the same field, then what is always "
                "computed there",
                hint='leave it out, or let the host do it: data.preprocess_on="host"',
            )
        return cls(crop, (*turning,), (*deferred,))  # type: ignore[arg-type]

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with the decoded parts, how they are resized, and the numbers of what is deferred."""
        field, size = self.crop.field, self.crop.size
        rest = self.crop.without_used(batch)
        check_no_locations(rest, self)
        _, *again = map(draws.again, turns([self.crop, *self.turns, *self.deferred]))
        images, parts = images_of(batch, field, self.crop, colour=True), self.crop.parts(batch, draws)
        pixels, resizes = _decoded_parts(images, parts, size)
        turned = self._drawn_turns(len(images), again[: len(self.turns)])
        blank = torch.empty(len(images), 3, size, size, dtype=torch.uint8, device="meta")
        for each, drawn in zip(self.deferred, again[len(self.turns) :], strict=True):
            rest = each({**rest, field: blank}, drawn)
        return {**rest, field: pixels, self._how: torch.cat([resizes, turned], dim=1)}

    def on_device(self, batch: dict[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
        """Resize and turn the images of a batch."""
        field = self.crop.field
        _check_floats(batch[field].values.device)
        how, how_here = (torch.split(each[self._how], [len(Resizes._fields), 3], dim=1) for each in (batch, here))
        resizes, resizes_here = (Resizes(*each.unbind(1)) for each, _ in (how, how_here))
        images = resized_batch(batch[field].values, resizes, resizes_here, self.crop.size)
        images = _turned(images, how[1], how_here[1])
        return {**{name: value for name, value in batch.items() if name != self._how}, field: images}

    @property
    def _how(self) -> str:
        """The field that says how images are resized and turned: int64 of shape (batch, 10)."""
        return f"{self.crop.field}.resizes"

    def _drawn_turns(self, count: int, draws: Sequence[Draws]) -> Tensor:
        """Draw the turns of each image, one after another: int64 (batch, 3), the columns of `Turn`."""
        found = np.zeros((3, count), dtype=np.bool_)
        for each, drawn in zip(self.turns, draws, strict=True):
            found = np.where(each.rows(drawn), np.stack(Turn(*found).then(each.turn)), found)
        return torch.from_numpy(found.T.astype(np.int64))


def _field_of(turn: RandomTurn) -> str:
    return str(getattr(turn, "field", "image"))


def _decoded_parts(images: Sequence[Image], parts: Sequence[ResizedPart], size: int) -> tuple[Ragged, Tensor]:
    """Decode the part of each image, and say how it is resized; one that is too large is resized here."""
    waits = [_can_wait(part) for part in parts]
    as_it_is = [size, size, size, size, 0, 0, METHODS.index(ANTIALIASED)]
    rows = [
        [*part.region[2:], *part[1:5], METHODS.index(part.method)] if can_wait else as_it_is
        for part, can_wait in zip(parts, waits, strict=True)
    ]
    resizes = torch.tensor(rows, dtype=torch.int64).view(-1, len(Resizes._fields))
    lengths = 3 * resizes[:, 0] * resizes[:, 1]
    pixels = Ragged(torch.empty(int(lengths.sum()), dtype=torch.uint8), lengths)
    for target, image, part, can_wait in zip(pixels, images, parts, waits, strict=True):
        raster = decoded(image, part.region) if can_wait else part.of(image, size)
        target.view(*raster.shape[1:], 3).copy_(raster.movedim(0, -1))
    return pixels, resizes


def _check_floats(device: torch.device) -> None:
    if device.type == "mps":
        raise InputError(
            "Apple's devices cannot resize images to the pixels of the host.",
            given=f"images on {device}",
            expected="a device with floats of 64 bits",
            hint='let the host resize: data.preprocess_on="host"',
        )


def _can_wait(part: ResizedPart) -> bool:
    _, _, height, width = part.region
    covered = max(height / part.height, width / part.width)
    return height * width <= _MOST_PIXELS and covered <= _MOST_COVERED and max(part.height, part.width) <= _LONGEST


def _turned(images: Tensor, turn: Tensor, here: Tensor) -> Tensor:
    """Turn each image by its own row, the columns of `Turn`; nothing is computed that no image needs."""
    for column, way in enumerate((Turn(exchange=True), Turn(flip_rows=True), Turn(flip_columns=True))):
        if here[:, column].any():
            images = torch.where(turn[:, column, None, None, None] > 0, way(images), images)
    return images.contiguous()
