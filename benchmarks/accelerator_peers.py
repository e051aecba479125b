"""The trainers that accelerator.py compares: ours, loops by hand with and without DDP, Lightning's; and tiny steps.

All of a net compute the same losses of the same module, from the same weights and the same stream of batches in uint8,
in bfloat16 and channels_last. By hand means as fast as we can write it: torch's fused and foreach kernels, batches
pinned and copied on a stream of their own while the one before is computed, no loss read, nothing checked.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from inception_peers import (
    AUXILIARY_WEIGHT,
    AVERAGE_DECAY,
    DECAY,
    EPSILON,
    HALF,
    L2,
    LR,
    MOMENTUM,
    NUM_CLASSES,
    SMOOTHING,
    TheirAverage,
    their_optimizer,
)
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.models.inception_v3 import InceptionV3
from lockstep.models.resnet import ResNet
from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import write_records
from lockstep.training.state import TrainState

RECORDS = 2048
Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[[], object]


class Settings(NamedTuple):
    """What a process compares."""

    net: str
    is_compiled: bool
    source: str
    """Of the batches: "memory" of the host, or "records"."""
    batch_size: int
    """Of each worker."""
    device: str | None
    """"cpu" tries it out."""
    shards: tuple[str, ...]
    """Records of ImageNet's form."""

    @property
    def image_size(self) -> int:
        """Height and width; small where it is only tried out."""
        if self.device == "cpu":
            return 107
        return 299 if self.net == "inception_v3" else 224


# Nets ---------------------------------------------------------------------------------------------------------------


