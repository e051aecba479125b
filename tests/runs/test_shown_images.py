"""The input images of a run, as its summaries have them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.images.drawing import COLOURS
from lockstep.progress import Progress
from lockstep.readers.reader import Cost
from lockstep.recipes.parts import Watch
from lockstep.runs.records import Records


class WithObjects:
    """Black images, each with one box over all of it if `boxes`."""

    cost: Cost = "memory"

    def __init__(self, boxes: bool) -> None:
        self._boxes = boxes

    def __len__(self) -> int:
        return 5

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        boxes = {"boxes": [torch.tensor([[0.0, 0.0, 1.0, 1.0]]) for _ in indices]}
        images = torch.zeros(len(indices), 1, 8, 9, dtype=torch.uint8)
        return {"image": images, **(boxes if self._boxes else {})}

    def example_id(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize("boxes", [True, False], ids=["with boxes", "without"])
def test_they_have_their_boxes_where_there_are_some(tmp_path: Path, boxes: bool) -> None:
    records = Records(tmp_path, Watch(images=2), Progress(0, 0, 5))
    records.show_images(Loader(WithObjects(boxes), batch_size=4), 2, 7)
    records.close()
    events = EventAccumulator(str(tmp_path / "summaries")).Reload()
    assert events.Tags()["images"] == ["input/0", "input/1"]
    for tag in events.Tags()["images"]:
        (event,) = events.Images(tag)
        assert event.step == 7
        pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        assert pixels.shape == ((8, 9, 3) if boxes else (8, 9))
        assert pixels[0].tolist() == ([[*COLOURS[0]]] * 9 if boxes else [0] * 9)
