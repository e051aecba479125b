"""RT-DETR gives the numbers of `transformers`, and has the names of the files that are published for it."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest
import rt_detr_inputs as inputs
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.detection import rt_detr
from lockstep.detection.detector import Targets
from lockstep.detection.rt_detr import RtDetrNet, losses_of_layers, match_queries
from lockstep.detection.rt_detr_layers import RtDetrSizes
from lockstep.detection.values import RtDetr
from lockstep.weights.warm_start import WarmStart

pytest.importorskip("scipy")
VALUE = RtDetr(inputs.NUM_CLASSES, num_queries=inputs.NUM_QUERIES, num_denoising=inputs.NUM_DENOISING)
VALUE_OF_ALL = RtDetr(inputs.NUM_CLASSES, num_queries=inputs.NUM_QUERIES, max_detections=inputs.NUM_QUERIES)


def recorded(name: str) -> dict[str, Any]:
    with np.load(inputs.PATH, allow_pickle=False) as file:
        return {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(name)}


def net_of(name: str) -> RtDetrNet:
    """A small net with the weights of the recorded one, by the names of its file."""
    net = RtDetrNet(VALUE, RtDetrSizes(**inputs.SIZES[name], **inputs.SHARED))
    values = {
        f"model.{each}": torch.from_numpy(inputs.weights(each, value.shape))
        for each, value in net.state_dict().items()
        if value.is_floating_point()
    }
    report = ls.warm_start(ls.TrainState(net, ls.optim.SGD(lr=0.1)), values, WarmStart(strip_prefix="model."))
    assert report.share == 1.0
    assert not report.unexpected
    return net


def targets() -> Targets:
    boxes, classes = ([torch.from_numpy(each) for each in kind] for kind in inputs.objects())
    return Targets(
        boxes=[each * torch.tensor(2 * inputs.SIDES) for each in boxes],
        labels=[each + 1 for each in classes],
        classes=[torch.eye(3)[each] for each in classes],
        weights=[torch.ones(len(each)) for each in boxes],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in boxes],
        shape=inputs.SIDES,
    )


def inputs_of(net: RtDetrNet) -> Tensor:
    return net.preprocess(torch.from_numpy(inputs.images()))


@pytest.mark.parametrize("name", inputs.SIZES)
@torch.no_grad()
def test_predictions_and_detections_are_those_of_transformers(name: str) -> None:
    net, expected = net_of(name).eval(), recorded(name)
    predicted = net(inputs_of(net))
    assert_close(predicted["logits"][-1], expected["logits"])
    assert_close(predicted["boxes"][-1], expected["found_boxes"])
    net.settings = VALUE_OF_ALL
    for image, found in enumerate(net.postprocess(predicted)):
        boxes = torch.from_numpy(expected["detected_boxes"][image])
        inside = boxes.clamp(min=0).minimum(torch.tensor([96.0, 64.0, 96.0, 64.0]))
        assert_close(found.boxes[:, [1, 0, 3, 2]], inside.numpy())
        assert_close(found.scores, expected["detected_scores"][image])
        assert found.labels.tolist() == (expected["detected_labels"][image] + 1).tolist()


@pytest.mark.parametrize("name", inputs.SIZES)
def test_losses_of_each_layer_and_gradients_are_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same draws of noise."""
    net, expected = net_of(name).train(), recorded(name)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    monkeypatch.setattr(rt_detr.torch, "rand", lambda *_, **__: torch.from_numpy(inputs.draws()))
    assigned = net.assign(targets())
    predicted, counts = net(inputs_of(net), assigned), net.counts(assigned)
    rows = match_queries(predicted["logits"], predicted["boxes"], assigned)
    of_objects = losses_of_layers(predicted["logits"], predicted["boxes"], rows, assigned)
    logits, rows = predicted["denoising_logits"], predicted["denoising_rows"]
    of_noise = losses_of_layers(logits, predicted["denoising_boxes"], rows.expand(len(logits), -1, -1), assigned)
    found = of_objects | {f"denoising_{kind}": each for kind, each in of_noise.items()}
    assert found.keys() == counts.keys() < expected.keys()
    for kind, each in found.items():
        assert_close(each.detach() / counts[kind], expected[kind])
    totals = {kind: each / counts[kind] for kind, each in net.losses(predicted, assigned).items()}
    torch.stack([*totals.values()]).sum().backward()
    norms = {each: parameter.grad.norm() for each, parameter in net.named_parameters() if parameter.grad is not None}
    assert_close(torch.stack([norms[each] for each in sorted(norms)]), expected["gradients"], 1e-3)


@pytest.mark.parametrize("backbone", inputs.PUBLISHED)
def test_the_names_and_shapes_are_those_of_the_published_files(backbone: Any) -> None:
    net = RtDetr(80, backbone).build(0)
    shapes = sorted((f"model.{name}", list(each.shape)) for name, each in net.state_dict().items())
    count, checksum = json.loads(str(recorded("files")["files"]))[backbone]
    assert (len(shapes), zlib.crc32(json.dumps(shapes).encode())) == (count, checksum)


def assert_close(found: Tensor, expected: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
