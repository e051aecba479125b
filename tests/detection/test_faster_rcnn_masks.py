"""Mask R-CNN draws within the boxes of Faster R-CNN."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from regions_drawn import SMALL, images, targets
from torch import Tensor

from lockstep.detection.faster_rcnn import MaskRcnnNet
from lockstep.detection.regions import Regions, mask_targets
from lockstep.detection.values import MaskRcnnFpn
from lockstep.errors import DataError

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "torchvision_parts_golden.npz")
BOXES = [[10.0, 20, 60, 90], [30, 30, 50, 60]]


def recorded(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


@pytest.fixture(scope="module")
def net() -> MaskRcnnNet:
    torch.set_num_threads(1)
    return MaskRcnnFpn(**asdict(SMALL)).build(0)


def test_parameters_have_the_names_of_torchvision(net: MaskRcnnNet) -> None:
    names = dict(net.state_dict())
    assert names["roi_heads.mask_head.3.0.weight"].shape == (256, 256, 3, 3)
    assert names["roi_heads.mask_predictor.conv5_mask.weight"].shape == (256, 256, 2, 2)
    assert names["roi_heads.mask_predictor.mask_fcn_logits.weight"].shape == (4, 256, 1, 1)
    assert len(names) == 360


@pytest.mark.parametrize("objects", [(BOXES, BOXES[:1]), (BOXES, []), ([], [])])
def test_images_with_and_without_objects_train(net: MaskRcnnNet, objects: tuple[list[list[float]], ...]) -> None:
    net.train().zero_grad()
    assigned = net.assign(targets(*objects))
    losses = net.losses(net(net.preprocess(images()), assigned), assigned)
    assert list(losses) == ["rpn_classification", "rpn_localization", "classification", "localization", "mask"]
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert (losses["mask"] > 0) == any(objects)
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in net.parameters())


def test_each_detection_has_a_mask_of_its_class(net: MaskRcnnNet) -> None:
    eager = MaskRcnnNet(
        MaskRcnnFpn(**asdict(replace(SMALL, score_threshold=0.0))), net.backbone, net.rpn["head"], net.roi_heads
    )
    with torch.no_grad():
        found = eager.eval().postprocess(eager(eager.preprocess(images())))
    for each in found:
        assert each.masks is not None
        assert each.masks.shape == (len(each.boxes), 28, 28)
        assert ((each.masks >= 0) & (each.masks <= 1)).all()


def test_what_a_mask_learns_is_torchvisions() -> None:
    boxes = recorded("region losses regions")[:, [1, 0, 3, 2]]
    object_of = recorded("region losses matched")
    given = replace(targets([], []), masks=[torch.zeros(0, 40, 50, dtype=torch.uint8), recorded("region losses masks")])
    regions = Regions(boxes, torch.ones_like(object_of), object_of, [0, len(boxes)], [0, len(boxes)])
    expected = recorded("region losses mask targets")
    torch.testing.assert_close(mask_targets(given, regions, (14, 14)), expected, rtol=1e-5, atol=1e-6)


def test_objects_without_masks_are_refused() -> None:
    given = replace(targets(BOXES), masks=None)
    nowhere = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(DataError, match="no masks"):
        mask_targets(given, Regions(torch.zeros(0, 4), nowhere, nowhere, [0], [0]), (14, 14))
