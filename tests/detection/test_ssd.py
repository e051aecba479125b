"""SSD: what its anchors learn, its losses, and its detections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor

from lockstep.detection.blocks import (
    AnchorGrid,
    ArgmaxMatcher,
    BatchNonMaxSuppression,
    FlexibleGridAnchorGenerator,
    HardExampleMiner,
    Loss,
    PostProcessing,
    WeightedGiou,
    WeightedSigmoid,
    WeightedSmoothL1,
)
from lockstep.detection.box_coders import decode
from lockstep.detection.boxes import matched_giou
from lockstep.detection.detector import Targets
from lockstep.detection.nms import postprocess
from lockstep.detection.ssd import AnchorTargets, SsdHead, SsdNet, SsdSettings
from lockstep.detection.values import SqueezeSsd

CELL, CLASSES, SHAPE = 8, 2, (16, 24)
GRID = FlexibleGridAnchorGenerator((AnchorGrid(CELL, CELL, (8.0, 8.0), (1.0, 4.0), 4, 4),))


class Stem(nn.Module):
    """One map with a cell for 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, CELL, CELL)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"0": self.norm(self.layer(images))}


def net_of(num_logits: int = CLASSES + 1, **settings: Any) -> SsdNet:
    torch.manual_seed(0)
    head = SsdHead([nn.Conv2d(4, 2 * num_logits, 1)], [nn.Conv2d(4, 8, 1)], num_logits)
    options = {"anchor_generator": GRID, "postprocess": lambda *_: [], **settings}
    return SsdNet(SsdSettings(CLASSES, **options), Stem(), head)


def targets_of(*images: list[tuple[list[float], int]], shape: tuple[int, int] = SHAPE) -> Targets:
    boxes = [tensor([box for box, _ in objects]).view(-1, 4) for objects in images]
    labels = [tensor([label for _, label in objects], dtype=torch.int64) for objects in images]
    classes = [torch.eye(CLASSES)[each - 1] for each in labels]
    weights = [torch.ones(len(each)) for each in labels]
    crowd = [torch.zeros(len(each), dtype=torch.bool) for each in labels]
    return Targets(boxes, labels, classes, weights, crowd, shape)


OBJECTS = ([([0.0, 0.0, 8.0, 8.0], 1), ([8.0, 9.0, 16.0, 17.0], 2)], [], [([1.0, 16.0, 9.0, 24.0], 2)])
"""The second object is most like anchor 6 of anchors 0 to 11, two a cell; the third like anchor 4."""


def run(net: SsdNet, *images: list[tuple[list[float], int]]) -> tuple[dict[str, Tensor], AnchorTargets, dict[str, Any]]:
    inputs = torch.randn(len(images), 3, *SHAPE, generator=torch.Generator().manual_seed(1))
    assigned = net.assign(targets_of(*images))
    predictions = net(inputs, assigned)
    return net.losses(predictions, assigned), assigned, predictions


def test_each_anchor_learns_the_object_of_its_own_image() -> None:
    assigned = net_of().assign(targets_of(*OBJECTS))
    assert assigned.matches.tolist() == [
        [0, *[-1] * 7, 1, *[-1] * 3],
        [-1] * 12,
        [*[-1] * 4, 0, *[-1] * 7],
    ]
    assert assigned.classes[0].tolist() == [1, *[0] * 7, 2, *[0] * 3]
    assert assigned.classes[1:].sum() == assigned.classes[2, 4] == 2
    assert assigned.boxes[2, 4].tolist() == [1, 16, 9, 24]
    assert torch.equal(assigned.boxes[1], assigned.anchors)
    assert assigned.localization_weights.sum(1).tolist() == [2, 0, 1]


