"""What a detector is: a module that predicts boxes, says what it learns from them, and makes detections of them.

Detections lie on the network's input; functions bring them to the images of the data, of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from lockstep.detection.boxes import Shape
from lockstep.images.objects import as_ragged
from lockstep.mask_runs import Flips
from lockstep.tensors import tensor_on
from lockstep.weights.names import NameMap

_MASK_THRESHOLD = 0.5  # of the probability that a pixel is the object's


class Detections(NamedTuple):
    """The detections of one image, those with the highest scores first."""

    boxes: Tensor
    """float32 (n, 4): top, left, bottom and right in pixels of the network's input."""
    scores: Tensor
    """float32 (n,), from 0 to 1."""
    labels: Tensor
    """int64 (n,), from 1 on."""
    masks: Tensor | None = None
    """float32 (n, height, width): how probably each cell of a grid over the box belongs to the object."""
    keypoints: Tensor | None = None
    """float32 (n, keypoints, 3): y and x in pixels of the network's input, and a score, the higher the surer."""


@dataclass(frozen=True, eq=False)
class Targets:
    """The objects on a tower's images, an item for each image, on the device of the images."""

    boxes: Sequence[Tensor]
    """float32 (n, 4): top, left, bottom and right in pixels of the network's input."""
    labels: Sequence[Tensor]
    """int64 (n,), from 1 on."""
    classes: Sequence[Tensor]
    """float32 (n, num_classes): 1 at the place of each of an object's labels, or scores of all classes."""
    weights: Sequence[Tensor]
    """float32 (n,): of each object in the losses."""
    is_crowd: Sequence[Tensor]
    """bool (n,)."""
    shape: Shape
    """Height and width of the network's input, in pixels."""
    masks: Sequence[Tensor] | None = None
    """uint8 (n, height, width) at the size of the image, 1 where the object is."""
    keypoints: Sequence[Tensor] | None = None
    """float32 (n, keypoints, 3): y and x in pixels of the network's input, and a weight: 1, 0 where not labelled."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], shape: Shape, sizes: Sequence[tuple[int, int]]) -> Targets:
        """Take the objects of a batch that has the fields of `DetectionTargets`.

        Args:
            batch: with boxes as shares of height and width of their image.
            shape: height and width of the network's input, in pixels.
            sizes: height and width of each image, which is in the upper left corner of the input.
        """
        boxes = as_ragged(batch["boxes"])
        device, number = boxes.values.device, len(boxes.values)
        sides = tensor_on(device, [(h, w, h, w) for h, w in sizes], torch.float32)
        lengths = tensor_on(device, boxes.lengths.tolist(), torch.int64)
        scale = sides.repeat_interleave(lengths, 0, output_size=number)
        columns = {name: list(as_ragged(batch[name])) for name in ("labels", "classes", "weights", "is_crowd")}
        keypoints = None
        if "keypoints" in batch:
            points, weights = (as_ragged(batch[name]) for name in ("keypoints", "keypoint_weights"))
            on_input = points.values * scale[:, None, :2]
            keypoints = list(points.replaced(torch.cat([on_input, weights.values[..., None]], 2)))
        on_inputs = list(boxes.replaced(boxes.values * scale))
        return cls(on_inputs, shape=shape, masks=batch.get("masks"), keypoints=keypoints, **columns)

    def __len__(self) -> int:
        return len(self.boxes)


class DetectionModel(nn.Module):
    """Base of detectors, with no state but parameters and buffers: what one call finds, the next is given.

    A tower runs `preprocess`, `assign`, `forward`, `losses`; an evaluation `preprocess`, `forward`, `postprocess`.
    """

    num_classes: int
    """Number of classes, without the background."""
    size_divisibility: int = 1
    """Height and width of the network's input are multiples of it: images are padded with zeros after `preprocess`."""
    backbone_prefixes: Sequence[str] = ("backbone.",)
    """The beginnings of the names of the parameters that a trained classifier, or another detector, can give."""
    anchors_fit_objects: bool = True
    """Whether an anchor learns objects of about its own size, so that a run is refused whose objects have other sizes;
    False where anchors are points that learn objects of any size."""

    @property
    def name_maps(self) -> Sequence[NameMap]:
        """Maps from the names of other trainers to the detector's, where neither a shipped map nor a prefix is enough.

        A subclass may have them as a plain attribute.
        """
        return ()

    def preprocess(self, images: Tensor) -> Tensor:
        """Make the network's input of images of one size.

        Args:
            images: red, green and blue, float32 (batch, 3, height, width) from 0 to 255.
        """
        return images

    def anchors(self, shape: Shape, device: torch.device) -> Tensor | None:
        """Return all anchors on an input, which are compared with the objects of the data before a run begins.

        Args:
            shape: height and width of the network's input, in pixels.
            device: of the anchors.

        Returns:
            float32 (anchors, 4): top, left, bottom and right in pixels. None where a detector has no anchors.
        """
        return None

    def assign(self, targets: Targets) -> Any:
        """Find what can be known before the forward pass, such as which anchor learns which object.

        It draws no random numbers: a detector that samples does it in `forward` or `losses`, which towers seed.

        Returns:
            What `counts`, `forward` and `losses` take. A detector that has nothing to find takes the targets.
        """
        return targets

    def counts(self, assigned: Any) -> Mapping[str, Tensor]:
        """Count the things that losses are sums over, by name: each is divided by their number over all towers.

        The losses that are not named are means over a tower, and the towers' mean counts.
        """
        return {}

    def forward(self, inputs: Tensor, assigned: Any = None) -> Mapping[str, Any]:
        """Predict.

        Args:
            inputs: what `preprocess` made.
            assigned: what `assign` made, in training; a second stage may learn from the objects among its proposals.
        """
        raise NotImplementedError

    def losses(self, predictions: Mapping[str, Any], assigned: Any) -> Mapping[str, Tensor]:
        """Compute the losses by name, each a scalar: sums where `counts` names them, means elsewhere."""
        raise NotImplementedError

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Make detections of predictions, for each image; no image changes those of another."""
        raise NotImplementedError


def boxes_on_stored(boxes: Tensor, resized: Sequence[int], stored: Sequence[int]) -> Tensor:
    """Scale boxes from an image as the network sees it to the same image as it is stored, and clip them to it.

    Args:
        boxes: float (n, 4) of top, left, bottom and right in pixels of the network's input.
        resized: height and width of the image in the input, without the padding below it and to its right.
        stored: height and width of the image in the data.

    Returns:
        float64 (n, 4) of top, left, bottom and right. A box in the padding has no area.
    """
    sides = torch.tensor([stored, resized], dtype=torch.float64, device=boxes.device).repeat(1, 2)
    return (boxes.double() * (sides[0] / sides[1])).clamp(min=0).minimum(sides[0])


def keypoints_on_stored(keypoints: Tensor, resized: Sequence[int], stored: Sequence[int]) -> Tensor:
    """Scale keypoints, (n, keypoints, 3) of y, x and score, as `boxes_on_stored` scales boxes, but do not clip them.

    Returns:
        float64 (n, keypoints, 3) of x, y and score, as metrics take them.
    """
    sides = torch.tensor([stored, resized], dtype=torch.float64, device=keypoints.device)
    points = keypoints.double()
    return torch.cat([(points[..., :2] * (sides[0] / sides[1])).flip(-1), points[..., 2:]], -1)


@dataclass(frozen=True, eq=False)
class FoundMasks:
    """The masks of the detections on one image, as runs over all of it; see `lockstep.mask_runs`."""

    height: int
    width: int
    runs: Sequence[Flips]

    def __len__(self) -> int:
        return len(self.runs)

    def flips(self) -> Sequence[Flips]:
        """Return where each mask changes between 0 and 1."""
        return self.runs


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> FoundMasks:
    """Put masks of detections into their boxes on an image: the pixels are those that torchvision gives.

    Masks are probabilities within each box, (n, side, side); boxes (n, 4) of top, left, bottom and right in pixels of
    the image, of this height and width.
    """
    side = masks.shape[-1]
    # As torchvision does: a border of zeros is put around the mask, and as much around the box.
    centres, halves = (boxes[:, 2:] + boxes[:, :2]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2 * ((side + 2) / side)
    edges = torch.cat([centres - halves, centres + halves], dim=1).long().tolist()
    bordered = pad(masks.float(), (1, 1, 1, 1)).cpu()
    return FoundMasks(*size, [_pasted(mask, box, size) for mask, box in zip(bordered, edges, strict=True)])


def _pasted(mask: Tensor, box: Sequence[int], size: tuple[int, int]) -> Flips:
    """Resize a mask to a box, whose last pixels belong to it, and find its runs on the image."""
    (top, left, bottom, right), (height, width) = box, size
    sides = max(bottom - top + 1, 1), max(right - left + 1, 1)
    pixels = interpolate(mask[None, None], sides, mode="bilinear", align_corners=False)[0, 0] > _MASK_THRESHOLD
    first_row, first_column = max(top, 0), max(left, 0)
    seen = pixels[first_row - top : max(height - top, 0), first_column - left : max(width - left, 0)]
    # Each column ends with a zero, so that its runs are its own.
    by_column = np.pad(seen.numpy().T, ((0, 0), (1, 1))).astype(np.int8)
    columns, rows = np.nonzero(np.diff(by_column, axis=1))
    flips = (columns + first_column) * height + rows + first_row
    # A run that goes on at the top of the next column is one.
    goes_on = np.flatnonzero(flips[1:-1:2] == flips[2::2]) * 2 + 1
    return np.delete(flips, np.concatenate([goes_on, goes_on + 1]))
