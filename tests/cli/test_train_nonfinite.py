"""What a user sees of a run that blew up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent
SETTINGS = ["batch_size=24", "evaluate.every=0", "watch.metrics=1 steps", "optimizer.kind=sgd", "optimizer.lr=1e30"]


def test_a_run_that_is_not_finite_ends_with_the_reason_last(tmp_path: Path) -> None:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    words += ["--workdir", str(tmp_path / "run"), "--towers", "2", "--workers", "2", "--steps", "6"]
    command = [sys.executable, "-m", "lockstep", "train", "mnist", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-5].startswith("error: worker ")
    assert lines[-5].endswith(" failed at step 1 (phase exchange):")
    assert lines[-4] == "The update after step 1 is not finite; nothing was changed."
    assert lines[-3].startswith("  given:    loss 'cross_entropy' is nan, ")
    assert "tower 1 on worker 1 (positions 36 to 47 of the stream): loss 'cross_entropy' is nan; " in lines[-3]
    assert "; examples train.tfrecords:" in lines[-3]
    assert lines[-2] == "  expected: finite losses and gradients"
    same = "made again, it gives the same on worker 0 and worker 1: it is the data or the code"
    assert lines[-1].startswith(f"  hint:     {same}; lower the learning rate")
    kept = tmp_path / "run/refused/position-000000024"
    assert f"the nonfinite batch is kept in {kept}" in lines
    assert (kept / "worker-1.safetensors").exists()
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1]
