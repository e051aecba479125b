from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.augmentations.crops import Resize
from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding
from lockstep.readers.coco import Coco
from lockstep.readers.label_map import Label, LabelMap, read_label_map

TESTS = Path(__file__).parent.parent
FIXTURE = TESTS / "fixtures" / "coco"
INSTANCES, KEYPOINTS, IMAGES = FIXTURE / "instances.json", FIXTURE / "person_keypoints.json", FIXTURE / "images"
FOLDER = os.environ.get("LOCKSTEP_COCO")
MORE_FILES = sorted(Path(FOLDER, "annotations").glob("[ip]*_*.json")) if FOLDER else []
FORMAT = "images, annotations (of instances or of keypoints) and categories, each with an id of its own"

Document = dict[str, Any]


def annotation(number: int, image: int, box: list[float], **more: Any) -> Document:
    return {"id": number, "image_id": image, "category_id": 7, "bbox": box, "area": 4.5, "iscrowd": 0, **more}


def document_of(*annotations: Document, sizes: tuple[tuple[int, int], ...] = ((4, 8), (6, 3), (4, 8))) -> Document:
    """Images 10, 20, ... of these heights and widths; the categories 7 and 9."""
    images = [
        {"id": 10 * place, "file_name": f"{place}.png", "height": height, "width": width}
        for place, (height, width) in enumerate(sizes, 1)
    ]
    categories = [{"id": 9, "name": "dog"}, {"id": 7, "name": "cat"}]
    return {"images": images, "annotations": list(annotations), "categories": categories}


def written(tmp_path: Path, document: object) -> tuple[Path, Path]:
    """The file of annotations, and the folder with the images that it lists."""
    folder = tmp_path / "images"
    folder.mkdir(exist_ok=True)
    for place, image in enumerate(document["images"] if isinstance(document, dict) else []):
        Image.new("RGB", (image["width"], image["height"]), (place,) * 3).save(folder / image["file_name"])
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(document))
    return path, folder


def field_of(reader: Coco, name: str) -> list[Any]:
    """The values of all images, as lists."""
    values = reader.read_batch(np.arange(len(reader)))[name]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]


def test_photographs_and_their_objects() -> None:
    reader = Coco(INSTANCES, IMAGES)
    document = json.loads(INSTANCES.read_text())
    assert (len(reader), reader.cost) == (2, "decode")
    assert [reader.example_id(index) for index in range(2)] == ["000000159269.jpg", "000000229358.jpg"]
    batch = reader.read_batch(np.array([1, 0]))
    assert [image.source for image in batch["image"]] == [f"{IMAGES}/{reader.example_id(index)}" for index in (1, 0)]
    assert [image.size for image in batch["image"]] == [(640, 423), (427, 640)]
    assert batch["source_id"] == ["229358", "159269"]
    for row, (number, width, height) in enumerate([(229358, 640, 423), (159269, 427, 640)]):
        own = [each for each in document["annotations"] if each["image_id"] == number]
        x, y, w, h = np.array([each["bbox"] for each in own]).T
        expected = np.stack([y / height, x / width, (y + h) / height, (x + w) / width], axis=1)
        np.testing.assert_allclose(batch["boxes"][row], expected, rtol=0, atol=1e-6)
        assert batch["labels"][row].tolist() == [each["category_id"] for each in own]
        assert batch["is_crowd"][row].tolist() == [bool(each["iscrowd"]) for each in own]
        assert batch["area"][row].tolist() == pytest.approx([each["area"] for each in own])
        assert batch["class_text"][row] == [reader.classes[each["category_id"]] for each in own]
    assert (len(reader.classes), reader.classes[1], reader.classes[90]) == (80, "person", "toothbrush")
    types = {name: batch[name][0].dtype for name in ("boxes", "labels", "is_crowd", "area")}
    assert types == {
        "boxes": torch.float32,
        "labels": torch.int64,
        "is_crowd": torch.bool,
        "area": torch.float32,
    }


