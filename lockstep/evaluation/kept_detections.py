"""The detections of an evaluation, kept in the order of its examples: for a file of them, and for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lockstep.evaluation.evaluate import example_indices
from lockstep.mask_runs import runs_text
from lockstep.metrics.detection_metric import ids_of
from lockstep.ragged import Ragged
from lockstep.readers.coco_results import ImageResults, MaskText

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.types import Batch

_SEPARATOR = "\n"  # of the texts of masks, in which it does not occur


class DetectedImage(NamedTuple):
    """The detections on one image."""

    example_index: int
    source_id: str
    found: ImageResults


class KeptDetections:
    """A metric that computes nothing: the chief's keeps the detections of all workers, of the first `most` images.

    What travels is as small as a file of it: masks are runs already.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.reset()

    def columns(self, batch: Batch, detections: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what `prepare` takes of a batch, and of what was found on it, as metrics take it."""
        return (example_indices(batch), batch["source_id"], *kept_columns(detections))

    def prepare(
        self,
        indices: Tensor,
        ids: Sequence[str],
        boxes: Ragged,
        scores: Ragged,
        labels: Ragged,
        keypoints: Ragged,
        *masks: Any,
    ) -> tuple[Any, ...]:
        """Make columns that travel."""
        texts = [_text_of(each) for column in masks for each in column]
        sizes = torch.tensor([[each.height, each.width] for column in masks for each in column])
        numbers = [each.replaced(each.values.double()) for each in (boxes, scores)]
        points = keypoints.replaced(keypoints.values.double())
        return (indices, ids_of(ids), *numbers, labels, points, *((sizes.view(-1, 2), ids_of(texts)) if masks else ()))

    def update(self, indices: Tensor, ids: Ragged, *columns: Any) -> None:
        """Keep what `prepare` has made of some images."""
        for row, index in enumerate(indices.tolist()):
            if self._most is not None and len(self._images) >= self._most:
                return
            image_id = ids[row].numpy().tobytes().decode(errors="surrogateescape")
            boxes, scores, labels, points = (each[row].numpy().copy() for each in columns[:4])
            found = ImageResults(boxes, labels, scores, _masks(row, *columns[4:]), points if points.shape[1] else None)
            self._places[image_id] = len(self._images)
            self._images.append(DetectedImage(index, image_id, found))

    def on(self, image_id: str) -> ImageResults:
        """Return the detections on the image of an id, with the labels of the detector."""
        return self._images[self._places[image_id]].found

    def index_of(self, image_id: str) -> int:
        """Return the index in the reader of the image of an id."""
        return self._images[self._places[image_id]].example_index

    def compute(self) -> dict[str, float]:
        """Return no scores."""
        return {}

    def reset(self) -> None:
        """Forget all images."""
        self._images: list[DetectedImage] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[DetectedImage]:
        return iter(self._images)


def kept_columns(detections: Mapping[str, Any]) -> list[Any]:
    """Return "boxes", "scores", "labels", "keypoints" (0 an object of a detector without), and "masks" if there are."""
    boxes = detections["boxes"]
    keypoints = detections.get("keypoints", boxes.replaced(boxes.values.new_zeros(len(boxes.values), 0, 3)))
    masks = [detections["masks"]] if "masks" in detections else []
    return [boxes, detections["scores"], detections["labels"], keypoints, *masks]


def _text_of(masks: Any) -> str:
    return _SEPARATOR.join(runs_text(flips, masks.height * masks.width) for flips in masks.flips())


def _masks(row: int, sizes: Tensor | None = None, texts: Ragged | None = None) -> Sequence[MaskText]:
    if sizes is None or texts is None:
        return ()
    height, width = sizes[row].tolist()
    joined = texts[row].numpy().tobytes().decode()
    return [MaskText(height, width, text) for text in joined.split(_SEPARATOR)] if joined else []


def with_data_labels(found: ImageResults, categories: Mapping[int, int]) -> ImageResults:
    """Give detections the numbers that the data has for their classes, by label; unknown labels stay."""
    labels = [categories.get(label, label) for label in found.labels.tolist()]
    return found._replace(labels=np.array(labels, np.int64))
