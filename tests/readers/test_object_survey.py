"""What is known of the objects of a reader before a run: all from annotations, of records only the first images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_detector import Objects, write_coco

from lockstep.errors import DataError
from lockstep.readers.coco import Coco
from lockstep.readers.detection import DetectionReader
from lockstep.readers.object_survey import survey_objects
from lockstep.readers.voc import Voc

BCCD = Path(__file__).parents[2] / "data/bccd"


class Unreadable(Objects):
    """Every fourth image cannot be read."""

    def read_batch(self, indices: Any) -> dict[str, Any]:
        for index in indices.tolist():
            if index % 4 == 1:
                raise DataError("It is damaged.", given=index, expected="an image", hint="repair it")
        return super().read_batch(indices)


def test_a_reader_that_has_to_read_knows_its_first_images() -> None:
    reader = DetectionReader(Objects(40), 2)
    found = survey_objects(reader, num_images=34)
    assert (len(found.boxes), found.is_complete) == (34, False), "34 are two parts of what is read at once"
    assert torch.equal(found.boxes.values, reader.read_batch(np.arange(34))["boxes"].values)
    assert found.sizes.tolist() == found.box_sizes.tolist() == [[24, 24]] * 34
    assert (found.most_objects, found.labels) == (2, {1, 2})
    assert survey_objects(reader).is_complete


@pytest.mark.parametrize("most", [None, 1])
def test_annotations_tell_of_all_images(tmp_path: Path, most: int | None) -> None:
    coco = Coco(write_coco(tmp_path, 8), tmp_path)
    reader = DetectionReader(coco, 2, max_number_of_boxes=most)
    first, every = survey_objects(reader, num_images=1), reader.read_batch(np.arange(8))
    assert first.is_complete
    assert len(first.boxes) == 1
    assert first.sizes.tolist() == every["original_size"].tolist()
    assert first.most_objects == int(every["boxes"].lengths.max())
    assert first.labels == {1, 2}, "numbered as the detector's, not as 3 and 90"


def test_voc_tells_of_all_images() -> None:
    reader = DetectionReader(Voc(BCCD, "train"), 3)
    found = survey_objects(reader, num_images=4)
    assert len(found.sizes) == len(reader)
    assert {tuple(size) for size in found.sizes.tolist()} == {(480, 640)}
    assert found.labels == {1, 2, 3}


def test_objects_that_are_left_out_are_counted() -> None:
    assert survey_objects(DetectionReader(Objects(6), 2, max_number_of_boxes=1)).num_left_out == 2


def test_examples_that_cannot_be_read_are_left_out_where_the_run_does_so() -> None:
    reader = DetectionReader(Unreadable(40), 2)
    with pytest.raises(DataError, match="damaged"):
        survey_objects(reader)
    found = survey_objects(reader, skip_bad=True)
    assert len(found.boxes) == 30
    first = DetectionReader(Unreadable(2), 2)
    assert len(survey_objects(first, skip_bad=True).boxes) == 1


def test_at_least_one_example_has_to_be_readable() -> None:
    class Damaged(Objects):
        def read_batch(self, indices: Any) -> dict[str, Any]:
            raise DataError("It is damaged.", given="a file", expected="an image", hint="repair it")

    with pytest.raises(DataError) as caught:
        survey_objects(DetectionReader(Damaged(3), 2), skip_bad=True)
    assert caught.value.what == "None of the first examples to train on can be read."