def test_masks_are_drawn_only_when_asked_for() -> None:
    reader = Coco(INSTANCES, IMAGES, masks=True)
    batch = reader.read_batch(np.array([0, 1]))
    assert [len(masks) for masks in batch["masks"]] == [len(boxes) for boxes in batch["boxes"]]
    for image, masks, areas, boxes in zip(*(batch[name] for name in ("image", "masks", "area", "boxes")), strict=True):
        drawn = masks.decode()
        assert drawn.shape == (len(areas), *image.size[::-1])
        # The areas in the file are those of polygons; what is drawn differs by half a pixel along the outline.
        height, width = drawn.shape[1:]
        sides = (boxes[:, 2:] - boxes[:, :2]) * torch.tensor([height, width])
        assert bool(((drawn.sum((1, 2)) - areas).abs() <= sides.sum(1) + 1).all())
    assert "masks" not in Coco(INSTANCES, IMAGES).read_batch(np.array([0]))


def test_an_object_without_an_outline_has_an_empty_mask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    square = [[1, 1, 3, 1, 3, 3, 1, 3]]
    boxes = [annotation(number, 10, [1, 1, 2, 2], segmentation=square if number == 2 else []) for number in (1, 2, 3)]
    path, folder = written(tmp_path, document_of(*boxes))
    (masks,) = Coco(path, folder, masks=True).read_batch(np.array([0]))["masks"]
    assert masks.decode().sum((1, 2)).tolist() == [0, 4, 0]
    assert caplog.messages == [
        f"2 of 3 objects in {path} have no outline, and masks of zeros: annotation 1, annotation 3"
    ]


def test_keypoints_are_shares_and_nan_where_not_labelled() -> None:
    reader = Coco(KEYPOINTS, IMAGES, keypoints=True)
    batch = reader.read_batch(np.array([0, 1]))
    document = json.loads(KEYPOINTS.read_text())
    expected = np.array([each["keypoints"] for each in document["annotations"]]).reshape(-1, 17, 3)
    assert [tuple(points.shape) for points in batch["keypoints"]] == [(0, 17, 2), (2, 17, 2)]
    assert [tuple(visibility.shape) for visibility in batch["keypoint_visibility"]] == [(0, 17), (2, 17)]
    points, visibility = batch["keypoints"][1], batch["keypoint_visibility"][1]
    assert (points.dtype, visibility.dtype) == (torch.float32, torch.int64)
    assert visibility.tolist() == expected[..., 2].tolist()
    labelled = expected[..., 2] > 0
    assert labelled.any()
    assert not labelled.all()
    assert points.isnan().all(2).tolist() == (~labelled).tolist()
    np.testing.assert_allclose(points[labelled], (expected[..., 1::-1] / (423, 640))[labelled], atol=1e-6)


def test_objects_without_keypoints_have_none_labelled(tmp_path: Path) -> None:
    document = document_of(
        annotation(1, 10, [1, 1, 2, 2]), annotation(2, 10, [1, 1, 2, 2], keypoints=[8, 4, 1, 2, 1, 2])
    )
    (visibility,) = field_of(Coco(*written(tmp_path, document), keypoints=True), "keypoint_visibility")[:1]
    assert visibility == [[0, 0], [1, 2]]


def test_objects_follow_their_images_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    boxes = [(1, 30), (2, 10), (3, 30), (4, 10), (5, 10)]
    document = document_of(*(annotation(number, image, [0, 0, number / 2, 1]) for number, image in boxes))
    reader = Coco(*written(tmp_path, document))
    rights = [[box[3] * 8 * 2 for box in image] for image in field_of(reader, "boxes")]
    assert rights == [[2, 4, 5], [], [1, 3]]
    assert field_of(reader, "class_text") == [["cat"] * 3, [], ["cat"] * 2]
    assert reader.read_batch(np.array([1]))["boxes"][0].shape == (0, 4)


