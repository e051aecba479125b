"""Detectors as values of a recipe."""

from __future__ import annotations

import pytest
import torch

from lockstep.detection.values import SqueezeSsd
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
