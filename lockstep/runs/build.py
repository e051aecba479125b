"""Build what a run needs from its recipe: model state, data loaders, towers, loss and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import Loader
from lockstep.errors import DataError
from lockstep.evaluation.evaluate import example_indices
from lockstep.losses import softmax_cross_entropy
from lockstep.metrics import in_top_k
from lockstep.metrics.metric import NO_METRICS, Metric
from lockstep.parallel.towers import Towers
from lockstep.readers.combine import Subset
from lockstep.readers.reader import Reader, reader_of
from lockstep.recipes.data import ImageData
from lockstep.recipes.detection import DetectionData
from lockstep.recipes.parts import CrossEntropy
from lockstep.recipes.recipe import Recipe
from lockstep.runs.inputs import check_best, check_same_classes
from lockstep.training.state import TrainState
from lockstep.types import Batch
from lockstep.workers.rank import Worker

CONFUSION, MISTAKES = "confusion", "mistakes"
"""Outputs of `score_in_detail`: the inputs of a confusion matrix, and of a list of the worst mistakes."""

SCORED = ("validation", "test")

ReaderFunction = Callable[[str], Reader | None]
"""`reader(split)` returns the examples of "train", "validation" or "test", with the fields "image" and "label", for
detectors "image", "boxes" and "labels"; or None where there are none."""


class Examples:
    """The examples of a run by split, and their loaders; each source is opened once.

    A function gives the examples in place of the recipe's paths.
    """

    def __init__(self, recipe: Recipe, function: ReaderFunction | None = None) -> None:
        self._recipe, self._function = recipe, function
        self._readers: dict[tuple[str, bool], Reader] = {}

    def prepare(self) -> None:
        """Write the files that the readers need; the chief alone calls it."""
        self._recipe.data.prepare()

    def training(self) -> Loader:
        """Make the loader of the training examples."""
        data = self._recipe.data
        reader = self.reader(data.split, to_train=True)
        targets = [data.targets(self._recipe.model.num_classes)] if isinstance(data, DetectionData) else []
        return self._loader(reader, order=self._recipe.feed.order, augment=[*data.training(), *targets])

    def held_out(self, split: str) -> Loader:
        """Make the loader of a split that is scored: in order, not augmented; the data must be prepared."""
        reader, wanted = self.reader(split), self._recipe.evaluate.examples
        if wanted is not None:
            if wanted > (there := len(reader)):
                raise DataError(
                    f"There are fewer {split} examples than are to be scored.",
                    given=f"{there} examples, {wanted} asked for",
                    expected=f"at most {there}",
                    hint=f"set evaluate.examples to {there} or less (--examples), or leave it out to score all of them",
                )
            reader = Subset(reader, slice(wanted))
        return self._loader(reader, order="sequential", augment=self._recipe.data.evaluation())

    def check_held_out(self) -> None:
        """Open all splits that are scored, so that errors come now and not after the first epoch, or the last."""
        for split in SCORED:
            if self.has(split):
                self.held_out(split)
                check_same_classes(split, _class_names(self.reader(split)), self.trained_classes)

    def counts(self) -> dict[str, int]:
        """Count the examples to train on, and those of each split that is scored."""
        counts = {"to train on": len(self.reader(self._recipe.data.split, to_train=True))}
        return counts | {split: len(self.reader(split)) for split in SCORED if self.has(split)}

    @property
    def trained_classes(self) -> Sequence[str]:
        """The names of the classes to train on, where the reader knows them."""
        return _class_names(self.reader(self._recipe.data.split, to_train=True))

    def reader(self, split: str, *, to_train: bool = False) -> Reader:
        """Return the reader of a split; to train on it, with the fields that its augmentations need."""
        key = (split, to_train)
        if key not in self._readers:
            self._readers[key] = self._opened(split, to_train)
        return self._readers[key]

    def _opened(self, split: str, to_train: bool) -> Reader:
        data, num_classes = self._recipe.data, self._recipe.model.num_classes
        if self._function is not None and isinstance(data, ImageData | DetectionData):
            given = self._function(split)
            if given is None:
                raise DataError(
                    f"The function of this run gives no {split} examples.",
                    given=f"reader({split!r}) is None",
                    expected="a reader",
                    hint=f"return a reader for {split!r}",
                )
            return data.labelled(reader_of(given), num_classes, to_train=to_train)
        return data.reader(split, num_classes, to_train=to_train)

    def has(self, split: str) -> bool:
        """Whether there are examples of a split, as far as is known without reading."""
        if self._function is not None:
            return self._function(split) is not None
        return split in self._recipe.data.splits

    def _loader(self, reader: Reader, **more: Any) -> Loader:
        feed = self._recipe.feed
        return Loader(
            reader,
            batch_size=self._recipe.batch_size,
            seed=self._recipe.seed,
            num_processes=feed.num_processes,
            num_threads=feed.num_threads,
            prefetch=feed.prefetch,
            bad_examples=feed.bad_examples,
            bad_budget=feed.bad_budget,
            timeout_seconds=self._recipe.watch.hang_seconds,
            **more,
        )


def _class_names(reader: Reader) -> Sequence[str]:
    """Return the names of a reader's classes in the order of their labels, from 0 on; none if it does not know them."""
    classes = getattr(reader, "classes", ())
    if isinstance(classes, Mapping):
        return [classes.get(label, "") for label in range(max(classes, default=-1) + 1)]
    return classes


