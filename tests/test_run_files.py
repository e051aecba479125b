"""Names of a run's files: what is no checkpoint of ours is none, whoever has named it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.checkpoints.mirror import steps_listed
from lockstep.checkpoints.store import Store
from lockstep.run_files import named_step, step_name
from lockstep.storage.remote_path import ObjectStat


@pytest.mark.parametrize("step", [0, 7, 12_345_678, 99_999_999, 100_000_000, 10**18 - 1])
def test_a_step_is_known_by_its_name(step: int) -> None:
    assert named_step(step_name(step)) == step


def test_what_is_named_otherwise_is_no_checkpoint(tmp_path: Path) -> None:
    odd = ["step-1", "step-000000001", f"step-1{'0' * 18}", "step-\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668"]
    for name in ["step-00000002", *odd]:
        (tmp_path / name).mkdir()
    assert Store(tmp_path).steps() == [2]
    names = [f"checkpoints/{name}/manifest.json" for name in ["step-00000002", *odd]]
    assert steps_listed(dict.fromkeys(names, ObjectStat(1, 1))) == [2]
