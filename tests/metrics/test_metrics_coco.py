"""COCO's metrics: each number is that of pycocotools, bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep as ls
from lockstep.images.masks import MaskOutlines, packed_outline
from lockstep.ragged import Ragged

pycocotools = pytest.importorskip("pycocotools.coco")
cocoeval = pytest.importorskip("pycocotools.cocoeval")
mask_api = pytest.importorskip("pycocotools.mask")

CATEGORIES = {1: "cat", 3: "dog", 4: "bird"}
HEIGHT, WIDTH = 240, 200
FIXTURES = Path(__file__).parent.parent / "fixtures/coco"
KINDS = {"boxes": "bbox", "masks": "segm", "keypoints": "keypoints"}
Instance = list[dict[str, Any]]
"""An image each: its id, and columns of detections and objects by name."""


def made_up(seed: int, num_images: int, most: int = 12) -> Instance:
    """Objects, and detections that are perturbed copies of them, tied, doubled, of the wrong class, or of nothing."""
    rng = np.random.default_rng(seed)
    images = []
    for image_id in rng.choice(2000, num_images, replace=False).tolist():
        num_objects = int(rng.integers(0, most))
        corners = np.round(rng.uniform(0, 120, (num_objects, 2)), 2)
        sides = np.round(rng.uniform(0, 80, (num_objects, 2)) * rng.choice([0.2, 1.0, 1.4], (num_objects, 1)), 2)
        truth = np.concatenate([corners, sides], 1)
        if num_objects and rng.random() < 0.5:  # twice in one place, with an area and a class of its own
            truth[num_objects // 2 :] = truth[rng.integers(0, num_objects, num_objects - num_objects // 2)]
        picked = rng.integers(0, max(num_objects, 1), int(rng.integers(0, 3 * most)) if num_objects else 0)
        noise = rng.choice([0.0, 0.0, 1.0, 6.0], (len(picked), 1)) * rng.normal(0, 2, (len(picked), 4))
        boxes = np.abs(truth[picked] + noise).round(rng.choice([0, 2, 12]))
        points = truth[:, None, :2] + rng.uniform(0, 1, (num_objects, 17, 2)) * truth[:, None, 2:]
        visibility = rng.choice([0, 1, 2], (num_objects, 17)) * (rng.random((num_objects, 1)) < 0.8)
        off = rng.choice([0.0, 1.0, 5.0], (len(picked), 1, 1)) * rng.normal(0, 2, (len(picked), 17, 2))
        labels = rng.choice(list(CATEGORIES), num_objects)
        strays = rng.random(len(picked)) < 0.1
        images.append({
            "id": image_id,
            "boxes": boxes,
            "scores": rng.integers(0, 12, len(picked)) / 10 if rng.random() < 0.5 else rng.random(len(picked)),
            "labels": np.where(strays, rng.choice(list(CATEGORIES), len(picked)), labels[picked]),
            "keypoints": np.concatenate([points[picked] + off, np.ones((len(picked), 17, 1))], 2),
            "truth_boxes": truth,
            "truth_labels": labels,
            "truth_is_crowd": rng.random(num_objects) < 0.15,
            "truth_area": np.round(sides.prod(1) * rng.uniform(0.5, 1, num_objects), 3),
            "truth_keypoints": np.concatenate([points, visibility[:, :, None]], 2),
        })  # fmt: skip
    return images


def masks_of(boxes: np.ndarray) -> torch.Tensor:
    """Ellipses in the boxes, with a hole: uint8 of shape (objects, HEIGHT, WIDTH)."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    left, top, width, height = boxes[:, :, None, None].transpose(1, 0, 2, 3)
    radius = ((x - left) / np.maximum(width, 1) * 2 - 1) ** 2 + ((y - top) / np.maximum(height, 1) * 2 - 1) ** 2
    return torch.from_numpy(((radius <= 1) & (radius > 0.05)).astype(np.uint8))


def with_masks(images: Instance) -> Instance:
    return [
        {**image, "masks": masks_of(image["boxes"]), "truth_masks": masks_of(image["truth_boxes"])} for image in images
    ]


def scored(images: Instance, measured: str, sizes: list[int], **options: Any) -> dict[str, float]:
    """Compute the metric in micro-batches of these sizes, in turn."""
    metric = ls.metrics.CocoMetric(CATEGORIES, measured, **options)
    start, turn = 0, 0
    while start < len(images):
        some = images[start : start + sizes[turn % len(sizes)]]
        metric.update(*metric.prepare(*columns_of(some, metric.fields)))
        start, turn = start + len(some), turn + 1
    return metric.compute()


