"""Classifiers of timm and torchvision learn by a recipe, where the libraries are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiny_images import image_folder

import lockstep as ls
from lockstep.recipes.toml import with_settings

MODELS = {
    "timm": '{kind = "timm", name = "test_vit", num_classes = 4, options = {img_size = 32, drop_path_rate = 0.1}}',
    "torchvision": '{kind = "torchvision", name = "squeezenet1_1", num_classes = 4}',
}


@pytest.mark.parametrize("library", MODELS)
def test_a_model_of_a_library_learns(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    image_folder(tmp_path / "photos", count=4)
    settings = [
        f"model={MODELS[library]}", f"data.train={tmp_path}/photos", f"data.validation={tmp_path}/photos",
        "data.image_size=32", "evaluate.top=[1]", "num_towers=2", "batch_size=4", "watch.summaries=0",
        "warm_start=none", "feed.num_processes=0", "end.count=3",
        'optimizer={kind = "layer_decay", optimizer = {kind = "adamw", lr = 1e-3}}',
    ]  # fmt: skip
    result = ls.run(with_settings(ls.recipes.find("flowers"), settings), tmp_path / "run")
    assert result.step == 3
    assert result.evaluation is not None
    assert 0 <= result.evaluation["top1"] <= 1
