"""The trainers of Inception-v3 that inception.py compares, one step of each when it is asked for.

    python benchmarks/inception_peers.py '{"batch_size": 8, "threads": 2, "shards": []}'

Each line of standard input is {"name": ..., "num_steps": ...}, answered by {"seconds": ..., "loss": ...}; the first one
of a name makes that trainer, and is answered by {"made_of": ...} or, where a library is not there, {"missing": ...}.
Several trainers live in one process, so that they share the memory of what they compute, but nothing is imported before
it is needed: each library may live in another environment.

All make the whole update of the reference: cross entropy with label smoothing, the auxiliary head's with weight 0.4, L2
on the weights, RMSProp, moving averages of parameters and statistics; with a smaller learning rate, for one small
batch again and again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn

    import lockstep as ls

NUM_CLASSES, SIZE = 1001, 299
LR, DECAY, MOMENTUM, EPSILON = 0.02, 0.9, 0.9, 1.0
SMOOTHING, AUXILIARY_WEIGHT, L2, AVERAGE_DECAY, DROPOUT = 0.1, 0.4, 4e-5, 0.9999, 0.2
HALF = (0.5, 0.5, 0.5)


class Settings(NamedTuple):
    batch_size: int
    threads: int
    shards: Sequence[str]
    """Where the trainer on records finds them."""


class Trainer(NamedTuple):
    step: Callable[[], Any]
    """Makes one update; returns the loss before it, where torch has it as a tensor."""
    made_of: str


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    trainers: dict[str, Trainer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["name"]
        if name in trainers:
            answer(**turn(trainers[name], request["num_steps"]))
            continue
        try:
            trainers[name] = TRAINERS[name](settings)
        except ImportError as error:
            answer(missing=str(error))
        else:
            answer(made_of=trainers[name].made_of)


def turn(trainer: Trainer, num_steps: int) -> dict[str, float]:
    began = time.perf_counter()
    for _ in range(num_steps):
        loss = trainer.step()
    loss = float(loss)
    return {"loss": loss, "seconds": time.perf_counter() - began}


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def synthetic(settings: Settings) -> tuple[Any, Any]:
    """Images as they come from bytes, float32 (batch, height, width, 3) from -1 to 1; labels, none the background."""
    generator = np.random.default_rng(1)
    pixels = generator.integers(0, 256, (settings.batch_size, SIZE, SIZE, 3), dtype=np.uint8)
    return pixels.astype(np.float32) / 127.5 - 1, generator.integers(1, NUM_CLASSES, settings.batch_size)


def torch_tensors(settings: Settings, *, channels_last: bool) -> tuple[Tensor, Tensor]:
    """The same with the channels second."""
    import torch

    torch.set_num_threads(settings.threads)
    pixels, labels = (torch.from_numpy(array) for array in synthetic(settings))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = pixels.permute(0, 3, 1, 2).contiguous(memory_format=layout)
    return images, labels


# Ours ---------------------------------------------------------------------------------------------------------------


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    import torch

    import lockstep as ls

    images, labels = batch["image"], batch["label"]
    if images.dtype == torch.uint8:
        images = ls.images.normalize(images, HALF, HALF)
    logits, auxiliary_logits = model(images)
    auxiliary = ls.losses.softmax_cross_entropy(auxiliary_logits, labels, label_smoothing=SMOOTHING)
    return {
        "cross_entropy": ls.losses.softmax_cross_entropy(logits, labels, label_smoothing=SMOOTHING),
        "auxiliary_cross_entropy": AUXILIARY_WEIGHT * auxiliary,
    }


def our_state(settings: Settings) -> ls.TrainState:
    import lockstep as ls
    from lockstep.models.inception_v3 import InceptionV3

    ls.join("cpu")
    return ls.TrainState(
        InceptionV3(num_classes=NUM_CLASSES, dropout=DROPOUT).build(seed=0),
        ls.optim.RMSProp(LR, alpha=DECAY, momentum=MOMENTUM, eps=EPSILON),
        regularization=[ls.losses.L2(L2)],
        average=ls.optim.MovingAverage(AVERAGE_DECAY, statistics=True),
    )


def ours(settings: Settings, *, on_records: bool = False, num_towers: int = 1, **options: Any) -> Trainer:
    """Our step, with `options` of the towers; its batch norm is the reference's."""
    import torch

    import lockstep as ls

    images, labels = torch_tensors(settings, channels_last=options.get("channels_last", False))
    towers = ls.Towers(num_towers, batch_norm="last", **options)
    towers.check(settings.batch_size, 1)
    state = our_state(settings)
    made_of = f"lockstep; torch {torch.__version__}"
    if on_records:
        reports = ls.train_steps(state, losses, record_loader(settings), towers)
        return Trainer(lambda: next(reports).total, made_of)
    size = settings.batch_size

    def step() -> float:
        fields = {"image": images, "label": labels}
        batch = ls.Batch(fields, position=0, batch_size=size, towers=range(num_towers), epoch_size=size)
        return ls.train_step(state, losses, batch, towers).total

    return Trainer(step, made_of)


def record_loader(settings: Settings) -> ls.data.Loader:
    import lockstep as ls

    if not settings.shards:
        raise ImportError("no records: name them with --shards")
    return ls.data.Loader(
        ls.data.ImageRecords(list(settings.shards), ls.data.ImageNetSchema()),
        batch_size=settings.batch_size,
        augment=[ls.augmentations.RandomResizedCrop(SIZE), ls.augmentations.HorizontalFlip()],
    )


# By hand in PyTorch -------------------------------------------------------------------------------------------------


