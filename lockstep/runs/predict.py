"""Predict the classes of images with the model of a run, the objects on them, or what a task of your own says of them.

Images in files come in batches as the model is scored on them, but files that cannot be read are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.crops import Resize
from lockstep.checks import PositiveInt, check_value
from lockstep.data.loader import EvaluationBatch, Loader
from lockstep.errors import DataError, InputError, LockstepError
from lockstep.evaluation.evaluate import example_indices
from lockstep.evaluation.kept_detections import DetectedImage, KeptDetections, kept_columns
from lockstep.evaluation.scores import Weights
from lockstep.images.colour import grey
from lockstep.inline_toml import kind_name
from lockstep.listing import csv_line
from lockstep.metrics.classification import class_name
from lockstep.metrics.metric import NO_METRICS
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.readers.coco_results import MaskText
from lockstep.readers.image_folder import ImageList
from lockstep.recipes.data import ImageData
from lockstep.recipes.python_parts import PythonData, PythonTask
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.tasks import Classification, Detection
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.runs.showing import Pipeline, examples
from lockstep.runs.trained import Trained, trained_model
from lockstep.runs.workdir import KnownData
from lockstep.types import BadExample, NonFiniteError, ProgressFunction
from lockstep.workers.rank import join

_MOST_NAMED = 3
_COLUMNS = ("label", "class", "probability")
_SIZE = "original_size"


def batches_of_images(
    recipe: Recipe,
    reader: ImageList,
    augment: Sequence[Augment],
    device: torch.device,
    progress: ProgressFunction | None = None,
) -> Iterator[EvaluationBatch]:
    """Yield the images in batches, as the run loads them; `bad` of a batch names files that could not be read.

    Raises:
        LockstepError: none of the files can be read.
    """
    feed = recipe.feed
    size = min(recipe.evaluate.micro_batch or recipe.batch_size // (recipe.num_towers or 1), len(reader))
    loader = Loader(
        reader,
        batch_size=size,
        order="sequential",
        augment=augment,
        num_processes=feed.num_processes if len(reader) > size else 0,  # for a single batch none are started
        num_threads=feed.num_threads if len(reader) > size else 0,
        prefetch=feed.prefetch,
        bad_examples="skip",
        bad_budget=len(reader),
        timeout_seconds=recipe.watch.hang_seconds,
    )
    try:
        with closing(loader.evaluation_batches(size, device=device)) as batches:
            for batch in batches:
                yield batch
                if progress:
                    progress(min(batch.position + size, len(reader)), len(reader))
    except DataError as error:
        problems = _problems(reader, augment)
        if not all(problems.values()):
            raise
        raise LockstepError(
            f"None of the {len(reader)} files can be read." if len(reader) > 1 else "The file cannot be read.",
            given="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
            expected="one image at least that can be decoded",
            hint="check the paths, and the kind of the files",
        ) from error


def _problems(reader: ImageList, augment: Sequence[Augment]) -> dict[str, str]:
    """Say of the first files why they cannot be read; "" of those that can."""
    first = range(min(_MOST_NAMED, len(reader)))
    shown = examples(reader, first, order="sequential", pipeline=Pipeline(augment))
    return {each.example_id: each.problem for each in shown}


class ClassProbability(NamedTuple):
    """A class and the probability that the model gives it."""

    label: int
    name: str
    """Its number as text, where the run knows no names."""
    probability: float


@dataclass(frozen=True)
class _OfImages:
    """What a model says of images in files, and the files that could not be read."""

    reader: ImageList
    """All files that were given, in their order."""
    skipped: Sequence[BadExample]
    """The files that could not be read, with their places and the reasons."""
    step: int
    """The number of updates that the weights have had."""
    weights: Weights

    def _as_json(self, predictions: Sequence[Mapping[str, Any]]) -> str:
        facts = {
            "step": self.step,
            "weights": self.weights,
            "folder": self.reader.folder,
            "predictions": predictions,
            "skipped": [{"file": bad.example_id, "problem": bad.reason} for bad in self.skipped],
        }
        return json.dumps(facts, indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Predictions(_OfImages):
    """The most probable classes of each image, and the files that could not be read."""

    positions: Tensor
    """The places of the images among all files: int64 of shape (images,)."""
    labels: Tensor
    """The most probable classes of each image, the most probable first: int64 of shape (images, top)."""
    probabilities: Tensor
    """Their probabilities, by the softmax of the logits of all classes: float32 of shape (images, top)."""
    class_names: Mapping[int, str]
    """Names of the classes by label, as far as the run knows them."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def files(self) -> list[str]:
        """The images, by their paths within `reader.folder`."""
        return [self.reader.example_id(position) for position in self.positions.tolist()]

    def classes(self, index: int) -> list[ClassProbability]:
        """Return the most probable classes of an image, the most probable first."""
        row = zip(self.labels[index].tolist(), self.probabilities[index].tolist(), strict=True)
        return [ClassProbability(label, class_name(self.class_names, label), value) for label, value in row]

    def by_position(self) -> dict[int, list[ClassProbability]]:
        """Return the classes of each image by its place; files that were skipped are missing."""
        return {position: self.classes(index) for index, position in enumerate(self.positions.tolist())}


