"""Predict the classes of images with the model of a run, and write the predictions as CSV or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checks import PositiveInt, check_value
from lockstep.errors import InputError, NonFiniteError
from lockstep.evaluation.evaluate import example_indices
from lockstep.evaluation.scores import Weights
from lockstep.images.augment import Augment
from lockstep.images.jitter import grey
from lockstep.images.resized_crops import Resize
from lockstep.inline_toml import kind_name
from lockstep.listing import csv_line
from lockstep.metrics.classification import class_name
from lockstep.randomness import Draws
from lockstep.readers.image_list import ImageList
from lockstep.recipes.data import ImageData
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.tasks import Classification
from lockstep.runs.given_images import batches_of_images
from lockstep.runs.known_data import KnownData
from lockstep.runs.trained import trained_model
from lockstep.types import BadExample, ProgressFunction
from lockstep.workers.rank import join

_COLUMNS = ("label", "class", "probability")


class ClassProbability(NamedTuple):
    """A class and the probability that the model gives it."""

    label: int
    name: str
    """Its number as text, where the run knows no names."""
    probability: float


@dataclass(frozen=True)
class Predictions:
    """The most probable classes of each image, and the files that could not be read."""

    reader: ImageList
    """All files that were given, in their order."""
    positions: Tensor
    """The places of the images among these files: int64 of shape (images,)."""
    labels: Tensor
    """The most probable classes of each image, the most probable first: int64 of shape (images, top)."""
    probabilities: Tensor
    """Their probabilities, by the softmax of the logits of all classes: float32 of shape (images, top)."""
    class_names: Mapping[int, str]
    """By label, as far as the run knows them."""
    skipped: Sequence[BadExample]
    """The files that could not be read, with their places and the reasons."""
    step: int
    """The number of updates that the weights have had."""
    weights: Weights

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
        progress: called with the number of files that are done, and of all.

    Raises:
        InputError: there is no run; a path is not there (`DataError`), or holds no images.
        CheckpointError: there is no such checkpoint, or it is damaged.
        NonFiniteError: the logits of an image are not finite.
        LockstepError: none of the files can be read.
    """
    if top is not None:
        check_value("top", top, PositiveInt)
    trained = trained_model(str(run), weights)
    recipe, place = trained.recipe, join(device or trained.recipe.device).device
    task = recipe.task
    if not isinstance(task, Classification):
        raise InputError(
            "This run has a detector, which finds objects: no image has a class.",
            given=f"the run {run}, of model.kind={kind_name(type(recipe.model))!r}",
            expected="the run of a classifier",
            hint="ls.detect(run, images) finds the objects on them; or the command: lockstep predict",
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
    return Predictions(reader, places, classes, values, names, skipped, trained.step, trained.weights)


def _images(recipe: Recipe, paths: str | Path | Sequence[str | Path]) -> tuple[ImageList, Sequence[Augment]]:
    """Open the images, and choose what makes of them the examples that the run is scored on."""
    data = recipe.data
    if isinstance(data, ImageData):
        return ImageList(paths, data.decoding), data.evaluation()
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
    facts = {
        "step": predictions.step,
        "weights": predictions.weights,
        "folder": predictions.reader.folder,
        "predictions": [
            {"file": file, "classes": [dict(zip(_COLUMNS, _cells(each), strict=True)) for each in classes]}
            for file, classes in zip(predictions.files, predictions.by_position().values(), strict=True)
        ],
        "skipped": [{"file": bad.example_id, "problem": bad.reason} for bad in predictions.skipped],
    }
    return json.dumps(facts, indent=1, allow_nan=False) + "\n"


def _cells(found: ClassProbability) -> tuple[int, str, float]:
    """Return label, name and probability, of which more than six digits would be the noise of float32."""
    return found.label, found.name, float(f"{found.probability:.6g}")


def _no_formula(file: str) -> str:
    """Name a file so that a spreadsheet takes it for no formula: `=1+1.jpg` is `./=1+1.jpg`."""
    return f"./{file}" if file.startswith(("=", "+", "-", "@")) else file
