"""The commands on a run that is on a bucket: what they need is brought to this machine first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bucket_runs import Machines, new_place
from bucket_script import train

import lockstep as ls
from lockstep.checkpoints.fetching import fetch_run, local_folder
from lockstep.cli.evaluate import evaluate_as_worker
from lockstep.cli.main import main
from lockstep.cli.shared import run_folder
from lockstep.cli.train import COMMAND, _read, train_as_worker
from lockstep.cli.verify import verify_as_worker
from lockstep.errors import InputError, LockstepError, WorkdirError
from lockstep.storage.remote_path import RemotePath
from lockstep.workers.rank import leave
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
    (status,) = json.loads(capsys.readouterr().out)
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
    (status,) = json.loads(capsys.readouterr().out)
    assert (status["state"], status["host"]) == ("running", "node7")


def test_what_it_did(trained: RemotePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trained), "--to", str(tmp_path / "page.html")]) == 0
    assert str(trained) in capsys.readouterr().out
    assert "mine" in (tmp_path / "page.html").read_text()


def test_its_weights(trained: RemotePath, tmp_path: Path) -> None:
    assert main(["export", f"{trained}@2", "--to", str(tmp_path / "model.safetensors")]) == 0
    assert (tmp_path / "model.safetensors").exists()
    assert main(["export", f"{trained}@1", "--to", str(tmp_path / "other.safetensors")]) == 2


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
    with pytest.raises(InputError, match="is not followed"):
        evaluate_as_worker(["evaluate", nowhere, "--follow"])


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
