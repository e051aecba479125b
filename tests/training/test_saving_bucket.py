"""Checkpoints of a script of one's own on a bucket: `ls.save`, `ls.Saver` and `ls.resume` with a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bucket_runs import Machines, new_place, objects, on_each_write
from torch import nn

import lockstep as ls
from lockstep.checkpoints import mirror
from lockstep.checkpoints.fetching import local_folder
from lockstep.checkpoints.mirror import Latest, UploadError
from lockstep.checkpoints.store import Store
from lockstep.errors import WorkdirError
from lockstep.run_files import LATEST
from lockstep.storage.remote_path import RemotePath
from lockstep.training.run_weights import open_weights, run_at_step


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path, monkeypatch)
    found.use("first")
    return found


def script() -> tuple[ls.TrainState, ls.data.Loader]:
    torch.manual_seed(1)
    images = torch.arange(64.0).reshape(16, 4) / 64
    loader = ls.data.Loader(ls.data.Arrays({"image": images}), batch_size=4, seed=0)
    return ls.TrainState(nn.Linear(4, 1), ls.optim.SGD(0.1, momentum=0.9)), loader


def steps_on(place: RemotePath) -> tuple[int, ...]:
    return Latest.decode((place / LATEST).read_bytes()).checkpoints


def train(state: ls.TrainState, loader: ls.data.Loader, until: int) -> None:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        return {"square": model(batch["image"]).square().mean()}

    for _ in ls.train_steps(state, losses, loader, ls.Towers(1), ls.Alone(), until=ls.Steps(until)):
        pass


def test_a_save_is_on_the_bucket_when_it_returns_and_another_machine_resumes(machines: Machines) -> None:
    place, (state, loader) = new_place(), script()
    assert ls.resume(state, loader, str(place)) is None
    train(state, loader, 2)
    ls.save(state, loader, str(place))
    assert steps_on(place) == (2,)
    machines.use("second")
    again, its_loader = script()
    assert ls.resume(again, its_loader, str(place)) == 2
    assert its_loader.position == loader.position == 8
    assert torch.equal(again.parameters["weight"], state.parameters["weight"])
    assert run_at_step(f"{place}@2") == (run_at_step(str(place))[0], 2)
    assert open_weights(run_at_step(str(place))[0]).tensors.keys() == {"weight", "bias"}
    for named in (str(place), f"{place}@2"):
        assert open_weights(named).tensors.keys() == {"weight", "bias"}


def test_a_saver_ends_with_all_of_it_on_the_bucket(machines: Machines) -> None:
    place, (state, loader) = new_place(), script()
    with ls.Saver(str(place)) as saver:
        for step in (1, 2, 3):
            train(state, loader, step)
            saver.save(state, loader)
    assert steps_on(place) == (1, 2, 3)
    train(state, loader, 4)
    saver.save(state, loader)
    saver.wait()
    assert steps_on(place) == (1, 2, 3, 4)


def test_a_save_with_the_bucket_away_is_on_the_disk(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    place, (state, loader) = new_place(), script()
    ls.resume(state, loader, str(place))

    def away(self: RemotePath, *arguments: Any) -> None:
        raise OSError("no route to host")

    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "_call", away)
        with pytest.raises(UploadError, match="not on the bucket as it is here"):
            ls.save(state, loader, str(place))
        assert Store(local_folder(place) / "checkpoints").steps() == [0]
    train(state, loader, 1)
    ls.save(state, loader, str(place))
    assert steps_on(place) == (0, 1)


def test_of_two_machines_that_save_the_one_that_is_behind_ends(machines: Machines) -> None:
    place, (state, loader) = new_place(), script()
    ls.save(state, loader, str(place))
    first = {**mirror._mirrors}
    machines.use("second")
    again, its_loader = script()
    ls.resume(again, its_loader, str(place))
    train(again, its_loader, 2)
    ls.save(again, its_loader, str(place))
    machines.use("first")
    mirror._mirrors.update(first)  # the process that is there still
    train(state, loader, 3)
    for _ in range(2):
        with pytest.raises(WorkdirError, match="has been taken further by another process"):
            ls.save(state, loader, str(place))
    assert steps_on(place) == (0, 2)
    assert ls.resume(state, loader, str(place)) == 2
    train(state, loader, 3)
    ls.save(state, loader, str(place))
    assert steps_on(place) == (0, 2, 3)


def test_an_upload_that_fails_is_an_error_of_the_save(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    place, (state, loader) = new_place(), script()

    def fail() -> None:
        raise OSError("no route to host")

    on_each_write(monkeypatch, fail)
    with pytest.raises(UploadError, match="not on the bucket as it is here"):
        ls.save(state, loader, str(place))
    with pytest.raises(UploadError), ls.Saver(str(place)) as saver:
        saver.save(state, loader)
    assert not objects(place)
