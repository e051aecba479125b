"""Keypoint R-CNN finds keypoints within the boxes of Faster R-CNN."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from regions_drawn import SMALL, images, targets
from torch import Tensor

from lockstep.detection.detector import Targets
from lockstep.detection.keypoint_rcnn import KeypointRcnnNet, _keypoints_of_graph, keypoint_cells, keypoints_in
from lockstep.detection.regions import Regions
from lockstep.detection.values import KeypointRcnnFpn
from lockstep.errors import DataError

BOXES = [[10.0, 20, 60, 90], [30, 30, 50, 60]]


needs_onnx = pytest.mark.skipif(
    find_spec("onnxruntime") is None or find_spec("onnxscript") is None, reason="needs ONNX Runtime"
)


def with_keypoints(given: Targets, *points: list[tuple[float, float, float]]) -> Targets:
    """As shares of each object's box, and a weight."""
    shares = torch.tensor(points[0])
    sides = [(each[:, None, :2], each[:, None, 2:] - each[:, None, :2]) for each in given.boxes]
    return replace(
        given,
        keypoints=[
            torch.cat([first + shares[:, :2] * side, shares[:, 2:].expand(len(first), -1, -1)], 2)
            for first, side in sides
        ],
    )


@pytest.fixture(scope="module")
def net() -> KeypointRcnnNet:
    torch.set_num_threads(1)
    return KeypointRcnnFpn(**asdict(replace(SMALL, score_threshold=0.0)), num_keypoints=2).build(0)


@pytest.mark.parametrize("objects", [(BOXES, []), ([], [])])
def test_images_with_and_without_objects_train(net: KeypointRcnnNet, objects: tuple[list[list[float]], ...]) -> None:
    names = net.state_dict()
    assert names["roi_heads.keypoint_head.14.weight"].shape == (512, 512, 3, 3)
    assert names["roi_heads.keypoint_predictor.kps_score_lowres.weight"].shape == (512, 2, 4, 4)
    net.train().zero_grad()
    assigned = net.assign(with_keypoints(targets(*objects), [(0.5, 0.5, 1), (0.2, 0.9, 0)]))
    losses = net.losses(net(net.preprocess(images()), assigned), assigned)
    assert list(losses) == ["rpn_classification", "rpn_localization", "classification", "localization", "keypoint"]
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert (losses["keypoint"] > 0) == any(objects)
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in net.parameters())


def test_each_detection_has_keypoints_in_its_box(net: KeypointRcnnNet) -> None:
    with torch.no_grad():
        found = net.eval().postprocess(net(net.preprocess(images())))
    for each in found:
        assert each.keypoints is not None
        assert each.keypoints.shape == (len(each.boxes), 2, 3)
        points, boxes = each.keypoints[..., :2], each.boxes[:, None]
        assert (
            (points >= boxes[..., :2]) & (points <= boxes[..., :2] + (boxes[..., 2:] - boxes[..., :2]).clamp(1))
        ).all()


def test_a_keypoint_is_a_cell_of_its_region_if_it_is_labelled_and_in_it() -> None:
    given = with_keypoints(targets(BOXES[:1]), [(0, 0, 1), (0.5, 0.25, 1), (1, 1, 1), (0.5, 0.5, 0), (0.5, 1.1, 1)])
    zero = torch.zeros(1, dtype=torch.int64)
    cells, counted = keypoint_cells(given, Regions(given.boxes[0], zero, zero, [1], [1]), 4)
    assert cells.tolist() == [[0, 2 * 4 + 1, 15, 0, 0]]
    assert counted.tolist() == [[True, True, True, False, False]]


def test_a_peak_is_read_at_the_size_of_the_box() -> None:
    maps = torch.zeros(2, 1, 8, 8)
    maps[0, 0, 2, 5], maps[1, 0, 7, 0] = 3.0, 2.0
    points: Tensor = keypoints_in(maps, torch.tensor([[10.0, 20, 26, 52], [0, 0, 0.5, 8]]))
    (y, x, logit), (low, left, least) = points[:, 0].tolist()
    assert 14 <= y <= 16
    assert 40 <= x <= 44
    assert logit > 2.5
    assert (low, left) == (0.5, 0.5), "boxes of less than a pixel are taken for one"
    assert least < 2


@pytest.mark.parametrize(
    ("given", "said"),
    [(targets(BOXES), "without keypoints"), (with_keypoints(targets(BOXES), [(0, 0, 1)]), "1 keypoints of each")],
)
def test_objects_without_these_keypoints_are_refused(net: KeypointRcnnNet, given: Targets, said: str) -> None:
    with pytest.raises(DataError, match=rf"(?s){said}.*2 of each object.*data.num_keypoints=2"):
        net.assign(given)


class OfGraph(torch.nn.Module):
    """Keypoints as graphs find them, on inputs of 96 x 128 pixels."""

    def forward(self, maps: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        return _keypoints_of_graph(maps, boxes, labels, (96, 128))


@pytest.mark.parametrize("in_onnx", [False, pytest.param(True, marks=needs_onnx)])
def test_products_of_matrices_find_what_resized_maps_have(tmp_path: Path, in_onnx: bool) -> None:
    """On boxes of all sizes, also below a pixel; nothing of those that are not there."""
    draw = torch.Generator().manual_seed(1)
    maps = torch.nn.functional.interpolate(torch.randn(16, 5, 28, 28, generator=draw) * 3, scale_factor=2.0)
    corners = torch.rand(16, 2, generator=draw) * torch.tensor([60.0, 80])
    boxes = torch.cat([corners, corners + torch.rand(16, 2, generator=draw) * torch.tensor([36.0, 48])], 1)
    boxes[:2, 2:] = boxes[:2, :2] + 0.3
    labels = torch.ones(2, 8, dtype=torch.int64)
    labels[1, 7] = 0
    given = maps.view(2, 8, 5, 56, 56), boxes.view(2, 8, 4), labels
    found = OfGraph()(*given)
    if in_onnx:
        session: Any = in_onnx_runtime(OfGraph(), given, tmp_path / "model.onnx")
        names = [each.name for each in session.get_inputs()]
        (numbers,) = session.run(None, {name: each.numpy() for name, each in zip(names, given, strict=True)})
        found = torch.from_numpy(numbers)
    torch.testing.assert_close(found.flatten(0, 1)[:15], keypoints_in(maps, boxes)[:15], rtol=0, atol=1e-4)
    assert not found[1, 7].any()


def in_onnx_runtime(module: torch.nn.Module, given: tuple[Tensor, ...], path: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(module, given, path, dynamo=True, verbose=False)
    return importlib.import_module("onnxruntime").InferenceSession(path)
