"""What is asked of the workers that measure, and how many there are."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from lockstep.errors import InputError
from lockstep.planning import start
from lockstep.planning.start import ProbeRequest, plan_probe, probe_on_workers
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.run_files import RECIPE


def recipe_of(num_towers: int) -> Recipe:
    return with_settings(find("mnist"), [f"num_towers={num_towers}", "device=cpu"])


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    request = ProbeRequest(recipe_of(4), (1, 2, 4), 2, 12.5)
    request.write(tmp_path)
    assert ProbeRequest.read(tmp_path) == request


@pytest.mark.parametrize(
    ("numbers", "per_host", "num_towers", "cores", "wanted"),
    [
        ((1,), None, 8, 8, 1),
        ((1, 2, 4), None, 8, 8, 4),
        ((1, 2, 4, 8, 64), None, 8, 4, 4),
        ((8,), 8, 8, 2, 2),
        ((2,), 1, 8, 4, 2),  # each alone on its host: an exchange takes two
        ((2, 4), None, 1, 4, 1),  # which the library refuses
        ((2,), None, 2, 1, 2),
    ],
)
def test_as_many_workers_measure_as_a_host_of_the_plan_has(
    numbers: tuple[int, ...],
    per_host: int | None,
    num_towers: int,
    cores: int,
    wanted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "usable_cores", lambda: cores)
    ProbeRequest(recipe_of(num_towers), numbers, per_host).write(tmp_path)
    assert plan_probe([str(tmp_path)])["workers"] == wanted


def test_a_save_is_measured_beside_the_runs_and_nothing_is_left_by_a_worker_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints").mkdir(parents=True)
    (run / RECIPE).write_text("")
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    made: list[Path] = []

    def ends_without_tidying(argv: list[str], **_: object) -> int:
        made.append(Path(argv[0]))
        (made[-1] / "first").mkdir()
        return 130

    monkeypatch.setattr(start, "launch_command", ends_without_tidying)
    for folder in (tmp_path, run, run / "checkpoints"):
        monkeypatch.chdir(folder)
        assert probe_on_workers(ProbeRequest(recipe_of(1), (1,))) == 130
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert probe_on_workers(ProbeRequest(recipe_of(1), (1,))) == 130
    assert [folder.parent for folder in made] == [tmp_path / "runs"] * 3 + [elsewhere]
    assert not any(folder.exists() for folder in made)


def test_a_disk_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(InputError, match="No space left on device"):
        probe_on_workers(ProbeRequest(recipe_of(1), (1,)))


def test_code_that_others_may_have_named_is_not_called() -> None:
    others = with_settings(find("mnist"), ['hooks=[{kind="python",function="their_code:run"}]', "device=cpu"])
    with pytest.raises(InputError, match="is not called: others may have written"):
        probe_on_workers(ProbeRequest(others, (1,)))
