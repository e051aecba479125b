"""The columns of detection metrics: detections and objects of a micro-batch of images, checked and laid end to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.checks import check_type
from lockstep.errors import InputError
from lockstep.mask_runs import Flips, flips_of_pixels
from lockstep.metrics.overlaps import box_overlaps, mask_overlaps
from lockstep.metrics.pairs import Bools, Floats, Ints, Pairs, groups_of
from lockstep.ragged import Ragged

IMAGES = "source_id"
"""The column of the ids of the images, texts."""
TRUTH = "truth_"
"""What the names of the columns of ground truth begin with."""
VERIFIED_LABELS = "truth_verified_labels"
"""The column of the classes of which it is known whether an image shows them; not one of its objects."""

_LARGEST_LABEL = 1_000_000  # PASCAL's values take memory for each label up to the largest

BACKGROUND = "background"
"""The name at the label 0, where the names of classes are a list."""

Values = npt.NDArray[Any]


class _Kind(NamedTuple):
    """What the values of a column are."""

    dtype: torch.dtype
    shape: tuple[int | None, ...] = ()
    """Shape of the value of one object; None is any number."""
    text: str = "(objects,)"


_KINDS: Mapping[str, _Kind] = {
    "boxes": _Kind(torch.float64, (4,), "(objects, 4)"),
    "keypoints": _Kind(torch.float64, (None, None), "(objects, keypoints, 2 or 3)"),
    "scores": _Kind(torch.float64),
    "area": _Kind(torch.float64),
    "labels": _Kind(torch.int64),
    "verified_labels": _Kind(torch.int64),
    "is_crowd": _Kind(torch.bool),
    "difficult": _Kind(torch.bool),
    "group_of": _Kind(torch.bool),
}


@dataclass(frozen=True)
class ScoredImages:
    """The detections and the objects of some images, each end to end; objects of one class stand together."""

    source_ids: Sequence[str]
    values: Mapping[str, Values]
    masks: Mapping[str, Sequence[Flips]]
    image: Ints
    """The row of the image of each detection."""
    truth_image: Ints
    """The row of the image of each object."""
    verified_image: Ints
    """The row of the image of each verified label."""

    @property
    def groups(self) -> Ints:
        """The image and class of each detection."""
        return groups_of(self.image, self.values["labels"])

    @property
    def truth_groups(self) -> Ints:
        """The image and class of each object, ascending."""
        return groups_of(self.truth_image, self.values[f"{TRUTH}labels"])

    def overlaps(self, pairs: Pairs, is_region: Bools) -> Floats:
        """Compute the IoU of each pair: of masks where there are some, else of boxes."""
        if self.masks:
            return mask_overlaps(self.masks["masks"], self.masks[f"{TRUTH}masks"], is_region, pairs)
        return box_overlaps(self.values["boxes"], self.values[f"{TRUTH}boxes"], is_region, pairs)


def scored_images(fields: Sequence[str], columns: Sequence[Any], classes: Collection[int]) -> ScoredImages:
    """Check the columns of a metric, and lay them end to end; see `CocoMetric` for what they are.

    Raises:
        InputError: a column is missing, or has other images or objects than its neighbours; a label is no class; a
            number is not finite; a box has a negative width or height. It names the field and the image.
    """
    if len(columns) != len(fields):
        raise InputError(
            "A detection metric takes one column for each of its fields.",
            given=f"{len(columns)} columns",
            expected=", ".join(map(repr, fields)),
            hint="return metric.columns(batch, detections) from the score function",
        )
    named = dict(zip(fields, columns, strict=True))
    source_ids = [str(source_id) for source_id in named.pop(IMAGES)]
    for name, column in named.items():
        if len(column) != len(source_ids):
            raise InputError(
                f"The column {name!r} of a detection metric has not as many images as the others.",
                given=f"{len(column)} images, and {len(source_ids)} values of {IMAGES!r}",
                expected="a Ragged, or a list with an entry for each image",
                hint="give an image without objects an empty tensor",
            )
    masks = {name: column for name, column in named.items() if name.endswith("masks")}
    ragged = {name: _ragged(name, column) for name, column in named.items() if name not in masks}
    lengths = {name: column.lengths.numpy() for name, column in ragged.items()}
    lengths |= {name: np.array([len(one) for one in column], np.int64) for name, column in masks.items()}
    _check_lengths(lengths, source_ids)
    for name, column in ragged.items():
        _check_values(name, column, source_ids, classes)
    _check_masks(masks, source_ids)

    def owner(name: str) -> Ints:
        return np.repeat(np.arange(len(source_ids)), lengths.get(name, 0))

    values = {name: column.values.numpy() for name, column in ragged.items()}
    flips = {name: [each for one in column for each in flips_in(one)] for name, column in masks.items()}
    truth_image = owner(f"{TRUTH}labels")
    by_class = np.lexsort((values[f"{TRUTH}labels"], truth_image))
    of_objects = {name for name in named if name.startswith(TRUTH) and name != VERIFIED_LABELS}
    return ScoredImages(
        source_ids,
        {name: column[by_class] if name in of_objects else column for name, column in values.items()},
        {name: [column[row] for row in by_class] if name in of_objects else column for name, column in flips.items()},
        owner("labels"),
        truth_image,
        owner(VERIFIED_LABELS),
    )


def _ragged(name: str, column: Any) -> Ragged:
    """Convert a column to the type of its numbers; shapes must fit."""
    kind = _KINDS[name.removeprefix(TRUTH)]
    if not isinstance(column, Ragged):
        column = Ragged.of([torch.as_tensor(one) for one in column])
    values = column.values.detach()
    if not len(values) and values.dim() <= 1:  # torch.zeros(0) where there are no objects
        values = values.new_zeros(0, *(size or 0 for size in kind.shape))
    is_right = values.dim() == 1 + len(kind.shape) and all(
        size in (None, given) for size, given in zip(kind.shape, values.shape[1:], strict=False)
    )
    if not is_right or (values.is_floating_point() and kind.dtype == torch.int64):
        raise InputError(
            f"A detection metric cannot use the column {name!r}.",
            given=f"{values.dtype} of shape {tuple(values.shape)} for all images together",
            expected=f"{kind.dtype} of shape {kind.text}",
            hint="boxes are x, y, width and height in pixels of the stored image" if kind.shape else "check the column",
        )
    return Ragged(values.to("cpu", kind.dtype), column.lengths)


def _check_lengths(lengths: Mapping[str, Ints], source_ids: Sequence[str]) -> None:
    """Refuse columns of detections, or of objects, that differ in number on an image."""
    for name, numbers in lengths.items():
        labels = f"{TRUTH}labels" if name.startswith(TRUTH) else "labels"
        if name != VERIFIED_LABELS and (differs := numbers != lengths[labels]).any():
            row = int(differs.argmax())
            raise InputError(
                f"The columns {name!r} and {labels!r} differ in number on the image {source_ids[row]!r}.",
                given=f"{numbers[row]} and {lengths[labels][row]}",
                expected="as many",
                hint="cut and sort all columns of an image together",
            )


def _check_values(name: str, column: Ragged, source_ids: Sequence[str], classes: Collection[int]) -> None:
    """Refuse numbers that are not finite, boxes with a negative side, labels that are no class."""
    values = column.values
    flat = values.reshape(len(values), -1) if len(values) else values.reshape(0, 1)
    if values.dtype == torch.float64:
        _refuse(name, column, ~flat.isfinite().all(1), source_ids, "finite numbers", "check what the model returns")
        if name.endswith("boxes"):
            wrong = (flat[:, 2:] < 0).any(1)
            _refuse(name, column, wrong, source_ids, "x, y, width and height", "of corners, subtract left and top")
        if name.endswith("area"):
            _refuse(name, column, flat[:, 0] < 0, source_ids, "0 or more pixels", "check the annotations")
    elif name.endswith("labels"):
        known = torch.tensor(sorted(classes))
        expected = f"one of {len(known)} classes from {known[0]} to {known[-1]}"
        unknown = ~torch.isin(values, known)
        _refuse(name, column, unknown, source_ids, expected, "give the metric all classes of the data")


def _refuse(
    name: str, column: Ragged, wrong: torch.Tensor, source_ids: Sequence[str], expected: str, hint: str
) -> None:
    """Name the first value that is wrong, if there is one."""
    if not wrong.any():
        return
    place = int(wrong.int().argmax())
    row = int(column.owner[place])
    first = int((column.owner < row).sum())
    raise InputError(
        f"The column {name!r} of a detection metric cannot be used.",
        given=f"{column.values[place].tolist()}: object {place - first} of the image {source_ids[row]!r}"
        + (f"; {int(wrong.sum()) - 1} more like it" if wrong.sum() > 1 else ""),
        expected=expected,
        hint=hint,
    )


def _check_masks(masks: Mapping[str, Any], source_ids: Sequence[str]) -> None:
    """Refuse masks that are no bytes, and masks of detections that are not of the size of the objects' masks."""
    for name, column in masks.items():
        for source_id, one in zip(source_ids, column, strict=True):
            if isinstance(one, torch.Tensor) and (one.dim() != 3 or one.is_floating_point()):
                raise InputError(
                    f"A detection metric cannot use the column {name!r} of the image {source_id!r}.",
                    given=f"{one.dtype} of shape {tuple(one.shape)}",
                    expected="uint8 or bool of shape (objects, height, width), or lazy masks",
                    hint="of probabilities, give those above a threshold: masks > 0.5",
                )
    for source_id, *both in zip(source_ids, *masks.values(), strict=True):
        sizes = {name: _size(one) for name, one in zip(masks, both, strict=True) if len(one)}
        if len(set(sizes.values())) > 1:
            raise InputError(
                f"The masks on the image {source_id!r} differ in size.",
                given=", ".join(f"{name} of {width} x {height}" for name, (height, width) in sizes.items()),
                expected="masks of the whole stored image",
                hint="resize the masks of detections to the image, or paste them into it",
            )


