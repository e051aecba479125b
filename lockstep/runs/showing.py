"""Examples to look at: as they are stored, after each augmentation, and with what a detector has found on them.

Detections of a file are shown beside the objects: which are right, which are wrong, and which objects are missed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.augmentations.augment import Augment, num_partners
from lockstep.augmentations.crops import Windows
from lockstep.checks import Checked, FiniteFloat, NonNegativeInt, PositiveInt, check_value
from lockstep.data.batch_reader import Fields, RowReader, read_examples
from lockstep.data.order import Order, order_of
from lockstep.data.rows import Rows, draw_partners
from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError
from lockstep.evaluation.kept_detections import KeptDetections
from lockstep.images.decode import EncodedImage
from lockstep.images.drawing import GREEN, GREY, RED, YELLOW, Colour, Marks, draw_marks, side_by_side
from lockstep.images.fields import describe_field
from lockstep.images.pillow import png_bytes
from lockstep.mask_runs import pixels_in
from lockstep.metrics.detection_report import FLAGS, outcomes
from lockstep.metrics.scored_images import flips_in
from lockstep.randomness import Draws
from lockstep.readers.coco_results import CocoResults, ImageResults
from lockstep.readers.reader import Reader
from lockstep.recipes.parts import Pictures
from lockstep.runs.workdir import class_names

Inputs = Callable[[Mapping[str, Any]], Any]

TRUTH = ("truth_boxes", "truth_labels", *FLAGS)
_IMAGE, _ID, _AT_ONCE = "image", "source_id", 64


@dataclass(frozen=True)
class Pipeline:
    """The augmentations and the preprocessing between a reader and a network."""

    augment: Sequence[Augment] = ()
    """Applied in this order."""
    inputs: Inputs | None = None
    """Makes a network's input of a batch, as a `Preset` does; None leaves the images as they are."""
    fields: Sequence[str] | None = None
    """The fields that augmentations are given, where an example has them; None: all of them."""


NOTHING = Pipeline()


@dataclass(frozen=True, eq=False)
class Picture:
    """An image after one stage of a pipeline, with the objects that its batch marks on it."""

    stage: str
    """"original", the name of the augmentation that made it, or "inputs"."""
    position: int
    """Position in the stream, by which random numbers were drawn."""
    pixels: Tensor
    """uint8 of shape (3, height, width)."""
    marks: Marks


@dataclass(frozen=True, eq=False)
class ShownExample:
    """An example of the stream, before and after augmentation."""

    position: int
    example_id: str
    label: int | None = None
    class_name: str = ""
    original: Picture | None = None
    """The image as it is stored, with all its objects, and the windows that were cropped from it."""
    compared: Compared | None = None
    """The detections on the image as it is stored, right and wrong, and the objects that they have missed."""
    augmented: tuple[Picture, ...] = ()
    """The image after the first augmentation and each that changed its pixels or its objects; of several draws, the
    last of each."""
    problem: str = ""
    """Why the example, or a part of it, is not shown."""


@runtime_checkable
class _Crop(Protocol):
    def windows(self, batch: Fields, draws: Draws) -> Windows: ...


def examples(
    reader: Reader,
    positions: Iterable[int],
    *,
    order: Order | str = "shuffled",
    seed: int = 0,
    pipeline: Pipeline = NOTHING,
    num_draws: int = 1,
    detections: Comparison | None = None,
) -> Iterator[ShownExample]:
    """Yield the examples that a run of this order and seed trains on at some positions of the stream, from 0 on.

    An example that cannot be read or augmented says why; a run would stop there, or read another in its place. Each is
    augmented `num_draws` times: as at its position, and as at the same place of later epochs. Detections are shown on
    the images as they are stored.
    """
    check_value("num_draws", num_draws, PositiveInt)
    order = order_of(order)
    if not len(reader):
        raise DataError(
            "There are no examples to show.",
            given=f"{type(reader).__name__} of length 0",
            expected="one example or more",
            hint="check the path or the pattern of the files",
        )
    epochs = np.arange(num_draws) * order.epoch_size(len(reader))
    partners_of = partial(draw_partners, order=order, size=len(reader), order_seed=seed)
    augmenting = RowReader(reader, pipeline.augment, seed, partners_of)
    for position in positions:
        check_value("position", position, NonNegativeInt)
        index = order.indices(np.array([position]), len(reader), seed)
        yield _shown(augmenting, [Rows(np.array([at]), index) for at in position + epochs], pipeline, detections)