def test_images_without_objects_and_crowds_may_be_left_out(tmp_path: Path) -> None:
    document = document_of(annotation(1, 10, [0, 0, 1, 1], iscrowd=1), annotation(2, 30, [0, 0, 1, 1]))
    path, folder = written(tmp_path, document)

    def ids(**options: bool) -> list[str]:
        return field_of(Coco(path, folder, **options), "source_id")  # type: ignore[arg-type]

    assert ids() == ids(crowd=False) == ["10", "20", "30"]
    assert ids(empty_images=False) == ["10", "30"]
    assert ids(empty_images=False, crowd=False) == ["30"]
    assert field_of(Coco(path, folder), "is_crowd") == [[True], [], [False]]
    assert field_of(Coco(path, folder, crowd=False), "is_crowd") == [[], [], [False]]


def test_boxes_are_clipped_and_those_without_area_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    boxes = [
        [-2, 1, 4, 9],
        [1, 1, 0, 2],
        [1, 1, 2, -1],
        [8, 0, 3, 3],
        [-5, 0, 5, 2],
        [6, 2, 2, 2],
        [0, 9, 1, 1],
        [3, 3, 0, 0],
    ]
    document = document_of(*(annotation(number, 10, box) for number, box in enumerate(boxes)))
    path, folder = written(tmp_path, document)
    caplog.set_level(logging.INFO, "lockstep")
    reader = Coco(path, folder, decoding=Decoding("pillow"))
    assert field_of(reader, "boxes")[0] == [[0.25, 0, 1, 0.25], [0.5, 0.75, 1, 1]]
    named = "annotation 1, annotation 2, annotation 3, annotation 4, annotation 6 and 1 more"
    assert caplog.messages == [
        f"1 of 8 boxes in {path} reach out of their image, and are clipped to it",
        f"6 of 8 objects in {path} have no area on their image, and are left out: {named}",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_missing_area_and_crowd_have_defaults(tmp_path: Path) -> None:
    plain = annotation(1, 10, [0, 0, 2.5, 2])
    del plain["area"], plain["iscrowd"]
    reader = Coco(*written(tmp_path, document_of(plain)))
    assert (field_of(reader, "area")[0], field_of(reader, "is_crowd")[0]) == ([5.0], [False])


def test_null_and_empty_lists_count_as_missing(tmp_path: Path) -> None:
    plain = annotation(1, 10, [0, 0, 2.5, 2], keypoints=[]) | {"area": None, "iscrowd": None}
    reader = Coco(
        *written(tmp_path, document_of(plain, annotation(2, 10, [0, 0, 1, 1], keypoints=[1, 1, 2]))), keypoints=True
    )
    assert (field_of(reader, "area")[0], field_of(reader, "is_crowd")[0]) == ([5.0, 4.5], [False, False])
    assert field_of(reader, "keypoint_visibility")[0] == [[0], [2]]


def test_other_things_may_have_the_id_of_an_image(tmp_path: Path) -> None:
    document = document_of(annotation(1, 10, [0, 0, 1, 1], attributes={"image_id": 3}))
    document["images"][0]["image_id"] = 10
    assert len(field_of(Coco(*written(tmp_path, document)), "boxes")[0]) == 1


def test_without_annotations_there_are_no_masks(tmp_path: Path) -> None:
    reader = Coco(*written(tmp_path, document_of()), masks=True)
    assert [masks.decode().shape for masks in field_of(reader, "masks")] == [(0, 4, 8), (0, 6, 3), (0, 4, 8)]


@pytest.mark.parametrize("name", ["../../../etc/passwd", "..", "a/../../1.png", "/etc/passwd"])
def test_a_file_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    path, folder = written(tmp_path, document_of())
    document = document_of()
    document["images"][1]["file_name"] = name
    path.write_text(json.dumps(document))
    with pytest.raises(DataError) as caught:
        Coco(path, folder)
    assert caught.value.what == f"The annotations name files that are not in {folder}."
    assert caught.value.given == name
    assert caught.value.expected == "paths within the folder, without .. and not from / on"
    assert caught.value.hint == "name the folder above all of them, and write the file names from there on"


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, link_to_zeros])
def test_what_is_no_file_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path, folder = written(tmp_path, document_of())
    (folder / "1.png").unlink()
    make(folder / "1.png")
    with pytest.raises(
        DataError, match=rf"{folder}/1\.png cannot be read\.\n.*no file, or one of more than 2147479552 bytes"
    ):
        Coco(path, folder).read_batch(np.array([0]))


