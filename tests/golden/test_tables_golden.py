"""What Hugging Face's datasets and TFDS have written (make_tables_golden.py) is read as they meant it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.readers.image_tables import DetectionTable, ImageTable
from lockstep.readers.open import open_detection, open_source
from lockstep.readers.tfds import TfdsRecords

HERE = Path(__file__).parent / "tables"
GOLDEN = json.loads((HERE / "tables_golden.json").read_text())
SUMS, CLASSES = GOLDEN["sums"], GOLDEN["classes"]


def whole(reader: Any) -> dict[str, Any]:
    fields: dict[str, Any] = reader.read_batch(np.arange(len(reader)))
    return fields


def numbers(fields: dict[str, Any]) -> list[int]:
    """Which of the images these are, by all their pixels."""
    return [SUMS.index(int(image.decode().sum())) for image in fields["image"]]


@pytest.mark.parametrize(
    ("path", "split", "reader"),
    [
        (f"{folder}/{split}", split, reader)
        for folder, reader in (
            (f"{HERE}/saved", ImageTable),
            (f"{HERE}/hub", ImageTable),
            (f"{HERE}/hub/data", ImageTable),
            (f"{HERE}/tfds/shapes/1.2.0", TfdsRecords),
            ("tfds:shapes/1.2.0", TfdsRecords),
            ("tfds:shapes", TfdsRecords),
        )
        for split in ("train", "test")
    ],
)
def test_images_with_a_class(path: str, split: str, reader: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(HERE / "tfds"))
    opened: Any = open_source(path)
    assert isinstance(opened, reader)
    fields = whole(opened)
    found = numbers(fields)
    assert sorted(found) == ([0, 1, 2, 3] if split == "train" else [4, 5])
    assert fields["label"].tolist() == [GOLDEN["labels"][number] for number in found]
    assert list(opened.classes) == CLASSES


@pytest.mark.parametrize("name", ["objects/train", "listed.parquet", "tfds/boxed/2.0.1"])
def test_images_with_objects(name: str) -> None:
    for reader in (open_source(HERE / name, truth=True), open_detection(HERE / name, split="train", truth=True)):
        assert isinstance(reader, DetectionTable | TfdsRecords)
        fields = whole(reader)
        found = numbers(fields)
        assert sorted(found) == [*range(6)]
        assert dict(reader.classes) == dict(enumerate(CLASSES, 1))  # type: ignore[call-overload]
        for number, boxes, labels in zip(found, fields["truth_boxes"], fields["labels"], strict=True):
            height, width = GOLDEN["sizes"][number]
            given = torch.tensor(GOLDEN["boxes"][number]).view(-1, 4).double()
            sides = torch.tensor([width, height, width, height])
            if isinstance(reader, TfdsRecords):  # shares of float32
                assert torch.allclose(boxes, given, atol=1e-5), (number, sides)
            else:
                assert boxes.tolist() == given.tolist()
            assert labels.tolist() == [category + 1 for category in GOLDEN["categories"][number]]
    if name.startswith("tfds"):
        assert fields["is_crowd"].values.tolist() == (fields["labels"].values == 2).tolist()
