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
    """Detections, with the labels of the detector."""


class KeptDetections:
    """A metric that computes nothing: the chief's keeps the detections of all workers.

    What travels is as small as a file of it: masks are runs already.

    Args:
        most: images that are kept, the first ones; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.reset()

    def columns(self, batch: Batch, detections: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what `prepare` takes of a batch, with "boxes", "scores", "labels" and perhaps "masks" found on it.

        They are those that metrics of detections take: see `CocoMetric.prepare`.
        """
        found = [detections[name] for name in ("boxes", "scores", "labels", "masks") if name in detections]
        return (example_indices(batch), batch["source_id"], *found)

    def prepare(
        self, indices: Tensor, ids: Sequence[str], boxes: Ragged, scores: Ragged, labels: Ragged, *masks: Any
    ) -> tuple[Any, ...]:
        """Make columns that travel."""
        texts = [_text_of(each) for column in masks for each in column]
        sizes = torch.tensor([[each.height, each.width] for column in masks for each in column])
        numbers = Ragged(boxes.values.double(), boxes.lengths), Ragged(scores.values.double(), scores.lengths), labels
        return (indices, ids_of(ids), *numbers, *((sizes.view(-1, 2), ids_of(texts)) if masks else ()))

    def update(self, indices: Tensor, ids: Ragged, boxes: Ragged, scores: Ragged, labels: Ragged, *masks: Any) -> None:
        """Keep what `prepare` has made of some images."""
        for row, index in enumerate(indices.tolist()):
            if self._most is not None and len(self._images) >= self._most:
                return
            image_id = ids[row].numpy().tobytes().decode(errors="surrogateescape")
            own_boxes, own_labels, own_scores = (each[row].numpy().copy() for each in (boxes, labels, scores))
            found = ImageResults(own_boxes, own_labels, own_scores, _masks(row, *masks))
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