def predict(
    run: str | Path,
    paths: str | Path | Sequence[str | Path],
    *,
    weights: Weights | None = None,
    top: int | None = 5,
    device: str | None = None,
    allow_code: bool = False,
    progress: ProgressFunction | None = None,
) -> Predictions:
    """Predict the classes of images with the model of a run, on this worker alone.

    The images are decoded and preprocessed as in an evaluation of the run. Of a model for MNIST they are shrunk to its
    size and made grey; a digit is to be white on black. The data of the run need not be there.

    Args:
        run: the workdir, for its newest checkpoint that is intact; or `WORKDIR@STEP`.
        paths: files, folders with images in them or below, or both.
        weights: the parameters as they are, or their moving averages; None: as the recipe scores them.
        top: how many of the most probable classes are kept; None, or more than there are: all.
        device: "cpu"; None for an accelerator where there is one.
        allow_code: call the code of a user's own that the recipe names, though others may have written the run.
        progress: called with the number of files that are done, and of all.

    Raises:
        InputError: there is no run; a path is not there (`DataError`), or holds no images.
        CheckpointError: there is no such checkpoint, or it is damaged.
        NonFiniteError: the logits of an image are not finite.
        LockstepError: none of the files can be read.
    """
    if top is not None:
        check_value("top", top, PositiveInt)
    trained = trained_model(str(run), weights, allow_code=allow_code)
    recipe, place = trained.recipe, join(device or trained.recipe.device).device
    task = recipe.chosen_task
    if not isinstance(task, Classification):
        is_own = isinstance(task, PythonTask)
        raise InputError(
            "This run has a task of its own: no image has a class."
            if is_own
            else "This run has a detector, which finds objects: no image has a class.",
            given=f"the run {run}, of model.kind={kind_name(type(recipe.model))!r}",
            expected="the run of a classifier",
            hint="ls.outputs(run, images) gives what the predict of the task returns"
            if is_own
            else "ls.detect(run, images) finds the objects on them; or the command: lockstep predict",
        )
    reader, augment = _images(recipe, paths)
    model, compute = trained.model.to(place), task.logits
    positions, labels, probabilities, skipped = list[Tensor](), list[Tensor](), list[Tensor](), list[BadExample]()
    for batch in batches_of_images(recipe, reader, augment, place, progress):
        with torch.inference_mode():
            logits = compute(model, batch)[: batch.valid].cpu()
        indices = example_indices(batch)[: batch.valid]
        _check_finite(logits, [reader.example_id(index) for index in indices.tolist()])
        ranked, order = logits.sort(dim=1, descending=True, stable=True)
        labels.append(order[:, :top])
        probabilities.append(ranked.softmax(1, dtype=torch.float32)[:, :top])
        positions.append(indices)
        skipped += batch.bad
    names = KnownData.of(trained.workdir).class_names
    places, classes, values = map(torch.cat, (positions, labels, probabilities))
    return Predictions(reader, skipped, trained.step, trained.weights, places, classes, values, names)


def _images(recipe: Recipe, paths: str | Path | Sequence[str | Path]) -> tuple[ImageList, Sequence[Augment]]:
    """Open the images, and choose what makes of them the examples that the run is scored on."""
    data = recipe.data
    if isinstance(data, ImageData):
        return ImageList(paths, data.decoding), data.evaluation()
    if isinstance(data, PythonData):
        raise InputError(
            "The examples of this run come from a function: how images become inputs is not known.",
            given=f"data.function={data.function.full_name!r}",
            expected="a run with ImageData",
            hint="in a script, call the model with what your reader gives",
        )
    return ImageList(paths), (Resize(data.image_size), _grey)