def columns_of(images: Instance, fields: tuple[str, ...]) -> list[Any]:
    def column(name: str) -> Any:
        if name == "source_id":
            return [str(image["id"]) for image in images]
        if name.endswith("masks"):
            return [image[name] for image in images]
        return Ragged.of([torch.from_numpy(image[name]) for image in images])

    return [column(name) for name in fields]


def reference(images: Instance, measured: str) -> list[float]:
    """The values of pycocotools."""
    encode = lambda mask: mask_api.encode(np.asfortranarray(mask.numpy()))  # noqa: E731
    truth, detections = [], []
    for image in images:
        for row in range(len(image["truth_labels"])):
            visible = image["truth_keypoints"][row, :, 2] > 0
            segmentation = {"segmentation": encode(image["truth_masks"][row])} if measured == "masks" else {}
            truth.append({
                "id": len(truth) + 1, "image_id": image["id"], "category_id": int(image["truth_labels"][row]),
                "bbox": image["truth_boxes"][row].tolist(), "area": float(image["truth_area"][row]),
                "iscrowd": int(image["truth_is_crowd"][row]), "num_keypoints": int(visible.sum()),
                "keypoints": image["truth_keypoints"][row].ravel().tolist(), **segmentation,
            })  # fmt: skip
        for row in range(len(image["labels"])):
            what = image[measured][row]
            key, value = {
                "boxes": lambda what: ("bbox", what.tolist()),
                "masks": lambda what: ("segmentation", encode(what)),
                "keypoints": lambda what: ("keypoints", what.ravel().tolist()),
            }[measured](what)
            detections.append({
                "image_id": image["id"], "category_id": int(image["labels"][row]),
                "score": float(image["scores"][row]), key: value,
            })  # fmt: skip
    return coco_eval(truth, detections, [image["id"] for image in images], CATEGORIES, KINDS[measured])


def coco_eval(
    truth: list[Any], detections: list[Any], image_ids: list[int], categories: Mapping[int, str], kind: str
) -> list[float]:
    api = pycocotools.COCO()
    api.dataset = {
        "images": [{"id": image_id, "height": HEIGHT, "width": WIDTH} for image_id in image_ids],
        "annotations": truth,
        "categories": [{"id": label, "name": name} for label, name in categories.items()],
    }
    return evaluated(api, detections, kind)


def evaluated(api: Any, detections: list[Any], kind: str) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        api.createIndex()
        if detections:
            found = api.loadRes(detections)
        else:
            found = pycocotools.COCO()
            found.dataset = {**api.dataset, "annotations": []}
            found.createIndex()
        evaluation = cocoeval.COCOeval(api, found, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats]


@pytest.mark.parametrize("measured", ["boxes", "keypoints"])
@given(seed=st.integers(0, 2**32 - 1), num_images=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_the_numbers_are_those_of_pycocotools(measured: str, seed: int, num_images: int) -> None:
    images = made_up(seed, num_images)
    assert list(scored(images, measured, [num_images]).values()) == reference(images, measured)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_the_numbers_of_masks_are_those_of_pycocotools(seed: int) -> None:
    images = with_masks(made_up(seed, 5, 6))
    assert list(scored(images, "masks", [5]).values()) == reference(images, "masks")


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 5), min_size=1), shuffle=st.randoms())
@settings(max_examples=15, deadline=None)
def test_micro_batches_and_their_order_change_no_bit(seed: int, sizes: list[int], shuffle: Any) -> None:
    images = made_up(seed, 9)
    whole = scored(images, "boxes", [9], per_category=True)
    shuffle.shuffle(images)
    assert scored(images, "boxes", sizes, per_category=True) == whole


@pytest.mark.parametrize("measured", KINDS)
def test_the_hundred_and_first_detection_of_a_class_does_not_count(measured: str) -> None:
    image = with_masks(made_up(5, 4))[2]
    rng = np.random.default_rng(1)
    some = rng.integers(0, len(image["labels"]), 340)
    image |= {name: image[name][some] for name in ("boxes", "labels", "keypoints", "masks")}
    image["scores"] = rng.integers(0, 6, 340) / 8  # tied across the boundary
    assert np.bincount(image["labels"]).max() > 101
    assert list(scored([image], measured, [1]).values()) == reference([image], measured)


