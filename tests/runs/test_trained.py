"""The model of a run with the weights of a checkpoint: of its stage, averaged or not, and what is no such model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_runs import recipe_of_photos, saved
from torch import nn

import lockstep as ls
from lockstep.checkpoints.store import Store
from lockstep.errors import CheckpointError, InputError
from lockstep.recipes.parts import Stage
from lockstep.recipes.recipe import Recipe
from lockstep.runs.trained import take_weights, trained_model
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.source import MemorySource


def test_images_are_as_large_as_in_the_stage_of_the_checkpoint(tmp_path: Path) -> None:
    shorten = replace(recipe_of_photos(), stages=(Stage(ls.Steps(2)), Stage(ls.Steps(2), image_size=48)))
    saved(tmp_path / "run", shorten, 2, 3)
    sides = [trained_model(f"{tmp_path}/run@{step}", "raw").recipe.data.image_size for step in (2, 3)]
    assert sides == [32, 48]


def test_averaged_statistics_are_taken_where_there_are_some() -> None:
    model = nn.BatchNorm1d(1)
    tensors = {
        "weight": torch.tensor([2.0]), "bias": torch.tensor([3.0]), "running_mean": torch.tensor([4.0]),
        "running_var": torch.tensor([5.0]), "num_batches_tracked": torch.tensor(6),
        "weight" + AVERAGE: torch.tensor([0.2]), "running_mean" + AVERAGE: torch.tensor([0.4]),
    }  # fmt: skip
    take_weights(model, MemorySource(tensors), average=False)
    assert [tensor.item() for tensor in model.state_dict().values()] == [2, 3, 4, 5, 6]
    take_weights(model, MemorySource(tensors), average=True)
    assert [tensor.item() for tensor in model.state_dict().values()] == pytest.approx([0.2, 3, 0.4, 5, 6])


def test_an_expanded_buffer_is_loaded() -> None:
    model = nn.Module()
    model.register_buffer("wide", torch.ones(2, 1).expand(2, 3))
    take_weights(model, MemorySource({"wide": torch.tensor([[2.0] * 3, [5.0] * 3])}), average=False)
    assert model.wide.tolist() == [[2.0] * 3, [5.0] * 3]


def test_averages_that_a_run_does_not_keep(tmp_path: Path, mnist: Recipe) -> None:
    saved(tmp_path / "run", mnist)
    with pytest.raises(InputError, match="This run keeps no averages of its parameters"):
        trained_model(str(tmp_path / "run"), "average")


def test_a_file_of_weights_is_no_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", w=np.ones(2))
    with pytest.raises(InputError, match="is no run with a trained model") as caught:
        trained_model(str(tmp_path / "weights.npz"), "raw")
    assert "lockstep import checkpoint" in str(caught.value)


def test_a_checkpoint_without_its_recipe(tmp_path: Path) -> None:
    Store(tmp_path / "checkpoints").write(1, {"parameters": {"w": torch.ones(1)}}, {})
    with pytest.raises(InputError, match="is no run with a trained model"):
        trained_model(str(tmp_path), "raw")


def test_a_checkpoint_of_another_model(tmp_path: Path, mnist: Recipe) -> None:
    state = saved(tmp_path / "run", mnist)
    sections = state.sections()
    sections["parameters"].pop("conv1.bias")
    Store(tmp_path / "run" / "checkpoints").write(8, sections, {})
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        trained_model(str(tmp_path / "run"), "raw")
    assert "'conv1.bias' is missing" in str(caught.value)
