"""What augmentations share that put several images together: canvases, and the objects of all images on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch

from lockstep.checks import Checked, Hint, Range
from lockstep.errors import InputError
from lockstep.images.fields import describe_field, images_of
from lockstep.images.objects import Fields, as_ragged, object_fields
from lockstep.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.images.fields import Image
    from lockstep.images.moves import Bools, Masks
    from lockstep.randomness import Draws

Colour = Annotated[int, Range(ge=0, le=255)]
Colours = Annotated[tuple[Colour, Colour, Colour], Hint("write [0, 0, 0]")]
"""Red, green and blue."""


class WithPartners(Checked):
    """Base of augmentations that put some of the images together with others, their partners: see `NeedsPartners`."""

    num_partners: ClassVar[int]
    """How many others there are for one image."""

    p: float
    field: str
    """The field of a batch that holds the images."""

    def needs_partners(self, draws: Draws) -> Bools:
        """Draw which images are put together with others, shape (batch,)."""
        return draws.uniform(f"{type(self).__name__} {self.field} p") < self.p

    def check_partners(self, partners: Sequence[Fields]) -> None:
        """Refuse a call without the partners that some examples need."""
        if len(partners) != self.num_partners:
            raise InputError(
                f"{type(self).__name__} needs other examples to put together with these.",
                given=f"{len(partners)} batches of partners",
                expected=f"{self.num_partners} of them",
                hint="give it to a Loader, which reads partners; called by hand it takes them as its third argument",
            )


def canvas(height: int, width: int, fill: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make an image of one colour: shape (3, height, width), channels last in memory as decoded images are."""
    pixels = torch.empty(height, width, 3, dtype=dtype)
    pixels[:] = torch.tensor(fill, dtype=dtype)
    return pixels.permute(2, 0, 1)


def dtype_of(images: Iterable[Image]) -> torch.dtype:
    """Return the dtype of what is made of some images: uint8, or float32 if colours have made floats of one."""
    has_floats = any(isinstance(image, torch.Tensor) and image.is_floating_point() for image in images)
    return torch.float32 if has_floats else torch.uint8


def images_and_objects(batch: Fields, field: str, wanted_by: object) -> Sequence[Image]:
    """Look up the images of a field; there have to be objects on them, whose labels say what is on a joined image."""
    if "boxes" not in object_fields(batch):
        raise InputError(
            f"{type(wanted_by).__name__} finds no objects on the images.",
            given=describe_field(batch, "boxes"),
            expected='boxes of objects in the field "boxes"',
            hint="use it for detectors; for classifiers there is lockstep.augmentations.MixDraws",
        )
    return images_of(batch, field, wanted_by)


def join_objects(batch: Fields, others: Sequence[Fields], rows: Tensor) -> Fields:
    """Put the objects of `others` on some of the images, after their own ones; all are where they are on new images.

    `rows` are the rows of the batch on whose images the others are, int64 of shape (others,).
    """
    joined = dict(batch)
    for name in object_fields(batch):
        columns = [batch[name], *(other[name] for other in others)]
        joined[name] = _JOINED.get(name, _joined_values)(columns, rows)
    return joined


def _joined_values(columns: Sequence[Ragged | Sequence[Tensor]], rows: Tensor) -> Ragged:
    own, *others = map(as_ragged, columns)
    owner = torch.cat([own.owner, *(rows[other.owner] for other in others)])
    values = torch.cat([own.values, *(other.values for other in others)])
    return Ragged(values[owner.argsort(stable=True)], owner.bincount(minlength=len(own)))


def _joined_texts(columns: Sequence[Sequence[Sequence[str]]], rows: Tensor) -> list[list[str]]:
    own, *others = columns
    texts = [[*each] for each in own]
    for other in others:
        for row, each in zip(rows.tolist(), other, strict=True):
            texts[row] += each
    return texts


def _joined_masks(columns: Sequence[Sequence[Masks | Tensor]], rows: Tensor) -> list[Masks | Tensor]:
    own, *others = columns
    masks = [*own]
    for row, *parts in zip(rows.tolist(), *others, strict=True):
        masks[row] = joined_masks([masks[row], *parts])
    return masks


_JOINED: dict[str, Callable[[Sequence[Any], Tensor], Any]] = {"class_text": _joined_texts, "masks": _joined_masks}


def joined_masks(parts: Sequence[Masks | Tensor]) -> Masks | Tensor:
    """Join masks of one size, one after another; where some are decoded, all are."""
    if any(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat([part if isinstance(part, torch.Tensor) else part.decode() for part in parts])
    lazy: list[Any] = [*parts]
    some = [part for part in lazy if len(part)]
    return JoinedMasks(tuple(some), lazy[0].height, lazy[0].width) if len(some) != 1 else some[0]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedMasks:
    """Masks of one size from several images, not decoded yet."""

    parts: tuple[Masks, ...]
    height: int
    """Height of each mask, in pixels."""
    width: int

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def decode(self) -> Tensor:
        """Decode to uint8 of shape (masks, height, width), 0 or 1."""
        none = torch.zeros(0, self.height, self.width, dtype=torch.uint8)
        return torch.cat([none, *(part.decode() for part in self.parts)])

    def selected(self, places: Sequence[int]) -> JoinedMasks:
        """Keep the masks at these places alone, which ascend."""
        starts = accumulate(map(len, self.parts), initial=0)
        kept = [
            part.selected([place - start for place in places if start <= place < start + len(part)])
            for start, part in zip(starts, self.parts, strict=False)
        ]
        return replace(self, parts=tuple(part for part in kept if len(part)))
