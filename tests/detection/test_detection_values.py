"""Detectors as values of a recipe."""

from __future__ import annotations

import pytest
import torch

from lockstep.detection.anchors import feature_shapes
from lockstep.detection.ssd import SsdNet
from lockstep.detection.values import Detector, FasterRcnnFpn, Fcos, MaskRcnnFpn, SqueezeSsd, Ssd300, Ssdlite
from lockstep.errors import InputError


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (SqueezeSsd(2).build(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    name = "head.classification_head.module_list.0.weight"
    assert not torch.equal(one[name], other[name])


def test_features_have_torchvisions_names() -> None:
    names = {name.removeprefix("backbone.") for name, _ in SqueezeSsd(2).build(0).named_parameters()}
    assert {"features.0.weight", "features.3.squeeze.bias", "features.12.expand3x3.weight"} <= names


@pytest.mark.parametrize(
    "fields",
    [{"layers": (12, 7)}, {"layers": ()}, {"extra_maps": 1}, {"layers": (5, 7)}, {"anchor_sizes": ((0.0,), (1.0,))}],
)
def test_a_squeeze_ssd_needs_anchors_for_each_map(fields: dict[str, object]) -> None:
    with pytest.raises(InputError):
        SqueezeSsd(2, **fields)  # type: ignore[arg-type]


def test_ratios_of_anchors_are_height_over_width_in_each_detector() -> None:
    one_stage = SqueezeSsd(2, (12,), anchor_sizes=((64.0,),), anchor_ratios=(4.0,))
    two_stages = FasterRcnnFpn(2, anchor_sizes=(64,) * 5, anchor_ratios=(4.0,))
    for detector in (one_stage, two_stages):
        anchors = detector.build(0).anchors((256, 256), torch.device("cpu"))
        assert anchors is not None
        sizes = anchors[:, 2:] - anchors[:, :2]
        torch.testing.assert_close(sizes, torch.tensor([128.0, 32.0]).expand_as(sizes))


@pytest.mark.parametrize("fields", [{"anchor_sizes": (32, 64)}, {"anchor_ratios": ()}])
@pytest.mark.parametrize("kind", [FasterRcnnFpn, MaskRcnnFpn])
def test_a_pyramid_needs_anchors_on_each_level(
    kind: type[FasterRcnnFpn | MaskRcnnFpn], fields: dict[str, tuple[int, ...]]
) -> None:
    with pytest.raises(InputError, match="Each of the 5 levels"):
        kind(3, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("detector", "number"), [(Ssd300(90), 35_641_826), (Ssdlite(90), 3_440_060), (Fcos(90), 32_269_600 + 53_120)]
)
def test_there_are_as_many_parameters_as_in_torchvisions_nets(detector: Detector, number: int) -> None:
    """As it tells of them; of FCOS without those of batch norm, which are buffers there."""
    assert sum(parameter.numel() for parameter in detector.build(0).parameters()) == number


@pytest.mark.parametrize(
    ("detector", "sides"), [(Ssd300(2), [38, 19, 10, 5, 3, 1]), (Ssdlite(2), [20, 10, 5, 3, 2, 1])]
)
def test_feature_maps_are_as_large_as_torchvisions(detector: Detector, sides: list[int]) -> None:
    net = detector.build(0)
    assert isinstance(net, SsdNet)
    size = detector.image_size
    assert feature_shapes(net.backbone, (size, size)) == tuple((side, side) for side in sides)
    least = detector.smallest_image
    assert min(feature_shapes(net.backbone, (least, least))[-1]) == 1
    with pytest.raises(InputError, match=f"{least} pixels or more"):
        net(torch.zeros(1, 3, least - 1, size))


def test_a_backbone_can_have_the_whole_tail_of_its_classifier() -> None:
    net = Ssdlite(2, reduced_tail=False).build(0)
    assert net.backbone.out_channels == (672, 960, 512, 256, 256, 128)
