"""The commands on a run that is on a bucket: what they need is brought to this machine first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bucket_runs import Machines, copied, new_place
from bucket_script import train
from object_server import Fault, FaultyProxy
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.checkpoints.fetching import fetch_run, local_folder
from lockstep.cli import scoring, status
from lockstep.cli.evaluate import evaluate_as_worker
from lockstep.cli.main import main
from lockstep.cli.shared import run_folder
from lockstep.cli.train import COMMAND, _read, train_as_worker
from lockstep.cli.verify import verify_as_worker
from lockstep.errors import LockstepError, WorkdirError
from lockstep.evaluation import follow
from lockstep.owner import this_process
from lockstep.storage import retries
from lockstep.storage.remote_path import ObjectStat, RemotePath
from lockstep.storage.retries import with_retries
from lockstep.training.run_weights import open_weights, run_at_step
from lockstep.workers.rank import join, leave
from lockstep.workers.store_server import LAUNCHED


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RemotePath:
    leave()
    with pytest.MonkeyPatch.context() as patch:
        Machines(tmp_path_factory.mktemp("machines"), patch).use("trains")
        place = new_place()
        train(str(place), 2, model=ls.models.LeNet(num_classes=2))
    leave()
    return place


@pytest.fixture(autouse=True)
def _another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machines(tmp_path, monkeypatch).use("looks")


def test_what_it_does(trained: RemotePath, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(trained), "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)["runs"]
    assert (status["run"], status["state"], status["step"]) == (str(trained), "finished", 2)
    assert status["checkpoint"] == 2
    assert not local_folder(trained).exists()


def test_that_it_goes_on_elsewhere(
    trained: RemotePath, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = trained / ".lease-000001"
    before = lease.read_bytes()
    owner = json.loads(before) | {"released": False, "system": "of another machine", "host": "node7"}
    lease.write_bytes(json.dumps(owner).encode())
    try:
        assert main(["status", str(trained), "--json"]) == 0
    finally:
        lease.write_bytes(before)
    (status,) = json.loads(capsys.readouterr().out)["runs"]
    assert (status["state"], status["host"]) == ("running", "node7")


def test_what_it_did(trained: RemotePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trained), "--to", str(tmp_path / "page.html")]) == 0
    assert str(trained) in capsys.readouterr().out
    assert "mine" in (tmp_path / "page.html").read_text()


def test_a_run_that_is_followed_is_listed_once_a_look(
    trained: RemotePath,
    bucket: RemotePath,
    object_store: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a real store, of a run that goes on on another machine: the listing, `latest.json`, the lease and its time."""
    place = bucket / "runs" / "mine"
    for name in trained.walk_files():
        (place / name).write_bytes((trained / name).read_bytes())
    owner = replace(this_process(), host="node7", system="of another machine")
    (place / ".lease-000001").write_bytes(owner.encode())
    right, counts = status._look, list[int]()

    def look(paths: Sequence[str]) -> list[status.RunStatus]:
        if len(counts) == 3:
            (place / ".lease-000001").write_bytes(replace(owner, released=True).encode())
        object_store.requests.clear()
        found = right(paths)
        counts.append(len(object_store.requests))
        return found

    monkeypatch.setattr(status, "_look", look)
    monkeypatch.setattr(status, "_SECONDS_BETWEEN_LOOKS", 0.0)
    assert main(["status", str(place), "--follow", "--json"]) == 0
    states = re.findall(r'"state": "(\w+)"', capsys.readouterr().out)
    assert states == ["running", "finished"]
    assert counts[0] > 10
    assert counts[1:] == [4, 4, 4]


