"""What an evaluation leaves of its detections: a file in COCO's format, and pictures of the first images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.data.detected import detection_marks
from lockstep.data.showing import Picture, examples
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.evaluation.kept_detections import KeptDetections, with_data_labels
from lockstep.images.drawing import draw_marks, side_by_side
from lockstep.images.pillow import png_bytes
from lockstep.readers.coco_results import ImageResults, write_coco_results
from lockstep.readers.detection import DetectionReader
from lockstep.recipes.parts import DetectionEvaluation, Pictures

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class DetectionOutputs:
    """The outputs that a recipe wants; `kept` is the metric that collects them."""

    how: DetectionEvaluation
    kept: KeptDetections

    @classmethod
    def of(cls, how: DetectionEvaluation) -> DetectionOutputs:
        """Make the outputs of evaluations."""
        return cls(how, KeptDetections(how.pictures.count if how.export_path is None else None))

    def write(self, reader: DetectionReader, classes: Mapping[int, str]) -> dict[str, npt.NDArray[Any]]:
        """Write the files, on the chief after an evaluation, in place of those of the one before.

        Args:
            reader: of the examples; its pictures are read once more.
            classes: the name of each class by its label.

        Returns:
            The pictures by the tags of the Object Detection API, "image-0" and on: uint8 (3, height, width).
        """
        if self.how.export_path is not None:
            categories = reader.category_ids
            found = ((each.source_id, with_data_labels(each.found, categories)) for each in self.kept)
            write_coco_results(self.how.export_path, found)
        pictures = self._pictures(reader, classes)
        if self.how.pictures.folder is not None:
            for tag, picture in pictures.items():
                write_picture(Path(self.how.pictures.folder) / f"export-{tag}.png", picture)
        return {tag: picture.numpy() for tag, picture in pictures.items()}

    def _pictures(self, reader: DetectionReader, classes: Mapping[int, str]) -> dict[str, Tensor]:
        """Draw the first images; one that cannot be read any more is left out."""
        first = [*self.kept][: self.how.pictures.count]
        shown = examples(reader, [image.example_index for image in first], order="sequential")
        return {
            f"image-{place}": drawn(example.original, image.found, classes, self.how.pictures)
            for place, (image, example) in enumerate(zip(first, shown, strict=True))
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
