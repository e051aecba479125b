"""Shipped recipes on a GPU, to the scores that are published for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FLOWERS, WEIGHTS = (os.environ.get(f"LOCKSTEP_{name}", "") for name in ("FLOWERS", "INCEPTION_WEIGHTS"))
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU it takes minutes, or hours"),
    pytest.mark.timeout(4 * 3600),
]


def scored(workdir: Path, *words: str) -> dict[str, Any]:
    """Train with these words of the command, and return the scores at the end with what they were computed in."""
    command = [sys.executable, "-m", "lockstep", "train", *words, "--workdir", str(workdir)]
    subprocess.run(command, cwd=ROOT, check=True)
    (found,) = json.loads((workdir / "result.json").read_text())["evaluations"].values()
    return dict(found)


def test_mnist(tmp_path: Path) -> None:
    found = scored(tmp_path / "run", "mnist")
    assert found["num_examples"] == 10_000
    assert found["scores"]["top1"] > 0.99


def test_mnist_in_bf16_is_scored_in_bf16(tmp_path: Path) -> None:
    found = scored(tmp_path / "run", "mnist", "--set", "towers.precision=bf16")
    assert found["precision"] == "bf16"
    assert found["scores"]["top1"] > 0.99


@pytest.mark.skipif(
    not (FLOWERS and WEIGHTS),
    reason="needs LOCKSTEP_FLOWERS, a folder with records train-* and validation-*, and LOCKSTEP_INCEPTION_WEIGHTS",
)
def test_inception_learns_flowers(tmp_path: Path) -> None:
    """The published fine-tune reached 93.4 %."""
    data = [f"data.{split}={FLOWERS}/{split}-*" for split in ("train", "validation")]
    settings = [word for setting in [*data, f"warm_start.path={WEIGHTS}"] for word in ("--set", setting)]
    found = scored(tmp_path / "run", "flowers", *settings)
    assert found["precision"] == "bf16"
    assert found["scores"]["top1"] > 0.92