def test_a_run_that_is_followed_outlives_an_outage_and_not_a_wrong_url(
    trained: RemotePath,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place, looks = copied(trained), list[int]()
    owner = replace(this_process(), host="node7", system="of another machine")
    (place / ".lease-000001").write_bytes(owner.encode())
    walk = RemotePath.walk_files

    def walk_files(self: RemotePath) -> dict[str, ObjectStat]:
        looks.append(len(looks))
        if len(looks) in (2, 3):
            raise ConnectionError("no route")
        if len(looks) == 4:
            (place / ".lease-000001").write_bytes(replace(owner, released=True).encode())
        return walk(self)

    monkeypatch.setattr(RemotePath, "walk_files", walk_files)
    monkeypatch.setattr(status, "_SECONDS_BETWEEN_LOOKS", 0.0)
    assert main(["status", str(place), "--follow", "--json"]) == 0
    assert re.findall(r'"state": "(\w+)"', capsys.readouterr().out) == ["running", "finished"]
    assert caplog.text.count("It is looked at again") == 1
    assert main(["status", f"{place}2", "--follow"]) == 2


def test_its_weights(trained: RemotePath, tmp_path: Path) -> None:
    assert main(["export", f"{trained}@2", "--to", str(tmp_path / "model.safetensors")]) == 0
    assert (tmp_path / "model.safetensors").exists()
    assert main(["export", f"{trained}@1", "--to", str(tmp_path / "other.safetensors")]) == 2


def test_a_checkpoint_by_its_own_url(trained: RemotePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the folder of a checkpoint on this machine: of a run, or copied from one."""
    of_run, alone = trained / "checkpoints" / "step-00000002", new_place()
    for name in of_run.walk_files():
        (alone / name).write_bytes((of_run / name).read_bytes())
    told = []
    for place in (of_run, alone, f"{trained}@2", trained / "checkpoints"):
        assert main(["inspect", str(place), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [each["step"] for each in told] == [2] * 4
    assert [each["tensors"] for each in told] == [told[0]["tensors"]] * 4
    assert [len(each["checkpoints"]) for each in told] == [2, 0, 2, 2]
    assert open_weights(str(alone)).tensors.keys() == open_weights(str(trained)).tensors.keys()
    assert run_at_step(str(of_run)) == run_at_step(f"{trained}@2") == (local_folder(trained), 2)
    assert main(["export", str(of_run), "--to", str(tmp_path / "model.safetensors")]) == 0
    scores = ["evaluate", str(of_run), "--device", "cpu", "--allow-code", "--to", str(tmp_path / "scores.json")]
    assert evaluate_as_worker(scores) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["step"] == 2
    leave()
    options = {"model": ls.models.LeNet(num_classes=2), "fork_from": str(of_run)}
    assert train(tmp_path / "fork", 3, **options).step == 3
    assert '"step": 2' in (tmp_path / "fork" / "history.jsonl").read_text().splitlines()[0]


def test_each_checkpoint_that_comes(
    trained: RemotePath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, looks = copied(trained), list[int]()
    later = {name: (place / name).read_bytes() for name in (*place.walk_files(),) if "00002/" in name}
    later |= {name: (place / name).read_bytes() for name in ("latest.json", "history.jsonl")}
    for name in later:
        (place / name).unlink()
    begun = later["history.jsonl"].splitlines(keepends=True)[0]
    (place / "history.jsonl").write_bytes(begun)

    def fetch(place: RemotePath) -> Path:
        looks.append(len(looks))
        if len(looks) == 3:
            for name, data in later.items():
                (place / name).write_bytes(data)
        return fetch_run(place)

    monkeypatch.setattr(scoring, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(scoring, "fetch_run", fetch)
    words = ["evaluate", str(place), "--follow", "--interval", "0", "--device", "cpu", "--allow-code"]
    assert evaluate_as_worker(words) == 0
    lines = (local_folder(place) / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2]
    assert "the run is over: no checkpoint will follow" in caplog.text


def test_its_scores_with_code_that_the_user_allows(trained: RemotePath, tmp_path: Path) -> None:
    """Whoever can write to the bucket could have named the code."""
    words = ["evaluate", str(trained), "--to", str(tmp_path / "scores.json"), "--device", "cpu"]
    with pytest.raises(LockstepError, match="--allow-code"):
        evaluate_as_worker(words)
    leave()
    assert evaluate_as_worker([*words, "--allow-code"]) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert (local_folder(trained) / "evaluations.jsonl").exists()


def test_that_it_is_what_it_says(trained: RemotePath, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_as_worker(["verify", str(trained), "--no-replay"]) == 0


def test_it_goes_on_by_its_url_or_by_its_workdir(trained: RemotePath) -> None:
    words = ["train", str(trained), "--allow-code", "--device", "cpu", "--steps"]
    assert train_as_worker([*words, "3"]) == 0
    leave()
    assert train_as_worker([*words, "4", "--workdir", str(trained)]) == 0
    assert [path.name[-1] for path in (trained / "checkpoints").iterdir()][-1] == "4"


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    nowhere = str(new_place())
    with pytest.raises(WorkdirError, match=f"There is no run in {nowhere}"):
        _read(COMMAND.parse(["train", nowhere]), [])
    for words in (["status", nowhere], ["export", nowhere, "--to", str(tmp_path / "m.pt2")]):
        assert main(words) == 2
    assert main(["status", "ftp://host/x"]) == 2


def test_a_command_for_the_end_is_left_out(trained: RemotePath, caplog: pytest.LogCaptureFixture) -> None:
    folder = fetch_run(trained)
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace('on_end = ""', 'on_end = "touch bad"'))
    at_end: list[tuple[str, str]] = []
    _read(COMMAND.parse(["train", str(trained)]), at_end)
    assert at_end == []
    assert "watch.on_end is left out" in caplog.text
    _read(COMMAND.parse(["train", str(trained), "--allow-code"]), at_end)
    assert at_end == [("touch bad", str(folder))]


def test_workers_do_not_ask_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = new_place()
    monkeypatch.setenv(LAUNCHED, "1")
    assert run_folder(str(nowhere)) == local_folder(nowhere)
    assert not local_folder(nowhere).exists()


def test_who_follows_outlives_an_outage_and_not_a_refusal(
    trained: RemotePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scoring, "_SECONDS_BETWEEN_LOOKS", 0.0)
    looks = scoring._BucketLooks(trained)
    leave()
    for error in (ConnectionError("no route"), OSError("reset"), PermissionError("no rights")):
        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "read_bytes", raising(error))
            if isinstance(error, PermissionError):
                with pytest.raises(WorkdirError, match="no rights"):
                    looks.is_over()
            else:
                assert not looks.is_over()
    assert caplog.text.count("It is looked at again") == 1
    assert looks.is_over()


def test_a_stop_ends_a_look(
    trained: RemotePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave()
    monkeypatch.setattr(RemotePath, "_call", lambda self, *_: with_retries(raising(OSError("no route")), str(self)))
    monkeypatch.setattr(retries.random, "uniform", lambda *_: 60.0)
    threading.Timer(0.3, setattr, (join().pulse, "stop_requested", "SIGTERM")).start()
    began = time.monotonic()
    assert not scoring._BucketLooks(trained).is_over()
    assert time.monotonic() - began < 60.0
    assert "It is looked at again" not in caplog.text
    leave()


@pytest.mark.slow
@pytest.mark.process
def test_a_stop_ends_the_tries_of_who_follows(
    trained: RemotePath, bucket: RemotePath, object_store: FaultyProxy, tmp_path: Path
) -> None:
    """A look at a store that is away would take half a minute."""
    place = bucket / "runs" / "mine"
    for name in trained.walk_files():
        (place / name).write_bytes((trained / name).read_bytes())
    (place / "history.jsonl").unlink()
    words = ["evaluate", str(place), "--follow", "--device", "cpu", "--workers", "1", "--allow-code"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "lockstep", *words], env=environment, stderr=log)
        told = ""

        def waits_for(text: str) -> None:
            nonlocal told
            deadline = time.monotonic() + HANG_SECONDS
            while text not in told and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
                told = (tmp_path / "log").read_text()
            assert text in told

        waits_for("weights of step 2")
        object_store.faults = [Fault("drop", 10**6, method="")]
        waits_for("try 5 of 8 follows")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_SECONDS) == 143, (tmp_path / "log").read_text()
    assert time.monotonic() - began < HANG_SECONDS / 20
    assert "try 8 of 8 follows" not in (tmp_path / "log").read_text()


def raising(error: Exception) -> Callable[..., bytes]:
    def request(*_: object) -> bytes:
        raise error

    return request
