"""The task of a recipe: what its model learns, how it is scored, and by which score a checkpoint is the best.

A task is a value that the recipe has by its data. It checks that the model fits, and gives losses, their counts,
scores and metrics: what builds, evaluates or benchmarks a run asks it, and not which task it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch

from lockstep.errors import InputError
from lockstep.metrics.metric import NO_METRICS, Metric
from lockstep.ragged import Ragged
from lockstep.recipes.parts import MAIN_SCORES, CrossEntropy, DetectionEvaluation
from lockstep.types import NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.augmentations.augment import Augment
    from lockstep.augmentations.mixing import MixDraws
    from lockstep.detection.detector import DetectionModel, Detections
    from lockstep.recipes.data import DetectionData
    from lockstep.types import Batch, CountFunction, LossFunction, ScoreFunction

CONFUSION, MISTAKES = "confusion", "mistakes"
"""Outputs of `score_in_detail`: the inputs of a confusion matrix, and of a list of the worst mistakes."""
_COCO_KEYPOINTS = 17
ASSIGNED = "assigned"
"""The field of a tower's batch with what its detector has found of the objects before the forward pass."""
KEPT, REPORT = "kept detections", "detection report"
"""The metrics of a detector that keep the detections of an evaluation, and tell of them by class."""


@dataclass(frozen=True)
class Classification:
    """A classifier learns one class for each image."""

    inputs: Callable[[Mapping[str, Any]], Tensor]
    """Makes the input of the model from a batch."""
    loss: CrossEntropy
    top: Sequence[int] = (1,)
    """The k of each top-k score."""
    flip: bool = False
    """Whether an example is scored by the mean of the logits of its image and the mirror image."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of the logits and the labels of all examples, by name."""
    mixing: MixDraws | None = None
    """What mixes the images of a training batch, and so the labels of the losses."""

    unused: ClassVar[Mapping[str, Any]] = {}
    """Fields of a recipe that say nothing for this task, with their defaults."""

    def check(self, num_classes: int) -> None:
        """Refuse a k beyond the number of classes."""
        most = max(self.top)
        if most > num_classes:
            raise InputError(
                f"A model with {num_classes} classes has no top {most}.",
                given=f"evaluate.top={list(self.top)}",
                expected=f"numbers of {num_classes} at most",
                hint="set evaluate.top=[1]",
            )

    @property
    def main_score(self) -> str:
        """The score that says which checkpoint is the best, where the recipe names none."""
        return self.score_names[0]

    @property
    def score_names(self) -> Sequence[str]:
        """Names of the scores: "top1", and the others."""
        return [f"top{k}" for k in self.top]

    def with_metrics(self, classes: Mapping[int, str], metrics: Mapping[str, Metric]) -> Self:
        """Take the metrics of a script: they get the logits and the labels of all examples."""
        return replace(self, metrics=metrics)

    def targets(self) -> Sequence[Augment]:
        """Return nothing: labels are the targets."""
        return ()

    def losses(self, model: nn.Module, batch: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Compute the cross entropy of each head, and as a metric the share of examples that the model gets right."""
        from lockstep.losses import softmax_cross_entropy
        from lockstep.metrics import in_top_k

        outputs, labels = model(self.inputs(batch)), batch["label"]
        smoothing = self.loss.label_smoothing
        logits, auxiliary = _heads(outputs)
        targets = self.mixing.apply_to_labels(batch, logits.shape[1]) if self.mixing else labels
        losses = {"cross_entropy": softmax_cross_entropy(logits, targets, label_smoothing=smoothing)}
        if auxiliary:
            each = [softmax_cross_entropy(head, targets, label_smoothing=smoothing) for head in auxiliary]
            losses["auxiliary_cross_entropy"] = self.loss.auxiliary_weight * torch.stack(each).sum()
        return losses, {"top1": in_top_k(logits.detach(), labels).mean()}

    def counts(self, model: nn.Module) -> None:
        """Return None: the losses are means."""

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Score each example: whether its class is among the k with the highest logits. Metrics get both."""
        return self._scores(self.logits(model, batch), batch["label"])

    def score_in_detail(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Score each example, and return the inputs of a confusion matrix and of a list of the worst mistakes, too."""
        from lockstep.evaluation.evaluate import example_indices
        from lockstep.losses import softmax_cross_entropy

        logits, labels = self.logits(model, batch), batch["label"]
        predicted = logits.argmax(1)
        loss = softmax_cross_entropy(logits, labels, reduction="none")
        more = {CONFUSION: (predicted, labels), MISTAKES: (loss, predicted, labels, example_indices(batch))}
        return {**self._scores(logits, labels), **more}

    def logits(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Compute the logits that are scored, shape (batch, classes)."""
        images = self.inputs(batch)
        logits, _ = _heads(model(images))
        if not self.flip:
            return logits
        mirrored, _ = _heads(model(images.flip(3)))
        return (logits + mirrored) / 2

    def _scores(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        from lockstep.metrics import in_top_k

        top = {name: in_top_k(logits, labels, k) for name, k in zip(self.score_names, self.top, strict=True)}
        return {**top, **dict.fromkeys(self.metrics, (logits, labels))}


def _heads(outputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Split the outputs into the logits of the last layer and those of the auxiliary heads, which only training has."""
    if isinstance(outputs, torch.Tensor):
        return outputs, []
    if not isinstance(outputs, tuple | list):
        raise InputError(
            "A classifier returns something else than logits.",
            given=type(outputs).__name__,
            expected="a tensor of shape (batch, classes), or a tuple of these, that of the last layer first",
            hint="return it from forward, as outputs.logits or outputs['logits']; or give losses of your own",
        )
    logits, *auxiliary = outputs
    return logits, [head for head in auxiliary if head is not None]


@dataclass(frozen=True)
class Detection:
    """A detector learns where on an image the objects of which classes are."""

    data: DetectionData
    """How images become inputs, and which objects become targets."""
    num_classes: int
    """Number of classes, without the background."""
    evaluation: DetectionEvaluation = field(default_factory=DetectionEvaluation)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of all detections, by name."""

    unused: ClassVar[Mapping[str, Any]] = {"loss": CrossEntropy(), "evaluate.top": (1,), "evaluate.flip": False}

    def check(self, num_classes: int) -> None:
        """Refuse keypoints that could not be scored; whether its model is a detector, a run asks where it begins."""
        read, sigmas = self.data.num_keypoints, len(self.evaluation.keypoint_sigmas) or _COCO_KEYPOINTS
        if "coco_keypoint_metrics" in self.evaluation.metrics and read != sigmas:
            raise InputError(
                "Keypoints are scored by a sigma for each of them.",
                given=f"data.num_keypoints={read}, and {sigmas} sigmas",
                expected="as many sigmas as keypoints that are read; COCO's persons have 17",
                hint="set data.num_keypoints, or give evaluate.detection.keypoint_sigmas a number for each",
            )

    @property
    def main_score(self) -> str:
        """The mean average precision of the first metric."""
        return MAIN_SCORES[self.evaluation.metrics[0]] if self.evaluation.metrics else ""

    @property
    def score_names(self) -> Sequence[str]:
        """Names of the scores of the metrics that the recipe names, but for those of single categories."""
        in_all = replace(self, evaluation=replace(self.evaluation, per_category=False))
        metrics = in_all.with_metrics({}, NO_METRICS).metrics.values()
        return [name for metric in metrics for name in getattr(metric, "score_names", ())]

    def with_metrics(self, classes: Mapping[int, str], metrics: Mapping[str, Metric]) -> Self:
        """Make the metrics that the recipe names, and take those of a script: they get batch and detections."""
        from lockstep.evaluation.kept_detections import KeptDetections
        from lockstep.metrics.detection_sets import detection_metrics

        told = self.evaluation
        names = () if told.ignore_ground_truth else told.metrics
        how: Mapping[str, Any] = {"per_category": told.per_category, "keypoint_sigmas": told.keypoint_sigmas}
        made: Mapping[str, Any] = detection_metrics(names, self._categories(classes), **how)
        most = told.pictures.count if told.export_path is None else None
        kept: Mapping[str, Any] = {} if most == 0 else {KEPT: KeptDetections(most)}
        return replace(self, metrics={**made, **metrics, **kept})

    def in_detail(self, classes: Mapping[int, str], *, keep_all: bool) -> Self:
        """Also tell of each class, by `DetectionReport`, if objects count; with `keep_all` keep all detections.

        It goes by masks where one of the metrics does.
        """
        from lockstep.evaluation.kept_detections import KeptDetections
        from lockstep.metrics.detection_report import DetectionReport

        more: dict[str, Any] = {KEPT: KeptDetections()} if keep_all else {}
        if not self.evaluation.ignore_ground_truth:
            least = self.evaluation.pictures.min_score
            by_masks = any(getattr(metric, "measured", None) == "masks" for metric in self.metrics.values())
            measured: Literal["boxes", "masks"] = "masks" if by_masks else "boxes"
            more[REPORT] = DetectionReport(self._categories(classes), measured, min_score=least)
        return replace(self, metrics={**self.metrics, **more})

    def _categories(self, classes: Mapping[int, str]) -> dict[int, str]:
        return {label: classes.get(label) or str(label) for label in range(1, self.num_classes + 1)}

    def targets(self) -> Sequence[Augment]:
        """Return what makes the targets of the losses of a batch's objects."""
        return [self.data.targets(self.num_classes)]

    def losses(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the detector's losses: sums where it counts, means elsewhere."""
        detector: DetectionModel = model  # type: ignore[assignment]
        assigned = batch[ASSIGNED] if ASSIGNED in batch else _assigned(detector, batch)
        return detector.losses(detector(network_input(detector, self.data.inputs(batch)), assigned), assigned)

    def counts(self, model: nn.Module) -> CountFunction:
        """Return what finds the targets of a tower and counts them; the losses of this tower take what it found."""
        detector: DetectionModel = model  # type: ignore[assignment]

        def count(batch: Batch) -> Mapping[str, float | Tensor]:
            batch[ASSIGNED] = _assigned(detector, batch)
            return detector.counts(batch[ASSIGNED])

        return count

    def detect(self, model: nn.Module, batch: Mapping[str, Any]) -> Sequence[Detections]:
        """Detect objects, one image after another where their sizes differ, so that none is padded for another."""
        detector: DetectionModel = model  # type: ignore[assignment]
        images = self.data.inputs(batch)
        parts = [images] if isinstance(images, torch.Tensor) else [image[None] for image in images]
        return [
            found for part in parts for found in detector.postprocess(detector(network_input(detector, part), None))
        ]

    def score(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Give the metrics the detections, and the objects that they are compared with."""
        found = self.on_stored_images(self.detect(model, batch), batch)
        metrics: Mapping[str, Any] = self.metrics
        return {name: metric.columns(batch, found) for name, metric in metrics.items()}

    def on_stored_images(self, detected: Sequence[Detections], batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make columns for metrics: boxes as x, y, width and height in pixels of the images of the data."""
        from lockstep.detection.detector import boxes_on_stored, keypoints_on_stored, paste_masks

        _check_finite(detected, batch)
        boxes: list[Tensor] = []
        masks: list[Any] = []
        points: list[Tensor] = []
        for found, stored in zip(detected, batch["original_size"].tolist(), strict=True):
            resized = self.data.resizer.size_of(*stored)
            corners = boxes_on_stored(found.boxes, resized, stored)
            boxes.append(torch.cat([corners[:, [1, 0]], corners[:, [3, 2]] - corners[:, [1, 0]]], dim=1))
            if found.masks is not None:
                masks.append(paste_masks(found.masks, corners, (stored[0], stored[1])))
            if found.keypoints is not None:
                points.append(keypoints_on_stored(found.keypoints, resized, stored))
        columns = {"scores": [each.scores for each in detected], "labels": [each.labels for each in detected]}
        made = {name: Ragged.of(rows) for name, rows in {"boxes": boxes, **columns}.items()}
        made |= {"keypoints": Ragged.of(points)} if points else {}
        return {**made, "masks": masks} if masks else made


@dataclass(frozen=True)
class OwnTask:
    """A task by functions of the user's own; see `PythonTask` for what each of them returns."""

    losses: LossFunction
    score: ScoreFunction | None = None
    """None: nothing is evaluated."""
    count: Callable[[nn.Module, Batch], Mapping[str, float | Tensor]] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    predict: Callable[[nn.Module, Batch], Mapping[str, Tensor]] | None = None

    def counts(self, model: nn.Module) -> CountFunction | None:
        """Return what counts the things that some of the losses are sums over; None: the losses are means."""
        return partial(self.count, model) if self.count else None


Task = Classification | Detection | OwnTask
"""What the model of a run learns."""


def network_input(model: DetectionModel, images: Tensor | Sequence[Tensor], *, is_preprocessed: bool = False) -> Tensor:
    """Preprocess images, and pad them with zeros below and at the right to the shape of a network's input."""
    shape = _input_shape(model, images)
    if isinstance(images, torch.Tensor):
        return _padded(images if is_preprocessed else model.preprocess(images), shape)
    return torch.cat([_padded(model.preprocess(image[None]), shape) for image in images])


def _check_finite(detected: Sequence[Detections], batch: Mapping[str, Any]) -> None:
    for row, found in enumerate(detected):
        columns = {"boxes": found.boxes, "scores": found.scores, "keypoints": found.keypoints}
        for name, values in columns.items():
            if values is not None and not torch.isfinite(values).all():
                example = batch["source_id"][row] if "source_id" in batch else f"image {row} of the batch"
                raise NonFiniteError(
                    f"The detector has found {name} on {example} that are not finite.",
                    given=f"{int((~torch.isfinite(values)).sum())} of {values.numel()} numbers",
                    expected="finite boxes and scores",
                    hint="go on from an earlier checkpoint, with a lower learning rate or clipped gradients",
                )


def _padded(images: Tensor, shape: tuple[int, int]) -> Tensor:
    height, width = images.shape[2:]
    return (
        images
        if (height, width) == shape
        else torch.nn.functional.pad(images, (0, shape[1] - width, 0, shape[0] - height))
    )


def _input_shape(model: DetectionModel, images: Tensor | Sequence[Tensor]) -> tuple[int, int]:
    """Return the largest height and width of images, as multiples of the detector's."""
    sizes = [images.shape[2:]] if isinstance(images, torch.Tensor) else [image.shape[1:] for image in images]
    step = model.size_divisibility
    height, width = (-(-max(sides) // step) * step for sides in zip(*sizes, strict=True))
    return height, width


def _assigned(model: DetectionModel, batch: Mapping[str, Any]) -> Any:
    from lockstep.detection.detector import Targets

    images: Tensor | Sequence[Tensor] = batch["image"]
    sizes = [(int(image.shape[1]), int(image.shape[2])) for image in images]
    return model.assign(Targets.of(batch, _input_shape(model, images), sizes))
