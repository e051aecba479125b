"""The data of a detector's recipe: what its paths lead to, and what batches come of it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.augmentations.boxes import ScaleBoxesToPixelCoordinates
from lockstep.augmentations.colours import RandomAdjustBrightness
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.convert.detection import convert_coco, convert_voc
from lockstep.convert.sharding import Settings
from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.ragged import Ragged
from lockstep.readers.coco import Coco
from lockstep.readers.label_map import LabelMap, read_label_map, write_label_map
from lockstep.recipes.code import Function
from lockstep.recipes.data import DetectionData

FIXTURES = Path(__file__).parent.parent / "fixtures"
COCO = f"{FIXTURES}/coco/instances.json:{FIXTURES}/coco/images"
VOC = str(FIXTURES / "voc" / "bccd")
ALONE = Settings(num_processes=1)


@pytest.fixture
def records(tmp_path: Path) -> str:
    """The images of COCO's fixture as records, with masks."""
    annotations, images = COCO.split(":")
    convert_coco(annotations, images, tmp_path, masks=True, base="all", settings=ALONE)
    return str(tmp_path / "all-*")


def batch_of(data: DetectionData, num_classes: int = 80, split: str = "train", **options: Any) -> dict[str, Any]:
    reader = data.reader(split, num_classes, **options)
    return reader.read_batch(np.arange(len(reader)))


def test_coco_and_records_of_it_give_the_same_objects(records: str) -> None:
    """The labels of records have no names without their label map, so the model has 90 classes."""
    of_coco = batch_of(DetectionData(COCO, masks=True), 90)
    of_records = batch_of(DetectionData(records, masks=True), 90)
    for name in ("boxes", "labels", "area", "is_crowd", "truth_labels", "truth_is_crowd", "truth_area"):
        torch.testing.assert_close(of_records[name].values, of_coco[name].values)
    assert [len(each) for each in of_records["masks"]] == [len(each) for each in of_coco["masks"]]
    torch.testing.assert_close(of_records["truth_boxes"].values, of_coco["truth_boxes"].values, rtol=0, atol=1e-4)


def test_the_80_classes_of_coco_are_numbered_from_1_to_80_for_a_model_of_80(records: str) -> None:
    reader = DetectionData(COCO).reader("train", 80)
    assert reader.classes[1] == "person"  # type: ignore[attr-defined]
    assert reader.classes[80] == "toothbrush"  # type: ignore[attr-defined]
    label_map = str(Path(records).parent / "label_map.pbtxt")
    assert batch_of(DetectionData(records, label_map=label_map))["labels"].values.max() == 80
    with pytest.raises(DataError, match="more classes than the detector"):
        DetectionData(COCO).reader("train", 20)


def test_a_class_that_the_label_map_lacks_is_named(records: str, tmp_path: Path) -> None:
    whole = read_label_map(Path(records).parent / "label_map.pbtxt")
    lacking = whole.names[int(batch_of(DetectionData(records), 90)["labels"].values[0])]
    write_label_map(tmp_path / "map.pbtxt", LabelMap(tuple(each for each in whole.labels if each.name != lacking)))
    data = DetectionData(records, label_map=str(tmp_path / "map.pbtxt"))
    with pytest.raises(DataError) as caught:
        batch_of(data, 90)
    error = caught.value
    assert error.what.endswith("is of a class that the label map lacks.")
    assert error.given == f"the class {lacking!r}, and {tmp_path / 'map.pbtxt'}"
    assert error.expected.startswith("one of person, ")
    assert error.hint.startswith("add the class to the label map, and to model.num_classes; or leave such objects out")
    assert batch_of(replace(data, bad_objects="drop"), 90)["objects_left_out"].sum() > 0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["BloodImage_00343.jpg"]),
        ({"train_split": "trainval"}, ["BloodImage_00338.jpg", "BloodImage_00343.jpg"]),
        ({"split": "validation"}, ["BloodImage_00338.jpg"]),
        ({"split": "validation", "validation_split": "train"}, ["BloodImage_00343.jpg"]),
    ],
)
def test_the_lists_of_vocs_folder_are_the_splits(options: dict[str, Any], names: list[str]) -> None:
    data = DetectionData(VOC, VOC, **options)
    assert batch_of(data, split=data.split)["source_id"] == names


def test_a_folder_of_voc_without_lists_is_read_whole() -> None:
    assert len(DetectionData(str(FIXTURES / "voc" / "raccoon")).reader("train", 1)) > 0


