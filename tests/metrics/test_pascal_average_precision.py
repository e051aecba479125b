"""Precision, recall and the area between them: the numbers of the Object Detection API's tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.metrics.pascal import (
    average_precision,
    correct_localisation,
    mean_of_known,
    precision_and_recall,
)

SCORES = np.array([0.4, 0.3, 0.6, 0.2, 0.7, 0.1])
RIGHT = np.array([0, 1, 1, 0, 0, 1], float)


def test_precision_and_recall_of_the_best_so_many() -> None:
    precision, recall = precision_and_recall(SCORES, RIGHT, 10)
    right = np.array([0, 1, 1, 2, 2, 3])
    assert precision.tolist() == (right / np.arange(1, 7)).tolist()
    assert recall.tolist() == (right / 10).tolist()


def test_a_part_of_an_object_counts_by_its_weight() -> None:
    precision, recall = precision_and_recall(SCORES, RIGHT * [1, 1, 1, 1, 1, 0.5], 10)
    right, wrong = np.array([0, 1, 1, 2, 2, 2.5]), np.array([1, 1, 2, 2, 3, 3])
    assert precision.tolist() == (right / (right + wrong)).tolist()
    assert recall.tolist() == (right / 10).tolist()


def test_the_precision_is_the_best_of_any_recall_from_there_on() -> None:
    # Precision 0, 1/2, 1/3, 2/4, 2/5, 3/6 at recall 0, .1, .1, .2, .2, .3.
    assert average_precision(SCORES, RIGHT, 10) == pytest.approx(0.3 * 0.5, abs=1e-15)


def test_without_objects_there_is_no_average_precision() -> None:
    assert math.isnan(average_precision(SCORES, RIGHT, 0))
    assert average_precision(SCORES[:0], RIGHT[:0], 3) == 0


def test_the_later_of_two_equal_scores_comes_first() -> None:
    precision, _ = precision_and_recall(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 1)
    assert precision.tolist() == [0, 0.5]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30), st.integers(0, 9))
def test_it_is_the_area_that_a_loop_adds_up(detections: list[tuple[int, bool]], missed: int) -> None:
    num_objects = sum(right for _, right in detections) + missed
    if not num_objects:
        return
    found = num_right = num_wrong = 0
    curve = []
    for _, (_, right) in sorted(enumerate(detections), key=lambda each: (-each[1][0], -each[0])):
        num_right, num_wrong = num_right + right, num_wrong + (not right)
        curve.append((num_right, num_right / (num_right + num_wrong)))
    area = 0.0
    for place, (right, _) in enumerate(curve):
        area += (right - found) / num_objects * max(precision for _, precision in curve[place:])
        found = right
    scores, rights = np.array(detections, float).T
    assert average_precision(scores, rights, num_objects) == pytest.approx(area, abs=1e-12)


def test_corloc_is_the_share_of_images_on_which_a_class_was_found() -> None:
    shares = correct_localisation(np.array([100, 1, 5, 1, 1]), np.array([10, 0, 1, 0, 0]))
    assert shares.tolist() == [0.1, 0, 0.2, 0, 0]
    assert mean_of_known(shares) == pytest.approx(0.06)


def test_corloc_of_a_class_on_no_image_is_not_a_number() -> None:
    shares = correct_localisation(np.array([100, 0, 0, 1, 1]), np.array([10, 0, 1, 0, 0]))
    assert np.array_equal(shares, [0.1, np.nan, np.nan, 0, 0], equal_nan=True)
    assert math.isnan(mean_of_known(shares[1:3]))
