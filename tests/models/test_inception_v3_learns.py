"""A thin Inception-v3 learns real photos by heart, trained by the library as the reference trained it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.images.decode import EncodedImage
from lockstep.losses import softmax_cross_entropy
from lockstep.models import InceptionV3

pytestmark = pytest.mark.process

FIXTURES = Path(__file__).parents[1] / "fixtures"
PIXELS, MOST_STEPS = 75, 30


@pytest.fixture(scope="module")
def photos() -> Tensor:
    """Ten photos, of which no two show the same: float32 (10, 3, 75, 75) from -1 to 1."""
    photos_of = {"inception/photos.webp": 8, "images/hopper.jpg": 1, "voc/bccd/JPEGImages/BloodImage_00338.jpg": 1}
    rows = [(EncodedImage((FIXTURES / name).read_bytes(), name).decode(), num) for name, num in photos_of.items()]
    rasters = [raster for row, num in rows for raster in row.chunk(num, dim=2)]
    sized = [F.interpolate(r[None].float(), (PIXELS, PIXELS), mode="bilinear", antialias=True) for r in rasters]
    return torch.cat(sized) / 127.5 - 1


def test_ten_photos_are_told_apart_within_a_few_steps(photos: Tensor) -> None:
    def losses(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        logits, auxiliary = model(batch["image"])
        right = (logits.argmax(1) == batch["label"]).float().mean()
        named = {
            "cross_entropy": softmax_cross_entropy(logits, batch["label"]),
            "auxiliary_cross_entropy": 0.4 * softmax_cross_entropy(auxiliary, batch["label"]),
        }
        return named, {"top1": right}

    reader = ls.data.Arrays({"image": photos, "label": torch.arange(10)})
    loader = ls.data.Loader(reader, batch_size=10, order="sequential")
    state = ls.TrainState(
        InceptionV3(num_classes=10, depth_multiplier=0.25).build(seed=0), ls.optim.RMSProp(0.05, momentum=0.9, eps=1.0)
    )
    for report in ls.train_steps(state, losses, loader, ls.Towers(channels_last=True), until=ls.Steps(MOST_STEPS)):
        if report.metrics["top1"] == 1.0 and report.losses["cross_entropy"] < 0.2:
            return
    pytest.fail(f"after {MOST_STEPS} steps: {report.losses}, {report.metrics}")
