"""What a run needs to begin, checked before anything is written: its data, its first weights, its workdir, libraries.

All that is wrong is reported together. No data is opened for it, and no torch is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from pathlib import Path

from lockstep.augmentations.turns import check_keypoint_order
from lockstep.checks import check_one_of, check_together
from lockstep.detection.tf_supported import check_supported
from lockstep.detection.values import Detector, RtDetr, TorchvisionDetector
from lockstep.errors import DataError, InputError, NotFoundError, WorkdirError
from lockstep.inline_toml import kind_name
from lockstep.listing import hint_for_path, shorten
from lockstep.loggers.logger import Logger, LoggerKind, check_loggers
from lockstep.metrics.metric import NO_METRICS, Metric, score_name
from lockstep.models import Timm, Torchvision
from lockstep.readers.label_map import read_labels
from lockstep.readers.paths import class_folders, is_folder
from lockstep.recipes.code import functions_of
from lockstep.recipes.data import DetectionData, ImageData
from lockstep.recipes.python_parts import PythonModel
from lockstep.recipes.recipe import Recipe
from lockstep.records.shards import data_path
from lockstep.runs.workdir import Workdir, located
from lockstep.types import Steps


def check_inputs(
    recipe: Recipe,
    path: Path | None,
    *,
    accept_changes: bool = False,
    fork_from: str | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
    loggers: Sequence[Logger | LoggerKind] = (),
) -> None:
    """Check all that can be seen to be missing or wrong before a run begins.

    Args:
        recipe: of the run.
        path: its workdir, which may hold the run already; None writes nothing.
        accept_changes: the run in the workdir may go on by another recipe.
        fork_from: the run, or RUN@STEP, that one without checkpoints begins with.
        metrics: that the script gives, by name.
        loggers: that the script gives, besides those of the recipe.

    Raises:
        InputError: InputErrors where several things are wrong.
    """
    if isinstance(recipe.model, Detector):
        check_supported(recipe.model)  # which says why it cannot be, whatever else is wrong
    checks: list[Callable[[], object]] = [partial(_check_library, recipe), partial(_check_task, recipe)]
    is_begun = path is not None and Workdir(path).holds_run
    found = located(recipe, path) if is_begun else recipe
    checks += [partial(_check_code, recipe), partial(_check_traced, recipe), partial(_check_keypoint_orders, recipe)]
    checks += [found.data.check_complete, partial(_check_class_folders, found)]
    if recipe.data.function is None:  # one of the user's own says later what there is
        has_validation = "validation" in recipe.data.splits
        checks.append(partial(check_best, recipe, has_validation=has_validation, metrics=metrics))
    checks += [partial(check_loggers, "loggers", given) for given in (recipe.loggers, loggers)]
    if path is None:
        checks.append(partial(_check_no_loggers, loggers))
        checks.append(partial(_check_no_rollback, recipe))
    else:
        checks.append(partial(Workdir(path).check, recipe, accept_changes=accept_changes))
    if path is None or not any(path.glob("checkpoints/step-*")):  # it goes on from its own
        checks += [partial(_check_first_weights, recipe), partial(_check_fork, fork_from)]
    check_together(checks)


def check_best(recipe: Recipe, *, has_validation: bool, metrics: Mapping[str, Metric] = NO_METRICS) -> None:
    """Refuse to keep the best checkpoints by a score that there will not be, as far as the metrics say which."""
    best = recipe.checkpoints.retention.best
    if best is not None and not has_validation:
        raise InputError(
            "Nothing would say which checkpoints are the best: there are no validation examples.",
            given=f"checkpoints.retention.best={best!r}, and no validation examples",
            expected="validation examples, or a run without best checkpoints",
            hint="--set data.validation=PATH; or --set checkpoints.retention.best=none",
        )
    known = recipe.chosen_task.score_names
    if known is None or best in (None, f"validation/{recipe.chosen_task.main_score}"):
        return
    names = [*known]
    for name, metric in metrics.items():
        keys = getattr(metric, "score_names", None)
        if keys is None and best.startswith(f"validation/{name}/"):
            return  # perhaps it computes a mapping with this key
        names += [name] if keys is None else [score_name(name, key) for key in keys]
    check_one_of("checkpoints.retention.best", best, [f"validation/{name}" for name in names])


def check_same_classes(split: str, scored: Mapping[int, str], trained: Mapping[int, str]) -> None:
    """Refuse classes that have other labels than those to train on, as far as both have names.

    Both are the name of each class by its label in the model; a name may be that of several classes.
    """
    labels = {name: label for label, name in trained.items()}
    for label, name in scored.items():
        if trained.get(label, name) != name or (label not in trained and name in labels):
            ours = f"label {label} is {trained[label]!r}" if label in trained else f"{name!r} has label {labels[name]}"
            raise DataError(
                f"The classes of the {split} examples have other labels than those to train on.",
                given=f"label {label} is {name!r}; {ours} to train on",
                expected=f"the same label for each class in both: {shorten(list(trained.values()))}",
                hint="have a folder with at least one image for each class in both; of objects, set data.label_map to "
                "a label map with all classes, or repair the ids of the categories; of folders, and of tables whose "
                "labels are text, set data.labels to the names of all classes, or to a file with one a line",
            )


def unused_classes(recipe: Recipe, classes: Sequence[str]) -> str:
    """Say that the model has more classes than the data, one of which may be the background; "" where it has not.

    `classes` are the names of those of the data, from label 0 on; none where they are not known.
    """
    given, offset = recipe.model.num_classes, getattr(recipe.data, "labels_offset", 0)
    if given is None:
        return ""
    if isinstance(recipe.data, DetectionData):  # label 0 is that of the background
        known = len(classes) - 1
        is_less = 0 < known < given
        return f"the model has {given} classes, the data {known} (model.num_classes={known})" if is_less else ""
    if not classes or len(classes) - offset >= given:
        return ""
    background = f"{len(classes) + 1} with data.labels_offset=-1 keeps class 0 for a background"
    return f"the model has {given} classes, the data {len(classes)} (model.num_classes={len(classes)}; {background})"


def _check_class_folders(recipe: Recipe) -> None:
    """Check folders of images by the names of the folders in them; other data is left to its reader."""
    data, num_classes = recipe.data, recipe.model.num_classes
    if not isinstance(data, ImageData) or num_classes is None or data.function:
        return
    classes: dict[str, Sequence[str]] = {}

    def look(split: str) -> None:
        found = class_folders(getattr(data, split))
        classes[split] = read_labels(data.labels) if found and data.labels is not None else found

    check_together(partial(look, split) for split in data.splits if is_folder(getattr(data, split)))
    for split, names in classes.items():
        needed = len(names) - data.labels_offset
        if names and needed > num_classes:
            where = f"labels in {data.labels}" if data.labels else f"folders in {data.path(split)}"
            raise DataError(
                f"The {split} examples have more classes than the model.",
                given=f"{len(names)} {where}, and model.num_classes={num_classes}"
                + (f" with data.labels_offset={data.labels_offset}" if data.labels_offset else ""),
                expected=f"a model with {needed} classes or more",
                hint=f"--set model.num_classes={needed}",
            )
    for split, names in classes.items():
        check_same_classes(split, dict(enumerate(names)), dict(enumerate(classes.get(data.split, ()))))


def _check_code(recipe: Recipe) -> None:
    """Refuse the first function that may not be called: for others the reason is the same."""
    for function in functions_of(recipe):
        function.check()


def _check_task(recipe: Recipe) -> None:
    is_detector, has_objects = isinstance(recipe.model, Detector), isinstance(recipe.data, DetectionData)
    if recipe.task is not None or isinstance(recipe.model, PythonModel):
        pass
    elif is_detector and not has_objects:
        raise InputError(
            f"{type(recipe.model).__name__} learns where objects are, not one class for each image.",
            given=f'data.kind="{kind_name(type(recipe.data))}"',
            expected="images with objects on them",
            hint='set data.kind="detection_data"',
        )
    elif has_objects and not is_detector:
        raise InputError(
            f"{type(recipe.model).__name__} learns one class for each image, not the objects on it.",
            given='data.kind="detection_data"',
            expected="data of images that have one class each",
            hint='set data.kind="image_data"; data of detectors is for `lockstep show` and `lockstep benchmark input`',
        )
    for path, default in recipe.chosen_task.unused.items():
        if (given := attrgetter(path)(recipe)) != default:
            raise InputError(
                f"{path} says nothing to {type(recipe.model).__name__}: it is for classifiers.",
                given=f"{path}={given}",
                expected="a recipe without it",
                hint=f"leave {path} out; what a detector learns by is in model, how it is scored in evaluate.detection",
            )


def _check_traced(recipe: Recipe) -> None:
    profile, end = recipe.watch.profile, recipe.end
    for name, steps in {"trace": recipe.watch.trace, "profile.steps": profile and profile.steps}.items():
        if steps and isinstance(end, Steps) and steps.start >= end.count:
            raise InputError(
                "The run would be over before the steps that are to be recorded.",
                given=f"watch.{name}={steps}, and an end after {end}",
                expected=f"steps below {end.count}: the last one begins when {end.count - 1} updates are complete",
                hint=f"--set watch.{name}={max(0, end.count - 10)}:{end.count}; or none",
            )


def _check_library(recipe: Recipe) -> None:
    if isinstance(recipe.model, Torchvision | Timm | TorchvisionDetector | RtDetr):
        recipe.model.check_installed()


def _check_first_weights(recipe: Recipe) -> None:
    """Refuse first weights that are asked for without a path, or are not there."""
    if recipe.warm_start is None:
        return
    path, takes = recipe.warm_start.path, recipe.warm_start.takes
    if takes is not None and not isinstance(recipe.model, Detector):
        raise InputError(
            "Only a detector takes a part of the weights.",
            given=f"warm_start.takes={takes!r}, and model.kind={kind_name(type(recipe.model))!r}",
            expected="a detector, or weights of the model itself",
            hint="--set warm_start.takes=none, and say in warm_start.mapping what is loaded",
        )
    if path is None:
        raise InputError(
            "This recipe starts from trained weights, and has not been told which.",
            given="no warm_start.path",
            expected="a run, a TensorFlow checkpoint, or a file of safetensors or torch",
            hint="--set warm_start.path=PATH (of TF-Slim's, also --set warm_start.mapping.name_map=slim_inception_v3); "
            "or --set warm_start=none to begin with fresh ones",
        )
    if not _is_there(path):
        raise NotFoundError(
            f"There are no first weights at {path}.",
            given=f"warm_start.path={path!r}",
            expected="a run, a TensorFlow checkpoint, or a file of safetensors or torch",
            hint=hint_for_path(path),
        )


def _check_keypoint_orders(recipe: Recipe) -> None:
    """Refuse to mirror images with keypoints without an order of all of these."""
    if not isinstance(recipe.data, DetectionData) or not recipe.data.num_keypoints:
        return
    for augment in recipe.data.augment:
        order = getattr(augment, "keypoint_flip_permutation", None)
        if order is not None:
            check_keypoint_order(order, recipe.data.num_keypoints, augment)


def _check_fork(fork_from: str | None) -> None:
    if fork_from is not None and not _is_there(fork_from):
        raise NotFoundError(
            f"There is no run {fork_from} to fork from.",
            given=f"--fork-from {fork_from}",
            expected="the folder of a run, or FOLDER@STEP",
            hint=hint_for_path(fork_from.partition("@")[0]),
        )


def _is_there(path: str) -> bool:
    """Whether a path may lead to weights: it exists, begins the names of files or is their pattern, or is RUN@STEP."""
    whole, run = data_path(path), path.rpartition("@")[0]
    try:
        names = [each.name for each in whole.parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # it may not be looked at: what opens it says why
        return True
    is_prefix = any(name.startswith(whole.name) or fnmatchcase(name, whole.name) for name in names)
    return is_prefix or whole.exists() or (bool(run) and data_path(run).is_dir())


def _check_no_loggers(loggers: Sequence[object]) -> None:
    if loggers:
        raise WorkdirError(
            "Without a workdir a run cannot be logged: that is where its loggers know it from when it goes on.",
            given=f"loggers={list(loggers)}",
            expected="a workdir, or no loggers",
            hint='name a folder: ls.run(recipe, "runs/mine", loggers=...)',
        )


def _check_no_rollback(recipe: Recipe) -> None:
    if recipe.nonfinite == "rollback":
        raise WorkdirError(
            "Without a workdir there is no checkpoint to go back to.",
            given="nonfinite=rollback",
            expected="a workdir, or another policy",
            hint="name a --workdir, or add --set nonfinite=skip",
        )
