"""What an evaluation leaves of its detections: a file in COCO's format, and pictures of the first images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.data.detected import detection_marks
from lockstep.data.showing import Picture, examples
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.evaluation.kept_detections import DetectedImage, with_data_labels
from lockstep.images.drawing import draw_marks, side_by_side
from lockstep.images.pillow import png_bytes
from lockstep.readers.coco_results import ImageResults, write_coco_results
from lockstep.readers.reader import Reader
from lockstep.recipes.parts import Pictures
from lockstep.recipes.tasks import KEPT, Detection, Task

if TYPE_CHECKING:
    import numpy.typing as npt


def evaluation_outputs(task: Task, reader: Reader) -> Mapping[str, npt.NDArray[Any]]:
    """Write the files of the detections that a task has kept, on the chief, in place of those written before.

    Args:
        task: of the evaluation.
        reader: of the examples that were scored, which are read once more for pictures.

    Returns:
        The pictures by the tags of the Object Detection API, "image-0" and on: uint8 (3, height, width). None of a
        task that keeps no detections.

    Raises:
        InputError: a file cannot be written.
    """
    if not isinstance(task, Detection) or KEPT not in task.metrics:
        return {}
    kept: Any = task.metrics[KEPT]
    how = task.evaluation
    if how.export_path is not None:
        categories = getattr(reader, "category_ids", {})
        found = ((image.source_id, with_data_labels(image.found, categories)) for image in kept)
        write_coco_results(how.export_path, found)
    pictures = _pictures([*kept][: how.pictures.count], reader, how.pictures)
    if how.pictures.folder is not None:
        for tag, picture in pictures.items():
            write_picture(Path(how.pictures.folder) / f"export-{tag}.png", picture)
    return {tag: picture.numpy() for tag, picture in pictures.items()}


def _pictures(images: Sequence[DetectedImage], reader: Reader, how: Pictures) -> dict[str, Tensor]:
    """Draw images with their detections; one that cannot be read any more is left out."""
    shown = examples(reader, [image.example_index for image in images], order="sequential")
    classes = getattr(reader, "classes", {})
    return {
        f"image-{place}": drawn(example.original, image.found, classes, how)
        for place, (image, example) in enumerate(zip(images, shown, strict=True))
        if example.original
    }


def drawn(original: Picture, found: ImageResults, classes: Mapping[int, str], how: Pictures) -> Tensor:
    """Draw detections onto a copy of an image, at its right the objects of the data if they are wanted.

    Args:
        original: the image as it is stored, with its objects.
        found: on it, with the labels of the detector.
        classes: the name of each class by its label.
        how: which detections are drawn.
    """
    height, width = original.pixels.shape[1:]
    best = found.at(np.argsort(-found.scores, kind="stable")[: how.max_boxes]).above(how.min_score)
    marks = detection_marks(best, (height, width), classes, labels=how.labels, scores=how.scores)
    detections = draw_marks(original.pixels, marks)
    return side_by_side([detections, draw_marks(original.pixels, original.marks)]) if how.ground_truth else detections


def write_picture(path: Path, picture: Tensor) -> None:
    """Write uint8 (3, height, width) to a PNG; its folder is made if need be."""
    with atomic_write(path, parents=True, failure=InputError) as file:
        file.write(png_bytes(Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())))
