"""Crops that are resized and flipped on a GPU: the pixels of the host, without a wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu_nets import make_state, worker
from test_gpu_waits import STEPS, WARM_UP, no_waits
from torch import Tensor, nn

import lockstep as ls
from lockstep.augmentations.augment import Augment

PIPELINES: dict[str, list[Augment]] = {
    "antialiased": [ls.augmentations.RandomResizedCrop(16), ls.augmentations.HorizontalFlip()],
    "as TensorFlow": [ls.augmentations.DistortedCrop(16, resize="random"), ls.augmentations.RandomRotation90()],
    "scored": [ls.augmentations.ShortSideCrop(16, (18, 18), place="middle")],
}
BATCH_SIZE = 24


class Photos:
    """Noise of several sizes, decoded already."""

    cost = "memory"

    def __len__(self) -> int:
        return 7 * BATCH_SIZE

    def read_batch(self, indices: Any) -> dict[str, Any]:
        images = [np.random.default_rng(n).integers(0, 256, (3, 20 + n % 60, 90 - n % 50), np.uint8) for n in indices]
        return {"image": [torch.from_numpy(each) for each in images], "label": torch.from_numpy(indices % 10)}

    def example_id(self, index: int) -> str:
        return f"photo {index}"


def loader(pipeline: list[Augment]) -> ls.data.Loader:
    return ls.data.Loader(Photos(), batch_size=BATCH_SIZE, augment=pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_a_device_gives_the_pixels_of_the_host(pipeline: list[Augment]) -> None:
    device = worker().device
    expected = loader(pipeline).batches(range(1), 1)
    for batch in loader([ls.augmentations.OnDevice.of(pipeline)]).batches(range(1), 1, device):
        different = (batch["image"].int().cpu() - next(expected)["image"].int()).abs()
        # One pixel in thousands where a device fuses a product and a sum of 32 bits, which it does in no whole numbers.
        assert different.max() <= (1 if pipeline is PIPELINES["as TensorFlow"] else 0)
        assert (different > 0).double().mean() < 1e-3
        if batch.position > 3 * BATCH_SIZE:
            break


def test_some_towers_get_the_rows_of_the_whole_batch() -> None:
    """However many images are resized together."""
    device, pipeline = worker().device, [ls.augmentations.OnDevice.of(PIPELINES["as TensorFlow"])]
    whole = next(loader(pipeline).batches(range(12), 12, device))["image"]
    for towers in (range(1), range(1, 6), range(6, 12)):
        part = next(loader(pipeline).batches(towers, 12, device))["image"]
        assert torch.equal(part, whole[2 * towers.start : 2 * towers.stop])


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    logits = model(ls.images.normalize(batch["image"]))
    return {"cross_entropy": nn.functional.cross_entropy(logits, batch["label"])}


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_the_host_waits_for_none_of_it(pipeline: list[Augment]) -> None:
    worker()
    reports = ls.train_steps(make_state(), losses, loader([ls.augmentations.OnDevice.of(pipeline)]), ls.Towers(2))
    for _ in range(WARM_UP):
        next(reports)
    with no_waits():
        for _ in range(STEPS):
            report = next(reports)
    assert report.step == WARM_UP + STEPS
    reports.close()
