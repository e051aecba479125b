"""A file whose names have another prefix than the model's is refused with the prefix to give, and that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.training.warm_start import targets_of
from lockstep.weights.assignment import assign_tensors
from lockstep.weights.names import Rename
from lockstep.weights.source import MemorySource
from lockstep.weights.warm_start import WarmStart, WarmStartReport


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))


def refusal(prefix: str, model: nn.Module, **fields: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as refused:
        report(prefix, model, **fields)
    return refused.value


def report(prefix: str, model: nn.Module, **fields: Any) -> WarmStartReport:
    source = MemorySource({prefix + name: value for name, value in net().state_dict().items()})
    return assign_tensors(source, targets_of(model), WarmStart(**fields)).report


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "ema.module.", "module._orig_mod.", "net.backbone."]
)
def test_a_prefix_of_the_file_is_given_as_what_to_strip(prefix: str) -> None:
    assert refusal(prefix, net()).hint == (
        f"give strip_prefix={prefix!r}, with which 8 of the 8 missing names are found"
    )
    assert report(prefix, net(), strip_prefix=prefix).share == 1


def test_a_prefix_behind_the_one_that_is_stripped_already_is_added_to_it() -> None:
    assert "give strip_prefix='module._orig_mod.', " in refusal("module._orig_mod.", net(), strip_prefix="module.").hint


def test_a_prefix_of_the_model_is_given_as_what_to_add() -> None:
    model = nn.ModuleDict({"backbone": net(), "head": nn.Linear(4, 2)})
    assert refusal("", model).hint == "give add_prefix='backbone.', with which 8 of the 10 missing names are found"
    assert report("", model, add_prefix="backbone.", ignore_missing=True).missing == ("head.weight", "head.bias")
    assert refusal("module.", model).hint.startswith("give strip_prefix='module.' and add_prefix='backbone.', ")
    assert report("module.", model, strip_prefix="module.", add_prefix="backbone.", skip="^head").missing == ()


def test_a_prefix_that_was_added_in_vain_is_taken_back() -> None:
    assert refusal("", net(), add_prefix="backbone.").hint.startswith("give add_prefix='', ")


def test_behind_renames_a_prefix_is_renamed() -> None:
    renames = (Rename("^old/", "new/"),)
    source = {f"old/{name}": value for name, value in net().state_dict().items()}
    with pytest.raises(CheckpointError) as refused:
        assign_tensors(MemorySource(source), targets_of(net()), WarmStart(rename=renames))
    assert refused.value.hint.startswith("give rename=(..., Rename('^new/', ''),), ")
    found = assign_tensors(MemorySource(source), targets_of(net()), WarmStart(rename=(*renames, Rename("^new/", ""))))
    assert found.report.share == 1


def test_behind_a_name_map_a_prefix_is_renamed() -> None:
    source = MemorySource({"scope/fc/weights": torch.zeros(2, 3), "scope/fc/biases": torch.zeros(3)})
    targets = targets_of(nn.ModuleDict({"fc": nn.Linear(2, 3)}))
    with pytest.raises(CheckpointError) as refused:
        assign_tensors(source, targets, WarmStart(name_map="tensorflow"))
    assert refused.value.hint.startswith(r"give rename=(Rename('^scope\\.', ''),), with which 2 of the 2 ")
    assert (
        assign_tensors(
            source, targets, WarmStart(name_map="tensorflow", rename=(Rename(r"^scope\.", ""),))
        ).report.share
        == 1
    )


def test_no_prefix_is_given_that_would_lose_what_is_found() -> None:
    model = nn.ModuleDict({"0": nn.Linear(2, 3), "1": nn.BatchNorm1d(3), "2": nn.Linear(3, 4), "head": nn.Linear(1, 1)})
    source = MemorySource(
        net().state_dict() | {"classifier.weight": torch.zeros(1, 1), "classifier.bias": torch.zeros(1)}
    )
    with pytest.raises(CheckpointError) as refused:
        assign_tensors(source, targets_of(model))
    assert refused.value.hint.startswith("give rename=..., ")
