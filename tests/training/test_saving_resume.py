"""Runs of a script whose data changes between two starts, or differs between workers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
import lockstep.training.saving as resuming
from lockstep.errors import NotFoundError
from tests.thread_workers import thread_workers


def write(folder: Path, *shards: int) -> Path:
    """A shard of four examples for each of the numbers, by which they differ."""
    for place, seed in enumerate(shards):
        pixels = np.random.default_rng(seed).integers(0, 256, (4, 3), dtype=np.uint8)
        examples = [ls.records.serialize_example({"x": [row.tobytes()]}) for row in pixels]
        ls.records.write_records(folder / f"train-{place:05d}-of-{len(shards):05d}", examples)
    return folder


def make(folder: Path, **more: Any) -> tuple[ls.TrainState, ls.data.Loader]:
    reader = ls.data.Records(folder / "train-*", {"x": ls.records.Pixels("x", (3,))})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
    return ls.TrainState(model, ls.optim.SGD(0.01), **more), ls.data.Loader(reader, batch_size=4)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"] / 255).square().mean()}


def start(folder: Path, workdir: Path, steps: int, **more: bool) -> int | None:
    """Train to a step from where the run stands; returns where it was resumed."""
    state, loader = make(folder)
    resumed = ls.resume(state, loader, workdir, **more)
    ls.train(state, losses, loader, until=ls.Steps(steps))
    ls.save(state, loader, workdir)
    return resumed


def test_shards_that_changed_places_end_a_resume_and_may_be_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, workdir = write(tmp_path / "data", 1, 2, 3), tmp_path / "run"
    assert start(data, workdir, 2) is None
    assert start(data, workdir, 3) == 2
    write(data, 1, 3, 2)
    with pytest.raises(ls.InputError, match=r"training data is not what it was") as caught:
        start(data, workdir, 4)
    lines = str(caught.value.given).split("; ")
    assert [line.split(" was ")[0] for line in lines] == ["train-00001-of-00003", "train-00002-of-00003"]
    assert start(data, workdir, 4, accept_data_change=True) == 3
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(" was ")[0] for line in warned] == [
        "changed in the training data since step 3: train-00001-of-00003",
        "changed in the training data since step 3: train-00002-of-00003",
    ]
    assert start(data, workdir, 5) == 4, "what was accepted is the data of the run"


def test_other_options_of_the_reader_end_a_resume_and_may_be_accepted(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 1, 2)

    def begin(columns: int, **more: bool) -> None:
        reader = ls.data.Records(data / "train-*", {"x": ls.records.Pixels("x", (3, columns))})
        state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.01))
        loader = ls.data.Loader(reader, batch_size=4)
        ls.resume(state, loader, tmp_path / "run", **more)
        ls.save(state, loader, tmp_path / "run")

    begin(1)
    begin(1)
    with pytest.raises(ls.InputError, match=r"training data is not what it was") as caught:
        begin(2)
    assert caught.value.given == "options of Records: fields['x'].shape.1: saved 1, given 2"
    begin(2, accept_data_change=True)


def test_a_run_goes_back_to_a_checkpoint_of_the_data_before(tmp_path: Path) -> None:
    data, workdir = write(tmp_path / "data", 1, 2), tmp_path / "run"
    start(data, workdir, 2)
    write(data, 2, 1)
    state, loader = make(data, nonfinite="rollback")
    ls.resume(state, loader, workdir, accept_data_change=True)
    with pytest.raises(ls.NonFiniteError) as caught:
        ls.train(state, lambda model, batch: {"nan": model(batch["x"] / 255).mean() * torch.nan}, loader)
    assert ls.rollback(state, loader, workdir, caught.value) == 2


def on_a_worker(folder: Path, workdir: Path, then: str) -> str:
    """What a worker says whose data is in a folder of its own, when it resumes or begins to train."""
    state, loader = make(folder / f"worker {ls.join().rank}")
    try:
        if then == "resume":
            ls.resume(state, loader, workdir)
        else:
            ls.train(state, losses, loader, ls.Towers(2), until=ls.Steps(1))
    except ls.WorkerError as error:
        return str(error)
    return ""


@pytest.mark.process
@pytest.mark.parametrize("then", ["resume", "train"])
def test_a_worker_with_other_data_is_named(then: str, tmp_path: Path, run_workers: Callable[..., list[Any]]) -> None:
    write(tmp_path / "worker 0", 1, 2)
    write(tmp_path / "worker 1", 1, 3)
    said = run_workers(on_a_worker, 2, tmp_path, tmp_path / "run", then)
    assert len({*said}) == 1
    assert said[0].startswith("The workers do not agree on the training data: worker 1 differs.\n")
    assert "worker 1: [1]: " in said[0]
    assert said[0].count('"train-00001-of-00002: 4 records, ') == 2


def until_another_step(folder: Path) -> str:
    """What a worker says whose training ends later than that of the others."""
    state, loader = make(folder / f"worker {ls.join().rank}")
    try:
        ls.train(state, losses, loader, ls.Towers(3), until=ls.Steps(15 if ls.join().rank == 1 else 10))
    except ls.WorkerError as error:
        return f"{error} at step {state.step}"
    return ""


@pytest.mark.process
def test_a_worker_that_is_to_train_for_longer_is_named_before_the_first_step(
    tmp_path: Path, run_workers: Callable[..., list[Any]]
) -> None:
    for rank in range(3):
        write(tmp_path / f"worker {rank}", 1, 2)
    said = run_workers(until_another_step, 3, tmp_path)
    assert (
        said
        == [
            "The workers do not agree on where the training ends (until): worker 1 differs.\n"
            '  given:    worker 1: "Steps(count=15)" instead of "Steps(count=10)"\n'
            "  expected: the same as on worker 0\n"
            "  hint:     start all workers with the same code, arguments, seed, files and versions at step 0"
        ]
        * 3
    )


@pytest.mark.process
def test_workers_with_copies_of_the_same_data_train(tmp_path: Path, run_workers: Callable[..., list[Any]]) -> None:
    for rank in range(2):
        write(tmp_path / f"worker {rank}", 1, 2)
    assert run_workers(on_a_worker, 2, tmp_path, tmp_path / "run", "train") == ["", ""]


def test_a_workdir_that_only_the_chief_sees_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts that share no file system."""
    worker = thread_workers(2)[1]
    monkeypatch.setattr(worker.group, "broadcast", lambda value: [7, False])  # the step that the chief has found
    monkeypatch.setattr(resuming, "join", lambda: worker)
    with pytest.raises(
        NotFoundError, match="worker 1 does not see the checkpoint that worker 0 goes on from"
    ) as caught:
        resuming.read_checkpoint(tmp_path)
    assert caught.value.given == f"no {tmp_path}/checkpoints/step-00000007"
    assert "all hosts mount" in caught.value.hint