def with_marks(batch: Mapping[str, Any], count: int) -> list[Tensor]:
    """Draw boxes, masks and keypoints, where a batch has them, on its first images.

    The results are (3, height, width) if the batch has boxes, and images of uint8 with one or three channels; else the
    images as they are.
    """
    images: Sequence[Tensor] = batch[_IMAGE][:count]
    if "boxes" not in batch or any(each.dtype != torch.uint8 or each.shape[0] not in (1, 3) for each in images):
        return [*images]
    return [draw_marks(image.expand(3, -1, -1), _marks(batch, row)) for row, image in enumerate(images)]


def _shown(reader: RowReader, draws: Sequence[Rows], pipeline: Pipeline, detections: Comparison | None) -> ShownExample:
    """Show one example, augmented once as at each of some positions."""
    position, index = int(draws[0].positions[0]), int(draws[0].indices[0])
    shown = ShownExample(position, reader.reader.example_id(index))
    classes = class_names(reader.reader)
    try:
        fields = read_examples(reader.reader, draws[0], reader.seed)
        label = _label(fields)
        shown = replace(shown, label=label, class_name=_class_name(classes, fields, label))
        original = Picture("original", position, _pixels(fields), _marks(fields, 0, classes))
        shown = replace(shown, original=original)
        if detections is not None:
            height, width = original.pixels.shape[1:]
            shown = replace(shown, compared=detections.of(fields, (height, width), classes))
        given = _given(fields, pipeline)
        marks = replace(original.marks, windows=_windows(given, pipeline, reader.seed, draws, original.pixels))
        shown = replace(shown, original=replace(original, marks=marks))
        pictures = [_pictures(reader, given, pipeline, each) for each in draws]
        augmented = pictures[0] if len(draws) == 1 else [picture for each in pictures for picture in each[-1:]]
        return replace(shown, augmented=tuple(augmented))
    except DataError as error:
        return replace(shown, problem=f"{error.what} {error.given}")


def _given(fields: Fields, pipeline: Pipeline) -> Fields:
    names = fields if pipeline.fields is None else pipeline.fields
    return {name: fields[name] for name in names if name in fields}


def _pictures(reader: RowReader, fields: Fields, pipeline: Pipeline, row: Rows) -> list[Picture]:
    """Return the image after the first augmentation, and after each that changes its pixels or its objects."""
    pictures: list[Picture] = []
    classes = class_names(reader.reader)
    for stage, there in _stages(reader, fields, pipeline, row):
        pixels = _pixels(there, of_augmentation=True)
        picture = Picture(stage, int(row.positions[0]), pixels, _marks(there, 0, classes))
        if not pictures or not _look_alike(picture, pictures[-1]):
            pictures.append(picture)
    return pictures