def _size(masks: Any) -> tuple[int, int]:
    height, width = masks.shape[1:] if isinstance(masks, torch.Tensor) else (masks.height, masks.width)
    return height, width


def flips_in(masks: Any) -> list[Flips]:
    """Return the flips of masks of an image: lazy ones are drawn, those of shape (objects, height, width) encoded."""
    if hasattr(masks, "flips"):
        return list(masks.flips())
    pixels = masks if isinstance(masks, torch.Tensor) else masks.decode()
    return flips_of_pixels(pixels.cpu().numpy()) if len(pixels) else []


def named_categories(categories: Mapping[int, str] | Sequence[str]) -> dict[int, str]:
    """Return the name of each class by its label, ascending; refuse what is missing, doubled or the background."""
    named: Any = categories
    if isinstance(categories, list | tuple) and [*categories[:1]] == [BACKGROUND]:
        named = {label: name for label, name in enumerate(categories) if label and name}
    check_type(
        "categories",
        named,
        Mapping,
        expected=f"the name of each class by its label, or a list of names of which the first is {BACKGROUND!r}",
        hint="give the classes of the reader, or of a label map",
    )
    wrong = [label for label in named if type(label) is not int or not 1 <= label <= _LARGEST_LABEL]
    twice = [name for name, count in Counter(named.values()).items() if count > 1]
    if not named or wrong or twice:
        raise InputError(
            "A detection metric cannot score these classes.",
            given=f"the label {wrong[0]!r}" if wrong else f"the name {twice[0]!r} twice" if twice else "no class",
            expected=f"one class or more, each with a name of its own and a label from 1 to {_LARGEST_LABEL:,}",
            hint="give the classes of the reader, or of a label map",
        )
    return dict(sorted(named.items()))


def check_keypoints(images: ScoredImages, number: int) -> None:
    """Refuse keypoints of another number, or without what each of them needs."""
    for name, size in (("keypoints", 2), (f"{TRUTH}keypoints", 3)):
        shape = images.values[name].shape
        if shape[0] and (shape[1] != number or shape[2] < size):
            raise InputError(
                f"A detection metric for {number} keypoints cannot use the column {name!r}.",
                given=f"the shape {shape}",
                expected=f"(objects, {number}, {size}{' or more' if size == 2 else ''})",
                hint="give a sigma for each keypoint of the data: CocoMetric(categories, 'keypoints', sigmas=...)",
            )
