"""What a task of the user's own predicts for images, with the model of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.evaluation.evaluate import example_indices
from lockstep.evaluation.scores import Weights
from lockstep.metrics.metric import NO_METRICS
from lockstep.readers.image_folder import ImageList
from lockstep.recipes.data import ImageData
from lockstep.recipes.python_parts import PythonTask
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.runs.predict import batches_of_images
from lockstep.runs.trained import Trained, trained_model
from lockstep.types import BadExample, ProgressFunction
from lockstep.workers.rank import join


@dataclass(frozen=True)
class Outputs:
    """What the `predict` of a task returns for each image, and the files that could not be read."""

    reader: ImageList
    """All files that were given, in their order."""
    positions: Tensor
    """The place of each image among these files, int64 of shape (images,)."""
    values: Mapping[str, Tensor]
    """Tensors by name, on the CPU, with the images first."""
    skipped: Sequence[BadExample]
    """The files that could not be read, with their places and the reasons."""
    step: int
    """The number of updates that the weights have had."""
    weights: Weights

    def __len__(self) -> int:
        return len(self.positions)

    def as_json(self) -> str:
        """Write them as JSON: step, weights, folder, and the lists `predictions` and `skipped`."""
        rows = {name: value.tolist() for name, value in self.values.items()}
        predictions = [
            {"file": self.reader.example_id(position), **{name: rows[name][index] for name in rows}}
            for index, position in enumerate(self.positions.tolist())
        ]
        facts = {
            "step": self.step,
            "weights": self.weights,
            "folder": self.reader.folder,
            "predictions": predictions,
            "skipped": [{"file": bad.example_id, "problem": bad.reason} for bad in self.skipped],
        }
        return json.dumps(without_nonfinite(facts), indent=1, allow_nan=False) + "\n"


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

    Args:
        run: the workdir, for its newest checkpoint that is intact; or `WORKDIR@STEP`.
        paths: files, folders with images in them or below, or both.
        weights: the parameters as they are, or their moving averages; None: as the recipe scores them.
        device: "cpu"; None for an accelerator where there is one.
        allow_code: call the code that the recipe names, though others may have written the run.
        progress: called with the number of files that are done, and of all.

    Raises:
        InputError: there is no run, its task has no `predict`, or it returns something else than tensors by name; a
            path is not there (`DataError`), or holds no images.
        CheckpointError: there is no such checkpoint, or it is damaged.
        LockstepError: none of the files can be read.
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
    return Outputs(reader, torch.cat(positions), values, skipped, trained.step, trained.weights)


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
