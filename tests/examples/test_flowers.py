"""`flowers.py` as a user runs it. LOCKSTEP_FLOWERS names the images for its whole training, which takes minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
WEIGHTS = ROOT / "data" / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"
FOLDER = os.environ.get("LOCKSTEP_FLOWERS")
needs_flowers = pytest.mark.skipif(not FOLDER, reason="LOCKSTEP_FLOWERS names no folder with train/ and val/")


def run(examples: Any, *options: str | Path, threads: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, examples.folder / "flowers.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Two photographs as flowers of two kinds."""
    for split in ("train", "val"):
        for kind, name in (("daisy", "hopper.jpg"), ("rose", "hopper_gray.jpg")):
            (tmp_path / split / kind).mkdir(parents=True)
            (tmp_path / split / kind / name).symlink_to(FIXTURES / "images" / name)
    return tmp_path


@pytest.mark.slow
def test_missing_data_is_named(examples: Any, tmp_path: Path) -> None:
    ended = run(examples, "--data", tmp_path, "--weights", WEIGHTS, "--workdir", tmp_path / "runs")
    assert ended.returncode == 1
    assert str(tmp_path / "train") in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_weights_of_something_else_are_refused_in_words(examples: Any, flowers: Path) -> None:
    weights = WEIGHTS.with_name("resnet20-12fca82f.th")
    ended = run(examples, "--data", flowers, "--weights", weights, "--workdir", flowers / "runs")
    assert ended.returncode == 1
    assert str(weights) in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_seed_is_trained_and_scored(examples: Any, flowers: Path) -> None:
    ended = run(examples, "--data", flowers, "--weights", WEIGHTS, "--seeds", "1", "--workdir", flowers / "runs")
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(
        r"seed 0: accuracy (0|50|100)\.0% of 2 images\n1 seeds: mean \1\.0%, from \1\.0% to \1\.0%\n", ended.stdout
    )
    assert found, ended.stdout


@needs_flowers
@pytest.mark.slow
def test_three_seeds_know_more_than_four_flowers_of_five(examples: Any, tmp_path: Path) -> None:
    options = ["--data", str(FOLDER), "--weights", WEIGHTS, "--seeds", "3", "--workdir", tmp_path]
    ended = run(examples, *options, threads=2)
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"3 seeds: mean (\d+\.\d)%, .*", ended.stdout.splitlines()[-1])
    assert found, ended.stdout
    assert float(found[1]) >= 80
