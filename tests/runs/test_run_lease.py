"""A run whose folder is no longer its own, and one that follows a dead one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_run_nonfinite import history, make_build, make_recipe, run

from lockstep.errors import WorkdirError
from lockstep.owner import this_process


def test_a_run_that_was_taken_over_writes_no_further_checkpoint(tmp_path: Path) -> None:
    other = replace(this_process(), host="node7", token="other")

    def take_over(position: int) -> None:
        if position == 16:  # step 5; the next checkpoint would be that of step 6
            (tmp_path / ".lease-000002").write_bytes(other.encode())
            (tmp_path / ".lease-000001").unlink()

    with pytest.raises(WorkdirError) as raised:
        run(tmp_path, make_recipe("stop"), make_build([], attempted=take_over))
    assert raised.value.given == f"taken over by {other}"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000000", "step-00000003"]


def test_the_history_names_who_went_on_in_whose_place(tmp_path: Path) -> None:
    run(tmp_path, make_recipe("stop", "end.count=1"), make_build([]))
    dead = replace(this_process(), started="12345")
    (tmp_path / ".lease-000002").write_bytes(dead.encode())
    run(tmp_path, make_recipe("stop", "end.count=2"), make_build([]))
    first, _, second, _ = history(tmp_path)
    assert (first["event"], first["pid"], "taken_over_from" in first) == ("start", os.getpid(), False)
    assert (second["event"], second["taken_over_from"]) == ("resume", str(dead))
