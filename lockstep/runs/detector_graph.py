"""A detector as one module for torch.export: from images, stored or resized, to boxes on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.images.resizing import ANTIALIASED, resampled
from lockstep.recipes.tasks import network_input

if TYPE_CHECKING:
    from torch import Tensor, nn


class DetectorGraph(torch.nn.Module):
    """Detects on one image, uint8 (3, height, width) of red, green and blue, or on a batch of these.

    It returns, each after the batch: float32 boxes (n, 4) of top, left, bottom and right in pixels of that image,
    float32 scores (n,), int64 labels (n,) from 1 on, and the number of them, int64; the best first, and below them rows
    of zeros up to the most that there may be. Of a detector that draws masks also these, float32 (n, side, side), and
    of one that finds keypoints these, float32 (n, keypoints, 3) of y and x in pixels of that image, and a score.

    Args:
        resizer: of the images that it is trained on.
        batch: it takes many images of one size, (batch, 3, height, width).
        raw: it takes images as they are stored, and resizes them.
        size: height and width of raw images; None: any.
    """

    def __init__(
        self,
        model: nn.Module,
        resizer: FixedShapeResizer | KeepAspectRatioResizer,
        *,
        batch: bool,
        raw: bool,
        size: tuple[int, int] | None,
    ) -> None:
        super().__init__()
        self.model, self._resizer = model, resizer
        self._is_batch, self._is_raw, self._has_size = batch, raw, size is not None
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Resize, detect, and bring the boxes to the images."""
        return tuple(self.found(images).values())

    def found(self, images: Tensor) -> dict[str, Tensor]:
        """Return what `forward` does by name."""
        detector: Any = self.model
        batch = images if self._is_batch else images[None]
        stored = batch.shape[2:]
        if self._is_raw:
            inputs, resized = self._resized(batch)
        else:
            inputs, resized = network_input(detector, batch.float()), stored
        detected: Sequence[Any] = detector.postprocess(detector(inputs, None))
        # Our own detectors return one block of all images; others those of the one image.
        is_block = detected[0].boxes.dim() == 3
        boxes, scores, labels, masks, keypoints = detected[0] if is_block else map(_batch_of_one, detected[0])
        edges = [torch.scalar_tensor(side, dtype=torch.float64) for side in (*stored, *stored)]
        scales = [edge / side for edge, side in zip(edges, (*resized, *resized), strict=True)]
        on_stored = (boxes.double() * torch.stack(scales)).clamp(min=0).minimum(torch.stack(edges)).float()
        outputs = {"boxes": on_stored, "scores": scores, "labels": labels, "num_detections": (labels > 0).sum(1)}
        if masks is not None:
            outputs["masks"] = masks
        if keypoints is not None:
            places = (keypoints[..., :2].double() * torch.stack(scales[:2])).float()
            outputs["keypoints"] = torch.cat([places, keypoints[..., 2:]], -1)
        return {name: each if self._is_batch else each[0] for name, each in outputs.items()}

    def _resized(self, batch: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Make the network's input of images as they are stored; returns also their height and width in it."""
        detector: Any = self.model
        resizer, (height, width) = self._resizer, batch.shape[2:]
        if isinstance(resizer, FixedShapeResizer) or self._has_size:
            rows, columns = resizer.size_of(height, width)
        else:
            rows, columns = _size_in_graph(resizer, height, width)
        if resizer.resize_method == ANTIALIASED:
            pixels = F.interpolate(batch, (rows, columns), mode="bilinear", antialias=True).float()
        else:
            pixels = resampled(batch, rows, columns, resizer.resize_method).round().clamp(0, 255)
        if isinstance(resizer, FixedShapeResizer):
            return network_input(detector, pixels), (rows, columns)
        side = resizer.max_dimension
        below = (0, side - columns, 0, side - rows)
        if resizer.pad_to_max_dimension:
            colour = torch.tensor(resizer.per_channel_pad_value, dtype=torch.float32).round()[:, None, None]
            return network_input(detector, F.pad(pixels - colour, below) + colour), (rows, columns)
        if self._has_size:
            return network_input(detector, pixels), (rows, columns)
        # The network sees a square, of which the image is a part: zeros stand around it, as in a batch.
        return network_input(detector, F.pad(detector.preprocess(pixels), below), is_preprocessed=True), (rows, columns)


def _batch_of_one(values: Tensor | None) -> Any:
    return None if values is None else values[None]


def _size_in_graph(resizer: KeepAspectRatioResizer, height: int, width: int) -> tuple[int, int]:
    """Compute `size_of` where height and width are known to nobody before the graph runs."""
    sides = torch.stack([torch.scalar_tensor(side, dtype=torch.float32) for side in (height, width)])
    # A number by a tensor would be rounded twice: torch multiplies by the reciprocal.
    least, most = torch.tensor([resizer.min_dimension, resizer.max_dimension], dtype=torch.float32)
    large = (sides * (least / sides.min())).round()
    small = (sides * (most / sides.max())).round()
    chosen = torch.where(large.max() > resizer.max_dimension, small, large).clamp(min=1).long()
    rows, columns = (cast(int, side.item()) for side in chosen)
    for side in (rows, columns):
        torch._check(side >= 1)  # type: ignore[no-untyped-call]
        torch._check(side <= resizer.max_dimension)  # type: ignore[no-untyped-call]
    return rows, columns
