"""Pipelines of torchvision's transforms v2 as augmentations, with boxes and masks, drawn exactly.

Torchvision is optional, and imported only when a pipeline runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from lockstep.checks import check_type
from lockstep.data.seeding import restore_global_generators, seed_global_generators
from lockstep.errors import DataError, InputError
from lockstep.images.fields import decoded, images_of
from lockstep.images.objects import areas_of, object_fields
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor

Fields = dict[str, Any]

_CORNERS = (1, 0, 3, 2)
"""The order that turns top, left, bottom, right into left, top, right, bottom, and back."""


class _Scene(NamedTuple):
    """An image and what is on it, in pixels, as pipelines take them."""

    image: Tensor
    """uint8 (3, height, width); a pipeline may return floats and any number of channels."""
    boxes: Tensor | None
    """Left, top, right and bottom: float32 (objects, 4)."""
    masks: Tensor | None
    """uint8 (objects, height, width), 0 or 1."""
    objects: Tensor
    """The places that the objects had before: int64 (objects,)."""

    @property
    def sides(self) -> Tensor:
        """Width and height of the image, float32 (2,)."""
        return torch.tensor([self.image.shape[-1], self.image.shape[-2]], dtype=torch.float32)


@dataclass(frozen=True)
class TorchvisionTransforms:
    """A pipeline of torchvision's transforms v2: TorchvisionTransforms(v2.Compose([v2.RandomHorizontalFlip(), ...])).

    It gets one example after another, as a dict with the image and, where the batch has them, "boxes" and "masks", as
    tv_tensors. Its "labels" are the places of the objects, so that SanitizeBoundingBoxes, which drops objects, drops
    them from all fields of the batch. It draws from the global generators of torch, numpy and Python, which are seeded
    for each example, and restored after the batch: the same position gives the same result, in the trainer and in
    loader processes. A loader with threads refuses it.

    Args:
        field: of the images; they are decoded first, to uint8 of shape (3, height, width).

    Raises:
        DataError: the pipeline fails, or returns other numbers of boxes, masks and labels.
        InputError: the batch has keypoints, which torchvision mirrors by whole pixels, left and right not exchanged.
    """

    transform: Callable[..., Any]
    field: str = "image"
    draws_globally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        hint = "write TorchvisionTransforms(v2.Compose([...]))"
        check_type("transform", self.transform, Callable, expected="a pipeline", hint=hint)  # type: ignore[arg-type]

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Transform the images of a batch, with their objects."""
        names = object_fields(batch)
        images_of(batch, self.field, self)
        if "keypoints" in names:
            raise InputError(
                "Pipelines of torchvision mirror keypoints by whole pixels, and do not exchange left and right.",
                given=f"a batch of {', '.join(batch)}",
                expected="images without keypoints",
                hint="use Lockstep's augmentations for them, such as ls.augmentations.HorizontalFlip",
            )
        rows = []
        with restore_global_generators():
            for row, position in enumerate(draws.positions.tolist()):
                example = {name: batch[name][row] for name in (self.field, *names)}
                seed_global_generators(draws.seed, position)
                rows.append(self._transformed(example, names, position))
        columns: Fields = {name: [row[name] for row in rows] for name in (self.field, *names)}
        columns |= {name: Ragged.of(columns[name]) for name in names if isinstance(batch[name], Ragged)}
        if len({image.shape for image in columns[self.field]}) == 1:
            columns[self.field] = torch.stack(columns[self.field])
        return {**batch, **columns}

    def _transformed(self, example: Fields, names: list[str], position: int) -> Fields:
        before = _scene(example, self.field, len(example[names[0]]) if names else 0)
        try:
            after = _run(self.transform, before)
        except Exception as error:
            raise self._failed(position, f"{type(error).__name__}: {error}") from error
        values = {"boxes": after.boxes, "masks": after.masks}
        for name in values.keys() & set(names):
            if (found := values[name]) is None or len(found) != len(after.objects):
                count = "none" if found is None else len(found)
                raise self._failed(position, f"{count} {name} for {len(after.objects)} objects")
        return _example(example, names, before, after, self.field)

    def _failed(self, position: int, given: str) -> DataError:
        return DataError(
            f"The pipeline of TorchvisionTransforms fails for the example at position {position} of the stream.",
            given=given,
            expected="an image, and as many boxes and masks as objects",
            hint="fix the pipeline; `lockstep show` shows what stands at a position",
        )


def _run(transform: Callable[..., Any], scene: _Scene) -> _Scene:
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    size = scene.image.shape[-2:]
    sample: dict[str, Any] = {"image": tv_tensors.Image(scene.image), "labels": scene.objects}
    if scene.boxes is not None:
        sample["boxes"] = tv_tensors.BoundingBoxes(scene.boxes, format="XYXY", canvas_size=size)
    if scene.masks is not None:
        sample["masks"] = tv_tensors.Mask(scene.masks)
    made = transform(sample)
    boxes = made.get("boxes")
    if isinstance(boxes, tv_tensors.BoundingBoxes):
        boxes = functional.convert_bounding_box_format(boxes, new_format="XYXY")
    found: list[Any] = [
        None if each is None else torch.as_tensor(each).as_subclass(torch.Tensor)
        for each in (made["image"], boxes, made.get("masks"), made["labels"])
    ]
    return _Scene(*found)


def _scene(example: Mapping[str, Any], field: str, count: int) -> _Scene:
    image = decoded(example[field])
    scene = _Scene(image, None, None, torch.arange(count))
    boxes, masks = example.get("boxes"), example.get("masks")
    if boxes is not None:
        boxes = boxes[:, _CORNERS] * scene.sides.repeat(2)
    if masks is not None and not isinstance(masks, torch.Tensor):
        masks = masks.decode()
    return scene._replace(boxes=boxes, masks=masks)


def _example(example: Fields, names: list[str], before: _Scene, after: _Scene, field: str) -> Fields:
    """Return an example whose image went through a pipeline: what is dropped is dropped from all fields of objects."""
    kept = after.objects.tolist()
    chosen = {name: _selected(example[name], kept) for name in names}
    if after.boxes is not None and before.boxes is not None:
        chosen["boxes"] = (after.boxes / after.sides.repeat(2))[:, _CORNERS]
        if "area" in chosen:
            stored = areas_of(before.boxes[after.objects]).clamp(min=torch.finfo(torch.float32).tiny)
            grown = areas_of(after.boxes) / stored
            chosen["area"] = chosen["area"] * grown
    if after.masks is not None:
        chosen["masks"] = after.masks
    return {**chosen, field: after.image}


def _selected(values: Any, kept: list[int]) -> Any:
    if isinstance(values, torch.Tensor):
        return values[kept]
    if hasattr(values, "selected"):
        return values.selected(kept)
    return [values[place] for place in kept]