def test_a_label_map_gives_the_labels(tmp_path: Path) -> None:
    document = document_of(annotation(1, 10, [0, 0, 1, 1]), annotation(2, 10, [0, 0, 1, 1], category_id=9))
    label_map = LabelMap((Label(1, "/m/dog", "dog"), Label(2, "cat"), Label(3, "cow")))
    reader = Coco(*written(tmp_path, document), label_map=label_map)
    assert field_of(reader, "labels")[0] == [2, 1]
    assert field_of(reader, "class_text")[0] == ["cat", "dog"]
    assert reader.classes == {1: "dog", 2: "cat", 3: "cow"}


def test_the_label_map_of_coco_gives_the_ids_of_its_categories() -> None:
    label_map = read_label_map(TESTS / "fixtures" / "label_maps" / "mscoco_label_map.pbtxt")
    given, mapped = (field_of(Coco(INSTANCES, IMAGES, label_map=each), "labels") for each in (None, label_map))
    assert given == mapped


def test_a_label_map_that_lacks_a_class_is_refused(tmp_path: Path) -> None:
    path, folder = written(tmp_path, document_of(annotation(1, 10, [0, 0, 1, 1])))
    with pytest.raises(DataError, match=r"cat is not in the label map") as caught:
        Coco(path, folder, label_map=LabelMap((Label(1, "dog"),)))
    assert caught.value.given == f"an object of it is on 1.png; the class 'cat' of {path}"
    with pytest.raises(InputError, match=r"label_map is str\n.*LabelMap\n.*read_label_map"):
        Coco(path, folder, label_map="map.pbtxt")  # type: ignore[arg-type]


def test_the_category_0_is_no_label(tmp_path: Path) -> None:
    document = document_of(annotation(1, 10, [0, 0, 1, 1], category_id=0))
    document["categories"].append({"id": 0, "name": "cow"})
    path, folder = written(tmp_path, document)
    with pytest.raises(DataError) as caught:
        Coco(path, folder, zero_based=False)
    assert caught.value.what == f"The ids of categories in {path} cannot be labels."
    assert caught.value.given == "the id 0 of 'cow'"
    assert caught.value.expected == "ids from 1 on: the label 0 is that of the background"
    assert caught.value.hint == (
        "leave zero_based out, and each label is the id + 1; or "
        "give a label_map, with a label for each category by its name"
    )
    assert field_of(Coco(path, folder, label_map=LabelMap((Label(1, "cow"),))), "labels")[0] == [1]


def test_categories_that_count_from_0_have_labels_from_1(tmp_path: Path) -> None:
    document = document_of(annotation(1, 10, [0, 0, 1, 1], category_id=0), annotation(2, 10, [1, 1, 2, 2]))
    document["categories"].append({"id": 0, "name": "cow"})
    path, folder = written(tmp_path, document)
    for zero_based in (True, None):
        reader = Coco(path, folder, zero_based=zero_based)
        assert field_of(reader, "labels")[0] == [1, 8]
        assert field_of(reader, "class_text")[0] == ["cow", "cat"]
        assert reader.classes == {1: "cow", 8: "cat", 10: "dog"}
    with pytest.raises(InputError, match="zero_based is int"):
        Coco(path, folder, zero_based=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("zero", "above", "label"),
    [("animals", "animals", 7), ("__background__", "", 7), ("cow", "animals", 8), ("cow", ["cow"], 8)],
    ids=["group", "background", "class", "no text"],
)
def test_a_category_0_without_objects_counts_if_it_is_a_class(
    tmp_path: Path, zero: str, above: object, label: int
) -> None:
    """So that a set which lacks the class has the labels of one that does not."""
    document = document_of(annotation(1, 10, [0, 0, 1, 1]))
    for category in document["categories"]:
        category["supercategory"] = above
    document["categories"].append({"id": 0, "name": zero, "supercategory": "none"})
    assert field_of(Coco(*written(tmp_path, document)), "labels")[0] == [label]


