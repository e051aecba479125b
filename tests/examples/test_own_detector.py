"""`own_detector.py` as a user runs it, and that it is as short as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

SCRIPT, MOST_LINES = "own_detector.py", 80


@pytest.mark.slow
@pytest.mark.process
def test_it_trains_and_is_scored(examples: Any) -> None:
    command = [sys.executable, examples.folder / SCRIPT, "--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"mAP@0.5IOU (\d\.\d+) over 72 examples", ended.stdout)
    assert found, ended.stdout
    assert 0 <= float(found[1]) <= 1


def test_it_is_short(examples: Any) -> None:
    assert len((examples.folder / SCRIPT).read_text().splitlines()) <= MOST_LINES
