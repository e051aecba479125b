"""What a detector's training asks of an accelerator, counted on CPU tensors: where the host waits, and launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from device_calls import DeviceCalls, accelerator, counted
from regions_drawn import SMALL, calm, ellipses, images, published
from torch import Tensor

import lockstep as ls
from lockstep.detection import faster_rcnn, tf_faster_rcnn
from lockstep.detection.blocks import HardExampleMiner
from lockstep.detection.detector import DetectionModel
from lockstep.detection.rt_detr import RtDetrNet
from lockstep.detection.rt_detr_layers import RtDetrSizes
from lockstep.detection.tf_faster_rcnn import TfFasterRcnn
from lockstep.detection.values import Detector, Fcos, MaskRcnnFpn, RtDetr, SqueezeSsd, Ssdlite
from lockstep.ragged import Ragged
from lockstep.recipes.data import DetectionData
from lockstep.recipes.tasks import Detection

OBJECTS = [[[0.1, 0.2, 0.6, 0.9], [0.3, 0.3, 0.5, 0.6], [0.05, 0.05, 0.2, 0.25]], [[0.3, 0.3, 0.5, 0.6]], []]
DETECTORS: Mapping[str, Detector] = {"ssdlite": Ssdlite(3), "squeeze": SqueezeSsd(3), "fcos": Fcos(3)}
MASKS = MaskRcnnFpn(**vars(SMALL))
TASK = Detection(DetectionData(), 3)


def fields_of(objects: list[list[list[float]]]) -> dict[str, list[Tensor]]:
    """Images of 96 x 96, and boxes as shares of them; the labels are 1, 2, 3, 1 ..."""
    boxes = [torch.tensor(each).view(-1, 4) for each in objects]
    labels = [torch.arange(len(each)) % 3 + 1 for each in boxes]
    return {
        "image": [*images().repeat(2, 1, 1, 1)[: len(boxes)]],
        "boxes": boxes,
        "labels": labels,
        "classes": [torch.eye(3)[each - 1] for each in labels],
        "weights": [torch.ones(len(each)) for each in boxes],
        "masks": [ellipses(each * 96) for each in boxes],
        "is_crowd": [torch.zeros(len(each), dtype=torch.bool) for each in boxes],
    }


def train(net: DetectionModel, fields: dict[str, list[Tensor]]) -> list[Tensor]:
    """The losses of a tower and their gradients, from the same draws each time."""
    plain = {"image": torch.stack(fields["image"]), "masks": fields["masks"]}
    batch = plain | {
        name: Ragged.of(values) for name, values in fields.items() if name not in plain
    }  # with host's lengths
    torch.manual_seed(5)
    losses = TASK.losses(net, ls.Batch(batch, position=0, batch_size=3, towers=range(1), epoch_size=3))
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(torch.stack([*losses.values()]).sum(), learning, allow_unused=True)
    return [*(each.detach() for each in losses.values()), *(each for each in gradients if each is not None)]


def of_one_step(net: DetectionModel, objects: list[list[list[float]]]) -> DeviceCalls:
    """What a step asks for, but for what the first one keeps."""
    fields = fields_of(objects)
    with accelerator():
        train(net, fields)
        with counted() as calls:
            train(net, fields)
    return calls


@pytest.fixture(scope="module", params=DETECTORS)
def net(request: pytest.FixtureRequest) -> DetectionModel:
    torch.set_num_threads(1)
    return DETECTORS[request.param].build(0).train()


@pytest.mark.parametrize("objects", [OBJECTS, pytest.param([[], []], marks=pytest.mark.slow)], ids=["objects", "none"])
def test_detectors_of_one_stage_never_wait(net: DetectionModel, objects: list[list[list[float]]]) -> None:
    assert of_one_step(net, objects).waits == []


def test_matching_waits_once_for_all_layers_and_images() -> None:
    sizes = RtDetrSizes((1, 1, 1, 1), False, 2, 0.5, 16, 16, stem=8, queries=16, decoder_feed_forward=16, heads=2)
    calls = of_one_step(RtDetrNet(RtDetr(3, num_queries=9), sizes).train(), OBJECTS)
    assert len(calls.waits) == 1, calls.waits


@pytest.fixture(
    scope="module",
    params=[
        "boxes",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("masks", "imported", "imported masks")),
    ],
)
def two_stages(request: pytest.FixtureRequest) -> DetectionModel:
    torch.set_num_threads(1)
    if not request.param.startswith("imported"):
        return {"boxes": SMALL, "masks": MASKS}[request.param].build(0).train()
    name = {"imported": "faster_rcnn_resnet101_fgvc", "imported masks": "mask_rcnn_resnet50_atrous_coco"}
    net = published(name[request.param]).build(0)
    assert isinstance(net, TfFasterRcnn)
    return calm(net).train()


@pytest.mark.parametrize("objects", [OBJECTS, pytest.param([[], []], marks=pytest.mark.slow)], ids=["objects", "none"])
def test_detectors_of_two_stages_wait_once_a_tower(
    two_stages: DetectionModel, objects: list[list[list[float]]]
) -> None:
    calls = of_one_step(two_stages, objects)
    assert len(calls.waits) == 1, calls.waits


@pytest.mark.parametrize("rounds", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_detectors_of_two_stages_learn_the_same_where_the_host_waits(
    two_stages: DetectionModel, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where NMS needs more rounds or boxes than it has at first, and the proposals are made again."""
    monkeypatch.setattr(faster_rcnn, "ROUNDS", rounds)
    monkeypatch.setattr(tf_faster_rcnn, "CANDIDATES", 4 * rounds)
    fields = fields_of(OBJECTS)
    expected = train(two_stages, fields)
    with accelerator():
        found = train(two_stages, fields)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_a_miner_among_regions_waits_once_more_and_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    net = published("faster_rcnn_resnet101_fgvc").build(0)
    assert isinstance(net, TfFasterRcnn)
    calm(net).train()
    miner = HardExampleMiner(num_hard_examples=5, iou_threshold=0.5, loss_type="both")
    monkeypatch.setattr(net, "config", replace(net.config, hard_example_miner=miner))
    fields = fields_of(OBJECTS)
    expected = train(net, fields)
    with accelerator():
        found = train(net, fields)
        with counted() as calls:
            train(net, fields)
    assert all(map(torch.equal, found, expected))
    assert len(calls.waits) == 2, calls.waits
