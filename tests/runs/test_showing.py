"""Examples to look at are those that a run trains on at the same places of the stream."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.crops import DistortedCrop, RandomCrop, RandomResizedCrop, Resize
from lockstep.augmentations.slim_presets import cifarnet_preset, inception_preset, vgg_preset
from lockstep.augmentations.turns import HorizontalFlip, RandomShift
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.errors import DataError, InputError
from lockstep.images.decode import EncodedImage
from lockstep.images.drawing import Marks, draw_marks
from lockstep.images.moves import Region, move
from lockstep.images.objects import move_objects
from lockstep.readers.classification import ClassificationReader
from lockstep.readers.reader import Cost
from lockstep.runs.showing import Pipeline, ShownExample, examples, with_marks

NUM_EXAMPLES = 7
HEIGHT, WIDTH = 12, 16
CROP: tuple[Augment, ...] = (RandomResizedCrop(8), HorizontalFlip())


def noise(index: int) -> Tensor:
    values = np.random.default_rng(index).integers(0, 256, (3, HEIGHT, WIDTH), dtype=np.uint8)
    return torch.from_numpy(values)


def encoded(index: int) -> EncodedImage:
    file = BytesIO()
    Image.fromarray(noise(index).permute(1, 2, 0).numpy()).save(file, "PNG")
    return EncodedImage(file.getvalue(), f"image {index}")


@dataclass
class Images:
    """Images of noise, labelled by their index; `broken` ones are cut short, and `more` fields are added."""

    broken: frozenset[int] = frozenset()
    more: dict[str, list[Any]] = field(default_factory=dict)
    classes: Any = ()
    cost: Cost = "memory"

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        whole = [encoded(index) for index in indices.tolist()]
        images = [EncodedImage(image.data[:100], image.source) if self._is_broken(image) else image for image in whole]
        more = {name: [values[index] for index in indices] for name, values in self.more.items()}
        return {"image": images, "label": torch.from_numpy(indices), **more}

    def example_id(self, index: int) -> str:
        return f"example {index}"

    def _is_broken(self, image: EncodedImage) -> bool:
        return image.source in {f"image {index}" for index in self.broken}


@dataclass
class Fields:
    """A single example with these fields."""

    fields: dict[str, Any]
    cost: Cost = "memory"

    def __len__(self) -> int:
        return 1

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        return self.fields

    def example_id(self, index: int) -> str:
        return "the one"


def one(reader: Any, **options: Any) -> ShownExample:
    """The first example of a reader, in its order."""
    (shown,) = examples(reader, [0], order="sequential", **options)
    return shown


def stages(shown: ShownExample) -> list[str]:
    return [picture.stage for picture in shown.augmented]


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_shown_examples_are_those_of_a_run_with_the_same_seed(order: str) -> None:
    positions = range(3, 12)  # into the second epoch
    loader = Loader(Images(), batch_size=len(positions), seed=5, order=order, augment=CROP)
    loader.position = positions.start
    batches = loader.batches(range(1), 1)
    batch = next(batches)
    batches.close()
    shown = list(examples(Images(), positions, order=order, seed=5, pipeline=Pipeline(CROP)))
    assert [each.position for each in shown] == [*positions]
    assert [each.label for each in shown] == batch["label"].tolist()
    assert [each.example_id for each in shown] == loader.example_ids(positions.start, len(positions))
    for each, pixels in zip(shown, batch["image"], strict=True):
        assert each.original is not None
        assert torch.equal(each.original.pixels, noise(each.label or 0))
        assert torch.equal(each.augmented[-1].pixels, pixels)
        assert each.augmented[-1].position == each.position
        assert not each.problem


def test_the_window_is_the_part_that_was_cropped() -> None:
    law: dict[str, Any] = {"area": (0.2, 0.5)}
    for shown in examples(Images(), range(NUM_EXAMPLES), pipeline=Pipeline((DistortedCrop(8, **law),))):
        assert shown.original is not None
        windows = shown.original.marks.windows
        assert windows is not None
        sides = torch.tensor([HEIGHT, WIDTH, HEIGHT, WIDTH])
        top, left, bottom, right = (windows[0] * sides).round().long().tolist()
        part = shown.original.pixels[:, top:bottom, left:right]
        file = BytesIO()
        Image.fromarray(part.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG")
        whole = Resize(8)({"image": [EncodedImage(file.getvalue(), "part")]}, None)["image"][0]  # type: ignore[arg-type]
        assert torch.equal(shown.augmented[0].pixels, whole)


def test_stages_that_change_nothing_are_left_out() -> None:
    never, always = HorizontalFlip(p=0.0), HorizontalFlip(p=1.0)
    crop = Resize(8)
    assert stages(one(Images(), pipeline=Pipeline((crop, never, always, never)))) == ["Resize", "HorizontalFlip"]
    same = one(Images(), pipeline=Pipeline((Resize(8), never)))
    assert stages(same) == ["Resize"]
    assert one(Images()).augmented == ()


def test_functions_are_called_by_their_names() -> None:
    def darker(batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {**batch, "image": batch["image"] // 2}

    shown = one(Images(), pipeline=Pipeline((Resize(8), darker)))
    assert stages(shown) == ["Resize", "darker"]
    assert torch.equal(shown.augmented[1].pixels, shown.augmented[0].pixels // 2)


def test_the_inputs_of_a_network_are_shown_with_their_colours() -> None:
    preset = inception_preset(8)
    (shown,) = examples(Images(), [2], pipeline=Pipeline(preset.train, preset.inputs, ("image",)), seed=1)
    assert stages(shown)[-1] == "inputs"
    loader = Loader(Images(), batch_size=3, seed=1, augment=preset.train)
    batches = loader.batches(range(1), 1)
    values = preset.inputs(next(batches))[2]
    batches.close()
    assert torch.equal(shown.augmented[-1].pixels, ((values + 1) / 2 * 255).round().to(torch.uint8))


def test_inputs_without_colours_are_the_pixels_themselves() -> None:
    preset = vgg_preset(8, (12, 12))
    shown = one(Images(), pipeline=Pipeline(preset.evaluate, preset.inputs))
    assert stages(shown) == ["ShortSideCrop"]


def test_standardised_inputs_go_from_their_least_to_their_largest() -> None:
    preset = cifarnet_preset(8)
    shown = one(Images(), pipeline=Pipeline(preset.evaluate, preset.inputs))
    pixels = shown.augmented[-1].pixels
    assert stages(shown)[-1] == "inputs"
    assert (pixels.min(), pixels.max()) == (0, 255)


def test_of_several_draws_the_ends_are_shown_and_all_windows() -> None:
    shown = one(Images(), pipeline=Pipeline((*CROP, HorizontalFlip(p=1.0))), num_draws=3)
    assert [picture.position for picture in shown.augmented] == [0, NUM_EXAMPLES, 2 * NUM_EXAMPLES]
    assert shown.original is not None
    assert shown.original.marks.windows is not None
    assert len(shown.original.marks.windows.unique(dim=0)) == 3
    later = next(examples(Images(), [2 * NUM_EXAMPLES], order="sequential", pipeline=Pipeline(CROP)))
    assert torch.equal(later.augmented[-1].pixels.flip(-1), shown.augmented[2].pixels)


def test_a_damaged_example_says_why_and_the_others_are_shown() -> None:
    found = list(examples(Images(broken=frozenset({1})), range(3), order="sequential", pipeline=Pipeline(CROP)))
    assert [bool(shown.problem) for shown in found] == [False, True, False]
    assert found[1].problem.startswith("image 1 cannot be decoded. ")
    assert found[1].original is None
    assert (found[1].example_id, found[1].label) == ("example 1", 1)


def test_an_example_that_cannot_be_augmented_is_shown_as_it_is() -> None:
    shown = one(Images(), pipeline=Pipeline((RandomCrop(40),)))
    assert shown.problem == "image 0 is too small to be cropped. 12 rows and 16 columns, with 0 more at each side"
    assert shown.original is not None
    assert shown.augmented == ()


class Halves:
    """Two masks, of which the first is the upper half."""

    def decode(self) -> Tensor:
        masks = torch.zeros(2, 2, 1, dtype=torch.uint8)
        masks[0, 0] = 1
        return masks

    def __len__(self) -> int:
        return 2


def test_what_is_known_of_objects_is_there() -> None:
    boxes = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]])
    points = torch.tensor([[[0.5, math.nan]], [[0.1, 0.2]]])
    labels = torch.tensor([4, 7])
    objects = {"boxes": boxes, "labels": labels, "class_text": ["cat", ""], "keypoints": points, "masks": Halves()}
    reader = Images(more={name: [value] * NUM_EXAMPLES for name, value in objects.items()})
    shown = one(reader, pipeline=Pipeline((DistortedCrop(8, boxes_field="boxes"),), fields=("image", "boxes")))
    assert shown.original is not None
    marks = shown.original.marks
    assert marks.boxes is boxes
    assert marks.names == ["cat", "7"]
    assert marks.keypoints is points
    assert marks.masks is not None
    assert torch.equal(marks.masks, Halves().decode())
    after = shown.augmented[0].marks
    assert (after.boxes, after.names, after.masks, after.keypoints) == (None, [], None, None), "the crop has none"


class Rectangles:
    """The masks of rectangles, not decoded yet: top, left, bottom and right in pixels of the image."""

    height, width = HEIGHT, WIDTH

    def __init__(self, *rectangles: tuple[int, int, int, int]) -> None:
        self.rectangles = rectangles

    def decode(self) -> Tensor:
        masks = torch.zeros(len(self), HEIGHT, WIDTH, dtype=torch.uint8)
        for mask, (top, left, bottom, right) in zip(masks, self.rectangles, strict=True):
            mask[top:bottom, left:right] = 1
        return masks

    def selected(self, places: Any) -> Rectangles:
        return Rectangles(*(self.rectangles[place] for place in places))

    def __len__(self) -> int:
        return len(self.rectangles)


def objects() -> Images:
    """Images with two objects: one in the upper left corner, one in the lower right one."""
    fields: dict[str, Any] = {
        "boxes": torch.tensor([[0.0, 0.0, 0.5, 0.25], [0.75, 0.5, 1.0, 1.0]]),
        "labels": torch.tensor([1, 2]),
        "keypoints": torch.tensor([[[0.25, 0.125]], [[0.875, math.nan]]]),
        "masks": Rectangles((0, 0, 6, 4), (9, 8, 12, 16)),
    }
    more = {name: [value] * NUM_EXAMPLES for name, value in fields.items()}
    return Images(more=more, classes=("background", "cat", ""))


def lower_half(batch: dict[str, Any], draws: Any) -> dict[str, Any]:
    """Cut out the lower half of each image, which stays encoded."""
    half = Region(HEIGHT // 2, 0, HEIGHT // 2, WIDTH)
    moved = move_objects(batch, [move((HEIGHT, WIDTH), half)] * len(batch["image"]))
    return {**moved, "image": [image.cropped(half) for image in batch["image"]]}


def test_objects_are_drawn_where_augmentations_have_moved_them() -> None:
    flip = HorizontalFlip(p=1.0, keypoint_flip_permutation=(0,))
    shown = one(objects(), pipeline=Pipeline((flip, lower_half, Resize(24))))
    flipped, cut, resized = shown.augmented
    marks = flipped.marks
    assert marks.names == ["cat", "2"], "the names of the reader, or else labels"
    assert marks.boxes is not None
    assert marks.boxes.tolist() == [[0.0, 0.75, 0.5, 1.0], [0.75, 0.0, 1.0, 0.5]]
    assert marks.masks is not None
    assert torch.equal(marks.masks, Rectangles((0, 12, 6, 16), (9, 0, 12, 8)).decode())
    assert marks.keypoints is not None
    assert marks.keypoints[0].tolist() == [[0.25, 0.875]]
    assert torch.equal(flipped.pixels, noise(0).flip(-1))

    for picture in (cut, resized):
        marks = picture.marks
        assert marks.names == ["2"], "the other one is not seen any more"
        assert marks.boxes is not None
        assert marks.boxes.tolist() == [[0.5, 0.0, 1.0, 0.5]]
        assert marks.masks is not None
        height, width = picture.pixels.shape[1:]
        assert marks.masks.shape == (1, height, width)
        assert marks.masks[0].nonzero().amin(0).tolist() == [height // 2, 0]
        assert int(marks.masks.sum()) == height * width // 4
    assert torch.equal(cut.pixels, noise(0).flip(-1)[:, HEIGHT // 2 :])


def test_what_changes_objects_alone_is_a_stage_of_its_own() -> None:
    def without_the_last(batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {**batch, "boxes": [boxes[:-1] for boxes in batch["boxes"]]}

    def renamed(batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {**batch, "labels": [labels + 1 for labels in batch["labels"]]}

    same = HorizontalFlip(p=0.0, keypoint_flip_permutation=(0,))
    assert stages(one(objects(), pipeline=Pipeline((same, without_the_last, renamed, same)))) == [
        "HorizontalFlip", "without_the_last", "renamed"
    ]  # fmt: skip


def test_floats_that_augmentations_make_are_shown_as_the_nearest_colours() -> None:
    def brighter(batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {**batch, "image": [image.decode() * 1.5 - 20.25 for image in batch["image"]]}

    (picture,) = one(Images(), pipeline=Pipeline((brighter,))).augmented
    expected = (noise(0) * 1.5 - 20.25).round().clamp(0, 255)
    assert picture.pixels.dtype == torch.uint8
    assert torch.equal(picture.pixels, expected.to(torch.uint8))


def test_labels_name_objects_without_texts() -> None:
    reader = Fields({"image": [encoded(0)], "boxes": [torch.zeros(2, 4)], "labels": [torch.tensor([4, 7])]})
    shown = one(reader)
    assert shown.original is not None
    assert shown.original.marks.names == ["4", "7"]


@pytest.mark.parametrize(
    ("more", "classes", "name"),
    [
        ({}, ("cat", "dog"), "cat"),
        ({}, {0: "a cat"}, "a cat"),
        ({}, {1: "a dog"}, ""),
        ({}, (), ""),
        ({"text": ["tabby"] * NUM_EXAMPLES}, ("cat",), "tabby"),
    ],
    ids=["a sequence", "a mapping", "another label", "none", "the example's own"],
)
def test_the_name_of_its_class(more: dict[str, list[Any]], classes: Any, name: str) -> None:
    assert one(Images(more=more, classes=classes)).class_name == name


def test_grey_tensors_are_shown_and_augmented() -> None:
    pixels = torch.arange(12, dtype=torch.uint8).view(1, 1, 3, 4)
    shown = one(Fields({"image": pixels}), pipeline=Pipeline((RandomShift(1),)))
    assert shown.original is not None
    assert torch.equal(shown.original.pixels, pixels[0].expand(3, 3, 4))
    assert (shown.label, shown.original.marks.windows) == (None, None)
    assert stages(shown) == ["RandomShift"]


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"label": torch.zeros(1)}, "'image' is missing; the fields are label"),
        ({"image": torch.zeros(1, 3, 2, 2)}, "'image' is a tensor of shape (1, 3, 2, 2), torch.float32; the fields"),
        ({"image": [b"x"]}, "'image' is a list of bytes; the fields are image"),
    ],
    ids=["missing", "floats", "bytes"],
)
def test_examples_without_images_are_refused(fields: dict[str, Any], given: str) -> None:
    with pytest.raises(InputError) as caught:
        one(Fields(fields))
    assert caught.value.what == "There is no image to show in the field 'image'."
    assert str(caught.value.given).startswith(given)
    assert caught.value.expected == "encoded images, or uint8 of shape (batch, 1 or 3, height, width)"
    assert caught.value.hint == "show images of whole numbers from 0 to 255, of which augmentations may make floats"


def test_an_augmentation_for_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="RandomResizedCrop finds no images"):
        one(Fields({"image": torch.zeros(1, 1, 2, 2, dtype=torch.uint8)}), pipeline=Pipeline(CROP))


def test_a_reader_without_examples_is_refused() -> None:
    class Empty(Images):
        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError) as caught:
        one(Empty())
    assert caught.value.what == "There are no examples to show."
    assert caught.value.given == "Empty of length 0"


@pytest.mark.parametrize(("options", "name"), [({"num_draws": 0}, "num_draws"), ({"positions": [-1]}, "position")])
def test_numbers_out_of_range_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is out of range"):
        list(examples(Images(), **{"positions": [0], **options}))


def test_a_batch_is_drawn_with_its_boxes() -> None:
    images = torch.stack([noise(0), noise(1)])
    boxes = [torch.tensor([[0.0, 0.0, 0.5, 0.5]]), torch.zeros(0, 4)]
    labels = [torch.tensor([3]), torch.zeros(0, dtype=torch.int64)]
    drawn = with_marks({"image": images, "boxes": boxes, "labels": labels}, 2)
    assert torch.equal(drawn[0], draw_marks(images[0], Marks(boxes[0], ["3"], labels=[3])))
    assert torch.equal(drawn[1], images[1])
    assert len(with_marks({"image": images, "boxes": boxes}, 1)) == 1


@pytest.mark.parametrize(
    "batch",
    [
        {"image": torch.zeros(2, 1, 4, 4, dtype=torch.uint8)},
        {"image": torch.zeros(2, 3, 4, 4), "boxes": [torch.ones(1, 4)] * 2},
        {"image": torch.zeros(2, 4, 4, 4, dtype=torch.uint8), "boxes": [torch.ones(1, 4)] * 2},
    ],
    ids=["no boxes", "floats", "four channels"],
)
def test_a_batch_on_which_nothing_can_be_drawn_is_left_alone(batch: dict[str, Any]) -> None:
    (image,) = with_marks(batch, 1)
    assert torch.equal(image, batch["image"][0])


def test_images_of_a_batch_need_no_common_size() -> None:
    images = [noise(0), noise(1)[:, :5]]
    drawn = with_marks({"image": images, "boxes": [torch.zeros(0, 4)] * 2}, 2)
    assert all(torch.equal(*both) for both in zip(drawn, images, strict=True))


def test_a_class_has_its_name_where_labels_are_shifted() -> None:
    shifted = ClassificationReader(Images(classes=("cat", "dog")), 3, offset=-1)
    assert one(shifted).class_name == "cat"
