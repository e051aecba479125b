"""FCOS: which points learn which objects, losses, and detections."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, tensor

from lockstep.detection.detector import Targets
from lockstep.detection.fcos import FcosNet, match_points
from lockstep.detection.values import Fcos
from lockstep.errors import InputError

SHAPE = (64, 192)
NET = Fcos(3, score_threshold=0.0, max_detections=5)


def targets_of(*images: list[tuple[list[float], int]]) -> Targets:
    boxes = [tensor([box for box, _ in objects]).view(-1, 4) for objects in images]
    labels = [tensor([label for _, label in objects], dtype=torch.int64) for objects in images]
    classes = [torch.eye(3)[each - 1] for each in labels]
    weights = [torch.ones(len(each)) for each in labels]
    crowd = [torch.zeros(len(each), dtype=torch.bool) for each in labels]
    return Targets(boxes, labels, classes, weights, crowd, SHAPE)


@pytest.fixture(scope="module")
def net() -> FcosNet:
    return NET.build(0)


def test_a_point_learns_the_smallest_object_that_it_is_in_the_middle_of() -> None:
    anchors = tensor([[4.0, 4.0, 12.0, 12.0], [36.0, 36.0, 44.0, 44.0], [24.0, 24.0, 32.0, 32.0]])
    boxes = tensor([[0.0, 0.0, 16.0, 18.0], [20.0, 20.0, 60.0, 60.0], [30.0, 30.0, 50.0, 50.0]])
    bounds = tensor([[0.0, 64.0]]).expand(3, 2)
    assert match_points(boxes, anchors, bounds).tolist() == [0, 2, -1]
    assert match_points(boxes, anchors, tensor([[9.0, 64.0], [0.0, 9.0], [0.0, 64.0]])).tolist() == [0, -1, -1]
    assert match_points(boxes[:0], anchors, bounds).tolist() == [-1, -1, -1]


def test_objects_of_each_size_are_learned_on_their_level(net: FcosNet) -> None:
    assigned = net.assign(targets_of([([8.0, 8.0, 24.0, 24.0], 1), ([0.0, 0.0, 64.0, 192.0], 2)], []))
    sizes = [len(level) for level in net.level_anchors(SHAPE, torch.device("cpu"))]
    assert sizes == [192, 48, 12, 3, 2]
    small, large = (torch.split(assigned.labels[0] == label, sizes) for label in (1, 2))  # type: ignore[no-untyped-call]
    assert [bool(each.any()) for each in small] == [True, False, False, False, False]
    assert [bool(each.any()) for each in large] == [False, True, False, False, False]
    assert not assigned.labels[1].any()
    assert float(net.counts(assigned)["localization"]) == int((assigned.labels > 0).sum())


def test_losses_are_finite_and_train_the_whole_net(net: FcosNet) -> None:
    images = net.preprocess(torch.rand(2, 3, *SHAPE, generator=torch.Generator().manual_seed(0)) * 255)
    assigned = net.assign(targets_of([([8.0, 8.0, 24.0, 24.0], 1)], []))
    losses = net.losses(net(images, assigned), assigned)
    sum(losses.values(), start=torch.zeros(())).backward()
    for name, parameter in net.named_parameters():
        assert isinstance(parameter.grad, Tensor), name
        assert parameter.grad.isfinite().all(), name
    net.zero_grad()


def test_images_without_objects_have_no_losses_of_boxes(net: FcosNet) -> None:
    assigned = net.assign(targets_of([]))
    with torch.no_grad():
        losses = net.losses(net(torch.zeros(1, 3, *SHAPE)), assigned)
    assert float(losses["localization"]) == float(losses["centerness"]) == 0
    assert 0 < float(losses["classification"]) < 1


def test_detections_are_the_best_of_all_levels(net: FcosNet) -> None:
    net.eval()
    with torch.no_grad():
        predictions = net(torch.randn(2, 3, *SHAPE, generator=torch.Generator().manual_seed(0)))
        found = net.postprocess(predictions)
        alone = net.postprocess(
            {**predictions, **{name: predictions[name][1:] for name in ("logits", "codes", "centerness")}}
        )
    for each in found:
        assert len(each.scores) == 5
        assert (each.scores.diff() <= 0).all()
        assert ((each.labels >= 1) & (each.labels <= 3)).all()
        assert (each.boxes >= 0).all()
    assert all(torch.equal(one, other) for one, other in zip(alone[0][:3], found[1][:3], strict=True))


def test_images_that_are_too_small_are_refused(net: FcosNet) -> None:
    with pytest.raises(InputError, match="32 pixels or more"):
        net(torch.zeros(1, 3, 16, 64))


def test_its_anchors_are_points_and_no_sizes_that_objects_must_have(net: FcosNet) -> None:
    assert not net.anchors_fit_objects
