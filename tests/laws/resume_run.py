"""A run to be killed: batch norm, dropout, augmentation and an average, on 6 towers, with the library's public parts.

lockstep run --workers 3 tests/laws/resume_run.py WORKDIR STEPS [detector | quantized | accelerator | gloo]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep import tensors
from lockstep.augmentations.resizers import KeepAspectRatioResizer
from lockstep.augmentations.turns import RandomShift
from lockstep.data.loader import Loader
from lockstep.models.quantization import quantize
from lockstep.readers.reader import Arrays
from lockstep.reporting.jsonl import MetricsFile

SAVE_EVERY = 4


def make_net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * 14 * 14, 10)
    )


def make_loader() -> Loader:
    generator = torch.Generator().manual_seed(6)
    images = torch.randint(0, 256, (150, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (150,), generator=generator)
    return Loader(Arrays({"image": images, "label": labels}), batch_size=24, seed=5, augment=RandomShift(2))


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["image"] / 255 - 0.5), batch["label"])}


def detector() -> tuple[nn.Module, Loader, Any, Any]:
    """The tiny detector, on images of several sizes: net, loader, losses and counts."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tiny_detector import Objects, TinyDetector, make_task
    from tiny_detector import make_loader as make_loader_of

    task, net = make_task(KeepAspectRatioResizer(24, 36)), TinyDetector(coupled=True)
    loader = make_loader_of(task, Objects(150, ((24, 30), (30, 24))), batch_size=24)
    return net, loader, task.losses, task.counts(net)


def main() -> None:
    workdir, steps = Path(sys.argv[1]), int(sys.argv[2])
    here = ls.join("cpu")
    if sys.argv[3:] == ["accelerator"]:  # as on a device that the host would wait for
        tensors.READ_AT_ONCE = frozenset()
    is_detector = sys.argv[3:] == ["detector"]
    net, loader, losses_of, counts = detector() if is_detector else (make_net(), make_loader(), losses, None)
    if sys.argv[3:] == ["quantized"]:
        quantize(net.train(), torch.zeros(2, 1, 16, 16), delay=40)
    state = ls.TrainState(
        net,
        ls.optim.SGD(ls.optim.Cosine(0.05, 200), momentum=0.9, nesterov=True),
        gradient_transforms=[ls.optim.ClipGlobalNorm(2.0)],
        average=ls.optim.MovingAverage(0.99),
    )
    ls.resume(state, loader, workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    metrics = MetricsFile(workdir / "metrics.jsonl", from_position=loader.position) if here.is_chief else None
    towers = ls.Towers(6)
    exchange = ls.AllReduce("gloo" if sys.argv[3:] == ["gloo"] else None, exact=True)
    end = ls.Steps(steps)
    for report in ls.train_steps(state, losses_of, loader, towers, exchange, counts=counts, until=end):
        if metrics:
            metrics.write(report)
        if report.step % SAVE_EVERY == 0 or report.step == steps:
            if metrics:
                metrics.flush()
            ls.save(state, loader, workdir)


if __name__ == "__main__":
    main()
