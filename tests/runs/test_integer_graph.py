"""Exported graphs of whole numbers, beside the network that was trained for them."""

from __future__ import annotations

import importlib
import io
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_detector import TinyDetector, tiny_recipe
from torch import nn

from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.detection.detector import DetectionModel, Targets
from lockstep.detection.regions import all_regions
from lockstep.detection.values import FasterRcnnFpn
from lockstep.errors import InputError
from lockstep.models.layers import Conv2dNormActivation
from lockstep.models.quantization import quantize
from lockstep.recipes.code import Function
from lockstep.recipes.parts import Quantization
from lockstep.recipes.pipeline_config import import_pipeline
from lockstep.recipes.python_parts import PythonModel
from lockstep.recipes.shipped import find
from lockstep.recipes.tasks import network_input
from lockstep.runs.build import build_model
from lockstep.runs.export import encode_model
from lockstep.runs.integer_graph import integer_network
from lockstep.runs.trained import Trained

needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")), reason="needs ONNX Runtime"
)


class Residual(nn.Module):
    """Batch norm, a depthwise convolution, a sum, on digits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv2dNormActivation(1, 8, 3, 4)
        self.deep = Conv2dNormActivation(8, 8, groups=8)
        self.last = Conv2dNormActivation(8, 8, 1, activation_layer=None)
        self.scores = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stem = self.stem(images)
        scores: torch.Tensor = self.scores((self.last(self.deep(stem)) + stem).mean((2, 3)))
        return scores


def digits(seed: int) -> torch.Tensor:
    return torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(seed)) - 0.5


def trained(kind: str, bits: int = 8, updates: int = 3) -> Trained:
    """A network whose ranges and statistics are those of a few batches."""
    torch.manual_seed(2)
    recipe = replace(find("mnist"), quantization=Quantization(0, bits, bits))
    if kind == "mnist":
        model = build_model(recipe)
    else:
        model = Residual().train()
        quantize(model, digits(0), delay=0, weight_bits=bits, activation_bits=bits)
    for seed in range(updates):
        model.train()(digits(seed))
    return Trained(model.eval().requires_grad_(False), recipe, 3, "raw", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mnist", "residual"])
def test_a_pt2_has_int8_weights_and_the_scores_of_the_training(kind: str) -> None:
    given = trained(kind)
    (data,) = encode_model(given, ".pt2")
    program = torch.export.load(io.BytesIO(bytes(data)))
    wide = [name for name, each in program.state_dict.items() if each.is_floating_point() and each.dim() > 1]
    assert wide == []
    assert sum(each.dtype == torch.int8 and each.dim() > 1 for each in program.state_dict.values()) >= 4
    found, wanted = program.module()(digits(9)), given.model(digits(9))
    step = (wanted.max() - wanted.min()) / 255
    assert (found - wanted).abs().max() <= step
    assert len(given.model.get_submodule("quantization").state_dict()) == 0  # the network itself is as it was


@needs_onnx
@pytest.mark.parametrize("kind", ["mnist", "residual"])
def test_onnx_runtime_gets_the_scores_of_the_training(tmp_path: Path, kind: str) -> None:
    given, path = trained(kind), tmp_path / "model.onnx"
    (data,) = encode_model(given, ".onnx")
    path.write_bytes(bytes(data))
    graph: Any = importlib.import_module("onnx").load(path).graph
    operators = [node.op_type for node in graph.node]
    assert operators.count("QuantizeLinear") == len(given.model.get_submodule("quantization").plan.outputs)  # type: ignore[union-attr]
    session = importlib.import_module("onnxruntime").InferenceSession(path)
    (found,) = session.run(None, {"images": digits(9).numpy()})
    wanted = given.model(digits(9))
    assert (torch.from_numpy(found) - wanted).abs().max() <= 2 * (wanted.max() - wanted.min()) / 255


@pytest.mark.parametrize(("bits", "updates"), [(4, 3), (8, 0)])
def test_what_is_not_of_8_bits_or_has_no_ranges_is_refused(bits: int, updates: int) -> None:
    with pytest.raises(InputError, match=r"This network cannot be exported as one of whole numbers\."):
        encode_model(trained("residual", bits, updates), ".pt2")


def test_a_detector_of_whole_numbers_predicts_what_the_trained_one_does() -> None:
    (path,) = (Path(__file__).parents[1] / "fixtures" / "odapi_configs").glob("ssd_mobilenet_v1_0.75*quantized*")
    recipe = import_pipeline(path.read_text(), path.name, "pets").recipe
    model = build_model(recipe)
    pictures = torch.randint(0, 256, (2, 3, 300, 300), generator=torch.Generator().manual_seed(1)).float()
    inputs = network_input(cast(DetectionModel, model), pictures)
    with torch.no_grad():
        model.train()(inputs)
        for layer in model.modules():  # the statistics that these pictures have
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.5
        for _ in range(3):
            model(inputs)
        wanted = model.eval()(inputs)
        found = integer_network(model, inputs, for_onnx=False)(inputs)
    for name in ("logits", "codes"):
        spread = wanted[name].max() - wanted[name].min()
        assert spread > 0.1
        assert (found[name] - wanted[name]).abs().max() <= 0.02 * spread
        assert (found[name] == wanted[name]).float().mean() > 0.9


class WithMasks(TinyDetector):
    """Has a layer that it calls for what it has detected."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_head = nn.Conv2d(8, 1, 1)


