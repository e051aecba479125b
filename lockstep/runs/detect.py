"""Detect objects on images with the model of a run, and write what was found as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.errors import InputError
from lockstep.evaluation.evaluate import example_indices
from lockstep.evaluation.kept_detections import DetectedImage, KeptDetections
from lockstep.evaluation.scores import Weights
from lockstep.inline_toml import kind_name
from lockstep.randomness import Draws
from lockstep.readers.coco_results import MaskText
from lockstep.readers.image_list import ImageList
from lockstep.recipes.tasks import Detection
from lockstep.runs.given_images import batches_of_images
from lockstep.runs.known_data import KnownData
from lockstep.runs.trained import Trained, trained_model
from lockstep.types import BadExample, ProgressFunction
from lockstep.workers.rank import join

_SIZE = "original_size"


class FoundObject(NamedTuple):
    """An object on an image."""

    label: int
    name: str
    """Of its class; the label as text, where the run knows no names."""
    score: float
    box: tuple[float, float, float, float]
    """x and y of the upper left corner, width and height, in pixels of the image in its file."""
    mask: MaskText | None
    """Over the whole image; None of a detector without masks."""


@dataclass(frozen=True)
class FoundObjects:
    """The objects on each image, and the files that could not be read."""

    reader: ImageList
    """All files that were given, in their order."""
    images: Sequence[DetectedImage]
    """What was found, image by image, with their places among these files."""
    class_names: Mapping[int, str]
    """By label, as far as the run knows them."""
    skipped: Sequence[BadExample]
    """The files that could not be read, with their places and the reasons."""
    step: int
    """The number of updates that the weights have had."""
    weights: Weights

    def __len__(self) -> int:
        return len(self.images)

    @property
    def files(self) -> list[str]:
        """The images, by their paths within `reader.folder`."""
        return [self.reader.example_id(image.example_index) for image in self.images]

    def objects(self, index: int) -> list[FoundObject]:
        """Return the objects on an image, that of the highest score first."""
        found = self.images[index].found
        masks = found.masks or (None,) * len(found.labels)
        rows = zip(found.labels.tolist(), found.scores.tolist(), found.boxes.tolist(), masks, strict=True)
        return [
            FoundObject(label, self.class_names.get(label) or str(label), score, tuple(box), mask)
            for label, score, box, mask in rows
        ]


def detect(
    run: str | Path,
    paths: str | Path | Sequence[str | Path],
    *,
    weights: Weights | None = None,
    device: str | None = None,
    progress: ProgressFunction | None = None,
) -> FoundObjects:
    """Detect objects on images with the model of a run, on this worker alone.

    The images are decoded and resized as in an evaluation of the run. The data of the run need not be there.

    Args:
        run: the workdir, for its newest checkpoint that is intact; or `WORKDIR@STEP`.
        paths: files, folders with images in them or below, or both.
        weights: the parameters as they are, or their moving averages; None: as the recipe scores them.
        device: "cpu"; None for an accelerator where there is one.
        progress: called with the number of files that are done, and of all.

    Raises:
        InputError: there is no run, or its model is no detector; a path is not there (`DataError`), or holds no images.
        CheckpointError: there is no such checkpoint, or it is damaged.
        NonFiniteError: a box or a score is not finite.
        LockstepError: none of the files can be read.
    """
    trained = trained_model(str(run), weights)
    task = _task(trained, run)
    place = join(device or trained.recipe.device).device
    model = trained.model.to(place)
    reader = ImageList(paths, task.data.decoding)
    kept, skipped = KeptDetections(), list[BadExample]()
    for batch in batches_of_images(trained.recipe, reader, (_with_sizes, *task.data.evaluation()), place, progress):
        skipped += batch.bad
        if not batch.valid:
            continue
        indices = example_indices(batch)[: batch.valid]
        ids = [reader.example_id(index) for index in indices.tolist()]
        rows = {name: batch[name][: batch.valid] for name in ("image", _SIZE)} | {"source_id": ids}
        with torch.inference_mode():
            found = task.on_stored_images(task.detect(model, rows), rows)
        columns = [found[name].to("cpu") for name in ("boxes", "scores", "labels")]
        masks = [found["masks"]] if "masks" in found else []
        kept.update(*kept.prepare(indices, ids, *columns, *masks))
    names = KnownData.of(trained.workdir).class_names
    return FoundObjects(reader, [*kept], names, skipped, trained.step, trained.weights)


def _task(trained: Trained, run: str | Path) -> Detection:
    task = trained.recipe.task
    if not isinstance(task, Detection):
        raise InputError(
            "This run has a classifier, which finds no objects.",
            given=f"the run {run}, of model.kind={kind_name(type(trained.recipe.model))!r}",
            expected="the run of a detector",
            hint="ls.predict(run, images) names their classes; or the command: lockstep predict",
        )
    return task


def _with_sizes(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
    """Add height and width of each image as it is stored."""
    sizes = [(image.size[1], image.size[0]) for image in batch["image"]]
    return {**batch, _SIZE: torch.tensor(sizes, dtype=torch.int64).view(-1, 2)}


def found_objects_json(found: FoundObjects) -> str:
    """Write what was found as JSON: step, weights, folder, and the lists `predictions` and `skipped`."""
    facts = {
        "step": found.step,
        "weights": found.weights,
        "folder": found.reader.folder,
        "predictions": [
            {"file": file, "objects": [_facts(each) for each in found.objects(index)]}
            for index, file in enumerate(found.files)
        ],
        "skipped": [{"file": bad.example_id, "problem": bad.reason} for bad in found.skipped],
    }
    return json.dumps(facts, indent=1, allow_nan=False) + "\n"


def _facts(found: FoundObject) -> dict[str, Any]:
    """Return a found object with at most six digits of each number, of which more would be the noise of float32."""
    box = [float(f"{edge:.6g}") for edge in found.box]
    facts = {"label": found.label, "class": found.name, "score": float(f"{found.score:.6g}"), "bbox": box}
    if found.mask is None:
        return facts
    return {**facts, "segmentation": {"size": [found.mask.height, found.mask.width], "counts": found.mask.runs}}