@pytest.mark.parametrize("measured", KINDS)
def test_images_without_objects_or_without_detections(measured: str) -> None:
    images = with_masks(made_up(11, 5))
    of_detections = ("boxes", "scores", "labels", "keypoints", "masks")
    for image, names in zip(images, ([], of_detections, [name for name in images[0] if "truth" in name]), strict=False):
        image |= {name: image[name][:0] for name in names}
    assert list(scored(images, measured, [2]).values()) == reference(images, measured)
    nothing = [{name: value if name == "id" else value[:0] for name, value in images[0].items()}]
    assert set(scored(nothing, measured, [1]).values()) == {-1}
    assert set(ls.metrics.CocoMetric(CATEGORIES, measured).compute().values()) == {-1}


def test_detections_of_nothing_but_crowds() -> None:
    images = made_up(3, 6)
    for image in images:
        image["truth_is_crowd"][:] = True
    assert scored(images, "boxes", [6])["DetectionBoxes_Precision/mAP"] == -1
    images[0]["truth_is_crowd"][:1] = False
    assert list(scored(images, "boxes", [6]).values()) == reference(images, "boxes")


def annotated(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The annotations of a file, and detections near them: moved, tied, doubled, of crowds, some of nothing."""
    content = json.loads(path.read_text())
    rng = np.random.default_rng(0)
    detections = []
    for annotation in content["annotations"]:
        for _ in range(rng.integers(0, 4)):
            off = rng.choice([0, 1, 4, 30])
            points = np.array(annotation.get("keypoints", []), float).reshape(-1, 3)
            points[:, :2] += off * rng.normal(0, 1, points[:, :2].shape)
            detections.append({
                "image_id": annotation["image_id"],
                "category_id": annotation["category_id"],
                "bbox": np.abs(annotation["bbox"] + off * rng.normal(0, 1, 4)).tolist(),
                "keypoints": points.ravel().tolist(),
                "segmentation": annotation["segmentation"],
                "score": int(rng.integers(0, 20)) / 20,
            })  # fmt: skip
    return content, detections


def of_annotations(content: dict[str, Any], detections: list[dict[str, Any]]) -> Callable[[str], list[Any]]:
    """The columns of a metric from annotations and detections, an image a row."""
    images = content["images"]
    by_image = [[each for each in content["annotations"] if each["image_id"] == image["id"]] for image in images]
    found = [[each for each in detections if each["image_id"] == image["id"]] for image in images]

    def column(name: str) -> list[Any]:
        key = {"boxes": "bbox", "scores": "score", "labels": "category_id", "is_crowd": "iscrowd"}
        kind = name.removeprefix("truth_")
        if name == "source_id":
            return [str(image["id"]) for image in images]
        rows = by_image if name.startswith("truth_") else found
        if kind == "masks":
            outlines = [[packed_outline(each["segmentation"]) for each in row] for row in rows]
            return [
                MaskOutlines(outline, image["height"], image["width"], image["file_name"])
                for outline, image in zip(outlines, images, strict=True)
            ]
        shape = {"boxes": (-1, 4), "keypoints": (-1, 17, 3)}.get(kind, (-1,))
        values = [np.array([each[key.get(kind, kind)] for each in row]).reshape(shape) for row in rows]
        return [torch.from_numpy(each.astype("i8" if kind == "labels" else "f8")) for each in values]

    return column


@pytest.mark.parametrize("measured", KINDS)
def test_annotations_of_coco(measured: str) -> None:
    check_annotations(FIXTURES / ("person_keypoints.json" if measured == "keypoints" else "instances.json"), measured)


def check_annotations(path: Path, measured: str) -> None:
    content, detections = annotated(path)
    categories = {category["id"]: category["name"] for category in content["categories"]}
    metric = ls.metrics.CocoMetric(categories, measured)
    column = of_annotations(content, detections)
    metric.update(*metric.prepare(*map(column, metric.fields)))
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    api = pycocotools.COCO()
    for each in detections if measured == "masks" else []:
        each["segmentation"] = encoded(each["segmentation"], *sizes[each["image_id"]])
    of_kind = {"boxes": "bbox", "masks": "segmentation", "keypoints": "keypoints"}[measured]
    named = ("image_id", "category_id", "score", of_kind)
    api.dataset = content
    found = [{name: each[name] for name in named} for each in detections]
    values = list(metric.compute().values())
    assert values == evaluated(api, found, KINDS[measured])
    assert max(values) > 0.3


def encoded(segmentation: Any, height: int, width: int) -> Any:
    """Encode an annotation's segmentation as results have it."""
    runs = mask_api.frPyObjects(segmentation, height, width)
    return mask_api.merge(runs) if isinstance(segmentation, list) else runs


def test_each_class_by_itself() -> None:
    images = made_up(8, 12)
    values = scored(images, "boxes", [3], per_category=True)
    keypoints = scored(images, "keypoints", [3], per_category=True)
    assert len(values) == 12 + len(CATEGORIES)
    assert len(keypoints) == 10 * (1 + len(CATEGORIES))
    for label, name in CATEGORIES.items():
        own = [
            {
                key: value if key == "id" else value[image["truth_labels" if "truth" in key else "labels"] == label]
                for key, value in image.items()
            }
            for image in images
        ]
        assert values[f"DetectionBoxes_PerformanceByCategory/mAP/{name}"] == reference(own, "boxes")[0]
        of_name = [value for key, value in keypoints.items() if key.endswith(f" ByCategory/{name}")]
        assert of_name == reference(own, "keypoints")


def test_the_names_are_those_of_the_object_detection_api() -> None:
    assert list(ls.metrics.CocoMetric(CATEGORIES).compute()) == [
        f"DetectionBoxes_{name}"
        for name in (
            *("Precision/mAP", "Precision/mAP@.50IOU", "Precision/mAP@.75IOU"),
            *("Precision/mAP (small)", "Precision/mAP (medium)", "Precision/mAP (large)"),
            *("Recall/AR@1", "Recall/AR@10", "Recall/AR@100"),
            *("Recall/AR@100 (small)", "Recall/AR@100 (medium)", "Recall/AR@100 (large)"),
        )
    ]
    assert all(name.startswith("DetectionMasks_") for name in ls.metrics.CocoMetric(CATEGORIES, "masks").compute())
    assert list(ls.metrics.CocoMetric(CATEGORIES, "keypoints").compute()) == [
        f"Keypoints_{name}"
        for name in (
            *("Precision/mAP", "Precision/mAP@.50IOU", "Precision/mAP@.75IOU"),
            *("Precision/mAP (medium)", "Precision/mAP (large)"),
            *("Recall/AR@20", "Recall/AR@.50IOU", "Recall/AR@.75IOU", "Recall/AR@20 (medium)", "Recall/AR@20 (large)"),
        )
    ]


def test_boxes_that_match_are_found_and_nothing_is_kept_after_a_reset() -> None:
    images = made_up(2, 4)
    for image in images:
        image |= {name: image[f"truth_{name}"] for name in ("boxes", "labels")}
        image |= {"scores": np.ones(len(image["labels"])), "truth_is_crowd": np.zeros(len(image["labels"]), bool)}
    metric = ls.metrics.CocoMetric(CATEGORIES)
    for _ in range(2):
        metric.reset()
        metric.update(*metric.prepare(*columns_of(images, metric.fields)))
        assert metric.compute()["DetectionBoxes_Precision/mAP"] == pytest.approx(1)


def test_columns_are_picked_by_name() -> None:
    batch = {"source_id": ["1"], "image": 0, "truth_boxes": 1, "truth_labels": 2, "truth_is_crowd": 3, "truth_area": 4}
    metric = ls.metrics.CocoMetric(CATEGORIES)
    assert metric.columns(batch, {"boxes": 5, "scores": 6, "labels": 7}) == (["1"], 5, 6, 7, 1, 2, 3, 4)
    with pytest.raises(ls.InputError, match="finds no 'truth_area' in the batch"):
        metric.columns(
            {name: batch[name] for name in batch if name != "truth_area"}, {"boxes": 5, "scores": 6, "labels": 7}
        )
    with pytest.raises(ls.InputError, match="finds no 'labels' in the detections"):
        metric.columns(batch, {"boxes": 5, "scores": 6})


@pytest.mark.parametrize(
    ("measured", "hint"),
    [
        ("keypoints", "open the data with keypoints=True (data.num_keypoints in a recipe)"),
        ("masks", "open the data with masks=True (data.masks=true in a recipe)"),
    ],
)
def test_what_a_reader_was_not_asked_for_is_said(measured: Any, hint: str) -> None:
    with pytest.raises(ls.InputError) as caught:
        ls.metrics.CocoMetric(CATEGORIES, measured).columns(
            {"source_id": [], "truth_ids": 1, "truth_boxes": 1}, {measured: 5, "scores": 6, "labels": 7}
        )
    assert caught.value.what == f"A detection metric finds no 'truth_{measured}' in the batch."
    assert caught.value.hint == hint