def _look_alike(one: Picture, other: Picture) -> bool:
    marks = ((getattr(each.marks, name) for each in (one, other)) for name in ("boxes", "masks", "keypoints"))
    return (
        torch.equal(one.pixels, other.pixels)
        and one.marks.names == other.marks.names
        and all(ours is theirs or _are_equal(ours, theirs) for ours, theirs in marks)
    )


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two fields of marks are equal, NaN to NaN."""
    return one is not None and other is not None and np.array_equal(one.numpy(), other.numpy(), equal_nan=True)


def _stages(reader: RowReader, fields: Fields, pipeline: Pipeline, row: Rows) -> Iterator[tuple[str, Fields]]:
    """Yield the name of each stage, and the batch after it."""

    def read(partner: RowReader, rows: Rows) -> Fields:
        return partner.augmented(_given(read_examples(partner.reader, rows, partner.seed), pipeline), rows, read)

    for augment, augmented in reader.stages(fields, row, read):
        fields = augmented
        yield getattr(augment, "__name__", type(augment).__name__), fields
    if pipeline.inputs is not None:
        yield "inputs", {**fields, _IMAGE: _as_pixels(pipeline.inputs(fields), pipeline.inputs)}


def _as_pixels(values: Tensor, inputs: Inputs) -> Tensor:
    """Scale the input of a network to uint8 of the same shape, to be looked at.

    Black and white are the values that the network gets for black and white images. Where these are equal, since each
    image is standardised by itself, they are the least and the largest value of the image.
    """
    black, white = (inputs({_IMAGE: torch.full((1, 3, 1, 1), level, dtype=torch.uint8)}) for level in (0, 255))
    if torch.equal(black, white):
        black, white = values.amin((1, 2, 3), keepdim=True), values.amax((1, 2, 3), keepdim=True)
    shares: Tensor = (values - black) / (white - black)
    return shares.nan_to_num(0).mul(255).round().clamp(0, 255).to(torch.uint8)


def _windows(fields: Fields, pipeline: Pipeline, seed: int, draws: Sequence[Rows], image: Tensor) -> Tensor | None:
    """Return the window that each draw crops, as shares of height and width; None without a crop of the image alone."""
    alone = takewhile(lambda augment: not num_partners(augment), pipeline.augment)
    crop = next((augment for augment in alone if isinstance(augment, _Crop)), None)
    if crop is None:
        return None
    regions = np.array([crop.windows(fields, Draws(seed, each.positions)).regions()[0] for each in draws])
    corners = np.concatenate([regions[:, :2], regions[:, :2] + regions[:, 2:]], axis=1)
    return torch.from_numpy(corners / np.tile(image.shape[1:], 2))


def _pixels(fields: Fields, *, of_augmentation: bool = False) -> Tensor:
    """Return the image of the only example: uint8 of shape (3, height, width); augmentations may also give floats."""
    images = fields.get(_IMAGE)
    first = images[0] if isinstance(images, Tensor | list) else None
    pixels = first.decode() if isinstance(first, EncodedImage) else first
    if isinstance(pixels, Tensor) and pixels.ndim == 3 and len(pixels) in (1, 3):
        if of_augmentation and pixels.is_floating_point():
            pixels = pixels.nan_to_num(0).round().clamp(0, 255).to(torch.uint8)
        if pixels.dtype == torch.uint8:
            return pixels.expand(3, -1, -1)
    raise InputError(
        f"There is no image to show in the field {_IMAGE!r}.",
        given=describe_field(fields, _IMAGE),
        expected="encoded images, or uint8 of shape (batch, 1 or 3, height, width)",
        hint="show images of whole numbers from 0 to 255, of which augmentations may make floats",
    )


def _marks(fields: Mapping[str, Any], row: int, classes: Mapping[int, str] = MappingProxyType({})) -> Marks:
    """Return the objects on an image of a batch, named by the batch or else by `classes`.

    Fields of other shapes are left out.
    """
    masks, labels = (fields[name][row] if name in fields else None for name in ("masks", "labels"))
    return Marks(
        boxes=_places(fields, "boxes", row, 2, 4),
        names=_names(fields, row, classes),
        labels=labels.tolist() if isinstance(labels, Tensor) and labels.ndim == 1 else (),
        masks=masks if masks is None or isinstance(masks, Tensor) else masks.decode(),
        keypoints=_places(fields, "keypoints", row, 3, 2),
    )


def _places(fields: Mapping[str, Any], name: str, row: int, ndim: int, numbers: int) -> Tensor | None:
    value = fields[name][row] if name in fields else None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    return value if value.ndim == ndim and value.shape[-1] == numbers else None


def _names(fields: Mapping[str, Any], row: int, classes: Mapping[int, str]) -> list[str]:
    texts = fields["class_text"][row] if "class_text" in fields else []
    labels = fields["labels"][row].tolist() if "labels" in fields else []
    named = [classes.get(label) or str(label) for label in labels]
    return [text or name for text, name in zip_longest(texts, named, fillvalue="")]


def _label(fields: Fields) -> int | None:
    labels = fields.get("label")
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
        return None
    return int(labels[0])


def _class_name(classes: Mapping[int, str], fields: Fields, label: int | None) -> str:
    """Return the class name that the example or else the reader gives, if any."""
    return str(fields["text"][0]) if "text" in fields else str(classes.get(label, "") if label is not None else "")


@dataclass(frozen=True, eq=False)
class Compared:
    """The detections on an image and the objects that they have not found, as they are drawn."""

    marks: Marks
    num_right: int
    num_wrong: int
    num_missed: int

    def __str__(self) -> str:
        return f"{self.num_right} right, {self.num_wrong} wrong, {self.num_missed} missed"


@dataclass(frozen=True)
class Comparison(Checked):
    """Detections to be compared with the objects of a reader that gives the fields "truth_...".

    They are those of a file, or those that an evaluation has kept. What is right is said by the rule of
    `lockstep.metrics.detection_report`.
    """

    results: CocoResults | KeptDetections
    min_score: FiniteFloat = 0.5
    """Detections of lower scores are left out."""
    by_masks: bool = False
    """Masks are compared, which the reader and the results have then; else boxes."""

    def of(self, fields: Mapping[str, Any], size: tuple[int, int], classes: Mapping[int, str]) -> Compared:
        """Compare the detections on the only image of a batch, which is stored with this height and width."""
        found = self.results.on(fields[_ID][0]).above(self.min_score)
        truth = {name: fields[name][0].numpy() for name in TRUTH if name in fields}
        boxes, labels = truth["truth_boxes"], truth["truth_labels"]
        of_detections = {"boxes": found.boxes, "labels": found.labels, "scores": found.scores}
        masks = {"masks": [each.flips() for each in found.masks]} if self.by_masks else {}
        masks |= {each: flips_in(fields[each][0]) for each in ("truth_masks",) if self.by_masks}
        result = outcomes({**of_detections, **truth}, masks)
        named = [classes.get(label) or str(label) for label in found.labels.tolist()]
        kinds = [_kind(*each) for each in zip(result.right, result.ignored, strict=True)]
        missed = [f"missed: {classes.get(label) or label}" for label in labels[result.missed].tolist()]
        names = [
            f"{word}{name} {score:.2f}" for (word, *_), name, score in zip(kinds, named, found.scores, strict=True)
        ]
        marks = Marks(
            _shares(np.concatenate([boxes[result.missed], found.boxes]), size),
            [*missed, *names],
            colours=[*[YELLOW] * len(missed), *(colour for _, colour, _ in kinds)],
            dashed=[*[True] * len(missed), *(dashed for _, _, dashed in kinds)],
        )
        num_right, num_ignored = int(result.right.sum()), int(result.ignored.sum())
        return Compared(marks, num_right, len(names) - num_right - num_ignored, len(missed))


def comparison(reader: Reader, results: CocoResults, min_score: float, source: str) -> Comparison:
    """Make the comparison of a file of results with the objects of a reader, whose images and classes it has to know.

    Errors call the data `source`.
    """
    classes = getattr(reader, "classes", ())
    results.check(_source_ids(reader, source), set(classes) if isinstance(classes, Mapping) else (), source)
    return Comparison(results, min_score)


def detection_marks(
    found: ImageResults, size: tuple[int, int], classes: Mapping[int, str], *, labels: bool = True, scores: bool = True
) -> Marks:
    """Mark the detections on an image of this height and width, each with the name of its class and its score.

    Without `labels` the classes are left out, without `scores` the scores.
    """
    named = ([classes.get(label) or str(label)] if labels else [] for label in found.labels.tolist())
    scored = ([f"{score:.2f}"] if scores else [] for score in found.scores.tolist())
    masks = [torch.from_numpy(pixels_in(mask.runs, mask.height, mask.width)) for mask in found.masks]
    points = found.keypoints
    if points is not None:  # all zeros: it is of a class that has none
        points = np.where(points.any(-1, keepdims=True), points[..., 1::-1] / size, np.nan)
    return Marks(
        _shares(found.boxes, size),
        [" ".join(words) for words in map(operator.add, named, scored)],
        labels=found.labels.tolist(),
        masks=torch.stack(masks) if masks else None,
        keypoints=None if points is None else torch.from_numpy(points),
    )


def drawn(original: Picture, found: ImageResults, classes: Mapping[int, str], how: Pictures) -> Tensor:
    """Draw detections onto a copy of an image as it is stored, at its right the objects of the data if wanted."""
    height, width = original.pixels.shape[1:]
    best = found.at(np.argsort(-found.scores, kind="stable")[: how.max_boxes]).above(how.min_score)
    marks = detection_marks(best, (height, width), classes, labels=how.labels, scores=how.scores)
    detections = draw_marks(original.pixels, marks)
    return side_by_side([detections, draw_marks(original.pixels, original.marks)]) if how.ground_truth else detections


def write_picture(path: Path, picture: Tensor) -> None:
    """Write uint8 (3, height, width) to a PNG; its folder is made if need be."""
    with atomic_write(path, parents=True, failure=InputError) as file:
        file.write(png_bytes(Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())))


def _source_ids(reader: Reader, source: str) -> set[str]:
    """Return the ids of all images; of records they are only known once all are read."""
    if hasattr(reader, "source_ids"):
        return {*reader.source_ids}
    found: set[str] = set()
    for first in range(0, len(reader), _AT_ONCE):
        indices = np.arange(first, min(first + _AT_ONCE, len(reader)))
        fields = read_examples(reader, Rows(indices, indices), seed=0)
        if _ID not in fields or TRUTH[0] not in fields:
            raise DataError(
                f"There are no objects in {source} to show detections beside.",
                given=f"the fields {', '.join(fields)}",
                expected="records of detection, a folder of VOC, or a file of COCO's annotations",
                hint="name the data that the detector was run on",
            )
        found.update(fields[_ID])
    return found


def _kind(is_right: bool, is_ignored: bool) -> tuple[str, Colour, bool]:
    """Return for a detection the word before its name, the colour, and whether its line is broken."""
    if is_right:
        return "", GREEN, False
    return ("ignored: ", GREY, True) if is_ignored else ("false: ", RED, True)


def _shares(boxes: Any, size: tuple[int, int]) -> torch.Tensor:
    """Convert x, y, width and height in pixels to top, left, bottom and right as shares."""
    left, top, width, height = boxes.T
    edges = np.stack([top, left, top + height, left + width], axis=1)
    return torch.from_numpy(edges / np.tile(size, 2))