def _grey(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
    """Make uint8 images of shape (batch, 1, height, width)."""
    return {**batch, "image": grey(batch["image"]).round_().to(torch.uint8)}


def _check_finite(logits: Tensor, files: Sequence[str]) -> None:
    wrong = (~logits.isfinite().all(1)).nonzero()
    if len(wrong):
        raise NonFiniteError(
            f"The model gives {files[int(wrong[0])]} no probabilities.",
            given="logits that are not finite",
            expected="finite numbers",
            hint="take another checkpoint of the run: these weights, or their statistics, are not usable",
        )


def predictions_csv(predictions: Predictions) -> str:
    """Write a line of CSV for each file below a header.

    Its columns: file, problem (why it was skipped, else empty), then label_1, class_1 and probability_1 of the most
    probable class, label_2, and so on.
    """
    columns = [f"{name}_{rank}" for rank in range(1, predictions.labels.shape[1] + 1) for name in _COLUMNS]
    lines: list[list[object]] = [["file", "problem", *columns]]
    problems, found = {bad.position: bad.reason for bad in predictions.skipped}, predictions.by_position()
    for position in range(len(predictions.reader)):
        cells = [cell for each in found.get(position, ()) for cell in _cells(each)]
        file = _no_formula(predictions.reader.example_id(position))
        lines.append([file, problems.get(position, ""), *(cells or [""] * len(columns))])
    return "".join(map(csv_line, lines))


def predictions_json(predictions: Predictions) -> str:
    """Write the predictions as JSON: step, weights, folder, and the lists `predictions` and `skipped`."""
    found = zip(predictions.files, predictions.by_position().values(), strict=True)
    listed = [
        {"file": file, "classes": [dict(zip(_COLUMNS, _cells(each), strict=True)) for each in classes]}
        for file, classes in found
    ]
    return predictions._as_json(listed)


def _cells(found: ClassProbability) -> tuple[int, str, float]:
    """Return label, name and probability, of which more than six digits would be the noise of float32."""
    return found.label, found.name, float(f"{found.probability:.6g}")


def _no_formula(file: str) -> str:
    """Name a file so that a spreadsheet takes it for no formula: `=1+1.jpg` is `./=1+1.jpg`."""
    return f"./{file}" if file.startswith(("=", "+", "-", "@")) else file


class FoundObject(NamedTuple):
    """An object on an image."""

    label: int
    name: str
    """Name of its class; the label as text, where the run knows no names."""
    score: float
    box: tuple[float, float, float, float]
    """x and y of the upper left corner, width and height, in pixels of the image in its file."""
    mask: MaskText | None
    """Over the whole image; None of a detector without masks."""
    keypoints: tuple[tuple[float, float, float], ...] | None = None
    """x and y in pixels of the image in its file, and a score, of each; None of a detector without keypoints."""


@dataclass(frozen=True)
class FoundObjects(_OfImages):
    """The objects on each image, and the files that could not be read."""

    images: Sequence[DetectedImage]
    """What was found, image by image, with their places among all files."""
    class_names: Mapping[int, str]
    """Names of the classes by label, as far as the run knows them."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def files(self) -> list[str]:
        """The images, by their paths within `reader.folder`."""
        return [self.reader.example_id(image.example_index) for image in self.images]

    def objects(self, index: int) -> list[FoundObject]:
        """Return the objects on an image, that of the highest score first."""
        found = self.images[index].found
        none = (None,) * len(found.labels)
        points = none if found.keypoints is None else [tuple(map(tuple, each)) for each in found.keypoints.tolist()]
        columns = (column.tolist() for column in (found.labels, found.scores, found.boxes))
        return [
            FoundObject(label, self.class_names.get(label) or str(label), score, tuple(box), mask, own)
            for label, score, box, mask, own in zip(*columns, found.masks or none, points, strict=True)
        ]


def detect(
    run: str | Path,
    paths: str | Path | Sequence[str | Path],
    *,
    weights: Weights | None = None,
    device: str | None = None,
    allow_code: bool = False,
    progress: ProgressFunction | None = None,
) -> FoundObjects:
    """Detect objects on images with the model of a run, on this worker alone.

    The images are decoded and resized as in an evaluation of the run. The data of the run need not be there.

    The arguments and what is raised are those of `predict`; an InputError also says of a model that it is no detector,
    a NonFiniteError of a box or a score that it is not finite.
    """
    trained = trained_model(str(run), weights, allow_code=allow_code)
    recipe, task = trained.recipe, trained.recipe.chosen_task
    if not isinstance(task, Detection):
        raise InputError(
            "This run has a classifier, which finds no objects.",
            given=f"the run {run}, of model.kind={kind_name(type(recipe.model))!r}",
            expected="the run of a detector",
            hint="ls.predict(run, images) names their classes; or the command: lockstep predict",
        )
    place = join(device or recipe.device).device
    model = trained.model.to(place)
    reader = ImageList(paths, task.data.decoding)
    kept, skipped = KeptDetections(), list[BadExample]()
    for batch in batches_of_images(recipe, reader, (_with_sizes, *task.data.evaluation()), place, progress):
        skipped += batch.bad
        if not batch.valid:
            continue
        indices = example_indices(batch)[: batch.valid]
        ids = [reader.example_id(index) for index in indices.tolist()]
        rows = {name: batch[name][: batch.valid] for name in ("image", _SIZE)} | {"source_id": ids}
        with torch.inference_mode():
            found = task.on_stored_images(task.detect(model, rows), rows)
        columns = [each.to("cpu") if isinstance(each, Ragged) else each for each in kept_columns(found)]
        kept.update(*kept.prepare(indices, ids, *columns))
    names = KnownData.of(trained.workdir).class_names
    return FoundObjects(reader, skipped, trained.step, trained.weights, [*kept], names)


def _with_sizes(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
    """Add height and width of each image as it is stored."""
    sizes = [(image.size[1], image.size[0]) for image in batch["image"]]
    return {**batch, _SIZE: torch.tensor(sizes, dtype=torch.int64).view(-1, 2)}


def found_objects_json(found: FoundObjects) -> str:
    """Write what was found as JSON: step, weights, folder, and the lists `predictions` and `skipped`."""
    files = enumerate(found.files)
    return found._as_json([{"file": file, "objects": [*map(_facts, found.objects(index))]} for index, file in files])


def _facts(found: FoundObject) -> dict[str, Any]:
    """Return a found object with at most six digits of each number, of which more would be the noise of float32."""
    box = [float(f"{edge:.6g}") for edge in found.box]
    facts = {"label": found.label, "class": found.name, "score": float(f"{found.score:.6g}"), "bbox": box}
    if found.keypoints is not None:
        facts["keypoints"] = [float(f"{number:.6g}") for point in found.keypoints for number in point]
    if found.mask is None:
        return facts
    return {**facts, "segmentation": {"size": [found.mask.height, found.mask.width], "counts": found.mask.runs}}


@dataclass(frozen=True)
class Outputs(_OfImages):
    """What the `predict` of a task returns for each image, and the files that could not be read."""

    positions: Tensor
    """The place of each image among all files, int64 of shape (images,)."""
    values: Mapping[str, Tensor]
    """Tensors by name, on the CPU, with the images first."""

    def __len__(self) -> int:
        return len(self.positions)

    def as_json(self) -> str:
        """Write them as JSON: step, weights, folder, and the lists `predictions` and `skipped`."""
        rows = {name: value.tolist() for name, value in self.values.items()}
        predictions = [
            {"file": self.reader.example_id(position), **{name: rows[name][index] for name in rows}}
            for index, position in enumerate(self.positions.tolist())
        ]
        return self._as_json(without_nonfinite(predictions))


def outputs(
    run: str | Path,
    paths: str | Path | Sequence[str | Path],
    *,
    weights: Weights | None = None,
    device: str | None = None,
    allow_code: bool = False,
    progress: ProgressFunction | None = None,
) -> Outputs:
    """Predict for images with the model of a run by a task of your own, on this worker alone.

    The images are decoded and preprocessed as in an evaluation of the run, whose data is images: `ImageData`.

    The arguments and what is raised are those of `predict`; an InputError also says that the task has no `predict`, or
    returns something else than tensors by name.
    """
    trained = trained_model(str(run), weights, allow_code=allow_code)
    compute, data = _predict_of(trained), trained.recipe.data
    if not isinstance(data, ImageData):
        raise InputError(
            "The examples of this run are no images in files.",
            given=f"data of {type(data).__name__}",
            expected="a run with ImageData",
            hint="in a script, call the model with what your reader gives",
        )
    place = join(device or trained.recipe.device).device
    model, reader = trained.model.to(place), ImageList(paths, data.decoding)
    positions, found, skipped = list[Tensor](), list[dict[str, Tensor]](), list[BadExample]()
    for batch in batches_of_images(trained.recipe, reader, data.evaluation(), place, progress):
        with torch.inference_mode():
            given = compute(model, batch)
        size = len(batch["image"])
        wrong = not isinstance(given, Mapping) or not all(
            isinstance(value, Tensor) and value.shape[:1] == (size,) for value in given.values()
        )
        if wrong:
            raise InputError(
                "The predict of this task returns something else than tensors by name.",
                given=f"{given!r}"[:200],
                expected=f"a dict of tensors whose first dimension is the batch, of {size} here",
                hint="return {'depth': depth}",
            )
        found.append({name: value[: batch.valid].cpu() for name, value in given.items()})
        positions.append(example_indices(batch)[: batch.valid])
        skipped += batch.bad
    values = {name: torch.cat([each[name] for each in found]) for name in found[0]}
    return Outputs(reader, skipped, trained.step, trained.weights, torch.cat(positions), values)


def _predict_of(trained: Trained) -> Any:
    task = trained.recipe.chosen_task
    made = task.with_metrics({}, NO_METRICS) if isinstance(task, PythonTask) else None
    if made is None or made.predict is None:
        raise InputError(
            "This run says nothing of how its outputs become predictions."
            if made
            else "This run has a task of Lockstep, which predicts itself.",
            given=f"the run in {trained.workdir.path}",
            expected="the run of a task with predict(model, batch)",
            hint="give the task predict(model, batch), which returns tensors by name"
            if made
            else "ls.predict(run, images), or ls.detect(run, images)",
        )
    return made.predict
