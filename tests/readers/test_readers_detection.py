"""Objects as a detector is trained on them: their labels, what becomes of bad ones, and what they are scored by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import DataError, InputError
from lockstep.images.masks import DenseMasks, dense_masks
from lockstep.ragged import Ragged
from lockstep.readers.coco import Coco
from lockstep.readers.detection import DetectionReader
from lockstep.readers.reader import Cost, Int64s

FIXTURE = Path(__file__).parent.parent / "fixtures" / "coco"
BOX = [0.1, 0.2, 0.5, 0.6]


class Objects:
    """Two images of 4 x 6 pixels, the first with the objects given, the second with none."""

    cost: Cost = "memory"

    def __init__(self, boxes: Sequence[Sequence[float]], labels: Sequence[int] | None = None, **more: Any) -> None:
        self.boxes = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
        self.labels = torch.tensor([1] * len(boxes) if labels is None else labels, dtype=torch.int64)
        self.more = more

    def __len__(self) -> int:
        return 2

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        fields = {"boxes": self.boxes, "labels": self.labels, **self.more}
        return {"image": torch.zeros(len(indices), 3, 4, 6, dtype=torch.uint8)} | {
            name: self._two(values) for name, values in fields.items()
        }

    @staticmethod
    def _two(values: Any) -> Any:
        return values if isinstance(values, list | Ragged) else [values, values[:0]]

    def example_id(self, index: int) -> str:
        return f"image {index}"


def read(reader: Any, num_classes: int = 3, **options: Any) -> dict[str, Any]:
    return DetectionReader(reader, num_classes, **options).read_batch(np.arange(2))


def refused(reader: Any, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(reader, **options)
    return caught.value


# Labels ---------------------------------------------------------------------------------------------------------------


def named(reader: Any, classes: Mapping[int, str]) -> Any:
    reader.classes = classes
    return reader


def test_labels_beyond_the_number_of_classes_are_numbered_in_their_order() -> None:
    source = named(Objects([BOX] * 3, [90, 1, 13]), {90: "toothbrush", 1: "person", 13: "stop sign"})
    reader = DetectionReader(source, 3)
    assert reader.classes == {1: "person", 2: "stop sign", 3: "toothbrush"}
    assert read(source)["labels"][0].tolist() == [3, 1, 2]


def test_labels_that_fit_are_taken_as_they_are() -> None:
    source = named(Objects([BOX] * 2, [4, 2]), {2: "dog", 4: "cat"})
    assert DetectionReader(source, 4).classes == {2: "dog", 4: "cat"}
    assert read(source, 4)["labels"][0].tolist() == [4, 2]


def test_labels_may_count_from_0() -> None:
    assert read(Objects([BOX] * 3, [0, 1, 2]), offset=-1)["labels"][0].tolist() == [1, 2, 3]


def test_a_label_map_says_which_classes_there_are() -> None:
    reader = DetectionReader(Objects([BOX] * 2, [7, 20]), 2, classes={0: "background", 7: "cat", 20: "dog"})
    assert reader.classes == {1: "cat", 2: "dog"}
    assert reader.read_batch(np.arange(2))["labels"][0].tolist() == [1, 2]


def test_more_classes_than_the_detector_has_are_refused_before_anything_is_read() -> None:
    with pytest.raises(DataError, match="more classes than the detector") as caught:
        DetectionReader(named(Objects([]), {1: "a", 5: "b", 9: "c"}), 2)
    assert caught.value.given == "3 classes: a, b, c"


@pytest.mark.parametrize("label", [-1, 0, 4, -(2**63), 2**63 - 1])
def test_a_label_that_is_none_of_the_classes_is_refused_or_left_out(label: int) -> None:
    source = Objects([BOX, BOX], [2, label])
    error = refused(source)
    assert error.what == "image 0: object 1 has labels that cannot be used."
    assert error.given == f"labels={label}"
    assert error.expected == "1 to 3: the classes of the detector, as the data numbers them"
    batch = read(source, bad_objects="drop")
    assert batch["labels"][0].tolist() == [2]
    assert batch["objects_left_out"].tolist() == [1, 0]


# Boxes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "box",
    [
        [0.5, 0.2, 0.1, 0.6],
        [0.1, 0.6, 0.5, 0.2],
        [math.nan, 0.2, 0.5, 0.6],
        [0.1, 0.2, 0.5, math.inf],
        [10.0, 20, 50, 60],
        [-0.2, 0.2, 0.5, 0.6],
    ],
)
def test_a_box_that_is_none_is_refused_or_left_out(box: list[float]) -> None:
    source = Objects([BOX, box], [1, 2])
    error = refused(source)
    assert error.what == "image 0: object 1 has boxes that cannot be used."
    assert "data.bad_objects" in (error.hint or "")
    batch = read(source, bad_objects="drop")
    assert batch["labels"][0].tolist() == [1]
    assert batch["objects_left_out"].tolist() == [1, 0]


def test_a_box_at_the_edge_is_clipped_and_one_without_area_is_left_out() -> None:
    batch = read(Objects([[-0.05, 0.2, 0.5, 1.1], [0.3, 0.3, 0.3, 0.9], [1.0, 0, 1.05, 1]], [1, 2, 3]))
    torch.testing.assert_close(batch["boxes"][0], torch.tensor([[0, 0.2, 0.5, 1]]))
    assert batch["labels"][0].tolist() == [1]
    assert batch["objects_left_out"].tolist() == [2, 0]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused_or_left_out(weight: float) -> None:
    source = Objects([BOX, BOX], weights=torch.tensor([1, weight]))
    assert refused(source).what == "image 0: object 1 has weights that cannot be used."
    assert read(source, bad_objects="drop")["weights"][0].tolist() == [1]


def test_images_without_objects_are_kept() -> None:
    batch = read(Objects([]))
    assert batch["boxes"].lengths.tolist() == [0, 0]
    assert batch["boxes"].values.shape == (0, 4)
    assert batch["original_size"].tolist() == [[4, 6], [4, 6]]
    assert batch["objects_left_out"].tolist() == [0, 0]


def test_the_first_objects_are_kept_where_there_are_too_many_and_the_others_are_counted() -> None:
    boxes = [BOX, [0.1, 0.1, 0.1, 0.1], BOX, BOX, BOX]
    batch = read(Objects(boxes, [1, 2, 3, 1, 2]), max_number_of_boxes=2)
    assert batch["labels"][0].tolist() == [1, 3]
    assert batch["objects_left_out"].tolist() == [3, 0]


def test_crowds_and_difficult_objects_are_left_out_where_they_are_not_wanted_and_not_counted() -> None:
    flags = {"is_crowd": torch.tensor([True, False, False]), "difficult": torch.tensor([False, True, False])}
    source = Objects([BOX] * 3, [1, 2, 3], **flags)
    assert read(source)["labels"][0].tolist() == [1, 2, 3]
    batch = read(source, crowd=False)
    assert batch["labels"][0].tolist() == [2, 3]
    assert batch["objects_left_out"].tolist() == [0, 0]
    assert read(source, crowd=False, difficult=False, max_number_of_boxes=1)["labels"][0].tolist() == [3]


edges = st.sampled_from([-0.3, -0.1, 0.0, 0.25, 0.5, 1.0, 1.1, 7.0, math.nan, math.inf])


@given(st.lists(st.tuples(edges, edges, edges, edges, st.integers(-1, 4))), st.none() | st.integers(1, 3))
def test_whatever_boxes_there_are_those_that_are_left_have_an_area_within_their_image(
    objects: list[tuple[float, ...]], most: int | None
) -> None:
    source = Objects([each[:4] for each in objects], [int(each[4]) for each in objects])
    batch = read(source, bad_objects="drop", max_number_of_boxes=most)
    boxes, labels = batch["boxes"].values, batch["labels"].values
    assert ((boxes >= 0) & (boxes <= 1)).all()
    assert (boxes[:, :2] < boxes[:, 2:]).all()
    assert ((labels >= 1) & (labels <= 3)).all()
    assert (batch["objects_left_out"] + batch["boxes"].lengths).tolist() == [len(objects), 0]
    assert most is None or len(boxes) <= most


# Fields that fit each other -------------------------------------------------------------------------------------------


def masks(count: int, height: int = 4, width: int = 6) -> DenseMasks:
    return dense_masks(np.ones((count, height, width), np.float32), height, width)


def test_masks_follow_their_objects_and_may_be_missing() -> None:
    source = Objects([BOX, [0.1, 0.1, 0.1, 0.1], BOX], masks=[masks(3), masks(0)])
    assert [len(each) for each in read(source)["masks"]] == [2, 0]
    assert [len(each) for each in read(Objects([BOX], masks=[masks(0), masks(0)]))["masks"]] == [0, 0]


@pytest.mark.parametrize(
    ("name", "values", "given"),
    [
        ("masks", [masks(1, 4, 5), masks(0)], "5 x 4 pixels"),
        ("masks", [masks(2), masks(0)], "2 of them"),
        ("is_crowd", torch.zeros(2, dtype=torch.bool), "2 of them"),
        ("weights", torch.zeros(1, dtype=torch.float64), "torch.float64 of shape (1,)"),
        ("labels", torch.zeros(1, 1, dtype=torch.int64), "torch.int64 of shape (1, 1)"),
        ("keypoints", [torch.zeros(1, 3, 2), torch.zeros(0, 4, 2)], "torch.float32 of shape (0, 4, 2)"),
        ("keypoints", [torch.zeros(1, 3, 2), torch.zeros(0, 3, 2)], "3 of each object"),
        ("boxes", [[1], []], "list"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(name: str, values: Any, given: str) -> None:
    source = Objects([BOX])
    source.more = {name: values}
    error = refused(source, num_keypoints=17, bad_objects="drop")
    assert f"the field '{name}' does not fit the others" in error.what
    assert error.what.startswith("image ")
    assert error.given == given


@pytest.mark.parametrize("missing", ["boxes", "labels"])
def test_data_without_objects_is_refused(missing: str) -> None:
    class Without(Objects):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            return {name: values for name, values in super().read_batch(indices).items() if name != missing}

    assert missing in (refused(Without([BOX])).hint or "")


def test_keypoints_outside_their_image_are_not_labelled() -> None:
    points = torch.tensor([[[0.0, 1.0], [-0.1, 0.3], [0.5, 300.0]]])
    batch = read(Objects([BOX], keypoints=points))
    assert batch["keypoint_visibility"][0].tolist() == [[2, 0, 0]]
    assert batch["keypoints"][0][0].isnan().all(1).tolist() == [False, True, True]


def test_keypoints_that_are_no_numbers_are_not_labelled() -> None:
    points = torch.tensor([[[0.1, 0.2], [math.nan, 0.3], [0.5, 0.5]]])
    visibility = torch.tensor([[2, 2, 0]])
    batch = read(Objects([BOX], keypoints=points, keypoint_visibility=visibility), num_keypoints=3)
    assert batch["keypoint_visibility"][0].tolist() == [[2, 0, 0]]
    assert torch.isnan(batch["keypoints"][0][0]).all(1).tolist() == [False, True, True]
    assert read(Objects([BOX], keypoints=points))["keypoint_visibility"][0].tolist() == [[2, 0, 2]]


@pytest.mark.parametrize(
    "options",
    [{"num_classes": 0}, {"max_number_of_boxes": 0}, {"bad_objects": "ignore"}, {"offset": 0.5}, {"num_keypoints": -1}],
)
def test_arguments_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        DetectionReader(Objects([]), **{"num_classes": 3, **options})


# What detections are scored against -----------------------------------------------------------------------------------


def test_the_truth_has_the_very_numbers_of_the_annotations_and_all_objects() -> None:
    path = FIXTURE / "person_keypoints.json"
    document = json.loads(path.read_text())
    source = Coco(path, FIXTURE / "images", masks=True, keypoints=True, truth=True)
    reader = DetectionReader(source, 90, crowd=False, max_number_of_boxes=1)
    batch = reader.read_batch(np.arange(len(reader)))
    for row, number in enumerate(batch["source_id"]):
        own = [each for each in document["annotations"] if each["image_id"] == int(number)]
        assert batch["truth_boxes"][row].tolist() == [each["bbox"] for each in own]
        assert batch["truth_area"][row].tolist() == [each["area"] for each in own]
        assert batch["truth_ids"][row].tolist() == [each["id"] for each in own]
        assert batch["truth_labels"][row].tolist() == [each["category_id"] for each in own]
        assert batch["truth_is_crowd"][row].tolist() == [bool(each["iscrowd"]) for each in own]
        assert batch["truth_keypoints"][row].flatten(1).tolist() == [each["keypoints"] for each in own]
        assert len(batch["truth_masks"][row]) == len(own)
        assert not batch["truth_difficult"][row].any()
    assert batch["boxes"].lengths.max() == 1


def test_what_a_reader_does_not_say_of_the_truth_is_the_area_of_the_box_or_false() -> None:
    truth = {"truth_boxes": torch.tensor([[1.0, 2, 3, 4]]).double(), "truth_labels": torch.tensor([20])}
    source = named(
        Objects([BOX], [20], **{name: Ragged.of([v, v[:0]]) for name, v in truth.items()}), {3: "a", 20: "b"}
    )
    batch = read(source, 2)
    assert batch["truth_labels"][0].tolist() == [2]
    assert batch["truth_area"][0].tolist() == [12]
    assert [batch[f"truth_{flag}"][0].tolist() for flag in ("is_crowd", "difficult", "group_of")] == [[False]] * 3


def test_the_truth_may_be_lists_and_has_boxes_and_labels() -> None:
    boxes, labels = torch.tensor([[1.0, 2, 3, 4]]).double(), torch.tensor([1])
    batch = read(Objects([BOX], truth_boxes=boxes, truth_labels=labels))
    assert [each.tolist() for each in batch["truth_boxes"]] == [[[1, 2, 3, 4]], []]
    error = refused(Objects([BOX], truth_boxes=boxes))
    assert error.what == "image 0: the field 'truth_labels' does not fit the others."
    assert (error.given, error.expected) == ("no such field, but truth_boxes", "both, or none")


def test_labels_of_images_are_numbered_and_those_of_no_class_left_out() -> None:
    boxes, labels = torch.tensor([[1.0, 2, 3, 4]]).double(), torch.tensor([20])
    more = {"truth_boxes": boxes, "truth_labels": labels, "truth_verified_labels": torch.tensor([3, 5, 20])}
    source = Objects([BOX], [20], **{name: Ragged.of([values, values[:0]]) for name, values in more.items()})
    batch = read(named(source, {3: "a", 20: "b"}), 2)
    assert [each.tolist() for each in batch["truth_verified_labels"]] == [[1, 2], []]


@pytest.mark.parametrize(
    ("given_masks", "said"), [(torch.ones(4, 6), "shape (4, 6)"), (np.ones((1, 4, 6)), "ndarray"), (None, "NoneType")]
)
def test_what_are_no_masks_is_refused(given_masks: Any, said: str) -> None:
    error = refused(Objects([BOX], masks=[given_masks, masks(0)]))
    assert error.what == "image 0: the field 'masks' does not fit the others."
    assert (error.given, error.expected) == (said, "lazy masks, or a tensor of shape (objects, height, width)")


def test_an_image_without_an_id_has_the_name_of_its_example() -> None:
    assert read(Objects([BOX]))["source_id"] == ["image 0", "image 1"]
    assert read(Objects([BOX], source_id=["7", ""]))["source_id"] == ["7", "image 1"]


def test_bad_objects_are_left_out_of_the_truth_too() -> None:
    boxes: Tensor = torch.tensor([[0.0, 0, 1, 1], [0, 0, math.nan, 1], [0, 0, -1, 1], [0, 0, 0, 0]]).double()
    labels = torch.tensor([1, 1, 1, 1])
    more: dict[str, Any] = {
        "truth_boxes": Ragged.of([boxes, boxes[:0]]),
        "truth_labels": Ragged.of([labels, labels[:0]]),
        "truth_masks": [masks(4), masks(0)],
    }
    batch = read(Objects([BOX], **more))
    assert batch["truth_boxes"][0].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert [len(each) for each in batch["truth_masks"]] == [2, 0]


def test_categories_of_the_data_are_known_by_label(tmp_path: Path) -> None:
    reader = Objects([BOX])
    reader.classes = {9: "dog", 3: "cat"}  # type: ignore[attr-defined]
    assert DetectionReader(reader, 2).category_ids == {1: 3, 2: 9}
    assert DetectionReader(Objects([BOX]), 2, offset=-1).category_ids == {1: 0, 2: 1}
    zero_based: dict[str, Any] = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": 4, "width": 6}],
        "annotations": [],
        "categories": [{"id": 0, "name": "cat"}, {"id": 7, "name": "dog"}],
    }
    (tmp_path / "instances.json").write_text(json.dumps(zero_based))
    (tmp_path / "a.jpg").touch()
    annotations = Coco(tmp_path / "instances.json", tmp_path, zero_based=True)
    assert annotations.category_ids == {1: 0, 8: 7}
    assert DetectionReader(annotations, 2).category_ids == {1: 0, 2: 7}
