"""Build what a run needs from its recipe: model state, data loaders, towers, loss and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from lockstep.data.loader import Loader
from lockstep.description import described
from lockstep.detection.detector import DetectionModel
from lockstep.errors import DataError, InputError
from lockstep.listing import shorten
from lockstep.metrics.metric import NO_METRICS, Metric
from lockstep.models.quantization import quantize, quantizer_of
from lockstep.models.torchvision_models import size_taken
from lockstep.readers.combine import Subset
from lockstep.readers.reader import Reader
from lockstep.recipes.data import DetectionData, MnistData
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.tasks import Detection, Task, network_input
from lockstep.runs.inputs import check_best, check_same_classes
from lockstep.runs.workdir import class_names
from lockstep.screen import log
from lockstep.towers.towers import Towers
from lockstep.training.state import TrainState
from lockstep.workers.rank import Worker, join

SCORED = ("validation", "test")
_EXAMPLES_TO_RUN = 2  # batch norm needs two values a channel

ReaderFunction = Callable[[str], Reader | None]
"""`given(split)` returns the examples of "train", "validation" or "test", or None where there are none."""


class Examples:
    """The examples of a run by split, and their loaders; each source is opened once.

    `given` asks the function of a recipe that has one in place of paths, in place of `recipe.data.given`. What `opened`
    has open, whose recipe has the same data, is not opened again. `class_names` by their labels are what a run that has
    begun knows, whose data may be gone.
    """

    def __init__(
        self,
        recipe: Recipe,
        given: ReaderFunction | None = None,
        *,
        opened: Examples | None = None,
        class_names: Mapping[int, str] | None = None,
    ) -> None:
        self._recipe, self._class_names = recipe, class_names
        self._given: ReaderFunction | None = opened._given if opened else given or given_once(recipe)
        self._readers: dict[tuple[str, bool], Reader] = opened._readers if opened else {}
        self._told: set[str] = set()
        """Splits of which the log has said that they have fewer examples than are to be scored."""

    def training(self) -> Loader:
        """Make the loader of the training examples."""
        data = self._recipe.data
        reader = self.reader(data.split, to_train=True)
        augment = [*data.training(), *self._recipe.chosen_task.targets()]
        return self._loader(reader, order=self._recipe.feed.order, augment=augment)

    def held_out(self, split: str, *, most: int | None = None) -> Loader:
        """Make the loader of a split that is scored: in order, not augmented; the data must be prepared.

        `most` is for a trial: so many of the first examples at most.
        """
        reader, wanted = self.reader(split), self._recipe.evaluate.examples
        there = len(reader)
        if wanted is not None and wanted > there and split not in self._told:
            self._told.add(split)
            if join().is_chief:
                log.info(
                    "all %d %s examples are scored: there are fewer than evaluate.examples=%d", there, split, wanted
                )
        if most is not None or wanted is not None:
            reader = Subset(reader, slice(min(number for number in (most, wanted, there) if number is not None)))
        return self._loader(reader, order="sequential", augment=self._recipe.data.evaluation())

    def check_held_out(self) -> None:
        """Open all splits that are scored, so that errors come now and not after the first epoch, or the last."""
        for split in SCORED:
            if self.has(split):
                self.held_out(split)
                trained = self.reader(self._recipe.data.split, to_train=True)
                check_same_classes(split, class_names(self.reader(split)), class_names(trained))

    def counts(self) -> dict[str, int]:
        """Count the examples to train on, and those of each split that is scored."""
        counts = {"to train on": len(self.reader(self._recipe.data.split, to_train=True))}
        return counts | {split: len(self.reader(split)) for split in SCORED if self.has(split)}

    @property
    def trained_classes(self) -> Sequence[str]:
        """The names of the classes to train on in the order of their labels, from 0 on, where the reader knows them."""
        classes = getattr(self.reader(self._recipe.data.split, to_train=True), "classes", ())
        if isinstance(classes, Mapping):
            return [classes.get(label, "") for label in range(max(classes, default=-1) + 1)]
        return classes

    def reader(self, split: str, *, to_train: bool = False) -> Reader:
        """Return the reader of a split; to train on it, with the fields that its augmentations need."""
        key = (split, to_train)
        if key not in self._readers:
            self._readers[key] = self._opened(split, to_train)
        return self._readers[key]

    def _opened(self, split: str, to_train: bool) -> Reader:
        data: Any = self._recipe.data
        num_classes = self._recipe.num_classes
        if self._given is None:
            known = {"class_names": self._class_names} if isinstance(data, DetectionData) else {}
            reader: Reader = data.reader(split, num_classes, to_train=to_train, **known)
            return reader
        if (given := self._given(split)) is None:
            raise DataError(
                f"The function of this run gives no {split} examples.",
                given=f"{data.function.full_name}({split!r}) is None",
                expected="a reader",
                hint=f"return a reader for {split!r}",
            )
        labelled: Reader = data.labelled(given, num_classes, to_train=to_train)
        return labelled

    def has(self, split: str) -> bool:
        """Whether there are examples of a split, as far as is known without reading."""
        if self._given is not None:
            return self._given(split) is not None
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


def given_once(recipe: Recipe) -> ReaderFunction | None:
    """Return what gives the examples in place of paths, and is called once a split; None where paths lead to them."""
    data = recipe.data
    return cache(data.given) if not isinstance(data, MnistData) and data.function is not None else None


@dataclass(frozen=True)
class Parts:
    """The parts of a run on one worker."""

    state: TrainState
    loader: Loader
    towers: Towers
    task: Task
    examples: Examples

    def scores(self, split: str) -> bool:
        """Whether there are examples of a split, and the task can score them."""
        return self.task.score is not None and self.examples.has(split)


def build(
    recipe: Recipe,
    worker: Worker,
    given: ReaderFunction | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
    *,
    is_prepared: bool = False,
    opened: Examples | None = None,
) -> Parts:
    """Build the parts of a run, whose recipe has its number of towers; the chief prepares the data, the others wait.

    Where the data `is_prepared`, as for a later stage, no other worker is waited for: one that joins builds it alone.
    `opened`: see `Examples`.
    """
    recipe.data.check_complete()
    towers = recipe.towers_for(worker.num_workers)
    recipe.check_towers(worker.num_workers)
    examples = Examples(recipe, given, opened=opened) if is_prepared else prepared(recipe, worker, given)
    examples.check_held_out()
    if not is_prepared:
        worker.group.agree("the numbers of examples", examples.counts())
    loader = examples.training()
    classes = class_names(examples.reader(recipe.data.split, to_train=True))
    task = recipe.chosen_task.with_metrics(classes, metrics)
    if task.score is None and recipe.checkpoints.retention.best is not None:
        raise InputError(
            "Nothing says which checkpoints are the best: this task has no score.",
            given=f"checkpoints.retention.best={recipe.checkpoints.retention.best!r}, and a task without score",
            expected="a score, or a run without best checkpoints",
            hint="give the task score(model, batch), or set checkpoints.retention.best=none",
        )
    check_best(recipe, has_validation=examples.has("validation"), metrics=metrics)
    state = build_state(recipe, worker)
    if isinstance(task, Detection) and not isinstance(state.model, DetectionModel):
        raise InputError(
            "This network of your own is no detector.",
            given=f'a {type(state.model).__name__}, and data.kind="detection_data"',
            expected="a subclass of ls.detection.DetectionModel, or a task of your own",
            hint="say with its methods what it learns from boxes, or give losses",
        )
    return Parts(state, loader, towers, task, examples)


def prepared(recipe: Recipe, worker: Worker, given: ReaderFunction | None = None) -> Examples:
    """Return the examples of a recipe, once the chief has prepared their files."""
    if worker.is_chief:
        recipe.data.prepare()
    worker.group.barrier("the data is prepared")
    return Examples(recipe, given)


def build_model(recipe: Recipe) -> nn.Module:
    """Build the network of a recipe with its first weights, on the CPU; quantized if the recipe says so."""
    model = recipe.model.build(recipe.seed)
    if (given := recipe.quantization) is not None:
        # A classifier's layers are all of those that it trains with; a detector's second stage would ask for objects.
        model.train(not isinstance(model, DetectionModel))
        quantize(model, blank_input(recipe, model, _EXAMPLES_TO_RUN), **vars(given))
        if isinstance(model, DetectionModel):
            _check_all_quantized(model)
    return model


def _check_all_quantized(model: DetectionModel) -> None:
    """Refuse a detector with layers that `forward` does not compute in evaluation: nothing would quantize them."""
    quantizer = quantizer_of(model)
    assert quantizer is not None, "it was made just now"
    left = quantizer.layers.keys() - {key.rpartition(":")[0] for key in quantizer.plan.layers}
    if left:
        raise InputError(
            "Layers for masks, for keypoints of regions, or for training alone are not trained for whole numbers.",
            given=f"{len(left)} layers of a {type(model).__name__} that no image alone reaches: "
            f"{shorten(sorted(left))}",
            expected="a detector all of whose layers compute on an image, such as an SSD or a Faster R-CNN",
            hint="leave quantization out of the recipe (--set quantization=none)",
        )


def blank_input(recipe: Recipe, model: nn.Module, num_examples: int) -> Tensor:
    """Return what a network is called with for as many black images."""
    images = recipe.data.blank(num_examples)
    return network_input(model, images) if isinstance(model, DetectionModel) else images


def build_state(recipe: Recipe, worker: Worker) -> TrainState:
    """Build the training state of a recipe; a model that takes other images than there are is refused."""
    model = build_model(recipe)
    if size := size_taken(model):
        recipe.check_image_sizes(size, size)
    state = TrainState(
        model.to(worker.device),
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
    state.compare_steps = recipe.watch.compare_steps
    state.replay_steps = recipe.verify.replay
    # As the first step says it, too: what is scored without one is computed with the same flags.
    towers = recipe.towers_for(worker.num_workers)
    state.train_with(towers=described(towers), exchange=described(recipe.exchange))
    return state