def test_counts_are_the_matches() -> None:
    net = net_of()
    assigned = net.assign(targets_of(*OBJECTS))
    assert {name: float(count) for name, count in net.counts(assigned).items()} == {
        "classification": 3,
        "localization": 3,
    }
    by_size = net_of(normalize_loc_loss_by_codesize=True)
    assert float(by_size.counts(assigned)["localization"]) == 12
    assert net_of(normalize_loss_by_num_matches=False).counts(assigned) == {}


def test_losses_are_those_of_a_loop_over_images_and_anchors() -> None:
    net = net_of()
    losses, assigned, predictions = run(net, *OBJECTS)
    classification = localization = 0.0
    for image in range(3):
        log_probabilities = predictions["logits"][image].detach().log_softmax(-1)
        objects = [anchor for anchor in range(12) if assigned.matches[image, anchor] >= 0]
        for anchor in objects:
            classification -= float(log_probabilities[anchor, assigned.classes[image, anchor]])
            codes, box = predictions["codes"][image, anchor].detach(), assigned.boxes[image, anchor]
            anchor_box = assigned.anchors[anchor]
            size, own = box[2:] - box[:2], anchor_box[2:] - anchor_box[:2]
            offset = 10 * (box[:2] + size / 2 - anchor_box[:2] - own / 2) / own
            goal = torch.stack([*offset.flip(0), *(5 * (size / own).log()).flip(0)])
            localization += float(nn.functional.smooth_l1_loss(codes, goal, reduction="sum"))
        others = sorted((-float(log_probabilities[a, 0]) for a in range(12) if a not in objects), reverse=True)
        classification += sum(others[: 3 * len(objects)])
    assert losses["classification"].item() == pytest.approx(classification, rel=1e-5)
    assert losses["localization"].item() == pytest.approx(localization, rel=1e-5)


def test_losses_of_a_batch_are_the_sum_over_its_images() -> None:
    net = net_of().eval()
    inputs = torch.randn(3, 3, *SHAPE, generator=torch.Generator().manual_seed(1))

    def losses(images: slice) -> Tensor:
        assigned = net.assign(targets_of(*OBJECTS[images]))
        return torch.stack([*net.losses(net(inputs[images], assigned), assigned).values()])

    torch.testing.assert_close(losses(slice(0, 3)), sum(losses(slice(i, i + 1)) for i in range(3)))


def test_images_without_objects_have_a_loss_of_0_and_finite_gradients() -> None:
    net = net_of()
    losses, _, _ = run(net, [], [])
    assert [loss.item() for loss in losses.values()] == [0, 0]
    sum(losses.values(), start=torch.zeros(())).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_ignored_anchors_have_no_loss_and_the_background_its_weight() -> None:
    matcher = ArgmaxMatcher(0.9, 0.2)
    loss = Loss(WeightedSmoothL1(), WeightedSigmoid())
    assigned = net_of(matcher=matcher, negative_class_weight=0.25, loss=loss).assign(targets_of(*OBJECTS))
    weights, matches = assigned.classification_weights, assigned.matches
    assert (weights[matches == -2] == 0).all()
    assert (matches == -2).any()
    assert (weights[matches == -1] == 0.25).all()
    assert (weights[matches >= 0] == 1).all()


@pytest.mark.parametrize(
    ("background", "of_none", "of_first"),
    [("class", [1, 0, 0], [0, 1, 0]), ("zeros", [0, 0, 0], [0, 1, 0]), ("none", [0, 0], [1, 0])],
)
def test_the_background_is_a_class_or_zeros_or_nothing(
    background: str, of_none: list[int], of_first: list[int]
) -> None:
    loss = Loss(WeightedSmoothL1(), WeightedSigmoid())
    assigned = net_of(background=background, loss=loss).assign(targets_of(*OBJECTS))
    assert assigned.classes[0, :2].tolist() == [of_first, of_none]


