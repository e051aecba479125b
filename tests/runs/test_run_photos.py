"""Inception-v3 learns 64 photos by heart through its recipe. LOCKSTEP_FLOWERS names them; it takes three minutes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep as ls

FOLDER = os.environ.get("LOCKSTEP_FLOWERS")
KINDS, PHOTOS, STEPS = 5, 64, 150


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The first photos of each kind, as links, in a folder of each kind."""
    kinds = sorted(path for path in (Path(str(FOLDER)) / "train").iterdir() if path.is_dir())
    for index, kind in enumerate(kinds):
        (tmp_path / "photos" / kind.name).mkdir(parents=True)
        for file in sorted(kind.iterdir())[: PHOTOS // KINDS + (index < PHOTOS % KINDS)]:
            (tmp_path / "photos" / kind.name / file.name).symlink_to(file)
    return tmp_path / "photos"


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="LOCKSTEP_FLOWERS names no folder with train/ and val/")
def test_its_averaged_weights_know_64_photos(photos: Path, tmp_path: Path) -> None:
    shipped, parts = ls.recipes.find("inception_v3"), ls.recipes
    recipe = replace(
        shipped,
        # Statistics and averages that follow within 150 steps.
        model=replace(shipped.model, num_classes=KINDS, batch_norm_decay=0.9),
        average=ls.optim.MovingAverage(0.9, statistics=True),
        optimizer=ls.optim.Adam(ls.optim.Cosine(0.001, STEPS)),
        loss=parts.CrossEntropy(),
        data=parts.ImageData(
            train=str(photos), validation=str(photos), image_size=96, preprocessing=parts.ResizedCrop(least_area=0.99)
        ),
        batch_size=32,
        num_towers=1,
        num_workers=1,
        end=ls.Steps(STEPS),
        evaluate=parts.Evaluate(every=ls.Interval(50, "steps"), weights="average"),
    )
    result = ls.run(recipe, tmp_path / "run")
    assert result.evaluation is not None
    assert result.evaluation.num_examples == PHOTOS
    assert result.evaluation.weights == "average"
    assert result.evaluation["top1"] > 0.95, str(result.evaluation)
