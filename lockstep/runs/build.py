"""From a recipe to the parts that run: the only place that puts them together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.checks import check_one_of
from lockstep.data.loader import Loader
from lockstep.errors import InputError
from lockstep.optim import Cosine
from lockstep.optim.resolution import resolve_schedule
from lockstep.parallel.towers import Towers
from lockstep.progress import Epochs, Steps
from lockstep.recipes.recipe import Recipe
from lockstep.runs.classification import Classification
from lockstep.runs.examples import Examples, ReaderFunction
from lockstep.training.state import TrainState
from lockstep.workers.rank import Worker


@dataclass(frozen=True)
class Parts:
    """What a recipe is made of, on one worker."""

    state: TrainState
    loader: Loader
    towers: Towers
    task: Classification
    examples: Examples


def build(recipe: Recipe, worker: Worker, reader: ReaderFunction | None = None) -> Parts:
    """Make what runs of a complete recipe; the chief prepares the data, the others wait for it.

    Args:
        recipe: with its number of towers.
        worker: this worker.
        reader: gives the examples, in place of the recipe's paths.

    Raises:
        InputError: the recipe is not complete, or something that it names cannot be used.
        WorkerError: the workers have different examples.
    """
    check_told(recipe, reader)
    towers = recipe.towers_for(worker.num_workers)
    towers.check(recipe.batch_size, worker.num_workers)
    examples = prepared(recipe, worker, reader)
    _check_scored(recipe, examples)
    examples.check_held_out()
    worker.group.agree("the numbers of examples", examples.counts())
    loader = examples.training()
    return Parts(build_state(recipe, worker), loader, towers, task(recipe), examples)


def check_told(recipe: Recipe, reader: ReaderFunction | None = None) -> None:
    """Refuse a recipe that still has to be told where its data or its first weights are.

    Raises:
        InputError: a path is missing; the message says how to give it.
        DataError: a path of the data is missing, or leads nowhere.
    """
    if reader is None:
        recipe.data.check_told()
        _check_scored(recipe, Examples(recipe))
    if recipe.warm_start is not None and recipe.warm_start.path is None:
        raise InputError(
            "This recipe starts from trained weights, and has not been told which.",
            given="no warm_start.path",
            expected="a run, a TensorFlow checkpoint, or a file of safetensors or torch",
            hint="--set warm_start.path=PATH (of TF-Slim's, also --set warm_start.mapping.name_map=slim_inception_v3); "
            "or --set warm_start=none to begin with fresh ones",
        )


def _check_scored(recipe: Recipe, examples: Examples) -> None:
    best = recipe.checkpoints.retention.best
    if best is not None and not examples.has("validation"):
        raise InputError(
            "Nothing would say which checkpoints are the best: there are no validation examples.",
            given=f"checkpoints.retention.best={best!r}, and no validation examples",
            expected="validation examples, or a run without best checkpoints",
            hint="--set data.validation=PATH; or --set checkpoints.retention.best=none",
        )
    if best is not None:
        known = [f"validation/{name}" for name in task(recipe).score_names]
        check_one_of("checkpoints.retention.best", best, known)


def prepared(recipe: Recipe, worker: Worker, reader: ReaderFunction | None = None) -> Examples:
    """The examples of a recipe; what their readers need is there, written by the chief alone."""
    examples = Examples(recipe, reader)
    if worker.is_chief:
        examples.prepare()
    worker.group.barrier("the data is prepared")
    return examples


def task(recipe: Recipe) -> Classification:
    """What the recipe's model is trained and scored by."""
    return Classification(recipe.data.inputs, recipe.loss, recipe.evaluate.top, recipe.evaluate.flip)


def example_input(recipe: Recipe, num_examples: int) -> Tensor:
    """What the model of a recipe is given, of blank images: it has the shape and the dtype. No data is needed."""
    return recipe.data.blank(num_examples)


def build_state(recipe: Recipe, worker: Worker) -> TrainState:
    """Make the state of a recipe, to train or to score it."""
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


def schedule_mismatch(recipe: Recipe, epoch_size: int, what: str = "the run") -> str | None:
    """A sentence where the learning rate comes to its end at another step than the run; None where all is well.

    Args:
        recipe: of the run, or of a stage of it.
        epoch_size: examples in an epoch.
        what: is called so.
    """
    given, end = getattr(recipe.optimizer, "lr", None), recipe.end
    if not isinstance(given, Cosine) or not isinstance(end, Steps | Epochs):
        return None
    schedule = resolve_schedule(given, epoch_size, recipe.batch_size)
    assert isinstance(schedule, Cosine), "it stays one"
    last = end.count if isinstance(end, Steps) else end.steps(epoch_size, recipe.batch_size)
    if schedule.steps == last:
        return None
    after = f"stays at {schedule.final:g} from there on" if last > int(str(schedule.steps)) else "is still on its way"
    return f"the learning rate ends at step {schedule.steps}, {what} at step {last}: it {after} (optimizer.lr.steps)"