def test_weights_of_objects_weigh_both_losses() -> None:
    net = net_of()
    targets = targets_of(*OBJECTS)
    halved = replace(targets, weights=[each / 2 for each in targets.weights])
    inputs = torch.randn(3, 3, *SHAPE)
    all_of_it, half = (net.assign(each) for each in (targets, halved))
    assert float(net.counts(half)["localization"]) == 1.5
    predictions = net(inputs)
    torch.testing.assert_close(
        net.losses(predictions, half)["localization"], net.losses(predictions, all_of_it)["localization"] / 2
    )


def test_boxes_are_compared_where_the_loss_takes_boxes() -> None:
    net = net_of(loss=Loss(WeightedGiou(), WeightedSigmoid()), background="zeros")
    losses, assigned, predictions = run(net, *OBJECTS)
    boxes = decode(net.settings.box_coder, predictions["codes"], assigned.anchors)
    learned = assigned.matches >= 0
    torch.testing.assert_close(
        losses["localization"], (1 - matched_giou(boxes[learned], assigned.boxes[learned])).sum()
    )


def test_more_negatives_can_be_asked_for_in_images_without_objects() -> None:
    miner = HardExampleMiner(0, 1.0, "classification", 3, min_negatives_per_image=2)
    net = net_of(loss=Loss(WeightedSmoothL1(), WeightedSigmoid(), miner), background="zeros")
    losses, _, predictions = run(net, [])
    of_anchors = nn.functional.softplus(predictions["logits"][0]).sum(-1)
    torch.testing.assert_close(losses["classification"], of_anchors.topk(2).values.sum())


def test_a_miner_without_a_limit_of_negatives_counts_all_of_them() -> None:
    loss = Loss(WeightedSmoothL1(), WeightedSigmoid(), HardExampleMiner(0, 1.0, "classification", 0))
    mined, _, _ = run(net_of(loss=loss, background="zeros"), *OBJECTS)
    all_count, _, _ = run(net_of(loss=replace(loss, hard_example_miner=None), background="zeros"), *OBJECTS)
    torch.testing.assert_close(mined, all_count)


def test_detections_are_chosen_by_the_settings() -> None:
    config = PostProcessing(BatchNonMaxSuppression(0.1), "softmax")
    net = net_of(postprocess=lambda boxes, logits, shape: postprocess(config, boxes[:, :, None], logits, shape)).eval()
    predictions = net(torch.randn(2, 3, *SHAPE))
    found = net.postprocess(predictions)
    assert [len(each.scores) > 0 for each in found] == [True, True]


def test_nothing_of_the_backbone_changes_when_its_shapes_are_found() -> None:
    net = net_of().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.assign(targets_of([]))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())


def test_anchors_of_an_evaluation_serve_training() -> None:
    net = net_of()
    with torch.inference_mode():
        net(torch.zeros(1, 3, 32, 40))
    assigned = net.assign(targets_of([([0.0, 0.0, 8.0, 8.0], 1)], shape=(32, 40)))
    losses = net.losses(net(torch.zeros(1, 3, 32, 40), assigned), assigned)
    sum(losses.values(), start=torch.zeros(())).backward()


def test_a_squeeze_ssd_trains_on_a_batch() -> None:
    value = SqueezeSsd(3, layers=(7, 12), extra_maps=1, anchor_sizes=((8.0,), (24.0, 32.0), (60.0,)))
    net = value.build(0)
    images = net.preprocess(torch.rand(2, 3, 96, 128) * 255)
    objects = [([10.0, 10.0, 40.0, 38.0], 1)], []
    assigned = net.assign(targets_of(*objects, shape=(96, 128)))
    losses = net.losses(net(images, assigned), assigned)
    sum(losses.values(), start=torch.zeros(())).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    maps = net.backbone(images)
    assert [each.shape[1:] for each in maps] == [(256, 12, 16), (512, 6, 8), (256, 3, 4)]
    assert sum(map(len, (net.anchors((96, 128), torch.device("cpu")),))) == 12 * 16 + 2 * 6 * 8 + 3 * 4
