"""Detectors of torchvision by name, and the one line where torchvision cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn, tensor

from lockstep.detection.detector import Targets
from lockstep.detection.torchvision_detectors import TorchvisionDetectionNet
from lockstep.detection.values import TorchvisionDetector
from lockstep.errors import DataError, InputError
from lockstep.models.torchvision_models import imported


def loads() -> bool:
    """Whether torchvision can be imported; one made for another torch fails in some other way."""
    try:
        imported("torchvision")
    except InputError:
        return False
    return True


class Stub(nn.Module):
    """What torchvision's detectors take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = SimpleNamespace()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None
    ) -> Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]:
        if targets is not None:
            return {"classification": self.scale * sum(float(each["boxes"][:, 0].sum()) for each in targets)}
        found = {"boxes": tensor([[1.0, 2.0, 3.0, 4.0]]), "scores": tensor([0.5]), "labels": tensor([2])}
        points = {"keypoints": tensor([[[5.0, 6.0, 1.0]]]), "keypoints_scores": tensor([[7.0]])}
        return [{**found, **points, "masks": torch.ones(1, 1, 28, 28)} for _ in images]


def targets() -> Targets:
    boxes = [tensor([[2.0, 7.0, 4.0, 9.0]]), torch.zeros(0, 4)]
    labels = [tensor([1]), torch.zeros(0, dtype=torch.int64)]
    weights = [torch.ones(len(each)) for each in boxes]
    return Targets(boxes, labels, [torch.eye(2)[each - 1] for each in labels], weights, weights, (16, 16))


def test_boxes_keypoints_and_masks_are_turned_around() -> None:
    stub = Stub()
    net = TorchvisionDetectionNet(stub, 2)
    images = net.preprocess(torch.full((2, 3, 16, 16), 255.0))
    assert images.max() == 1
    assigned = net.assign(targets())
    assert assigned[0]["boxes"].tolist() == [[7, 2, 9, 4]]
    losses = net.losses(net(images, assigned), assigned)
    assert {name: each.item() for name, each in losses.items()} == {"classification": 7}
    assert net.counts(assigned) == {}
    found = net.postprocess(net(images))
    assert found[1].boxes.tolist() == [[2, 1, 4, 3]]
    assert found[1].masks is not None
    assert found[1].masks.shape == (1, 28, 28)
    assert found[1].keypoints is not None
    assert found[1].keypoints.tolist() == [[[6, 5, 7]]]
    stub.roi_heads = nn.ModuleDict({"keypoint_predictor": nn.Identity()})
    with pytest.raises(DataError, match="without keypoints"):
        net.assign(targets())
    points = [tensor([[[4.0, 8.0, 1.0]]]), torch.zeros(0, 1, 3)]
    assert net.assign(replace(targets(), keypoints=points))[0]["keypoints"].tolist() == [[[8, 4, 1]]]


def test_where_torchvision_cannot_be_imported_one_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match="This model needs torchvision, which cannot be imported"):
        TorchvisionDetector("retinanet_resnet50_fpn_v2", 2).build(0)


@pytest.mark.skipif(not loads(), reason="torchvision is not there, or does not load")
def test_retinanet_is_made_by_its_name() -> None:
    with pytest.raises(InputError, match="is no detector of images"):
        TorchvisionDetector("resnet50", 2).build(0)
    net = TorchvisionDetector("retinanet_resnet50_fpn", 2).build(0)
    images = net.preprocess(torch.rand(2, 3, 96, 64) * 255)
    assigned = net.assign(targets())
    losses = net.losses(net(images, assigned), assigned)
    assert losses.keys() == {"classification", "bbox_regression"}
    sum(losses.values(), start=torch.zeros(())).backward()
    net.eval()
    assert len(net.postprocess(net(images))) == 2
