"""Our detectors beside torchvision's, from equal weights: losses, gradients, detections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from detection_inputs import (
    CASES,
    NUM_CLASSES,
    NUM_KEYPOINTS,
    NUM_WITH_KEYPOINTS,
    SEED,
    Case,
    boxes_of,
    freeze_norms,
    images_of,
    keypoints_of,
    labels_of,
    masks_of,
    summary,
    weights_for,
)
from torch import Tensor

from lockstep.detection.detector import DetectionModel, Targets
from lockstep.detection.values import Detector, FasterRcnnFpn, Fcos, KeypointRcnnFpn, MaskRcnnFpn, Ssd300, Ssdlite

GOLDEN = np.load(Path(__file__).parent / "torchvision_detection_golden.npz")
OURS: dict[str, Detector] = {
    "ssd300_vgg16": Ssd300(NUM_CLASSES),
    "ssdlite320_mobilenet_v3_large": Ssdlite(NUM_CLASSES),
    "fcos_resnet50_fpn": Fcos(NUM_CLASSES),
    "fasterrcnn_resnet50_fpn": FasterRcnnFpn(NUM_CLASSES),
    "maskrcnn_resnet50_fpn": MaskRcnnFpn(NUM_CLASSES),
    "keypointrcnn_resnet50_fpn": KeypointRcnnFpn(
        NUM_CLASSES, num_keypoints=NUM_KEYPOINTS, max_detections=NUM_WITH_KEYPOINTS
    ),
}
DEAR = dict.fromkeys(
    [name for name in OURS if name not in ("ssdlite320_mobilenet_v3_large", "fasterrcnn_resnet50_fpn")],
    pytest.mark.slow,
)
"""Five seconds or more; SSDlite is SSD300's net with other layers, Faster R-CNN is Mask R-CNN's without masks, and its
pyramid is that of FCOS."""
LOSSES = {
    "one stage": {
        "localization": "bbox_regression",
        "classification": "classification",
        "centerness": "bbox_ctrness",
    },
    "two stages": {
        "rpn_classification": "loss_objectness",
        "rpn_localization": "loss_rpn_box_reg",
        "classification": "loss_classifier",
        "localization": "loss_box_reg",
        "mask": "loss_mask",
        "keypoint": "loss_keypoint",
    },
}
"""Torchvision's names of our losses."""


def of_torchvision(boxes: Tensor) -> Tensor:
    """Left, top, right, bottom of top, left, bottom, right, and the other way round."""
    return boxes[:, [1, 0, 3, 2]]


def targets_of(case: Case) -> Targets:
    boxes, labels = boxes_of(case), labels_of(case)
    return Targets(
        boxes=[of_torchvision(each) for each in boxes],
        labels=labels,
        classes=[torch.eye(NUM_CLASSES)[each - 1] for each in labels],
        weights=[torch.ones(len(each)) for each in labels],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in labels],
        shape=(case.height, case.width),
        masks=masks_of(case),
        keypoints=[each[..., [1, 0, 2]] for each in keypoints_of(case)],
    )


def losses_of(model: DetectionModel, inputs: Tensor, targets: Targets) -> dict[str, Tensor]:
    assigned = model.assign(targets)
    torch.manual_seed(SEED)
    for _ in targets.boxes:
        torch.empty(1).uniform_()  # torchvision draws a size for each image first
    losses = model.losses(model(inputs, assigned), assigned)
    counts = model.counts(assigned)
    return {name: loss / counts[name].clamp(min=1) if name in counts else loss for name, loss in losses.items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=DEAR.get(name, ())) for name in CASES])
def test_losses_gradients_and_detections_are_those_of_torchvision(name: str) -> None:
    case = CASES[name]
    model = OURS[name].build(0)
    model.load_state_dict(weights_for(model.state_dict(), case.gains))
    inputs = model.preprocess(images_of(case))
    assert_detections(model.eval(), inputs, name)
    freeze_norms(model.train())
    # In float32, rounding turns a ReLU on or off somewhere: up to 1e-4 of the gradients below it.
    losses = losses_of(model.double(), inputs.double(), targets_of(case))
    names = LOSSES["two stages" if name.endswith("rcnn_resnet50_fpn") else "one stage"]
    recorded = {key: float(GOLDEN[f"{name} loss {key}"]) for key in map(names.get, losses)}
    assert {names[key]: loss.item() for key, loss in losses.items()} == pytest.approx(recorded, rel=1e-5)
    torch.stack(list(losses.values())).sum().backward()
    assert_gradients(model, name)


def assert_gradients(model: DetectionModel, name: str) -> None:
    names = str(GOLDEN[f"{name} parameters"]).split("\n")
    expected = dict(zip(names, GOLDEN[f"{name} gradients"], strict=True))
    found = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    # Where the norms are frozen, theirs have gradients that ours need not.
    assert {key for key in expected if ".bn" not in key and "downsample.1" not in key} <= set(found) <= set(expected)
    # The losses take float32: of heat maps with logits up to 40 it rounds more, also what is 0 for the last bias.
    share, least = (1e-4, 1e-7) if name.startswith("keypoint") else (1e-5, 1e-9)
    for key, gradient in found.items():
        norm, product = expected[key]
        bounds = share * norm, share * norm * (gradient.numel() / 3) ** 0.5
        off = np.abs(np.subtract(summary(gradient), (norm, product)))
        assert (off <= np.add(bounds, least)).all(), key


def assert_detections(model: DetectionModel, inputs: Tensor, name: str) -> None:
    with torch.no_grad():
        detections = model.postprocess(model(inputs))
    for number, found in enumerate(detections):
        recorded = {key: GOLDEN[f"{name} image {number} {key}"] for key in ("boxes", "scores", "labels")}
        assert len(recorded["labels"]) > (50 if found.keypoints is None else 15)
        assert found.labels.tolist() == recorded["labels"].tolist()
        np.testing.assert_allclose(found.scores, recorded["scores"], rtol=1e-5)
        np.testing.assert_allclose(
            of_torchvision(found.boxes), recorded["boxes"], rtol=1e-5, atol=1e-5 * inputs.shape[3]
        )
        if found.masks is not None:
            masks = np.array([summary(each) for each in found.masks])
            np.testing.assert_allclose(masks, GOLDEN[f"{name} image {number} masks"], rtol=1e-5, atol=1e-4)
        if found.keypoints is not None:
            points = np.array([summary(_with_visibility(each)) for each in found.keypoints])
            np.testing.assert_allclose(points, GOLDEN[f"{name} image {number} keypoints"], rtol=1e-5, atol=1e-3)
            logits = np.array([summary(each) for each in found.keypoints[..., 2]])
            recorded_logits = GOLDEN[f"{name} image {number} keypoints_scores"]
            np.testing.assert_allclose(logits, recorded_logits, rtol=1e-4, atol=1e-4)


def _with_visibility(keypoints: Tensor) -> Tensor:
    """Torchvision's x, y and 1 of our y, x and logit."""
    return torch.cat([keypoints[..., [1, 0]], torch.ones_like(keypoints[..., :1])], -1)
