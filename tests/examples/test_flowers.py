"""`flowers.py` as a user runs it. LOCKSTEP_FLOWERS names its images, LOCKSTEP_SLOW=1 asks for its whole training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WEIGHTS = Path(__file__).parent.parent / "fixtures" / "weights" / "squeezenet1_1_imagenet_features.safetensors"
FOLDER = os.environ.get("LOCKSTEP_FLOWERS")
needs_flowers = pytest.mark.skipif(not FOLDER, reason="LOCKSTEP_FLOWERS names no folder with train/ and val/")


def run(examples: Any, *options: str | Path, threads: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, examples.folder / "flowers.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_what_is_missing_is_named(examples: Any, tmp_path: Path) -> None:
    ended = run(examples, "--data", tmp_path, "--weights", WEIGHTS)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith(f"error: {tmp_path / 'train'} is missing")


def test_weights_of_something_else_are_refused_in_words(examples: Any, flowers: Path) -> None:
    weights = WEIGHTS.with_name("resnet20-12fca82f.th")
    ended = run(examples, "--data", flowers, "--weights", weights)
    assert ended.returncode == 1
    assert str(weights) in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Two photographs as flowers of two kinds."""
    images = WEIGHTS.parent.parent / "images"
    for split in ("train", "val"):
        for kind, name in (("daisy", "hopper.jpg"), ("rose", "hopper_gray.jpg")):
            (tmp_path / split / kind).mkdir(parents=True)
            (tmp_path / split / kind / name).symlink_to(images / name)
    return tmp_path


def test_it_starts_from_the_features_trains_and_is_scored(examples: Any, flowers: Path) -> None:
    ended = run(examples, "--data", flowers, "--weights", WEIGHTS, "--seeds", "1", "--steps", "2")
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert re.search(r"50 of 55 tensors of the model, 99\.\d % of its parameters$", said[0]), said
    found = re.fullmatch(r"seed 0: accuracy (0|50|100)\.0% of 2 images", said[-2])
    assert found, said
    assert said[-1] == f"1 seeds: mean {found[1]}.0%, from {found[1]}.0% to {found[1]}.0%"


@needs_flowers
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not os.environ.get("LOCKSTEP_SLOW"), reason="LOCKSTEP_SLOW is not set: it takes minutes")
def test_three_seeds_know_four_flowers_of_five(examples: Any) -> None:
    ended = run(examples, "--data", str(FOLDER), "--weights", WEIGHTS, "--seeds", "3", threads=2)
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"3 seeds: mean (\d+\.\d)%, .*", ended.stdout.splitlines()[-1])
    assert found, ended.stdout
    assert float(found[1]) >= 80


@needs_flowers
def test_a_few_steps_on_flowers_beat_chance(examples: Any) -> None:
    ended = run(examples, "--data", str(FOLDER), "--weights", WEIGHTS, "--seeds", "1", "--steps", "15")
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"seed 0: accuracy (\d+\.\d)% of 100 images", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) > 40