def test_voc_of_a_year_is_below_its_path(tmp_path: Path) -> None:
    (tmp_path / "VOC2007").symlink_to(VOC)
    assert len(DetectionData(str(tmp_path), year=2007).reader("train", 3)) == 1


def test_labels_may_count_from_0(records: str, tmp_path: Path) -> None:
    shards = tmp_path / "voc"
    convert_voc(VOC, shards, split="trainval", settings=ALONE)
    labels = batch_of(DetectionData(f"{shards}/trainval-*"), 3)["labels"].values
    assert torch.equal(
        batch_of(DetectionData(f"{shards}/trainval-*", labels_offset=-1), 4)["labels"].values, labels + 1
    )
    assert batch_of(DetectionData(COCO, labels_offset=-1))["labels"].values.max() == 80


def test_what_is_scored_has_its_truth_and_what_is_trained_on_has_none(records: str) -> None:
    for path in (COCO, records):
        names = batch_of(DetectionData(path, path), 90, "validation").keys()
        assert {"truth_boxes", "truth_labels", "truth_is_crowd", "truth_difficult", "truth_group_of"} <= names
        assert not any(name.startswith("truth_") for name in batch_of(DetectionData(path), 90, to_train=True))


def test_training_batches_are_augmented_and_of_one_size_with_targets() -> None:
    data = DetectionData(COCO, resizer=FixedShapeResizer(32, 48), augment=(HorizontalFlip(p=1.0),), masks=True)
    reader = data.reader("train", 80, to_train=True)
    loader = Loader(
        reader, batch_size=2, order="sequential", augment=[*data.training(), data.targets(80)], num_processes=0
    )
    with closing(loader.batches(range(1), 1)) as batches:
        batch = next(batches)
    assert data.inputs(batch).shape == data.blank(2).shape == (2, 3, 32, 48)
    plain = reader.read_batch(np.arange(2))["boxes"]
    torch.testing.assert_close(batch["boxes"].values[:, 1], 1 - plain.values[:, 3])
    assert batch["classes"].values.shape == (len(plain.values), 80)
    assert [tuple(masks.shape) for masks in batch["masks"]] == [(int(count), 32, 48) for count in plain.lengths]
    assert batch["original_size"].tolist() == [[640, 427], [423, 640]]


def test_colours_wait_for_the_size_of_the_network_unless_told_otherwise() -> None:
    augment = (RandomAdjustBrightness(max_delta=0.8), HorizontalFlip())
    waiting = DetectionData(COCO, resizer=FixedShapeResizer(32, 48), augment=augment)
    in_order = replace(waiting, colours_after_resizing=False)
    batch, ordered = (first_batch(data) for data in (waiting, in_order))
    assert batch["image"].dtype == torch.uint8
    assert ordered["image"].dtype == torch.float32
    added = 255 * batch["image.colours"][:, :, None, None]
    torch.testing.assert_close(waiting.inputs(batch), (batch["image"] + added).clamp(0, 255), rtol=0, atol=1e-3)
    assert torch.equal(in_order.inputs(ordered), ordered["image"])
    assert 0 < (waiting.inputs(batch) - ordered["image"]).abs().mean() < 8  # clipped after the resize, not before
    scored = {"image": batch["image"]}
    assert torch.equal(waiting.inputs(scored), scored["image"].float())


def test_padding_is_not_coloured() -> None:
    resizer = KeepAspectRatioResizer(20, 60, pad_to_max_dimension=True)
    data = DetectionData(COCO, resizer=resizer, augment=(RandomAdjustBrightness(),))
    assert data.training() == (RandomAdjustBrightness(), resizer)


def first_batch(data: DetectionData) -> dict[str, Any]:
    """Two training examples."""
    reader = data.reader("train", 80, to_train=True)
    loader = Loader(reader, batch_size=2, order="sequential", augment=data.training(), num_processes=0)
    with closing(loader.batches(range(1), 1)) as batches:
        return next(batches)


def test_objects_that_are_not_wanted_are_left_out_of_training_alone() -> None:
    data = DetectionData(COCO, COCO, crowd=False, max_number_of_boxes=5)
    batch = batch_of(data, split="validation")
    assert batch["boxes"].lengths.tolist() == [5, 5]
    assert batch["truth_boxes"].lengths.tolist() == [35, 10]
    assert batch["objects_left_out"].tolist() == [29, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"merge_multiple_label_boxes": True, "masks": True},
        {"merge_multiple_label_boxes": True, "num_keypoints": 17},
        {"merge_multiple_label_boxes": True, "use_multiclass_scores": True},
        {"bad_objects": "ignore"},
        {"train": ""},
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        DetectionData(**options)


