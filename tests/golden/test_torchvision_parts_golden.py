"""The parts of detectors compute what torchvision's do; make_torchvision_parts_golden.py has recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.detection.anchor_matching import AnyMatcher, match, match_images
from lockstep.detection.anchors import AnyAnchorGenerator, anchors
from lockstep.detection.blocks import (
    AnchorGrid,
    FlexibleGridAnchorGenerator,
    LinearBoxCoder,
    PyramidAnchorGenerator,
    SsdMatcher,
    ThresholdMatcher,
    WeightedSigmoidFocal,
    XYBoxCoder,
)
from lockstep.detection.box_coders import decode, encode
from lockstep.detection.boxes import area, clip, iou, matched_giou
from lockstep.detection.fcos import PointTargets, centerness_of
from lockstep.detection.losses import classification_loss
from lockstep.detection.ssd import AnchorTargets, SsdNet, SsdSettings
from lockstep.detection.values import Fcos, Ssd300, Ssdlite

PATH = Path(__file__).with_name("torchvision_parts_golden.npz")
SSD300_MAPS = [(38, 38), (19, 19), (10, 10), (5, 5), (3, 3), (1, 1)]
SWAPPED = [1, 0, 3, 2]  # torchvision has x before y


@pytest.fixture(scope="module")
def golden() -> Mapping[str, Tensor]:
    with np.load(PATH) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def shapes(rows: Tensor) -> list[tuple[int, int]]:
    return [(height, width) for height, width in rows.view(-1, 2).tolist()]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_default_boxes(golden: Mapping[str, Tensor]) -> None:
    made = torch.cat(anchors(generator_of(Ssd300(2).build(0)), SSD300_MAPS, (300, 300)))[::53]
    torch.testing.assert_close(made[:, SWAPPED], golden["anchors of SSD300, every 53rd"], rtol=1e-5, atol=1e-4)
    maps, (image,) = (shapes(golden[f"anchors of SSDlite, {name}"]) for name in ("maps", "image"))
    made = torch.cat(anchors(generator_of(Ssdlite(2).build(0)), maps, image))
    torch.testing.assert_close(made[:, SWAPPED], golden["anchors of SSDlite"], rtol=1e-5, atol=1e-4)


def generator_of(net: SsdNet) -> AnyAnchorGenerator:
    return net.settings.anchor_generator


@pytest.mark.parametrize(
    ("name", "generator"),
    [
        ("Faster R-CNN", PyramidAnchorGenerator(((32,), (64,), (128,), (256,), (512,)))),
        ("FCOS", PyramidAnchorGenerator(((8,), (16,), (32,), (64,), (128,)), (1.0,))),
    ],
)
def test_anchors_of_pyramids(golden: Mapping[str, Tensor], name: str, generator: PyramidAnchorGenerator) -> None:
    maps, (image,) = (shapes(golden[f"anchors of a pyramid, {name}"]) for name in ("maps", "image"))
    assert torch.equal(torch.cat(anchors(generator, maps, image))[:, SWAPPED], golden[f"anchors of {name}"])


@pytest.mark.parametrize("weights", [(10.0, 10.0, 5.0, 5.0), (1.0, 1.0, 1.0, 1.0)])
def test_box_coder(golden: Mapping[str, Tensor], weights: tuple[float, float, float, float]) -> None:
    coder, name = XYBoxCoder(weights), " ".join(f"{each:g}" for each in weights)
    objects, priors = (golden[f"box coders {name}"][:, SWAPPED] for name in ("objects", "anchors"))
    close(encode(coder, objects, priors), golden[f"box coders encoded {name}"])
    close(decode(coder, golden["box coders codes"], priors)[:, SWAPPED], golden[f"box coders decoded {name}"])


def test_linear_box_coder(golden: Mapping[str, Tensor]) -> None:
    objects, priors = (golden[f"box coders {name}"][:, SWAPPED] for name in ("objects", "anchors"))
    close(encode(LinearBoxCoder(), objects, priors), golden["box coders encoded linear"])
    decoded = decode(LinearBoxCoder(), golden["box coders linear codes"], priors)
    close(decoded[:, SWAPPED], golden["box coders decoded linear"])


def test_overlaps(golden: Mapping[str, Tensor]) -> None:
    first, second = (golden[f"overlaps {name}"][:, SWAPPED] for name in ("first", "second"))
    close(area(first), golden["overlaps area"])
    close(iou(first, second), golden["overlaps iou"])
    close(matched_giou(first[:, None], second), golden["overlaps giou"])
    close(1 - matched_giou(first, second[:7]), golden["overlaps giou loss of pairs"])
    close(clip(first, (40, 50))[:, SWAPPED], golden["overlaps clipped to 40, 50"])


@pytest.mark.parametrize(
    ("name", "matcher"),
    [
        ("SSD 0.5", SsdMatcher()),
        ("SSD 0.3", SsdMatcher(0.3)),
        *(
            (f"argmax {high} {low}" + " and low quality" * low_quality, ThresholdMatcher(high, low, low_quality))
            for high, low in ((0.7, 0.3), (0.5, 0.5), (0.5, 0.4))
            for low_quality in (False, True)
        ),
    ],
)
def test_matchers(golden: Mapping[str, Tensor], name: str, matcher: AnyMatcher) -> None:
    assert torch.equal(match(matcher, golden["matchers similarity"]), golden[f"matchers {name}"])


def test_losses_of_ssd(golden: Mapping[str, Tensor]) -> None:
    part = {name.removeprefix("ssd losses "): value for name, value in golden.items() if name.startswith("ssd losses")}
    grid = FlexibleGridAnchorGenerator((AnchorGrid(8, 8, (8.0,), (1.0,)),))
    net = SsdNet(SsdSettings(4, grid, lambda *_: []), nn.Identity(), nn.Identity())
    priors, none = part["anchors"][:, SWAPPED], torch.zeros(0, 4)
    objects = [part["first objects"][:, SWAPPED], none, part["third objects"][:, SWAPPED]]
    matched = match_images(net.settings.matcher, net.settings.similarity, objects, priors)
    assert torch.equal(matched, part["matched"])
    is_object = matched >= 0
    labels = [part["first labels"], torch.zeros(0, dtype=torch.int64), part["third labels"]]
    learned = [torch.cat([each.new_zeros(1, *each.shape[1:]), each]) for each in (*labels, *objects)]
    classes = torch.stack([each[row] for each, row in zip(learned[:3], (matched + 1).clamp(min=0), strict=True)])
    boxes = torch.stack([each[row] for each, row in zip(learned[3:], (matched + 1).clamp(min=0), strict=True)])
    boxes = torch.where(is_object[..., None], boxes, priors)
    targets = AnchorTargets(priors, matched, boxes, classes, torch.ones_like(boxes[..., 0]), is_object.float())
    codes, logits = part["codes"].requires_grad_(), part["logits"].requires_grad_()
    losses = net.losses({"codes": codes, "logits": logits}, targets)
    # Where three times the objects' anchors are more than there are others, torchvision counts those of objects twice.
    twice = nn.functional.cross_entropy(logits[0, is_object[0]], classes[0, is_object[0]], reduction="sum")
    classification = (losses["classification"] + twice) / is_object.sum()
    localization = losses["localization"] / is_object.sum()
    close(classification, part["classification"])
    close(localization, part["bbox_regression"])
    gradients = torch.autograd.grad(classification + localization, [codes, logits])
    close(gradients[0], part["gradient of codes"])
    close(gradients[1], part["gradient of logits"])


def test_losses_of_fcos(golden: Mapping[str, Tensor]) -> None:
    part = {name.removeprefix("fcos losses "): value for name, value in golden.items() if name.startswith("fcos")}
    priors, objects = golden["anchors of FCOS"][:, SWAPPED], part["objects"][:, SWAPPED]
    rows = (part["matched"] + 1).clamp(min=0)
    is_object = rows > 0
    labels = torch.cat([torch.zeros(1, dtype=torch.int64), part["labels"]])[rows] * is_object
    boxes = torch.where(is_object[..., None], torch.cat([objects[:1], objects])[rows], priors)
    targets = PointTargets(priors, boxes, labels, is_object.float())
    predictions = {name: part[name].requires_grad_() for name in ("logits", "codes", "centerness")}
    net = Fcos(3).build(0)
    losses = net.losses({**predictions, "centerness": predictions["centerness"][..., 0]}, targets)
    for ours, theirs in (("classification",) * 2, ("localization", "bbox_regression"), ("centerness", "bbox_ctrness")):
        close(losses[ours] / is_object.sum(), part[f"{theirs} loss"])
    assert ((centerness_of(targets) >= 0) & (centerness_of(targets) <= 1)).all()


def test_focal_loss(golden: Mapping[str, Tensor]) -> None:
    logits, targets = (golden[f"focal losses {name}"] for name in ("logits", "targets"))
    each = classification_loss(WeightedSigmoidFocal(2.0, 0.25), logits[None], targets[None], torch.ones(1, 6))
    close(each[0], golden["focal losses of each"].sum(1))
