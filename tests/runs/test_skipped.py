"""What is kept of a refused batch of a detector: images of several sizes and objects, as tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_detector import Objects, TinyDetector, make_loader, make_task

import lockstep as ls
from lockstep.augmentations.resizers import KeepAspectRatioResizer
from lockstep.recipes.tasks import ASSIGNED
from lockstep.runs.skipped import keep_batch
from lockstep.types import NonFiniteReport


def test_images_of_several_sizes_are_kept_as_tensors(tmp_path: Path) -> None:
    task = make_task(KeepAspectRatioResizer(24, 36))
    loader = make_loader(task, Objects(sides=((24, 30), (30, 24))), batch_size=4)
    batch = next(iter(ls.batches(loader)))
    task.counts(TinyDetector())(batch)
    assert ASSIGNED in batch
    nonfinite = NonFiniteReport(0, ("loss 'classification' is nan",), ("tower 0",), batch)
    keep_batch(tmp_path, nonfinite, 0, loader, ls.join("cpu"))
    folder = tmp_path / "position-000000000"
    found = load_file(folder / "worker-0.safetensors")
    for row, image in enumerate(batch["image"]):
        assert torch.equal(found[f"image.{row}"], image)
    assert torch.equal(found["boxes.values"], batch["boxes"].values)
    about = json.loads((folder / "worker-0.json").read_text())
    assert about["fields"] == {"source_id": batch["source_id"]}, "what was found of the objects is found again"
    assert json.loads((folder / "report.json").read_text())["examples"] == batch["source_id"]
