"""What a detector has found by class: the rule as a loop, and pycocotools where it has the same numbers."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep as ls
from lockstep.metrics.detection_report import DetectionReport, Outcomes, curves_csv, outcomes

NAMES = {1: "cat", 3: "dog", 4: "bird"}
LABELS = list(NAMES)
COCO = Path(__file__).parent.parent / "fixtures/coco"
SQUARE = [10.0, 10.0, 8.0, 8.0]
Image = tuple[list[Any], list[Any]]
"""Detections (box, label, score) and objects (box, label, is_crowd, is_group, is_difficult)."""


def columns_of(image: Image) -> dict[str, np.ndarray]:
    detections, objects = ([list(column) for column in zip(*rows, strict=True)] for rows in image)
    boxes, labels, scores = detections or ([], [], [])
    truth, classes, *flags = objects or ([], [], [], [], [])
    named = zip(("truth_is_crowd", "truth_group_of", "truth_difficult"), flags, strict=True)
    return {
        "boxes": np.array(boxes, np.float64).reshape(-1, 4),
        "labels": np.array(labels, np.int64),
        "scores": np.array(scores, np.float64),
        "truth_boxes": np.array(truth, np.float64).reshape(-1, 4),
        "truth_labels": np.array(classes, np.int64),
        **{name: np.array(flag, bool) for name, flag in named},
    }


def reported(images: list[Image], min_score: float = 0.5) -> DetectionReport:
    """The report of images with the ids 0, 1, ..., which have come in another order and in two parts."""
    report = DetectionReport(NAMES, min_score=min_score)
    order = [*range(len(images))][::-1]
    for places in (order[:2], order[2:]):
        if places:
            each = [{"source_id": str(place), **columns_of(images[place])} for place in places]
            report.update(*report.prepare(*([one[name] for one in each] for name in report.fields)))
    return report


# The rule as a loop --------------------------------------------------------------------------------------------------


def overlap(box: list[float], other: list[float], *, is_region: bool) -> float:
    wide, high = (
        min(box[side] + box[side + 2], other[side] + other[side + 2]) - max(box[side], other[side]) for side in (0, 1)
    )
    if wide <= 0 or high <= 0:
        return 0.0
    area = box[2] * box[3]
    return wide * high / (area if is_region else area + other[2] * other[3] - wide * high)


def cells_of(image: Image, min_score: float) -> tuple[list[tuple[int, int]], list[tuple[int, float, bool]]]:
    """Cells of the matrix, and label, score and rightness of all detections that count."""
    detections, objects = image
    ranked = sorted(range(len(detections)), key=lambda row: -detections[row][2])
    counted = [row for row, each in enumerate(objects) if not any(each[2:])]

    def best(row: int, candidates: list[int]) -> int | None:
        found = None
        for number in candidates:
            is_region = bool(objects[number][2] or objects[number][3])
            value = overlap(detections[row][0], objects[number][0], is_region=is_region)
            if value >= 0.5 and (found is None or value >= found[0]):
                found = value, number
        return None if found is None else found[1]

    taken: dict[int, int] = {}
    listed, shown = [], []
    for row in ranked:
        _, label, score = detections[row]
        number = best(row, [n for n in counted if objects[n][1] == label and n not in taken.values()])
        if number is not None:
            taken[row] = number
        elif best(row, [n for n, each in enumerate(objects) if each[1] == label and n not in counted]) is not None:
            continue
        listed.append((label, score, number is not None))
        shown += [row] if score >= min_score else []
    taken = {row: number for row, number in taken.items() if row in shown}
    for row in shown:
        if row not in taken:
            others = [n for n in counted if objects[n][1] != detections[row][1] and n not in taken.values()]
            if (number := best(row, others)) is not None:
                taken[row] = number
    cells = [(objects[taken[row]][1] if row in taken else 0, detections[row][1]) for row in shown]
    return cells + [(objects[n][1], 0) for n in counted if n not in taken.values()], listed


boxes = st.tuples(*[st.integers(0, 5)] * 2, *[st.integers(1, 5)] * 2).map(lambda box: [float(side) for side in box])
labels = st.sampled_from(LABELS)
scores = st.sampled_from([0.1, 0.4, 0.5, 0.5, 0.9])
flags = st.sampled_from(
    [(False, False, False)] * 5 + [(True, False, False), (False, True, False), (False, False, True)]
)
objects = st.tuples(boxes, labels, flags).map(lambda each: (*each[:2], *each[2]))
images = st.tuples(st.lists(st.tuples(boxes, labels, scores), max_size=9), st.lists(objects, max_size=6))


@settings(max_examples=100, deadline=None)
@given(st.lists(images, max_size=4))
def test_matrix_table_and_worst_images_are_those_of_the_rule(scored: list[Image]) -> None:
    report = reported(scored)
    found = report.compute()
    cells, listed = [], []
    for image in scored:
        own_cells, own_listed = cells_of(image, 0.5)
        cells.append(own_cells)
        listed += own_listed
    every = [cell for own in cells for cell in own]
    order = [*LABELS, 0]
    assert found["confusion"] == [[every.count((true, predicted)) for predicted in order] for true in order]
    for row, label in zip(found["classes"], LABELS, strict=True):
        assert row.right == every.count((label, label))
        assert row.objects == row.right + row.missed == sum(true == label for true, _ in every)
        assert row.right + row.false == sum(predicted == label for _, predicted in every)
        assert row.precision == pytest.approx(row.right / (row.right + row.false or math.nan), nan_ok=True)
        assert row.recall == pytest.approx(row.right / (row.objects or math.nan), nan_ok=True)
        own = [each for each in listed if each[0] == label]
        best = (math.nan, math.nan)
        for least in sorted({score for _, score, _ in own}, reverse=True) if row.objects else ():
            kept = [is_right for _, score, is_right in own if score >= least]
            f1 = 2 * sum(kept) / (len(kept) + row.objects)
            best = (f1, least) if not f1 <= best[0] else best
        assert (row.best_f1, row.best_score) == pytest.approx(best, nan_ok=True)
    of_all = found["all"]
    assert of_all[1:5] == tuple(sum(row[place] for row in found["classes"]) for place in range(1, 5))
    mistakes = [
        (place, *(sum(a != b and cell != 0 for a, b in own for cell in [(a, b)[side]]) for side in (1, 0)))
        for place, own in enumerate(cells)
    ]
    worst = sorted((each for each in mistakes if each[1] + each[2]), key=lambda each: -(each[1] + each[2]))[:3]
    assert [(int(image), false, missed) for image, false, missed in report.worst(3)] == worst


@settings(max_examples=60, deadline=None)
@given(images)
def test_what_is_drawn_on_an_image_is_what_is_counted(image: Image) -> None:
    found = outcomes(columns_of(image), {})
    (worst,) = reported([image], min_score=0.0).worst(1) or [("0", 0, 0)]
    assert worst[1] == (~found.right & ~found.ignored).sum()
    assert worst[2] == found.missed.sum()


# Beside pycocotools --------------------------------------------------------------------------------------------------


def coco_eval(scored: list[Image]) -> Any:
    coco, cocoeval = (pytest.importorskip(f"pycocotools.{name}") for name in ("coco", "cocoeval"))
    truth, results = coco.COCO(), []
    truth.dataset = {
        "images": [{"id": place} for place in range(len(scored))],
        "categories": [{"id": label} for label in LABELS],
        "annotations": [
            {"id": 1 + 100 * place + row, "image_id": place, "bbox": box, "category_id": label,
             "iscrowd": int(is_crowd), "area": box[2] * box[3]}
            for place, (_, own) in enumerate(scored)
            for row, (box, label, is_crowd, *_) in enumerate(own)
        ],
    }  # fmt: skip
    for place, (detections, _) in enumerate(scored):
        results += [{"image_id": place, "bbox": b, "category_id": label, "score": s} for b, label, s in detections]
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluation = cocoeval.COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def made_up() -> Iterator[list[Image]]:
    rng = np.random.default_rng(0)
    for _ in range(4):
        scored: list[Image] = []
        for _ in range(12):
            truth = np.concatenate([rng.uniform(0, 80, (6, 2)), rng.uniform(5, 40, (6, 2))], 1).round(1)
            classes, crowds = rng.choice(LABELS, 6), rng.random(6) < 0.2
            picked = rng.integers(0, 6, 14)
            near = (np.abs(truth[picked] + rng.normal(0, 3, (14, 4)))).round(1)
            named = np.where(rng.random(14) < 0.2, rng.choice(LABELS, 14), classes[picked])
            detections = [*zip(near.tolist(), named.tolist(), (rng.integers(1, 20, 14) / 20).tolist(), strict=True)]
            own = zip(truth.tolist(), classes.tolist(), crowds.tolist(), strict=True)
            scored.append((detections, [(*each, False, False) for each in own]))
        yield scored


def test_curves_are_those_of_pycocotools_to_the_last_bit() -> None:
    for scored in made_up():
        found = coco_eval(scored).eval
        for place, curve in enumerate(reported(scored).curves().values()):
            precision, score = (found[name][0, :, place, 0, -1] for name in ("precision", "scores"))
            assert 20 < len(curve.recall) <= 101
            assert not precision[len(curve.recall) :].any()
            assert curve.precision.tolist() == precision[: len(curve.recall)].tolist()
            assert curve.score.tolist() == score[: len(curve.recall)].tolist()


def test_right_and_missed_are_those_of_pycocotools() -> None:
    for scored in made_up():
        rows = reported(scored, min_score=0.0).compute()["classes"]
        recalls = coco_eval(scored).eval["recall"][0, :, 0, -1]
        assert [row.recall for row in rows] == recalls.tolist()
        assert all(row.objects > row.missed > 0 for row in rows)


# By hand -------------------------------------------------------------------------------------------------------------


def on_one_image(detections: list[Any], objects: list[Any]) -> Outcomes:
    return outcomes(columns_of((detections, [(box, label, crowd, 0, 0) for box, label, crowd in objects])), {})


def test_what_is_taken_for_another_class() -> None:
    """A cat is found twice, once as a dog of a higher score; a dog is found as a bird alone; one bird is missed."""
    dog, bird = [40.0, 10.0, 8.0, 8.0], [70.0, 10.0, 8.0, 8.0]
    near = [10.0, 10.0, 8.0, 7.0]
    detections = [(SQUARE, 3, 0.9), (near, 1, 0.6), (dog, 4, 0.7), (bird, 4, 0.3)]
    clear = (False, False, False)
    found = reported([(detections, [(SQUARE, 1, *clear), (dog, 3, *clear), (bird, 4, *clear)])]).compute()
    assert found["confusion"] == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert found["classes"][2]._asdict() == {
        "name": "bird", "objects": 1, "right": 0, "false": 1, "missed": 1, "precision": 0.0, "recall": 0.0, "f1": 0.0,
        "best_f1": pytest.approx(2 / 3), "best_score": 0.3,
    }  # fmt: skip


def test_half_is_enough_and_less_is_not() -> None:
    half, less = [10.0, 10.0, 8.0, 4.0], [10.0, 10.0, 8.0, 3.9]
    assert on_one_image([(half, 1, 0.5)], [(SQUARE, 1, 0)]).right.tolist() == [True]
    found = on_one_image([(less, 1, 0.5)], [(SQUARE, 1, 0)])
    assert (found.right.tolist(), found.missed.tolist()) == ([False], [True])


def test_only_the_best_hundred_of_a_class_count() -> None:
    others = [([50.0 + place, 50.0, 1.0, 1.0], 1, 1.0 + place) for place in range(100)]
    found = on_one_image([(SQUARE, 1, 0.5), *others], [(SQUARE, 1, 0)])
    assert found.ignored.tolist() == [True, *[False] * 100]
    assert found.missed.tolist() == [True]
    assert on_one_image([(SQUARE, 3, 0.5), *others], [(SQUARE, 3, 0)]).right.sum() == 1


def test_all_objects_count_where_the_data_do_not_say_which_do_not() -> None:
    reader = ls.data.Coco(COCO / "instances.json", COCO / "images", truth=True)
    batch = reader.read_batch(np.arange(len(reader)))
    assert "truth_difficult" not in batch
    labels, report = batch["truth_labels"], DetectionReport(reader.classes)
    found = {name: batch[f"truth_{name}"] for name in ("boxes", "labels")}
    found["scores"] = labels.replaced(labels.values / labels.values)
    report.update(*report.prepare(*report.columns(batch, found)))
    of_all = report.compute()["all"]
    assert of_all.right == of_all.objects == int((~batch["truth_is_crowd"].values).sum()) > 10


def test_nothing_at_all() -> None:
    report = reported([])
    assert report.compute()["confusion"] == [[0] * 4] * 4
    assert [math.isnan(value) for value in report.compute()["all"][5:]] == [True] * 5
    assert (report.worst(3), curves_csv(report.curves())) == ([], "class,recall,precision,score\n")
    assert [len(each) for each in on_one_image([], [])] == [0, 0, 0]
    assert on_one_image([], [(SQUARE, 1, 0)]).missed.tolist() == [True]
    assert on_one_image([(SQUARE, 1, 0.5)], []).right.tolist() == [False]


def test_a_curve_is_a_line_for_each_level_that_is_reached() -> None:
    clear = (False, False, False)
    image = ([(SQUARE, 1, 0.75)], [(SQUARE, 1, *clear), ([50.0, 50.0, 5.0, 5.0], 1, *clear)])
    rows = [*csv.DictReader(io.StringIO(curves_csv(reported([image]).curves())))]
    assert len(rows) == 51
    assert {**rows[-1], "precision": ""} == {"class": "cat", "recall": "0.5", "precision": "", "score": "0.75"}
    assert float(rows[-1]["precision"]) == pytest.approx(1)


def test_what_is_no_score_is_refused() -> None:
    with pytest.raises(ls.InputError, match="min_score"):
        ls.metrics.DetectionReport(NAMES, min_score=math.nan)
