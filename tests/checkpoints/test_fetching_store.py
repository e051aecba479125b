"""What a look at a run in a real object store costs, and that it can be left at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bucket_runs import Machines, files, mirrored
from checkpoint_helpers import write
from object_server import Fault, FaultyProxy
from worker_processes import HANG_SECONDS

from lockstep.checkpoints.fetching import fetch_run, local_folder
from lockstep.storage.remote_path import RemotePath

LOGS = [f"summaries/events-{number}" for number in range(16)]
MOST_REQUESTS = 4
"""Of a look at a run that has not changed: the listing, `latest.json`, the lease and its time."""


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path, monkeypatch)
    found.use("first")
    return found


@pytest.fixture
def place(machines: Machines, bucket: RemotePath) -> RemotePath:
    """A run with three checkpoints and many files, uploaded by the first machine, and held there."""
    found = bucket / "runs" / "x"
    folder = fetch_run(found)
    (folder / "recipe.toml").write_text("batch_size = 8\n")
    (folder / "summaries").mkdir()
    for name in LOGS:
        (folder / name).write_text(name)
    write(mirrored(folder), 1, 2, 3)
    mirrored(folder).mirror.settle()
    (found / ".lease-000001").write_bytes(b"{}")
    machines.use("second")
    return found


def test_a_look_asks_for_what_has_changed(place: RemotePath, object_store: FaultyProxy) -> None:
    def requests() -> list[str]:
        object_store.requests.clear()
        folder = fetch_run(place, contents=False)
        assert (folder / "metrics.jsonl").read_text() == text
        return [path.partition("?")[0] for _, path, _ in object_store.requests]

    text = "first\n"
    (place / "metrics.jsonl").write_bytes(text.encode())
    assert len(requests()) == MOST_REQUESTS + len(LOGS) + len(["recipe.toml", "metrics.jsonl"]) + len([1, 2, 3])
    assert len(requests()) == MOST_REQUESTS
    text = "first\nsecond\n"
    (place / "metrics.jsonl").write_bytes(text.encode())
    found = requests()
    assert len(found) == MOST_REQUESTS + 1
    assert [path for path in found if path.endswith("metrics.jsonl")] == [f"/{place.key}/metrics.jsonl"]
    (fetch_run(place, contents=False) / "metrics.jsonl").write_text("written over by somebody here\n")
    assert len(requests()) == MOST_REQUESTS + 1


def test_files_come_many_at_once(place: RemotePath, object_store: FaultyProxy) -> None:
    object_store.most_open, object_store.delay_seconds = 0, 0.05
    folder = fetch_run(place)
    assert 4 <= object_store.most_open <= 32
    object_store.delay_seconds = 0.0
    assert {*LOGS} < {*files(folder)}


def test_a_file_becomes_a_folder_and_a_folder_a_file(
    machines: Machines, place: RemotePath, caplog: pytest.LogCaptureFixture
) -> None:
    def go_on(step: int) -> Path:
        folder = fetch_run(place)
        write(mirrored(folder), step)
        mirrored(folder).mirror.settle()
        return folder

    (place / "summaries" / "one").write_bytes(b"1")
    (place / "notes").write_bytes(b"a file")
    go_on(4)
    machines.use("first")
    for name in ("notes", "summaries/one", *LOGS):
        (place / name).unlink()
    (place / "summaries").write_bytes(b"a file")
    (place / "notes" / "one").write_bytes(b"1")
    folder = go_on(5)
    assert ((folder / "summaries").read_bytes(), (folder / "notes" / "one").read_bytes()) == (b"a file", b"1")
    machines.use("second")
    assert files(fetch_run(place)) == files(folder)
    (place / "notes").write_bytes(b"both at once, as stores let it be")
    machines.use("third")
    assert files(fetch_run(place)) == files(folder)
    assert f"{place}/notes is a file, and a folder with others. It is left out." in caplog.text


@pytest.mark.process
def test_an_interrupt_in_a_download_ends_it_at_once(
    place: RemotePath, object_store: FaultyProxy, tmp_path: Path
) -> None:
    """However many files are under way, of which none comes."""
    object_store.faults = [Fault("status", 1000, path="summaries", status=503)]
    command = [sys.executable, "-m", "lockstep", "export", str(place), "--to", "model.safetensors"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        deadline = time.monotonic() + HANG_SECONDS
        while object_store.num_requests("summaries") < 8 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        object_store.delay_seconds = HANG_SECONDS  # what is asked for now is not answered
        time.sleep(1.0)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_SECONDS) == 130
        assert time.monotonic() - began < HANG_SECONDS / 4  # and not when an answer comes
    assert os.listdir(local_folder(place).parent) == [f".{local_folder(place).name}.lock"]  # noqa: PTH208
