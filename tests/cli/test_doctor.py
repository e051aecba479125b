"""`lockstep doctor`: what it says of a machine and of a recipe, and what its exit code is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_images import image_folder

from lockstep.cli import doctor
from lockstep.cli.main import main
from lockstep.cli.train import train_as_worker
from lockstep.doctor import compute, libraries
from lockstep.doctor.check_result import CheckResult
from lockstep.recipes.toml import to_toml
from tests.saved_runs import recipe_of_photos

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load no libraries in another process, which takes seconds; and decode for no time."""
    monkeypatch.setattr(libraries, "library_results", lambda: iter([CheckResult("torch", "torch 2.13")]))
    monkeypatch.setattr(compute, "_SECONDS", 0.01)


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.mark.process
def test_it_looks_at_the_whole_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--workdir", str(tmp_path / "runs"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["can_train"]
    checked = {each["checked"] for each in facts["findings"]}
    assert checked >= {
        *("torch", "libraries", "torch build", "devices", "memory", "JPEG", "checksums", "cores", "threads"),
        *("open files", "processes", "/dev/shm", "allocator", "OpenMP waits", "clock", "room", "workdir"),
    }
    assert all(each["mend"] for each in facts["findings"] if each["verdict"] != "OK")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_libraries")
def test_text_ends_with_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--workdir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "OK     torch: torch 2.13"
    assert lines[-1].startswith("It can train: ")
    assert all(line[:7] in ("OK     ", "warn   ", "fails  ", "       ", "") for line in lines[:-1])


@pytest.mark.usefixtures("no_libraries")
def test_what_fails_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--workdir", str(tmp_path / "file")]) == 1
    assert "It cannot train: 1 of " in capsys.readouterr().out
    assert main(["doctor", "--workdir", "none", "--hosts", "name.invalid", "--json"]) == 1
    [found] = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["verdict"] == "fails"]
    assert found["checked"] == "host name.invalid"


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no such file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "it ended its process by SIGILL"),
    ],
)
def test_torch_that_is_broken_is_named_and_the_rest_is_seen(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text(source)
    words = [sys.executable, "-m", "lockstep", "doctor", "mnist", "--workdir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'broken'}:{ROOT}"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("fails")]
    assert line.endswith(f"does not load: {why}")
    assert "workdir: " in done.stdout
    assert "recipe: not looked at: torch does not load" in done.stdout


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A recipe of photos, in a file."""
    images = image_folder(tmp_path / "photos")
    file = tmp_path / "few.toml"
    file.write_text(to_toml(recipe_of_photos(train=str(images))))
    return file


def look(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, Any]]:
    assert main(["doctor", *words, "--seconds", "0", "--json"]) == code
    return {each["checked"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.usefixtures("no_libraries")
def test_a_run_can_begin_and_go_on_and_its_folder_is_left_as_it_is(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    given = [str(photos), "--workdir", str(run), "--device", "cpu", "--workers", "2", "--towers", "2"]
    found = look(given, capsys, 0)["recipe"]
    assert found["found"] == f"{photos} can begin: 2 x 1 examples an update, from step 0, position 0, on 2 workers"
    assert not run.exists()
    assert train_as_worker(["train", *given, "--steps", "1", "--workers", "1"]) == 0
    before, threads = snapshot(run), torch.get_num_threads()
    found = look([str(run)], capsys, 0)
    assert "from step 1, position 2" in found["recipe"]["found"]
    assert found["workdir"]["found"].startswith(f"{tmp_path} takes ")
    assert snapshot(run) == before
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("no_libraries")
def test_all_that_keeps_a_run_from_beginning_is_told(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(photos), "--workdir", "none", "--set", "data.train=nowhere", "--set", "nonfinite=rollback"]
    assert main(["doctor", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("fails  recipe: ")]
    assert len(failed) == 2
    assert lines[lines.index(failed[-1]) + 1].startswith("       mend: ")


@pytest.mark.usefixtures("no_libraries")
def test_what_torch_says_as_a_net_is_built_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has 80 GiB.")

    monkeypatch.setattr(doctor, "_try_start", refuse)
    found = look(["mnist", "--workdir", "none"], capsys, 1)["recipe"]
    assert found["found"] == "CUDA out of memory. Tried to allocate 2 GiB."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such_recipe"], "no_such_recipe"),
        (["torn.toml"], "torn.toml"),
        (["."], "is neither a recipe nor the folder of a run"),
        (["mnist", "--set", "bach_size=2"], "bach_size"),
        (["--set", "batch_size=2", "--towers", "2"], "--towers --set"),
        (["--hosts", "node1:port"], "--hosts node1:port"),
        (["--workdir", "x" * 300], "a part of 300 bytes"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("torn.toml").write_text("name = [")
    try:
        assert main(["doctor", *words]) == 2
    finally:
        Path("torn.toml").unlink()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["doctor"]) == 2
    assert "on Linux alone" in capsys.readouterr().err
