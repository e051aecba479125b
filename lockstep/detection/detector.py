"""What a detector is: a module that predicts boxes, says what it learns from them, and makes detections of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.images.objects import as_ragged
from lockstep.weights.names import NameMap


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
    shape: tuple[int, int]
    """Height and width of the network's input, in pixels."""
    masks: Sequence[Tensor] | None = None
    """uint8 (n, height, width) at the size of the image, 1 where the object is."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], shape: tuple[int, int], sizes: Sequence[tuple[int, int]]) -> Targets:
        """Take the objects of a batch that has the fields of `DetectionTargets`.

        Args:
            batch: with boxes as shares of height and width of their image.
            shape: height and width of the network's input, in pixels.
            sizes: height and width of each image, which is in the upper left corner of the input.
        """
        boxes = as_ragged(batch["boxes"])
        sides = torch.tensor([(h, w, h, w) for h, w in sizes], dtype=torch.float32)
        scale = sides.repeat_interleave(boxes.lengths, 0).to(boxes.values.device, non_blocking=True)
        columns = {name: list(as_ragged(batch[name])) for name in ("labels", "classes", "weights", "is_crowd")}
        return cls(list(boxes.replaced(boxes.values * scale)), shape=shape, masks=batch.get("masks"), **columns)

    def __len__(self) -> int:
        return len(self.boxes)


class DetectionModel(nn.Module):
    """Base of detectors, with no state but parameters and buffers: what one call finds, the next is given.

    A tower runs `preprocess`, `assign`, `forward`, `losses`; an evaluation `preprocess`, `forward`, `postprocess`.
    """

    num_classes: int
    """Without the background."""
    size_divisibility: int = 1
    """Height and width of the network's input are multiples of it: images are padded with zeros after `preprocess`."""
    backbone_prefixes: Sequence[str] = ("backbone.",)
    """The beginnings of the names of the parameters that a trained classifier, or another detector, can give."""
    name_maps: Sequence[NameMap] = ()
    """From the names of other trainers to the detector's, where neither a shipped map nor a prefix is enough."""

    anchors_fit_objects: bool = True
    """Whether an anchor learns objects of about its own size, so that a run is refused whose objects have other sizes;
    False where anchors are points that learn objects of any size."""

    def preprocess(self, images: Tensor) -> Tensor:
        """Make the network's input of images of one size.

        Args:
            images: red, green and blue, float32 (batch, 3, height, width) from 0 to 255.
        """
        return images

    def anchors(self, shape: tuple[int, int], device: torch.device) -> Tensor | None:
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