def forge(checkpoint: Path, text: str) -> None:
    """Give a checkpoint other values, with the hashes that fit them."""
    (checkpoint / "values.json").write_text(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    (entry,) = [file for file in manifest["files"] if file["name"] == "values.json"]
    entry |= {"size_bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(compact.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def with_value(place: str, value: Any) -> Callable[[dict[str, Any]], str]:
    def changed(values: dict[str, Any]) -> str:
        *outer, last = place.split("/")
        inner = values
        for name in outer:
            inner = inner[name]
        inner[last] = value
        return json.dumps(values)

    return changed


@pytest.mark.parametrize(
    ("change", "given"),
    [
        *((with_value("loader/position", value), "position") for value in ("x", None, 1.5, -5, 1e30)),
        *((with_value("states//step", value), "step") for value in (-1, 1e30, "x", True)),
        (with_value("states//step", 1), "states at step 1"),
        (with_value("states//num_refused", None), "num_refused of the state is NoneType"),
        (with_value("states/", None), "the state is NoneType"),
        (with_value("states//extra", 5), "extra is int"),
        (with_value("frozen", 5), "frozen: 5"),
        (with_value("frozen", {"parameters": 5}), "frozen: {'parameters': 5}"),
        (with_value("frozen", {"parameters": [[5]]}), "frozen: {'parameters': [[5]]}"),
        (with_value("trained_with", 5), "trained_with is int"),
        (with_value("trained_with/states", 5), "states is int"),
        (with_value("trained_with/states/", 5), "what it was trained with is int"),
        (with_value("trained_with/loader", 5), "loader is int"),
        (with_value("loader/quarantine", {"9" * 5000: "x"}), "quarantine["),
        (with_value("states//loss_scale", {}), "value of loss_scale"),
        (with_value("states//smoothed/averages", {"square": "x"}), "average of 'square'"),
        (with_value("states", {}), "states at step none"),
        (with_value("loader", []), "loader is list"),
        (lambda values: json.dumps({"states": values["states"]}), "loader is NoneType"),
        (lambda _: '{"a":' + "[" * 200_000 + "]" * 200_000 + "}", "content that cannot be read"),
    ],
)
def test_values_that_no_run_has_saved_are_damage_whatever_their_hash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], str], given: str
) -> None:
    data, workdir = write(tmp_path / "data", 1), tmp_path / "run"
    start(data, workdir, 1)
    start(data, workdir, 2)
    forged = workdir / "checkpoints/step-00000002"
    forge(forged, change(json.loads((forged / "values.json").read_text())))
    caplog.clear()
    state, loader = make(data)
    assert ls.resume(state, loader, workdir) == 1
    assert (state.step, loader.position) == (1, 4)
    (warning,) = [each for each in caplog.messages if "damaged" in each]
    assert warning.startswith(f"{forged / 'values.json'} is damaged. Given: ")
    assert given in warning
    with pytest.raises(ls.CheckpointError, match=r"values.json is damaged"):
        resuming.read_checkpoint(workdir, 2)
