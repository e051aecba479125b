"""Classifiers of timm become the backbones of detectors: each tensor of the features has its place and its shape."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.detection.values import Ssdlite
from lockstep.models.efficientnet import efficientnet_features
from lockstep.models.mobilenet import mobilenet_v2_features, mobilenet_v3_features
from lockstep.training.warm_start import fitted, targets_of
from lockstep.weights.assignment import assign_tensors
from lockstep.weights.source import MemorySource
from lockstep.weights.warm_start import WarmStart

RECORDED = Path(__file__).parents[1] / "golden" / "timm_names.json.gz"
HEAD = ("classifier.", "conv_head.", "bn2.")
"""What timm has behind the features; of MobileNetV2 the last two are among them."""


def classifier(name: str) -> MemorySource:
    """A file of timm, whose tensors hold numbers of their own."""
    shapes = json.loads(gzip.decompress(RECORDED.read_bytes()))[name]
    tensors = {key: torch.full(shape, place) for place, (key, shape) in enumerate(shapes.items())}
    return MemorySource({key: each.float() if each.dim() else each for key, each in tensors.items()})


class Backbone(nn.Module):
    """A detector's, by the names of its parameters."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"features": features})


def loaded(model: nn.Module, source: MemorySource, name_maps: Any = ()) -> Any:
    targets = targets_of(model)
    mapping = fitted(source, targets, "classifier", WarmStart(), prefixes=("backbone.",), name_maps=name_maps)
    return assign_tensors(source, targets, mapping).report


@pytest.mark.parametrize(
    ("name", "features", "head"),
    [
        ("mobilenetv2_100", mobilenet_v2_features, HEAD[:1]),
        ("mobilenetv3_large_100", mobilenet_v3_features, HEAD),
        ("mobilenetv3_small_100", lambda: mobilenet_v3_features("small"), HEAD),
        ("efficientnet_b0", lambda: efficientnet_features(0), HEAD),
    ],
)
def test_each_tensor_of_the_features_has_its_place(name: str, features: Callable[[], nn.Module], head: Any) -> None:
    source = classifier(name)
    report = loaded(Backbone(features()), source)
    assert not report.missing
    assert not report.mismatched
    taken = [each.source for each in report.loaded]
    assert sorted(taken) == sorted(key for key in source.tensors if not key.startswith(head))


def test_a_backbone_in_two_parts_takes_one_of_timm() -> None:
    model = Ssdlite(3, reduced_tail=False).build(0)
    report = loaded(model, classifier("mobilenetv3_large_100"), model.name_maps)
    assert not report.mismatched
    assert {each.target.partition(".")[0] for each in report.loaded} == {"backbone"}
    assert not [name for name in report.missing if name.startswith("backbone.features.")]