def their_net(*, channels_last: bool) -> nn.Module:
    """Torchvision's, with our initial weights; its batch norm has a scale."""
    import torch
    from torchvision.models import inception_v3

    from lockstep.models.inception_v3 import InceptionV3

    net = inception_v3(
        weights=None, num_classes=NUM_CLASSES, init_weights=False, transform_input=False, dropout=DROPOUT
    )
    net.load_state_dict(InceptionV3(num_classes=NUM_CLASSES).build(seed=0).state_dict(), strict=False)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return net.to(memory_format=layout).train()


def their_loss(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    from torch.nn import functional as F

    outputs = net(images)
    logits, auxiliary_logits = outputs.logits.float(), outputs.aux_logits.float()
    auxiliary = F.cross_entropy(auxiliary_logits, labels, label_smoothing=SMOOTHING)
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING) + AUXILIARY_WEIGHT * auxiliary


def their_optimizer(net: nn.Module) -> Any:
    """Torch's rule differs from TensorFlow's: where epsilon and the rate stand, and at what the squares start."""
    import torch

    weights = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": L2}, {"params": others}]
    return torch.optim.RMSprop(groups, LR, alpha=DECAY, momentum=MOMENTUM, eps=EPSILON, foreach=True)


class TheirAverage:
    """Moving averages of parameters and statistics."""

    def __init__(self, net: nn.Module) -> None:
        self._sources = [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]
        self._averages = [source.detach().clone() for source in self._sources]
        self._step = 0

    def update(self) -> None:
        import torch

        self._step += 1
        decay = min(AVERAGE_DECAY, (1 + self._step) / (10 + self._step))
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._sources, 1 - decay)


def by_hand(settings: Settings, *, bf16: bool = False, channels_last: bool = False) -> Trainer:
    """The loop that everybody writes; the loss is read at the end of a turn alone."""
    import torch
    import torchvision

    images, labels = torch_tensors(settings, channels_last=channels_last)
    net = their_net(channels_last=channels_last)
    optimizer, average = their_optimizer(net), TheirAverage(net)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = their_loss(net, images, labels)
        loss.backward()
        optimizer.step()
        average.update()
        return loss.detach()

    return Trainer(step, f"torch {torch.__version__}; torchvision {torchvision.__version__}")


# TF-Slim ------------------------------------------------------------------------------------------------------------


def tf_slim(settings: Settings, *, bf16: bool = False) -> Trainer:
    """A graph and a session, as the reference ran it; in bf16 what TensorFlow's own rewriter makes of the graph."""
    import tensorflow.compat.v1 as tf
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

    options = tf.ConfigProto(
        intra_op_parallelism_threads=settings.threads, inter_op_parallelism_threads=settings.threads
    )
    if bf16:
        options.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16 = RewriterConfig.ON
    with tf.Graph().as_default():
        total, update = tf_graph(settings)
        session = tf.Session(config=options)
        session.run(tf.global_variables_initializer())
    return Trainer(lambda: session.run([total, update])[0], f"tensorflow {tf.__version__}")


def tf_graph(settings: Settings) -> tuple[Any, Any]:
    """The objective, and what makes the whole update."""
    import tensorflow.compat.v1 as tf
    import tf_slim
    from tensorflow.python.framework import ops
    from tf_slim.nets import inception

    ops.Tensor = tf.Tensor  # TF-Slim looks for it where it once was
    images, labels = synthetic(settings)
    step = tf.train.get_or_create_global_step()
    # In a collection of that name TF-Slim calls its own fused batch norm, in the usual one that of tf_keras.
    scope = inception.inception_v3_arg_scope(weight_decay=L2, updates_collections="statistics")
    with tf_slim.arg_scope(scope):
        logits, outputs = inception.inception_v3(
            tf.constant(images), NUM_CLASSES, is_training=True, dropout_keep_prob=1 - DROPOUT
        )
    classes = tf.one_hot(labels, NUM_CLASSES)
    tf.losses.softmax_cross_entropy(classes, logits, label_smoothing=SMOOTHING)
    tf.losses.softmax_cross_entropy(classes, outputs["AuxLogits"], AUXILIARY_WEIGHT, label_smoothing=SMOOTHING)
    total = tf.losses.get_total_loss()
    update = tf.train.RMSPropOptimizer(LR, DECAY, MOMENTUM, EPSILON).minimize(total, step)
    averages = tf.train.ExponentialMovingAverage(AVERAGE_DECAY, step).apply(tf.model_variables())
    return total, tf.group(update, averages, *tf.get_collection("statistics"))


TRAINERS: dict[str, Callable[[Settings], Trainer]] = {
    "ours, fp32": partial(ours),
    "ours, fp32, channels_last": partial(ours, channels_last=True),
    "ours, fp32, channels_last, records": partial(ours, channels_last=True, on_records=True),
    "ours, bf16": partial(ours, precision="bf16"),
    "ours, bf16, channels_last": partial(ours, precision="bf16", channels_last=True),
    "ours, bf16, channels_last, 8 towers": partial(ours, precision="bf16", channels_last=True, num_towers=8),
    "ours, bf16, channels_last, compiled": partial(ours, precision="bf16", channels_last=True, compile=True),
    "ours, bf16, channels_last, records": partial(ours, precision="bf16", channels_last=True, on_records=True),
    "by hand, fp32": partial(by_hand),
    "by hand, fp32, channels_last": partial(by_hand, channels_last=True),
    "by hand, bf16, channels_last": partial(by_hand, bf16=True, channels_last=True),
    "TF-Slim, fp32": tf_slim,
    "TF-Slim, bf16": partial(tf_slim, bf16=True),
}


if __name__ == "__main__":
    main()