def net(name: str) -> nn.Module:
    """The same weights each time."""
    if name == "inception_v3":
        return InceptionV3(num_classes=NUM_CLASSES, dropout=0.0).build(seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(2048, NUM_CLASSES)
    body = ResNet(50, generator=generator)
    return nn.Sequential(OrderedDict(body=body, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=head))


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The cross entropy of each head."""
    outputs = model(ls.images.normalize(images, HALF, HALF))
    if isinstance(outputs, Tensor):
        return {"cross_entropy": F.cross_entropy(outputs, labels, label_smoothing=SMOOTHING)}
    logits, auxiliary = (F.cross_entropy(each, labels, label_smoothing=SMOOTHING) for each in outputs)
    return {"cross_entropy": logits, "auxiliary_cross_entropy": AUXILIARY_WEIGHT * auxiliary}


# Batches ------------------------------------------------------------------------------------------------------------


def loader(settings: Settings, num_workers: int) -> ls.data.Loader:
    size, pixels = settings.batch_size * num_workers, settings.image_size
    if settings.source == "records":
        reader = ls.data.ImageRecords(list(settings.shards), ls.data.ImageNetSchema())
        return ls.data.Loader(
            reader,
            batch_size=size,
            augment=[ls.augmentations.RandomResizedCrop(pixels), ls.augmentations.HorizontalFlip()],
        )
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2 * size, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    labels = torch.randint(1, NUM_CLASSES, (2 * size,), generator=generator)
    return ls.data.Loader(ls.data.Arrays({"image": images, "label": labels}), batch_size=size)


def write_noise(path: Path) -> None:
    """Write records of JPEGs of 500 x 375 pixels, as many of ImageNet's are."""
    generator = np.random.default_rng(0)

    def record(number: int) -> bytes:
        coarse = Image.fromarray(generator.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        file = BytesIO()
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG")
        label = np.array([1 + number % (NUM_CLASSES - 1)])
        return serialize_example({"image/encoded": [file.getvalue()], "image/class/label": label})

    write_records(path, map(record, range(RECORDS)))


def by_hand_batches(settings: Settings) -> Batches:
    """Our loader's batches on the device: pinned, and copied on a stream of their own one batch ahead."""
    worker = ls.join()
    mine = range(worker.rank, worker.rank + 1)
    source = loader(settings, worker.num_workers).batches(mine, worker.num_workers)
    pairs = ((batch["image"], batch["label"]) for batch in source)
    if worker.device.type == "cpu":
        yield from pairs
        return
    stream = torch.cuda.Stream()

    def copied(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(stream):
            images, labels = (each.pin_memory().to(worker.device, non_blocking=True) for each in tensors)
        return images, labels

    ahead = copied(next(pairs))
    for pair in pairs:
        torch.cuda.current_stream().wait_stream(stream)
        now = ahead
        for tensor in now:
            tensor.record_stream(torch.cuda.current_stream())
        ahead = copied(pair)
        yield now


# Trainers -----------------------------------------------------------------------------------------------------------


def ours(settings: Settings) -> Step:
    """Our loop with all that it does: reports, finite checks, random streams."""
    worker = ls.join()
    optimizer, more = ls.optim.SGD(LR, momentum=MOMENTUM, nesterov=True), {}
    if settings.net == "inception_v3":
        optimizer = ls.optim.RMSProp(LR, alpha=DECAY, momentum=MOMENTUM, eps=EPSILON)
        average = ls.optim.MovingAverage(AVERAGE_DECAY, statistics=True)
        more = {"regularization": [ls.losses.L2(L2)], "average": average}
    state = TrainState(net(settings.net).to(worker.device), optimizer, **more)
    towers = ls.Towers(worker.num_workers, precision="bf16", channels_last=True, compile=settings.is_compiled)
    batches = loader(settings, worker.num_workers)
    reports = ls.train_steps(state, lambda model, batch: losses(model, batch["image"], batch["label"]), batches, towers)
    return lambda: next(reports).losses["cross_entropy"]


def by_hand(settings: Settings, *, is_distributed: bool) -> Step:
    """The loop that everybody writes; with DDP's all-reduce beside the backward pass, or of one worker without DDP."""
    device = ls.join().device
    module = net(settings.net).to(device, memory_format=torch.channels_last)
    optimizer, update_average = their_update(settings, module)
    model = module
    if is_distributed:
        ids = None if device.type == "cpu" else [device]
        model = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True, static_graph=True)
    if settings.is_compiled:
        model = torch.compile(model)  # type: ignore[assignment]
    batches = by_hand_batches(settings)

    def step() -> Tensor:
        images, labels = next(batches)
        images = images.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            found = losses(model, images, labels)
        torch.stack([*found.values()]).sum().backward()
        optimizer.step()
        update_average()
        return found["cross_entropy"].detach()

    return step


def their_update(settings: Settings, module: nn.Module) -> tuple[Any, Step]:
    if settings.net == "inception_v3":
        return their_optimizer(module), TheirAverage(module).update
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=MOMENTUM, nesterov=True, fused=True)
    return optimizer, lambda: None


def lightning(settings: Settings) -> Step:
    """Its Trainer in bf16, in a thread: it drives the loop, and waits for the next batch until a step is asked for."""
    import lightning

    device = ls.join().device
    module = net(settings.net).to(device, memory_format=torch.channels_last)
    optimizer, update_average = their_update(settings, module)
    model = torch.compile(module) if settings.is_compiled else module
    batches = by_hand_batches(settings)
    asked, done = threading.Semaphore(0), threading.Semaphore(0)
    last: list[Tensor] = []
    failed: list[BaseException] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
            images, labels = batch
            images = images.contiguous(memory_format=torch.channels_last)
            found = losses(self.net, images, labels)
            last[:] = [found["cross_entropy"].detach()]
            return torch.stack([*found.values()]).sum()

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            update_average()
            done.release()

    class Asked:
        def __len__(self) -> int:  # with a length Lightning takes no batch ahead
            return sys.maxsize

        def __iter__(self) -> Batches:
            for batch in batches:
                asked.acquire()
                yield batch

    trainer = lightning.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu", devices=1, precision="bf16-mixed", max_steps=-1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip

    def fit() -> None:
        try:
            trainer.fit(Module(), Asked())
        except BaseException as error:
            failed.append(error)
        done.release()

    threading.Thread(target=fit, daemon=True).start()

    def step() -> Tensor:
        asked.release()
        done.acquire()
        if failed:
            raise failed[0]
        return last[0]

    return step


# Tiny steps ---------------------------------------------------------------------------------------------------------


def tiny_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def tiny_batch(device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    image, label = torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)
    return {"image": image.to(device), "label": label.to(device)}


class Resident(ls.data.Loader):
    """One batch that is on the device already."""

    def batches(self, towers: range, num_towers: int, device: torch.device, **_: Any) -> Iterator[ls.Batch]:  # type: ignore[override]
        fields = tiny_batch(device)
        for _ in repeat(None):
            yield ls.Batch(
                dict(fields), position=self.position, batch_size=32, towers=towers, epoch_size=32, loader=self
            )


def tiny_ours(*, is_compiled: bool) -> Step:
    """Our loop with schedule, clip, finite check, average and report."""
    device = ls.join().device
    state = TrainState(
        tiny_net().to(device),
        ls.optim.SGD(ls.optim.Cosine(0.01, 10_000_000), momentum=MOMENTUM, nesterov=True),
        gradient_transforms=[ls.optim.ClipGlobalNorm(10.0)],
        average=ls.optim.MovingAverage(AVERAGE_DECAY),
    )
    batches = Resident(ls.data.Arrays(tiny_batch(torch.device("cpu"))), batch_size=32)

    def tiny_losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"])}

    reports = ls.train_steps(state, tiny_losses, batches, ls.Towers(1, compile=is_compiled))
    return lambda: next(reports).total


def tiny_by_hand(*, is_graph: bool) -> Step:
    """The bare step with torch's fused kernel: launch by launch, or on an accelerator as one CUDA graph."""
    device = ls.join().device
    model, fields = tiny_net().to(device), tiny_batch(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=MOMENTUM, nesterov=True, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(fields["image"]), fields["label"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    if device.type == "cpu" or not is_graph:
        return step
    start = [parameter.detach().clone() for parameter in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # what the first steps alone do is not captured
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():  # all contenders begin with the same weights
        torch._foreach_copy_([*model.parameters()], start)
        torch._foreach_zero_([slots["momentum_buffer"] for slots in optimizer.state.values()])

    def replay(_kept: object = step) -> Tensor:  # it works on the memory of the model and its optimizer
        graph.replay()
        return loss

    return replay


def contenders(settings: Settings) -> dict[str, Callable[[], Step]]:
    """What makes each trainer of a net, by name."""
    made: dict[str, Callable[[], Step]] = {
        "ours": lambda: ours(settings),
        "DDP": lambda: by_hand(settings, is_distributed=True),
    }
    if ls.join().num_workers == 1:
        made |= {"by hand": lambda: by_hand(settings, is_distributed=False), "Lightning": lambda: lightning(settings)}
    return made


def tiny_contenders(*, is_compiled: bool) -> dict[str, Callable[[], Step]]:
    """What makes each tiny step, by name."""
    return {
        "ours": lambda: tiny_ours(is_compiled=is_compiled),
        "by hand": lambda: tiny_by_hand(is_graph=False),
        "one CUDA graph": lambda: tiny_by_hand(is_graph=True),
    }