def test_a_detector_whose_layers_an_image_alone_does_not_reach_is_refused() -> None:
    recipe = replace(tiny_recipe(Path("gone")), model=PythonModel(Function.of(WithMasks), num_classes=2))
    quantized = replace(recipe, quantization=Quantization(0))
    with pytest.raises(InputError, match=r"Layers for masks, for keypoints .*\n.*: mask_head\n"):
        build_model(quantized)


@pytest.mark.slow
def test_both_stages_of_a_detector_compute_with_whole_numbers() -> None:
    few = {"rpn_pre_nms_top_n_train": 60, "rpn_post_nms_top_n_train": 20, "max_detections": 10}
    few |= {"rpn_pre_nms_top_n_test": 60, "rpn_post_nms_top_n_test": 20}
    net: Any = FasterRcnnFpn(2, freeze_batchnorm=False, **few)
    data = replace(find("bccd").data, resizer=FixedShapeResizer(64, 64))  # type: ignore[type-var]
    model: Any = build_model(replace(find("bccd"), model=net, data=data, frozen=(), quantization=Quantization(2)))
    inputs = network_input(model, torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 255)
    objects = [torch.tensor([[8.0, 8, 40, 40]])] * 2
    ones, classes = [torch.ones(1)] * 2, [torch.tensor([[1.0, 0]])] * 2
    targets = Targets(objects, [torch.tensor([1])] * 2, classes, ones, [torch.zeros(1).bool()] * 2, (64, 64))
    for layer in model.train().modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 0.5  # the statistics that these pictures have
    for _ in range(3):
        losses = model.losses(model(inputs, model.assign(targets)), model.assign(targets))
    sum(losses.values()).backward()
    assert all(each.weight.grad.abs().max() > 0 for each in model.quantization.layers.values())
    regions = all_regions(objects)
    model._regions = lambda *_: regions  # proposals of almost equal scores come in another order
    with torch.no_grad():
        wanted = model.eval()(inputs)
        found = integer_network(model, inputs, for_onnx=False)(inputs)
    for name in ("objectness", "anchor_codes", "logits", "codes"):
        spread = wanted[name].max() - wanted[name].min()
        assert spread > 0
        assert (found[name] - wanted[name]).abs().mean() <= 0.1 * spread  # of 60 layers, with steps of 1 / 255