@dataclass(frozen=True)
class Parts:
    """The parts of a run on one worker."""

    state: TrainState
    loader: Loader
    towers: Towers
    task: Classification
    examples: Examples


def build(
    recipe: Recipe,
    worker: Worker,
    reader: ReaderFunction | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
) -> Parts:
    """Build the parts of a run, whose recipe has its number of towers; the chief prepares the data, the others wait."""
    if reader is None:
        recipe.data.check_complete()
    towers = recipe.towers_for(worker.num_workers)
    towers.check(recipe.batch_size, worker.num_workers)
    examples = prepared(recipe, worker, reader)
    check_best(recipe, has_validation=examples.has("validation"), metrics=metrics)
    examples.check_held_out()
    worker.group.agree("the numbers of examples", examples.counts())
    loader = examples.training()
    return Parts(build_state(recipe, worker), loader, towers, task(recipe, metrics), examples)


def prepared(recipe: Recipe, worker: Worker, reader: ReaderFunction | None = None) -> Examples:
    """Return the examples of a recipe, once the chief has prepared their files."""
    examples = Examples(recipe, reader)
    if worker.is_chief:
        examples.prepare()
    worker.group.barrier("the data is prepared")
    return examples


def task(recipe: Recipe, metrics: Mapping[str, Metric] = NO_METRICS) -> Classification:
    """Return the loss and the scores of a recipe, with the metrics that a script gives."""
    return Classification(recipe.data.inputs, recipe.loss, recipe.evaluate.top, recipe.evaluate.flip, metrics)


def build_state(recipe: Recipe, worker: Worker) -> TrainState:
    """Build the training state of a recipe."""
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


@dataclass(frozen=True)
class Classification:
    """The loss and the scores of a classifier."""

    inputs: Callable[[Mapping[str, Any]], Tensor]
    """Makes the input of the model from a batch."""
    loss: CrossEntropy
    top: Sequence[int] = (1,)
    """The k of each top-k score."""
    flip: bool = False
    """Whether an example is scored by the mean of the logits of its image and the mirror image."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of the logits and the labels of all examples, by name."""

    @property
    def score_names(self) -> list[str]:
        """Names of the scores: "top1", and the others."""
        return [f"top{k}" for k in self.top]

    def losses(self, model: nn.Module, batch: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Compute the cross entropy of each head, and as a metric the share of examples that the model gets right."""
        outputs, labels = model(self.inputs(batch)), batch["label"]
        smoothing = self.loss.label_smoothing
        logits, auxiliary = _heads(outputs)
        losses = {"cross_entropy": softmax_cross_entropy(logits, labels, label_smoothing=smoothing)}
        if auxiliary:
            each = [softmax_cross_entropy(head, labels, label_smoothing=smoothing) for head in auxiliary]
            losses["auxiliary_cross_entropy"] = self.loss.auxiliary_weight * torch.stack(each).sum()
        return losses, {"top1": in_top_k(logits.detach(), labels).mean()}

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Score each example: whether its class is among the k with the highest logits. Metrics get both."""
        return self._scores(self.logits(model, batch), batch["label"])

    def score_in_detail(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Score each example, and return the inputs of a confusion matrix and of a list of the worst mistakes, too."""
        logits, labels = self.logits(model, batch), batch["label"]
        predicted = logits.argmax(1)
        loss = softmax_cross_entropy(logits, labels, reduction="none")
        more = {CONFUSION: (predicted, labels), MISTAKES: (loss, predicted, labels, example_indices(batch))}
        return {**self._scores(logits, labels), **more}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the logits that are scored, shape (batch, classes)."""
        images = self.inputs(batch)
        logits, _ = _heads(model(images))
        if not self.flip:
            return logits
        mirrored, _ = _heads(model(images.flip(3)))
        return (logits + mirrored) / 2

    def _scores(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        top = {name: in_top_k(logits, labels, k) for name, k in zip(self.score_names, self.top, strict=True)}
        return {**top, **dict.fromkeys(self.metrics, (logits, labels))}


def _heads(outputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Split the outputs into the logits of the last layer and those of the auxiliary heads, which only training has."""
    if isinstance(outputs, Tensor):
        return outputs, []
    logits, *auxiliary = outputs
    return logits, [head for head in auxiliary if head is not None]
