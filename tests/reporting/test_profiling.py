"""Profiles of some steps by torch.profiler; as TF-Slim made its traces, with `every`."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_calls import accelerator
from torch import Tensor, nn

import lockstep as ls
from lockstep.readers.reader import Arrays
from lockstep.reporting.profiling import Profile, ProfileHook
from lockstep.types import StepRange


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def train(folder: Path, profile: Profile, until: int, start: int = 0, rank: int = 0) -> ls.TrainState:
    torch.manual_seed(0)
    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(Arrays({"x": torch.ones(8, 3)}), batch_size=4)
    for batch in ls.batches(loader, until=ls.Steps(start)) if start else ():
        ls.train_step(state, losses, batch)
    worker: Any = SimpleNamespace(rank=rank, is_chief=rank == 0, device=torch.device("cpu"))
    hook = ProfileHook(profile, folder, worker, start=start)
    try:
        ls.train(state, losses, loader, until=ls.Steps(until), hooks=[hook])
    finally:
        hook.close()
    return state


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def num_updates(path: Path) -> int:
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event["name"].startswith("aten::_fused_sgd") for event in events if event.get("ph") == "X")


def test_every_n_steps_a_trace_is_kept_named_after_the_step_before_it(tmp_path: Path) -> None:
    """TF-Slim: trace_every_n_steps=100 over 300 steps writes three, of steps 0, 100 and 200."""
    train(tmp_path, Profile(every=100), 300)
    assert files(tmp_path) == sorted(f"profile-{step}.{kind}" for step in (0, 100, 200) for kind in ("json", "txt"))
    assert [num_updates(tmp_path / f"profile-{step}.json") for step in (0, 100, 200)] == [1, 1, 1]
    assert "aten::addmm" in (tmp_path / "profile-100.txt").read_text()


def test_the_chief_alone_makes_profiles_unless_all_are_to(tmp_path: Path) -> None:
    train(tmp_path, Profile(every=2), 3, rank=1)
    assert files(tmp_path) == []
    train(tmp_path, Profile(every=2, all_workers=True), 2, rank=1)
    assert files(tmp_path) == ["profile-0.worker-1.json", "profile-0.worker-1.txt"]


def test_some_steps_are_one_profile(tmp_path: Path) -> None:
    train(tmp_path, Profile(steps=StepRange(2, 5)), 8)
    assert files(tmp_path) == ["profile-2-5.json", "profile-2-5.txt"]
    assert num_updates(tmp_path / "profile-2-5.json") == 3


def test_a_run_that_goes_on_profiles_what_is_left(tmp_path: Path) -> None:
    train(tmp_path, Profile(steps=StepRange(2, 5)), 8, start=4)
    assert files(tmp_path) == ["profile-4.json", "profile-4.txt"]
    train(tmp_path / "over", Profile(steps=StepRange(2, 5)), 8, start=5)
    assert files(tmp_path / "over") == []


def test_a_run_that_ends_within_a_profile_has_it(tmp_path: Path) -> None:
    train(tmp_path, Profile(steps=StepRange(2, 50)), 4)
    assert num_updates(tmp_path / "profile-2-50.json") == 2
    train(tmp_path / "warmed", Profile(steps=StepRange(4, 9)), 3)
    train(tmp_path / "warmed", Profile(every=1), 4, start=3)
    assert files(tmp_path / "warmed") == ["profile-3.json", "profile-3.txt"]


def test_where_steps_are_read_late_the_one_before_is_recorded_too(tmp_path: Path) -> None:
    with accelerator():
        train(tmp_path, Profile(steps=StepRange(2, 3)), 6)
    assert num_updates(tmp_path / "profile-2.json") >= 2


def test_a_profile_changes_no_bits(tmp_path: Path) -> None:
    with_it = train(tmp_path, Profile(every=3, record_shapes=True, profile_memory=True, with_stack=True), 5)
    without = train(tmp_path, Profile(every=100), 5, rank=1)
    assert with_it.model.weight.tolist() == without.model.weight.tolist()


def test_a_profile_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("mine")
    assert train(tmp_path / "traces", Profile(every=2), 3).step == 3
    assert "the profile is not written: " in caplog.text


@pytest.mark.parametrize("num_bytes", [4096, 0])
def test_a_profile_on_a_disk_that_is_full_leaves_no_part_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """As torch does, which writes beside the file, and logs an error."""
    export = torch.profiler.profile.export_chrome_trace

    def export_a_part(profiler: torch.profiler.profile, path: str) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            export(profiler, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export_a_part)
    assert train(tmp_path, Profile(steps=StepRange(1, 3)), 4).step == 4
    assert files(tmp_path) == []
    assert "the profile is not written: " in caplog.text
    assert "profile-1-3.json cannot be written. torch has not written all of it" in caplog.text


@pytest.mark.parametrize(
    ("fields", "what", "given"),
    [
        ({}, "A profile is made at an interval, or of some steps.", "every=0, steps=None"),
        (
            {"every": 3, "steps": StepRange(1, 2)},
            "A profile is made at an interval, or of some steps.",
            "every=3, steps=1:2",
        ),
        (
            {"steps": StepRange(0, 101)},
            "So many steps are too much for one profile: torch keeps every call of an operator in memory.",
            "steps=0:101",
        ),
        ({"every": -1}, "every is out of range.", "every=-1"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(fields: dict[str, Any], what: str, given: str) -> None:
    with pytest.raises(ls.InputError) as caught:
        Profile(**fields)
    assert (caught.value.what, caught.value.given) == (what, given)