def test_a_path_that_nobody_told_says_how_to_build_the_data() -> None:
    with pytest.raises(DataError, match="told where its train images are") as caught:
        DetectionData().check_complete()
    assert "lockstep convert detection" in (caught.value.hint or "")
    assert "COCO" in (caught.value.expected or "")


def test_a_label_map_that_is_not_there_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no data at .*no_map\.pbtxt") as caught:
        DetectionData(COCO, label_map=str(tmp_path / "no_map.pbtxt")).check_complete()
    assert caught.value.expected == "a label map: a file with the id and the name of each class"


def test_what_a_detector_can_read_is_offered_in_the_place_of_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no data at") as caught:
        DetectionData(str(tmp_path / "bccd")).check_complete()
    assert caught.value.expected == DetectionData.known
    assert "each class" not in DetectionData.known


def test_paths_are_looked_for_in_the_folder_of_the_run_too(tmp_path: Path) -> None:
    (tmp_path / "map.pbtxt").write_text("item { id: 1 name: 'a' }")
    (tmp_path / "voc").symlink_to(VOC)
    found = DetectionData("voc", label_map="map.pbtxt").found_from(tmp_path)
    assert (found.train, found.label_map) == (str(tmp_path / "voc"), str(tmp_path / "map.pbtxt"))


def test_the_size_of_the_images_is_that_of_the_resizer() -> None:
    assert DetectionData(resizer=FixedShapeResizer(300, 200)).image_size == 200
    kept = KeepAspectRatioResizer(600, 1024)
    assert DetectionData(resizer=kept).image_size == 600
    assert DetectionData(resizer=replace(kept, pad_to_max_dimension=True)).blank(1).shape == (1, 3, 1024, 1024)


def test_images_of_several_sizes_stay_apart() -> None:
    data = DetectionData(resizer=KeepAspectRatioResizer(20, 40))
    images = [torch.zeros(3, 20, 30), torch.zeros(3, 20, 40)]
    assert data.inputs({"image": images[:1]}).shape == (1, 3, 20, 30)
    assert [tuple(each.shape) for each in data.inputs({"image": images})] == [(3, 20, 30), (3, 20, 40)]


def test_boxes_in_pixels_end_the_augmentations() -> None:
    to_pixels = ScaleBoxesToPixelCoordinates()
    assert DetectionData(COCO, augment=(HorizontalFlip(), to_pixels, RandomAdjustBrightness())).augment[1] == to_pixels
    with pytest.raises(InputError, match=r"(?s)ScaleBoxesToPixelCoordinates before HorizontalFlip.*at the end"):
        DetectionData(COCO, augment=(to_pixels, HorizontalFlip()))


def test_a_function_may_give_the_examples() -> None:
    source = Coco(*COCO.split(":"))
    batch = DetectionData(function=Function("", "mine")).labelled(source, 80, to_train=True).read_batch(np.arange(2))
    assert batch["labels"].values.max() == 80


def bits_of(batch: Any) -> dict[str, list[Any]]:
    """Each field but the names, as numbers that can be compared; NaN is equal to itself."""
    rows = {name: list(values) for name, values in batch.items() if isinstance(values, Ragged | torch.Tensor | list)}
    return {
        name: [row.numpy().tobytes() if isinstance(row, torch.Tensor) else row for row in values]
        for name, values in rows.items()
    }


@pytest.mark.process
def test_targets_are_the_same_whoever_reads_them() -> None:
    data = DetectionData(
        f"{FIXTURES}/coco/person_keypoints.json:{FIXTURES}/coco/images",
        masks=True,
        num_keypoints=17,
        resizer=FixedShapeResizer(24, 32),
        augment=(HorizontalFlip(keypoint_flip_permutation=tuple(range(17))),),
    )

    def batches(**crew: int) -> list[dict[str, list[Any]]]:
        augment = [*data.training(), data.targets(1)]
        loader = Loader(data.reader("train", 1, to_train=True), batch_size=2, seed=3, augment=augment, **crew)
        with closing(loader.batches(range(2), 2)) as found:
            return [bits_of(batch) for batch in islice(found, 3)]

    alone = batches(num_processes=0)
    assert {"classes", "weights", "keypoint_weights", "masks", "objects_left_out", "original_size"} <= alone[0].keys()
    assert batches(num_processes=1) == alone
    assert batches(num_processes=3) == alone