def test_a_category_below_0_is_no_label(tmp_path: Path) -> None:
    document = document_of(annotation(1, 10, [0, 0, 1, 1], category_id=-1))
    document["categories"].append({"id": -1, "name": "cow"})
    with pytest.raises(DataError, match=r"ids from 0 on(.|\n)*\n.*give a label_map") as caught:
        Coco(*written(tmp_path, document), zero_based=True)
    assert caught.value.hint == "give a label_map, with a label for each category by its name"


def test_values_of_a_batch_are_its_own(tmp_path: Path) -> None:
    reader = Coco(*written(tmp_path, document_of(annotation(1, 10, [0, 0, 8, 4]))))
    reader.read_batch(np.array([0]))["boxes"][0].zero_()
    assert field_of(reader, "boxes")[0] == [[0, 0, 1, 1]]


def changed(name: str, **values: Any) -> Callable[[Document], object]:
    """The document, with other values in its first image, annotation or category."""

    def change(document: Document) -> object:
        document[name][0].update(values)
        return document

    return change


def without(name: str, key: str) -> Callable[[Document], object]:
    def change(document: Document) -> object:
        del document[name][0][key]
        return document

    return change


def twice(name: str) -> Callable[[Document], object]:
    return lambda document: {**document, name: [*document[name], document[name][0]]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda document: [document], "a list"),
        (lambda document: {"images": []}, "no list 'annotations', but 'images'"),
        (lambda document: {}, "no list 'images', but nothing"),
        (lambda document: {**document, "categories": {}}, "dict as 'categories', not a list"),
        (lambda document: {**document, "images": []}, "no images"),
        (without("images", "id"), "image number 0: no id"),
        (without("images", "file_name"), "image number 0: no file_name"),
        (without("images", "width"), "image number 0: no width"),
        (changed("images", id="10"), "image number 0: id '10'"),
        (changed("images", height=0), "image number 0: height 0"),
        (changed("images", width=-3), "image number 0: width -3"),
        (changed("images", height=2**40), f"image number 0: height {2**40}"),
        (changed("images", file_name=""), "image number 0: file_name ''"),
        (changed("images", file_name="a\0b"), "image number 0: file_name 'a\\x00b'"),
        (changed("images", file_name="\ud800"), "image number 0: 'utf-8' codec can't encode"),
        (lambda document: {**document, "images": [3]}, "image number 0: argument of type 'int'"),
        (twice("images"), "the id 10 of more than one image"),
        (without("annotations", "id"), "an annotation: no id"),
        (
            without("annotations", "image_id"),
            "annotation number 0, without image_id or bbox: {'id': 1, 'category_id': 7",
        ),
        (without("annotations", "category_id"), "annotation 1: no category_id"),
        (without("annotations", "bbox"), "annotation number 0, without image_id or bbox: {'id': 1, 'image_id': 10"),
        (lambda document: {**document, "annotations": ["x"]}, "annotation number 0, without image_id or bbox: 'x'"),
        (changed("annotations", bbox=[1, 2, 3]), "annotation 1: bbox [1, 2, 3]"),
        (changed("annotations", bbox=[1, 2, 3, "4"]), "annotation 1: bbox [1, 2, 3, '4']"),
        (changed("annotations", bbox=[1, 2, 3, float("nan")]), "annotation 1: bbox [1, 2, 3, nan]"),
        (changed("annotations", bbox=[0, 0, 1e308, 1e308]), "annotation 1: bbox [0, 0, 1e+308, 1e+308]"),
        (changed("annotations", bbox=[-(2**31), 0, 1, 1]), "annotation 1: bbox [-2147483648, 0, 1, 1]"),
        (changed("annotations", area="4"), "annotation 1: area '4'"),
        (changed("annotations", area=1e300), "annotation 1: area 1e+300"),
        (changed("annotations", area=-1), "annotation 1: area -1"),
        (changed("annotations", keypoints=[1e300, 1, 2]), "annotation 1: keypoints [1e+300, 1, 2]"),
        (changed("annotations", iscrowd=2), "annotation 1: iscrowd 2"),
        (changed("annotations", id=2**63), f"annotation {2**63}: id {2**63}"),
        (changed("annotations", image_id=11), "annotation 1 is of image 11, which is not listed"),
        (changed("annotations", category_id=8), "annotation 1 is of category 8, which is not listed"),
        (twice("annotations"), "the id 1 of more than one annotation"),
        (without("annotations", "segmentation"), "annotation 1: no segmentation"),
        (changed("annotations", segmentation=[[1]]), "annotation 1: a polygon of 1 numbers"),
        (without("annotations", "keypoints"), "no object with keypoints"),
        (changed("annotations", keypoints=[1, 2]), "annotation 1: keypoints [1, 2]"),
        (changed("annotations", keypoints=[1, 2, None]), "annotation 1: keypoints [1, 2, None]"),
        (changed("annotations", keypoints=[1, 2, 3]), "annotation 1: keypoints with a visibility other than 0, 1"),
        (
            lambda document: {
                **document,
                "annotations": [
                    *document["annotations"],
                    annotation(2, 20, [0, 0, 1, 1], keypoints=[1, 2, 2] * 2, segmentation=[]),
                ],
            },
            "annotation 2 has another number of keypoints than annotation 1",
        ),
        (without("categories", "name"), "category number 0: no name"),
        (changed("categories", id=None), "category number 0: id None"),
        (twice("categories"), "the id 9 of more than one category"),
    ],
    ids=range(46),
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Document], object], problem: str
) -> None:
    refused(tmp_path, change, problem)


