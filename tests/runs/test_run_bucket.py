"""Runs whose workdir is on a bucket: on an empty machine they go on from what was uploaded, to the same bytes."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from bucket_runs import Machines, copied, mirrored, new_place, objects, on_each_write
from bucket_script import STEPS, train, train_stored
from object_server import Fault, FaultyProxy
from PIL import Image
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.checkpoints.fetching import fetch_run, local_folder
from lockstep.checkpoints.mirror import Latest, Mirror, UploadError, store_in
from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.store import Store
from lockstep.errors import StoreError, WorkdirError
from lockstep.images.pillow import png_bytes
from lockstep.owner import this_process
from lockstep.run_files import LATEST
from lockstep.runs.metrics_logger import MetricsLogger
from lockstep.runs.workdir import Workdir
from lockstep.storage import retries
from lockstep.storage.remote_path import RemotePath
from lockstep.workers.rank import leave

SCRIPT = "import sys, bucket_script; bucket_script.train(sys.argv[1])"
LONG_SCRIPT = "import sys, bucket_script as b; r = b.train(sys.argv[1], 100_000); print(r.reason, r.step)"
CHANGING = (
    "manifest.json",
    "timings.jsonl",
    "history.jsonl",
    "result.json",
    "summaries",
    "latest.json",
    "chain.jsonl",
    "data.json",
)
"""What holds times, or tells of starts and of the folder where they were made."""


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path, monkeypatch)
    found.use("first")
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.0)
    return found


def learned(place: RemotePath) -> dict[str, bytes]:
    """Every byte that a run has learned or said, at its end."""
    names = {name: data for name, data in objects(place).items() if "saves.jsonl" not in name}
    return {name: data for name, data in names.items() if not any(part in CHANGING for part in name.split("/"))}


def scores(place: RemotePath) -> object:
    return json.loads((place / "result.json").read_bytes())["evaluations"]


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> list[RemotePath]:
    """What the bucket of an undisturbed run held after each request that has changed it; its end is the last one."""
    leave()
    with pytest.MonkeyPatch.context() as patch:
        Machines(tmp_path_factory.mktemp("machines"), patch).use("undisturbed")
        place, found = new_place(), list[RemotePath]()
        on_each_write(patch, lambda: found.append(copied(place)))
        begin = Mirror.begin

        def begin_and_settle(self: Mirror, step: int, retention: Retention) -> None:
            """As if uploads were faster than steps: each checkpoint is sent."""
            begin(self, step, retention)
            self.settle()

        patch.setattr(Mirror, "begin", begin_and_settle)
        assert train(str(place)).reason == "end"
    return [*found, place]


def resumes_from(moment: RemotePath, moments: list[RemotePath], machines: Machines, name: str) -> None:
    machines.use(name)
    leave()
    train(str(moment))
    assert learned(moment) == learned(moments[-1])
    assert scores(moment) == scores(moments[-1])


def test_killed_at_random_moments(moments: list[RemotePath], machines: Machines) -> None:
    """The law: whatever a machine that was lost had uploaded, an empty one ends with the same bytes."""
    steps = [Latest.decode((each / LATEST).read_bytes()).step if (each / LATEST).exists() else -1 for each in moments]
    assert {*steps} >= {-1, 3, STEPS}
    choose = random.Random(3)
    first = "checkpoints/step-00000000/manifest.json"
    before = [place for place, step in zip(moments, steps, strict=True) if step == -1]
    whole = [place for place in before if first in place.walk_files()]  # and `latest.json` not there
    of_six = [place for place, step in zip(moments, steps, strict=True) if step == 6]
    for number, place in enumerate([choose.choice(before), *whole[:1], choose.choice(of_six)]):
        resumes_from(copied(place), moments, machines, f"machine-{number}")


@pytest.mark.slow
def test_killed_at_any_moment(moments: list[RemotePath], machines: Machines) -> None:
    for number, moment in enumerate(moments):
        resumes_from(copied(moment), moments, machines, f"machine-{number}")


def test_the_run_is_on_the_bucket_and_another_machine_takes_it_further(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place = new_place()
    train(str(place), 4)
    machines.use("second")
    leave()
    assert train(str(place), 6).step == 6
    assert "resumed at step 4, position 32" in caplog.text
    events = [json.loads(line)["event"] for line in (place / "history.jsonl").read_bytes().splitlines()]
    assert events == ["start", "end", "resume", "end"]
    assert Latest.decode((place / LATEST).read_bytes()).step == 6


def test_a_failing_upload_does_not_end_the_run_but_its_end(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, reached = new_place(), list[int]()
    is_down = [False]

    def fail() -> None:
        if is_down[0]:
            raise OSError("no route to host")

    def cut(report: ls.StepReport) -> None:
        is_down[0] = report.step >= 4
        reached.append(report.step)

    with monkeypatch.context() as patched:
        on_each_write(patched, fail)
        with pytest.raises(UploadError, match="The run is not on the bucket as it is here") as caught:
            train(str(place), hooks=[cut])
    assert reached == [*range(1, STEPS + 1)]
    assert caught.value.exit_code == 1
    assert str(local_folder(place)) in caught.value.hint
    assert "the next checkpoint is another try: see that the bucket can be reached" in caplog.text
    (place / ".lease-000001").unlink()  # which could not be released; another process would see this one dead
    leave()
    assert train(str(place)).step == STEPS  # here the run is whole
    assert Latest.decode((place / LATEST).read_bytes()).step == STEPS


def test_two_machines_do_not_train_one_run(machines: Machines) -> None:
    place = new_place()
    errors = list[WorkdirError]()

    def another(report: ls.StepReport) -> None:
        if report.step == 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(local_folder(place).parent / "elsewhere"))
                with pytest.raises(WorkdirError) as caught:
                    Workdir(fetch_run(place)).check_free()
                errors.append(caught.value)

    train(str(place), 3, hooks=[another])
    assert errors[0].what == f"The run in {place} is going on already."
    assert f"held by process {os.getpid()} on host" in errors[0].given


def test_once_the_run_is_taken_over_nothing_is_overwritten_or_deleted(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine takes the lease after any write of an upload: that was the last one."""
    fs, num_seen = fsspec.filesystem("memory"), 0
    another = replace(this_process(), host="node7", system="of another machine").encode()

    def write(store: Store, step: int) -> None:
        (store.folder.parent / "metrics.jsonl").write_text(f"{step}\n" * step)
        store.write(step, {"parameters": {"w": torch.full((4,), float(step))}}, {"step": step})

    for moment in range(100):
        machines.use(f"machine-{moment}")
        place = new_place()
        workdir = Workdir(fetch_run(place))
        found, left = list[dict[str, bytes]](), [moment]

        def take_over(place: RemotePath = place, found: list[Any] = found, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                found.append(objects(place))
                fs.pipe_file(f"{place.key}/.lease-000002", another)

        with workdir.held():
            store = store_in(workdir.path, Retention(newest=1))
            (workdir.path / "recipe.toml").write_text("batch_size = 8\n")
            (workdir.path / "result.json").write_text("{}")
            write(store, 1)
            workdir.settle()
            (workdir.path / "result.json").unlink()
            with monkeypatch.context() as patched:
                on_each_write(patched, take_over, after=True)
                write(store, 2)
                if moment == 0:
                    workdir.settle()
                    num_writes = -left[0]
                    continue
                with pytest.raises(WorkdirError, match="is no longer this start's"):
                    workdir.settle()
        assert objects(place) == found[0]
        num_seen += 1
        if moment == num_writes - 1:  # after the last one there is nothing left to be written
            break
    assert num_seen == num_writes - 1 >= 8


STORED_SCRIPT = """
import os, sys, bucket_script
from lockstep.errors import StoreError
from lockstep.runs import segment
from lockstep.storage import ranges, retries
waits, rank, answers = {waits}, int(os.environ["RANK"]), ranges._answers
def fail(*given):
    if os.path.isdir(os.path.join(sys.argv[2], "checkpoints", "step-00000003")):
        raise StoreError("the credentials have expired", given="", expected="", hint="")
    return answers(*given)
if waits:
    retries._CREDENTIALS_WAIT_SECONDS, retries._CREDENTIALS_POLL_SECONDS = waits[rank], 1.0
elif rank == 1:
    ranges._answers, segment._CHIEF_SECONDS = fail, 1.0
bucket_script.train_stored(sys.argv[1], sys.argv[2], 100_000)
"""


@pytest.fixture
def photos(bucket: RemotePath) -> RemotePath:
    """Grey images by classes, in the bucket."""
    for number in range(40):
        content = png_bytes(Image.fromarray(np.full((28, 28), 5 * number, np.uint8)))
        (bucket / "photos" / f"{number % 2}" / f"{number}.png").write_bytes(content)
    return bucket / "photos"


def failed_at(run: Path) -> int:
    """The step at which a run has failed, as its history says."""
    last = json.loads((run / "history.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "failed"
    return int(last["step"])


EXPIRED = Fault("status", 10**6, path="photos/.*png", status=400)


def test_a_save_at_last_that_fails_hides_nothing(
    machines: Machines,
    photos: RemotePath,
    object_store: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(retries, "_CREDENTIALS_WAIT_SECONDS", 0.0)
    right = MetricsLogger.flush

    def flush(self: MetricsLogger) -> None:
        if "is saved at step" in caplog.text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        right(self)

    monkeypatch.setattr(MetricsLogger, "flush", flush)
    object_store.faults = [replace(EXPIRED, after=50)]
    with pytest.raises(StoreError, match="the credentials have expired"):
        train_stored(str(photos), tmp_path / "run")
    assert "could not be saved: [Errno 28] No space left on device; older checkpoints are as they were" in caplog.text


def test_credentials_that_expire_end_the_run_with_its_step_saved(
    machines: Machines,
    photos: RemotePath,
    object_store: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(retries, "_CREDENTIALS_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(retries, "_CREDENTIALS_POLL_SECONDS", 0.1)
    train_stored(str(photos), tmp_path / "undisturbed")
    leave()
    object_store.faults = [replace(EXPIRED, after=object_store.num_requests(EXPIRED.path) - 30)]
    with pytest.raises(StoreError, match="the credentials have expired") as caught:
        train_stored(str(photos), tmp_path / "run")
    assert "start the same command again" in caught.value.hint
    step = failed_at(tmp_path / "run")
    assert step in (7, 8)  # between two checkpoints
    assert Store(tmp_path / "run" / "checkpoints").newest() == step
    assert f"the run ends with an error, and is saved at step {step}" in caplog.text
    object_store.faults = []
    leave()
    train_stored(str(photos), tmp_path / "run")
    names = [f"checkpoints/step-{STEPS:08d}/{section}.safetensors" for section in ("parameters", "buffers", "slots")]
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


@pytest.mark.process
@pytest.mark.parametrize(
    "waits",
    [pytest.param((1.0, 60.0), marks=pytest.mark.slow), (4.0, 1.0), pytest.param(None, marks=pytest.mark.slow)],
)
def test_of_several_workers_the_chief_saves_whoever_is_first(
    machines: Machines, photos: RemotePath, object_store: FaultyProxy, tmp_path: Path, waits: tuple[float, float] | None
) -> None:
    """The chief, or the other one while the chief waits for data, too, or while it waits for the other's gradients."""
    (tmp_path / "script.py").write_text(STORED_SCRIPT.format(waits=waits))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["lockstep", "run", "--workers", "2", "--device", "cpu", str(tmp_path / "script.py")]
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", *words, str(photos), str(tmp_path / "run")]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    store = Store(tmp_path / "run" / "checkpoints")
    while process.poll() is None and 3 not in store.steps():
        time.sleep(0.05)
    object_store.faults = [EXPIRED] if waits else []
    code, told = process.wait(HANG_SECONDS), (tmp_path / "log").read_text()
    assert code == 1, told
    assert "the credentials have expired" in told
    assert "the run ends with an error, and is saved at step" in told
    assert store.newest() == failed_at(tmp_path / "run")


@pytest.mark.process
@pytest.mark.parametrize("is_silent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_signal_while_the_bucket_is_away_ends_the_run_soon(
    machines: Machines, bucket: RemotePath, object_store: FaultyProxy, tmp_path: Path, is_silent: bool
) -> None:
    """Connections are refused, or taken, and nothing is answered."""
    place = bucket / "runs" / "x"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LONG_SCRIPT, str(place)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout
    while process.poll() is None and step_of(place) < 3:
        time.sleep(0.05)
    object_store.refuses, object_store.delay_seconds = not is_silent, HANG_SECONDS * is_silent
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=HANG_SECONDS)[0].decode()
    assert time.monotonic() - began < HANG_SECONDS / 10
    text = (tmp_path / "log").read_text()
    assert said.startswith("stopped "), text
    step = int(said.split()[1])
    assert text.count("The run is not on the bucket as it is here") == 1
    assert f"the run is whole in {local_folder(place)}, up to step {step}" in text
    assert Store(local_folder(place) / "checkpoints").newest() == step
    object_store.reset()
    assert train(str(place), step + 3).step == step + 3
    assert step_of(place) == step + 3


def test_after_a_run_that_was_lost_the_same_process_goes_on(machines: Machines) -> None:
    place = new_place()
    workdir = Workdir(fetch_run(place))

    def lost() -> None:
        raise WorkdirError("taken over", given="", expected="", hint="")

    def write(step: int) -> None:
        store.write(step, {"parameters": {"w": torch.full((4,), float(step))}}, {"step": step})

    with workdir.held():
        store = mirrored(workdir.path)
        store.mirror.check = lost
        write(1)
        with pytest.raises(WorkdirError, match="taken over"):
            workdir.settle()
    for step in (2, 3):
        with workdir.held():
            write(step)
            assert store.mirror._thread
            store.mirror._thread.join()
            assert Latest.decode((place / LATEST).read_bytes()).step == step
    write(4)  # by a script, after the lease is given up
    store.mirror.settle()
    assert Latest.decode((place / LATEST).read_bytes()).step == 4


# A store of real code -------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_workdir_is_told_before_the_first_step(
    machines: Machines, bucket: RemotePath, object_store: FaultyProxy
) -> None:
    with pytest.raises(WorkdirError, match="cannot be used") as caught:
        train("s3://there-is-no-such-bucket/runs/x")
    assert caught.value.exit_code == 2
    assert "make the bucket, or name another" in caught.value.hint
    object_store.faults = [Fault("status", 100, method="PUT", status=403)]
    leave()
    with pytest.raises(WorkdirError, match="cannot be used") as caught:
        train(f"{bucket}/runs/x")
    assert "credentials that may read and write" in caught.value.hint
    assert not [*bucket.walk_files()]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("seed", range(20))
def test_processes_killed_and_gone_on_with_on_empty_machines(
    moments: list[RemotePath], machines: Machines, bucket: RemotePath, tmp_path: Path, seed: int
) -> None:
    """Kill a run at random moments after a save, three times, and go on each time on a machine that has nothing."""
    place, choose, kills = bucket / "runs" / "x", random.Random(seed), 3
    for number in range(kills + 1):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["XDG_CACHE_HOME"] = str(tmp_path / f"machine-{number}")
        log = tmp_path / f"log-{number}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(place)], env=environment, stdout=file, stderr=file
            )
        if number == kills:
            assert process.wait(HANG_SECONDS) == 0, log.read_text()
            break
        before = step_of(place)
        while process.poll() is None and step_of(place) == before:
            time.sleep(0.01)
        time.sleep(choose.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_SECONDS)
    # A machine that is lost may have uploaded the newest of several checkpoints alone.
    found, last = learned(place), f"checkpoints/step-{STEPS:08d}/"
    assert {name for name in found if name.startswith(last)}
    assert found == {name: data for name, data in learned(moments[-1]).items() if name in found}
    assert scores(place) == scores(moments[-1])


def step_of(place: RemotePath) -> int:
    place.invalidate()
    return Latest.decode((place / LATEST).read_bytes()).step if (place / LATEST).exists() else -1
