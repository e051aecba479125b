"""Files of detections: what is in them comes back, and whatever is no detection is refused by its entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import DataError
from lockstep.readers import coco_results
from lockstep.readers.coco_results import (
    CocoResults,
    ImageResults,
    MaskText,
    read_coco_results,
    write_coco_results,
)

GOOD: dict[str, Any] = {"image_id": 7, "category_id": 3, "bbox": [1.5, 2, 3, 4.25], "score": 0.75}


def read(tmp_path: Path, *entries: Any) -> CocoResults:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(entries))
    return read_coco_results(path)


def test_detections_come_by_image_in_the_order_of_the_file(tmp_path: Path) -> None:
    results = read(
        tmp_path,
        GOOD,
        {**GOOD, "image_id": "a.jpg", "score": 2, "segmentation": {"size": [2, 3], "counts": "06"}},
        {**GOOD, "image_id": "7", "category_id": 1, "bbox": [0, 0, 0, 0], "score": -1e9},
    )
    boxes, labels, scores, *_ = results.on("7")
    assert len(results) == 3
    assert boxes.tolist() == [[1.5, 2, 3, 4.25], [0, 0, 0, 0]]
    assert labels.tolist() == [3, 1]
    assert scores.tolist() == [0.75, -1e9]
    assert results.on("a.jpg").scores.tolist() == [2]
    assert results.on("unheard of").boxes.shape == (0, 4)
    assert results.on("7").above(0.75).labels.tolist() == [3]


def test_a_file_without_detections_is_one(tmp_path: Path) -> None:
    results = read(tmp_path)
    assert len(results) == 0
    assert results.on("7").boxes.shape == (0, 4)
    results.check(["7"], [], "data")


@pytest.mark.parametrize(
    ("entry", "given"),
    [
        ({**GOOD, "bbox": [1, 2, float("nan"), 4]}, "bbox [1, 2, nan, 4]"),
        ({**GOOD, "bbox": [1, 2, -3, 4]}, "bbox [1, 2, -3, 4], of a negative width or height"),
        ({**GOOD, "bbox": [1, 2, 3]}, "bbox [1, 2, 3]"),
        ({**GOOD, "bbox": [1, 2, 3, "4"]}, "bbox [1, 2, 3, '4']"),
        ({**GOOD, "bbox": [1, 2, 3, 10**400]}, "bbox [1, 2, 3, 1000000000"),
        ({**GOOD, "bbox": None}, "bbox None"),
        ({**GOOD, "score": float("inf")}, "score inf"),
        ({**GOOD, "score": "high"}, "score 'high'"),
        ({**GOOD, "score": True}, "score True"),
        ({**GOOD, "score": 10**400}, "score 1000000000"),
        ({**GOOD, "category_id": 1.0}, "category_id 1.0"),
        ({**GOOD, "category_id": 2**63}, "category_id 9223372036854775808"),
        ({**GOOD, "image_id": 1.5}, "image_id 1.5"),
        ({**GOOD, "image_id": True}, "image_id True"),
        ({**GOOD, "image_id": ""}, "image_id ''"),
        ({**GOOD, "id": "x"}, "id 'x'"),
        ({name: GOOD[name] for name in GOOD if name != "score"}, "no score"),
        ({name: GOOD[name] for name in GOOD if name != "image_id"}, "no image_id: {'category_id': 3"),
        ([1, 2], "no image_id: [1, 2]"),
        (GOOD, "the same detection as entry 1"),
        ({**GOOD, "score": 0.5, "id": 9}, "the same id as entry 0"),
    ],
)
def test_what_is_no_detection_is_refused_by_its_entry(tmp_path: Path, entry: Any, given: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, {**GOOD, "image_id": 1, "id": 9}, GOOD, entry)
    assert caught.value.what.startswith(f"Entry 2 of {tmp_path}/results.json cannot be used as a detection")
    assert str(caught.value.given).startswith(given)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "[", "[NaN", "\udcff", "[" * 100_000, "{}", "7"])
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"results\.json cannot be"):
        read_coco_results(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco_results, "_MOST_BYTES", 100)
    with pytest.raises(DataError) as caught:
        read(tmp_path, *({**GOOD, "score": number} for number in range(9)))
    assert "more than 100" in str(caught.value.given)
    with pytest.raises(DataError, match="cannot be read"):
        read_coco_results(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("known", "labels", "given", "expected"),
    [
        (["7", "9"], [3], "image_id 8", "images of data.json, such as 7, 9"),
        (["7", "8"], [1, 2], "category_id 3", "categories of data.json: 1, 2"),
    ],
)
def test_detections_of_other_data_are_refused(
    tmp_path: Path, known: list[str], labels: list[int], given: str, expected: str
) -> None:
    results = read(tmp_path, {**GOOD, "category_id": labels[0]}, {**GOOD, "image_id": 8})
    results.check(["7", "8"], [], "data.json")
    with pytest.raises(DataError) as caught:
        results.check(known, labels, "data.json")
    assert caught.value.what.startswith("Entry 1 of ")
    assert (caught.value.given, caught.value.expected) == (given, expected)


def test_many_detections_are_sorted_by_image(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 5, 60).tolist()
    results = read(tmp_path, *({**GOOD, "image_id": image, "score": place} for place, image in enumerate(images)))
    for image in range(5):
        assert results.on(str(image)).scores.tolist() == [place for place, each in enumerate(images) if each == image]


def detections(*scores: float, masks: bool = False) -> ImageResults:
    boxes = np.array([[0.1, 2, 3, score] for score in scores], np.float64).reshape(-1, 4)
    texts = [MaskText(2, 3, "06")] * len(scores) if masks else ()
    return ImageResults(boxes, np.full(len(scores), 18, np.int64), np.array(scores, np.float64), texts)


def test_what_is_written_is_read_back_with_all_its_digits(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    points = np.array([[[1.5, 2, 0.25], [3, 4, -1]]])
    found = [
        ("42", detections(1 / 3, 0.1)),
        ("0042", detections()),
        ("2007_000032", detections(0.7, masks=True)._replace(keypoints=points)),
    ]
    write_coco_results(path, found)
    entries = json.loads(path.read_text())
    assert [entry["image_id"] for entry in entries] == [42, 42, "2007_000032"]
    assert entries[0] == {"image_id": 42, "category_id": 18, "bbox": [0.1, 2, 3, 1 / 3], "score": 1 / 3}
    assert entries[2]["segmentation"] == {"size": [2, 3], "counts": "06"}
    assert entries[2]["keypoints"] == [1.5, 2, 0.25, 3, 4, -1]
    results = read_coco_results(path)
    for image_id, written in found:
        for column in ("boxes", "labels", "scores"):
            assert np.array_equal(getattr(results.on(image_id), column), getattr(written, column))


def test_an_empty_file_is_written_where_nothing_was_found(tmp_path: Path) -> None:
    write_coco_results(tmp_path / "results.json", [("1", detections())])
    assert len(read_coco_results(tmp_path / "results.json")) == 0


def test_a_file_that_is_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_coco_results(tmp_path / "results.json", [("1", detections(0.5)), ("2", detections(float("nan")))])
    assert not list(tmp_path.iterdir())