def refused(tmp_path: Path, change: Callable[[Document], object], problem: str) -> str:
    whole = annotation(1, 10, [0, 0, 1, 1], segmentation=[], keypoints=[1, 2, 2])
    path, folder = written(tmp_path, document_of(whole))
    path.write_text(json.dumps(change(document_of(whole))))
    with pytest.raises(DataError) as caught:
        Coco(path, folder, masks=True, keypoints=True)
    assert caught.value.what == f"{path} cannot be used as annotations in COCO's format."
    assert str(caught.value.given).startswith(problem)
    assert caught.value.hint == "repair the file, or leave out what is named"
    return caught.value.expected


BOX = "as bbox, four finite numbers: x and y of the upper left corner, width and height, in pixels"
ID = "as id, a whole number of 64 bits, which nothing else in its list has"
POINTS = "as keypoints, finite numbers, x, y and visibility (0, 1 or 2) of each keypoint, equally many for all objects"
SIDE = "a whole number of pixels, from 1 to 2147483647"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda document: {"images": []}, FORMAT),
        (lambda document: {**document, "images": [3]}, FORMAT),
        (without("images", "id"), ID),
        (changed("images", height=0), f"as height, {SIDE}"),
        (without("images", "width"), f"as width, {SIDE}"),
        (changed("images", width=0), f"as width, {SIDE}"),
        (changed("images", file_name="\ud800"), "as file_name, the path of the image's file, as text"),
        (without("annotations", "image_id"), "as image_id, the id of one of the images"),
        (changed("annotations", image_id=11), "as image_id, the id of one of the images"),
        (changed("annotations", category_id=8), "as category_id, the id of one of the categories"),
        (without("annotations", "bbox"), BOX),
        (changed("annotations", bbox=[1, 2, 3]), BOX),
        (changed("annotations", bbox=[1, 2, 3, float("nan")]), BOX),
        (
            changed("annotations", area=-1),
            "as area, a finite number of square pixels, 0 or more; null or left out for ",
        ),
        (changed("annotations", iscrowd=2), "as iscrowd, 0 or 1; null or left out for 0"),
        (changed("annotations", segmentation=[[1]]), "as segmentation, a list of polygons, each of x and y of its "),
        (without("annotations", "keypoints"), POINTS),
        (changed("annotations", keypoints=[1, 2, 3]), POINTS),
        (twice("annotations"), ID),
        (without("categories", "name"), "as name, the name of the category, as text"),
    ],
    ids=range(20),
)
def test_what_is_expected_is_said_of_the_entry(
    tmp_path: Path, change: Callable[[Document], object], expected: str
) -> None:
    assert refused(tmp_path, change, "").startswith(expected)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"images": [{"id": 1', "JSONDecodeError: Expecting ',' delimiter"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"[" + b"1" * 5000 + b"]", "ValueError: Exceeds the limit"),
        (None, "FileNotFoundError"),
    ],
    ids=["truncated", "no text", "nested", "long number", "no file"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "instances.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        Coco(path, tmp_path)
    assert caught.value.what == f"{path} cannot be read."
    assert str(caught.value.given).startswith(problem)
    assert caught.value.expected == "a whole file of JSON that may be read"
    assert caught.value.hint == "check the path, and copy or fetch the file again"


def test_a_missing_image_is_named_at_once(tmp_path: Path) -> None:
    path, folder = written(tmp_path, document_of())
    (folder / "2.png").unlink()
    with pytest.raises(DataError) as caught:
        Coco(path, folder)
    assert caught.value.what == f"Images are missing in {folder}."
    assert caught.value.given == "no 2.png"
    assert caught.value.expected == "all 3 that the annotations name"
    assert caught.value.hint == "put them there, or name the folder that they are in"


def test_a_missing_folder_of_images_is_named(tmp_path: Path) -> None:
    path, _ = written(tmp_path, document_of())
    with pytest.raises(DataError) as caught:
        Coco(path, tmp_path / "train")
    assert caught.value.what == f"The images in {tmp_path / 'train'} cannot be listed."
    assert "No such file" in str(caught.value.given)
    assert caught.value.expected == "the folder of the images that the annotations name"
    assert caught.value.hint == "name the folder in which the annotations' file names are to be found"


def test_an_image_that_is_gone_is_named(tmp_path: Path) -> None:
    path, folder = written(tmp_path, document_of())
    reader = Coco(path, folder)
    (folder / "2.png").unlink()
    with pytest.raises(DataError) as caught:
        reader.read_batch(np.arange(3))
    assert caught.value.what == f"{folder}/2.png cannot be read."
    assert "No such file" in str(caught.value.given)
    assert caught.value.expected == "the image that was there when the folder was listed"
    assert caught.value.hint == "put it back, or begin again with the folder as it is now"


def test_images_may_lie_in_folders_of_the_folder(tmp_path: Path) -> None:
    document = document_of()
    path, folder = written(tmp_path, document)
    for place, image in enumerate(document["images"]):
        (folder / str(place % 2)).mkdir(exist_ok=True)
        (folder / image["file_name"]).rename(folder / str(place % 2) / image["file_name"])
        image["file_name"] = f"{place % 2}/{image['file_name']}"
    path.write_text(json.dumps(document))
    reader = Coco(path, folder)
    assert [reader.example_id(index) for index in range(3)] == ["0/1.png", "1/2.png", "0/3.png"]
    assert len(field_of(reader, "image")) == 3


def test_an_image_of_another_size_is_named_when_read(tmp_path: Path) -> None:
    path, folder = written(tmp_path, document_of())
    Image.new("RGB", (3, 7)).save(folder / "2.png")
    reader = Coco(path, folder)
    reader.read_batch(np.array([0, 2]))
    with pytest.raises(DataError) as caught:
        reader.read_batch(np.array([1]))
    assert caught.value.what == f"{folder}/2.png is not of the size that its annotation is for."
    assert caught.value.given == "3 x 7 pixels"
    assert caught.value.expected == "3 x 6 pixels"
    assert caught.value.hint == "put the annotated image there, or annotate it as it is stored"


def test_boxes_are_those_of_the_raster_as_it_is_stored(tmp_path: Path) -> None:
    path, folder = written(tmp_path, document_of(sizes=((4, 8),)))
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (8, 4)).save(folder / "1.png", "JPEG", exif=turned)
    (image,) = Coco(path, folder).read_batch(np.array([0]))["image"]
    assert image.decode().shape == (3, 4, 8)
    with pytest.raises(InputError) as caught:
        Coco(path, folder, decoding=Decoding(exif=True))
    assert caught.value.what == "Images cannot be turned as EXIF asks for, and their boxes be left where they are."
    assert caught.value.given == "Decoding(exif=True) for images with boxes"
    assert caught.value.expected == "Decoding(exif=False): boxes and masks are those of the raster as it is stored"
    assert caught.value.hint.startswith("leave exif out; if the boxes are those of the turned images, write")


@pytest.mark.parametrize("name", ["masks", "keypoints", "crowd", "empty_images"])
def test_switches_are_true_or_false(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is of the wrong type"):
        Coco(INSTANCES, IMAGES, **{name: "yes"})  # type: ignore[arg-type]


@pytest.mark.process
@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_loader_augments_an_epoch_of_it(tmp_path: Path, num_processes: int) -> None:
    square = {"size": [4, 8], "counts": [8, 4, 20]}
    boxes = [annotation(1, 10, [2, 0, 1, 4], segmentation=square), annotation(2, 30, [2, 0, 1, 4], segmentation=[])]
    path, folder = written(tmp_path, document_of(*boxes))
    loader = Loader(
        Coco(path, folder, masks=True),
        batch_size=3,
        seed=5,
        augment=Resize(4, resize="nearest"),
        num_processes=num_processes,
    )
    with closing(loader.batches(range(1), 1)) as batches:
        batch = next(batches)
    ids = loader.example_ids(0, 3)
    assert sorted(ids) == ["1.png", "2.png", "3.png"]
    assert batch["image"].shape == (3, 3, 4, 4)
    assert [f"{int(image[0, 0, 0]) + 1}.png" for image in batch["image"]] == ids
    boxes_of = {"1.png": [[0, 0.25, 1, 0.375]], "2.png": [], "3.png": [[0, 0.25, 1, 0.375]]}
    assert [boxes.tolist() for boxes in batch["boxes"]] == [boxes_of[name] for name in ids]
    pixels = {"1.png": 4, "2.png": 0, "3.png": 0}
    assert [int(masks.decode().sum()) for masks in batch["masks"]] == [pixels[name] for name in ids]


@pytest.mark.skipif(not MORE_FILES, reason="LOCKSTEP_COCO names no folder with more of COCO")
@pytest.mark.parametrize("path", MORE_FILES, ids=lambda path: path.stem)
def test_more_of_coco_is_read(path: Path) -> None:
    instances = path.stem.startswith("instances")
    reader = Coco(path, path.parent.parent / path.stem.split("_")[-1], masks=instances, keypoints=not instances)
    document = json.loads(path.read_text())
    batch = reader.read_batch(np.arange(len(reader)))
    assert batch["source_id"] == [str(image["id"]) for image in document["images"]]
    assert sum(map(len, batch["boxes"])) == len(document["annotations"])
    assert all(image.decode().shape[0] == 3 for image in batch["image"][:3])
    if instances:
        digests = {}
        for number, masks in zip(document["images"], batch["masks"], strict=True):
            own = [each["id"] for each in document["annotations"] if each["image_id"] == number["id"]]
            for each, mask in zip(own, masks.decode(), strict=True):
                digests[each] = hashlib.sha256(mask.contiguous().numpy().tobytes()).hexdigest()[:8]
        golden = json.loads(gzip.decompress((TESTS / "golden" / "masks_golden.json.gz").read_bytes()))["files"][
            path.name
        ]
        assert "".join(digests[each] for each in sorted(digests)) == golden
