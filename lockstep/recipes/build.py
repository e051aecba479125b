"""From a recipe to the parts that run: the only place that puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import Loader
from lockstep.losses.classification import softmax_cross_entropy
from lockstep.metrics.top_k import in_top_k
from lockstep.models.mnist import IMAGE_SHAPE
from lockstep.optim import Cosine
from lockstep.optim.schedules import resolved
from lockstep.parallel.towers import Towers
from lockstep.progress import Epochs, Steps
from lockstep.readers.mnist import mnist_reader, prepare_records, scale_image
from lockstep.readers.reader import Cost, Int64s, Reader
from lockstep.recipes.recipe import Recipe
from lockstep.training.state import TrainState
from lockstep.types import Batch
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.types import LossFunction

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Parts:
    """What a recipe is made of, on one worker."""

    state: TrainState
    loader: Loader
    towers: Towers
    losses: LossFunction


def build(recipe: Recipe, worker: Worker) -> Parts:
    """Make model, state and loader of a complete recipe; the chief prepares the data, the others wait for it."""
    towers = recipe.towers_for(worker.num_workers)
    towers.check(recipe.batch_size, worker.num_workers)
    prepare(recipe, worker)
    reader = mnist_reader(recipe.data.split, _folder(recipe))
    loader = _loader(recipe, reader, order=recipe.feed.order, augment=recipe.data.augment)
    return Parts(_state(recipe, worker), loader, towers, classification_losses)


def build_state(recipe: Recipe, worker: Worker) -> TrainState:
    """Make the state of a recipe alone, to score it: on any number of workers. The chief prepares the data."""
    prepare(recipe, worker)
    return _state(recipe, worker)


def held_out(recipe: Recipe, split: str) -> Loader:
    """The examples of a split to score, in their order, not augmented; the data must be prepared."""
    reader = mnist_reader(split, _folder(recipe))
    if recipe.evaluate.examples:
        reader = _First(reader, recipe.evaluate.examples)
    return _loader(recipe, reader, order="sequential")


def _loader(recipe: Recipe, reader: Reader, **more: Any) -> Loader:
    feed = recipe.feed
    return Loader(
        reader,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        num_processes=feed.num_processes,
        num_threads=feed.num_threads,
        prefetch=feed.prefetch,
        bad_examples=feed.bad_examples,
        bad_budget=feed.bad_budget,
        **more,
    )


def prepare(recipe: Recipe, worker: Worker) -> None:
    """Have the records there, written by the chief alone."""
    if worker.is_chief:
        prepare_records(_folder(recipe))
    worker.group.barrier("the data is prepared")


def example_input(recipe: Recipe, num_examples: int) -> Tensor:
    """What the model of a recipe is given, of blank images: it has the shape and the dtype. No data is needed."""
    return scale_image(torch.zeros(num_examples, *IMAGE_SHAPE, dtype=torch.uint8))


def classification_losses(model: nn.Module, batch: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Cross entropy, and the share of examples that the model gets right, as a metric."""
    logits = model(scale_image(batch["image"]))
    top1 = in_top_k(logits.detach(), batch["label"]).mean()
    return {"cross_entropy": softmax_cross_entropy(logits, batch["label"])}, {"top1": top1}


def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What an evaluation adds up: whether the class with the highest score is the right one."""
    return {"top1": in_top_k(model(scale_image(batch["image"])), batch["label"])}


@dataclass(frozen=True)
class _First:
    """The first examples of a reader."""

    reader: Reader
    count: int

    @property
    def cost(self) -> Cost:
        return self.reader.cost

    def __len__(self) -> int:
        return min(self.count, len(self.reader))

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        return self.reader.read_batch(indices)

    def example_id(self, index: int) -> str:
        return self.reader.example_id(index)


def _state(recipe: Recipe, worker: Worker) -> TrainState:
    return TrainState(
        recipe.model.build(recipe.seed).to(worker.device),
        recipe.optimizer,
        frozen=recipe.frozen,
        train_only=recipe.train_only,
        freeze_statistics=recipe.freeze_statistics,
        regularization=recipe.regularization,
        tower_gradient_transforms=recipe.tower_gradient_transforms,
        gradient_transforms=recipe.gradient_transforms,
        average=recipe.average,
        loss_average=recipe.loss_average,
        nonfinite=recipe.nonfinite,
        nonfinite_budget=recipe.nonfinite_budget,
    )


def schedule_mismatch(recipe: Recipe, epoch_size: int) -> str | None:
    """A sentence where the learning rate comes to its end at another step than the run; None where all is well."""
    given, end = getattr(recipe.optimizer, "lr", None), recipe.end
    if not isinstance(given, Cosine) or not isinstance(end, Steps | Epochs):
        return None
    schedule = resolved(given, epoch_size, recipe.batch_size)
    assert isinstance(schedule, Cosine), "it stays one"
    last = end.count if isinstance(end, Steps) else end.steps(epoch_size, recipe.batch_size)
    if schedule.steps == last:
        return None
    after = f"stays at {schedule.final:g} from there on" if last > int(str(schedule.steps)) else "is still on its way"
    return f"the learning rate ends at step {schedule.steps}, the run at step {last}: it {after} (optimizer.lr.steps)"


def _folder(recipe: Recipe) -> Path | None:
    return Path(recipe.data.folder) if recipe.data.folder else None
