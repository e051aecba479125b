"""Faster R-CNN learns from what it has drawn, and trains whatever its images hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from regions_drawn import SMALL, images, targets

from lockstep.detection.blocks import XYBoxCoder
from lockstep.detection.box_coders import encode
from lockstep.detection.boxes import iou
from lockstep.detection.faster_rcnn import FasterRcnnNet, RoIHeads, RpnHead
from lockstep.detection.regions import in_blocks


@pytest.fixture(scope="module")
def net() -> FasterRcnnNet:
    torch.set_num_threads(1)
    return SMALL.build(0)


def test_parameters_have_the_names_of_torchvision(net: FasterRcnnNet) -> None:
    names = dict(net.state_dict())
    assert names["backbone.body.layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert names["backbone.body.bn1.running_var"].shape == (64,)
    assert names["backbone.fpn.inner_blocks.3.0.weight"].shape == (256, 2048, 1, 1)
    assert names["backbone.fpn.layer_blocks.0.0.bias"].shape == (256,)
    assert names["rpn.head.conv.0.0.weight"].shape == (256, 256, 3, 3)
    assert names["rpn.head.cls_logits.weight"].shape == (3, 256, 1, 1)
    assert names["rpn.head.bbox_pred.weight"].shape == (12, 256, 1, 1)
    assert names["roi_heads.box_head.fc6.weight"].shape == (1024, 256 * 49)
    assert names["roi_heads.box_predictor.cls_score.weight"].shape == (4, 1024)
    assert names["roi_heads.box_predictor.bbox_pred.bias"].shape == (16,)
    assert len(names) == 348


def test_weights_depend_on_the_seed_and_no_stream_is_touched(net: FasterRcnnNet) -> None:
    before = torch.random.get_rng_state()
    heads = [RoIHeads(8, 2, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    first, again, other = (torch.cat([part.flatten() for part in head.parameters()]) for head in heads)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    RpnHead(8, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_anchors_are_drawn_in_balance_and_learn_their_objects(net: FasterRcnnNet) -> None:
    given = targets([[10.0, 20, 60, 90], [30, 30, 50, 60]], [])
    assigned = net.draw_anchors(net.assign(given))
    anchors = net.anchors((96, 96), torch.device("cpu"))
    image_of = assigned.places // len(anchors)
    assert image_of.bincount().tolist() == [SMALL.rpn_batch_size_per_image] * 2
    is_object = assigned.is_object > 0
    assert 0 < is_object.sum() <= SMALL.rpn_batch_size_per_image // 2
    assert not image_of[is_object].any(), "the second image has no objects"
    drawn = anchors[assigned.places % len(anchors)][is_object]
    best = given.boxes[0][iou(drawn, given.boxes[0]).argmax(1)]
    assert torch.equal(assigned.codes[is_object], encode(XYBoxCoder((1.0, 1.0, 1.0, 1.0)), best, drawn))


def test_crowds_are_neither_learned_nor_background(net: FasterRcnnNet) -> None:
    boxes = [[10.0, 20, 60, 90]]
    crowd = targets(boxes, boxes, is_crowd=True)
    anchors = net.anchors((96, 96), torch.device("cpu"))
    assigned = net.assign(crowd)
    drawn = net.draw_anchors(assigned)
    assert not drawn.is_object.any()
    near = iou(anchors[drawn.places % len(anchors)], crowd.boxes[0]).amax()
    assert near < 0.7
    regions = net(net.preprocess(images()), assigned)["regions"]
    assert (regions.object_of < 0).all()


def test_the_objects_are_among_the_proposals(net: FasterRcnnNet) -> None:
    given = targets([[10.0, 20, 60, 90]], [[30.0, 30, 50, 60]])
    predictions = net.train()(net.preprocess(images()), net.assign(given))
    regions = predictions["regions"]
    for image, boxes in enumerate(given.boxes):
        own = regions.boxes[(regions.image_of == image) & (regions.object_of == 0)]
        assert (own == boxes).all(1).any()
    assert len(regions.boxes) <= 2 * SMALL.box_batch_size_per_image


@pytest.mark.parametrize("objects", [([], []), ([[10.0, 20, 60, 90]], [])])
def test_images_without_objects_train(net: FasterRcnnNet, objects: tuple[list[list[float]], ...]) -> None:
    given = targets(*objects)
    net.train().zero_grad()
    assigned = net.assign(given)
    losses = net.losses(net(net.preprocess(images()), assigned), assigned)
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert all(torch.isfinite(each) for each in losses.values())
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in net.parameters())


def test_no_proposals_train_and_detect_nothing(net: FasterRcnnNet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "tried_proposals", lambda *given: in_blocks([torch.zeros(0, 4)] * 2))
    assigned = net.assign(targets([], []))
    losses = net.train().losses(net(net.preprocess(images()), assigned), assigned)
    assert losses["classification"] == losses["localization"] == 0
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in net.parameters())
    found = net.eval().postprocess(net(net.preprocess(images())))
    assert [len(each.boxes) for each in found] == [0, 0]


def test_boxes_that_are_not_finite_are_no_proposals(net: FasterRcnnNet) -> None:
    number = len(net.anchors((96, 96), torch.device("cpu")))
    codes = torch.zeros(1, number, 4)
    codes[0, ::2] = torch.nan
    (proposals,) = net.propose(torch.randn(1, number), codes, (96, 96))
    assert torch.isfinite(proposals).all()
    assert len(proposals)


def test_detections_of_an_image_depend_on_no_other(net: FasterRcnnNet) -> None:
    eager = FasterRcnnNet(replace(SMALL, score_threshold=0.0), net.backbone, net.rpn["head"], net.roi_heads).eval()
    inputs = eager.preprocess(images())
    with torch.no_grad():
        together = eager.postprocess(eager(inputs))
        for image in range(2):
            (alone,) = eager.postprocess(eager(inputs[image : image + 1]))
            torch.testing.assert_close(alone.boxes, together[image].boxes, rtol=1e-4, atol=1e-3)
            assert alone.labels.tolist() == together[image].labels.tolist()
            assert 0 < len(alone.boxes) <= SMALL.max_detections
            assert alone.boxes.amin() >= 0
            assert alone.boxes.amax() <= 96
