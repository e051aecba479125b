"""Runs on several hosts whose workdir is on a bucket: each has a folder of its own, and the chief's is uploaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import bucket_script
import pytest
from bucket_runs import Machines, new_place
from bucket_script import STEPS
from worker_processes import HANG_SECONDS, free_port

from lockstep.checkpoints.fetching import fetch_run
from lockstep.checkpoints.mirror import Latest
from lockstep.errors import InputError
from lockstep.owner import this_process
from lockstep.recipes.code import with_code
from lockstep.run_files import LATEST, RESULT
from lockstep.runs.run import Run, _check_written
from lockstep.runs.workdir import Workdir
from lockstep.storage.remote_path import AnyPath, RemotePath
from lockstep.types import StepRange, Steps
from lockstep.workers.rank import join, leave

SCRIPT = "import sys, bucket_script as b; b.train_on_hosts(sys.argv[1], sys.argv[2], float(sys.argv[3]))"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the run comes to on one worker, in a folder."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    bucket_script.train_on_hosts(folder)
    leave()
    return learned(folder)


def learned(run: AnyPath) -> dict[str, bytes]:
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    sections = ("parameters", "buffers", "slots")
    files = {name: (last / f"{name}.safetensors").read_bytes() for name in sections}
    return {**files, "metrics": (run / "metrics.jsonl").read_bytes()}


def history(place: RemotePath) -> list[dict[str, object]]:
    return [json.loads(line) for line in (place / "history.jsonl").read_bytes().splitlines()]


def step_of(place: RemotePath) -> int:
    place.invalidate()
    return Latest.decode((place / LATEST).read_bytes()).step if (place / LATEST).exists() else -1


@contextmanager
def on_hosts(folder: Path, place: RemotePath, hosts: list[str], *flags: str, lost: str = "") -> Iterator[list[Path]]:
    """Start the run on hosts, which have folders of these names and one worker each; yields their logs."""
    (folder / "script.py").write_text(SCRIPT)
    seats = ["--hosts", str(len(hosts)), "--chief", f"127.0.0.1:{free_port()}", "--workers", str(len(hosts))]
    words = [sys.executable, "-m", "lockstep", "run", *seats, "--device", "cpu", "--threads", "1", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as stack:
        started, logs = list[subprocess.Popen[bytes]](), list[Path]()
        for number, name in enumerate(hosts):
            home, log = folder / name, stack.enter_context((folder / f"log-{name}").open("wb"))
            home.mkdir(exist_ok=True)
            logs.append(Path(log.name))
            command = [*words, "--host-rank", str(number), str(folder / "script.py"), str(place), lost, "0.1"]
            own = {"XDG_CACHE_HOME": str(home), "LOCKSTEP_KEY": "k" * 32}
            process = subprocess.Popen(
                command, cwd=home, env=environment | own, stdout=log, stderr=log, start_new_session=True
            )
            started.append(process)
            stack.callback(ended, process)
        yield logs
        codes = [process.wait(HANG_SECONDS) for process in started]
        assert codes == [0] * len(hosts), [log.read_text() for log in logs]


def ended(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(HANG_SECONDS)


class KilledError(Exception):
    """All hosts are to be killed."""


@pytest.mark.slow
@pytest.mark.process
def test_killed_and_gone_on_with_on_other_hosts(
    undisturbed: dict[str, bytes], bucket: RemotePath, tmp_path: Path
) -> None:
    """Gone on with by an empty host with one whose folder is older, and then by two with older folders."""
    place = bucket / "runs" / "x"
    for hosts, step in ((["a", "b"], 3), (["c", "a"], 6)):
        with suppress(KilledError), on_hosts(tmp_path, place, hosts) as logs:
            deadline = time.monotonic() + HANG_SECONDS
            while step_of(place) < step:
                assert time.monotonic() < deadline, [log.read_text() for log in logs]
                time.sleep(0.05)
            raise KilledError
    with on_hosts(tmp_path, place, ["b", "c"]):
        pass
    assert learned(place) == undisturbed
    events = [event["event"] for event in history(place)]
    assert events.count("rollback") >= 1
    assert (events[0], events[-1]) == ("start", "end")


@pytest.mark.slow
@pytest.mark.process
def test_another_host_takes_the_place_of_the_chief(
    undisturbed: dict[str, bytes], bucket: RemotePath, tmp_path: Path
) -> None:
    """From what is on the bucket: of what came after it the other host knows nothing."""
    place, flags = bucket / "runs" / "x", ("--on-failure", "continue", "--restarts", "3")
    with on_hosts(tmp_path, place, ["a", "b"], *flags, lost=str(tmp_path / "lost")) as logs:
        pass
    assert learned(place) == undisturbed
    [loss] = [event for event in history(place) if event["event"] == "continue"]
    assert str(loss["from"]).startswith("the checkpoint of step"), logs[0].read_text()
    assert (tmp_path / "b" / "lockstep").is_dir()


def test_the_next_chief_writes_the_recipe_of_this_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost before its first upload, a chief leaves the recipe and the result of the start before on the bucket."""
    Machines(tmp_path, monkeypatch).use("first")
    place = new_place()
    bucket_script.train(str(place), 4)
    Machines(tmp_path, monkeypatch).use("second")
    leave()
    path = fetch_run(str(place))
    saved = Workdir(path).recipe()
    assert saved
    assert (path / RESULT).exists()
    recipe = replace(with_code(saved), end=Steps(6))
    run = Run(recipe, path, join("cpu"))
    run._chief = replace(this_process(), host="lost")
    with run._held:
        assert run._hold_workdir()
        assert Workdir(path).recipe() == recipe
        assert not (path / RESULT).exists()
    leave()


def test_a_trace_of_several_hosts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machines(tmp_path, monkeypatch).use("first")
    recipe = bucket_script.small_recipe()
    recipe = replace(recipe, watch=replace(recipe.watch, trace=StepRange(2, 4)))
    _check_written(recipe, tmp_path)
    with pytest.raises(InputError, match="A trace of several hosts needs a workdir that all of them see"):
        _check_written(recipe, fetch_run(new_place()))
