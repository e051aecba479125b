from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_calls import accelerator, counted
from torch import Tensor, nn
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep import tensors
from lockstep.checkpoints.background import BackgroundWriter
from lockstep.checkpoints.store import Store
from lockstep.errors import CheckpointError
from lockstep.training.state import before_change

BATCH_SIZE, STEPS = 8, 6


def make() -> tuple[ls.TrainState, ls.data.Loader]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 400), nn.BatchNorm1d(400), nn.Dropout(0.3), nn.Linear(400, 1))
    state = ls.TrainState(model, ls.optim.SGD(1e-3, momentum=0.9), average=ls.optim.MovingAverage(0.9))
    fields = {"x": torch.randn(64, 5, generator=torch.Generator().manual_seed(1))}
    return state, ls.data.Loader(ls.data.Arrays(fields), batch_size=BATCH_SIZE)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def save_each_step(workdir: Path, *, in_background: bool) -> None:
    torch.set_num_threads(1)
    (state, loader), store = make(), Store(workdir / "checkpoints")
    with ls.Saver(store) as saver:
        for _ in ls.train_steps(state, losses, loader, ls.Towers(2), until=ls.Steps(STEPS)):
            if in_background:
                saver.save(state, loader)
            else:
                ls.save(state, loader, store)


def saved(workdir: Path, *, in_background: bool) -> dict[str, bytes]:
    """The files of the checkpoints of a run that saves after each step."""
    save_each_step(workdir, in_background=in_background)
    files = sorted((workdir / "checkpoints").glob("step-*/*[!t].[sj]*"))
    return {path.relative_to(workdir).as_posix(): path.read_bytes() for path in files if "manifest" not in path.name}


def test_a_background_save_writes_what_a_waiting_save_writes(tmp_path: Path) -> None:
    assert saved(tmp_path / "one", in_background=True) == saved(tmp_path / "other", in_background=False)


def test_a_save_on_an_accelerator_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = saved(tmp_path / "one", in_background=True)
    monkeypatch.setattr(tensors, "READ_AT_ONCE", frozenset())
    assert saved(tmp_path / "other", in_background=True) == on_cpu


def test_a_save_on_an_accelerator_waits_for_nothing(tmp_path: Path) -> None:
    with accelerator(), ls.Saver(tmp_path) as saver:
        state, loader = make()
        for _ in ls.train_steps(state, losses, loader, until=ls.Steps(2)):
            saver.wait()
            with counted() as calls:
                saver.save(state, loader)
                for check in before_change.copy():
                    check()
    assert calls.waits == calls.mixed == []
    assert calls.num_launches == 2  # float32, and int64 of the batch norm


def on_two(workdir: Path) -> list[int]:
    save_each_step(workdir, in_background=True)
    return Store(workdir / "checkpoints").steps()


@pytest.mark.process
def test_on_two_workers_the_chief_alone_saves(tmp_path: Path, run_workers: Callable[..., list[Any]]) -> None:
    chief, _ = run_workers(on_two, 2, tmp_path)
    assert chief == [2, 3, 4, 5, 6]


class Slow(Store):
    """Writes nothing before it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def write(self, *arguments: Any, **more: Any) -> Path:
        self.may_write.wait(HANG_SECONDS)
        return super().write(*arguments, **more)


def test_steps_are_made_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    state, loader = make()
    store = Slow(tmp_path)
    saver = ls.Saver(store)
    saver.save(state, loader)
    before = {name: tensor.clone() for name, tensor in state.sections()["parameters"].items()}
    ls.train(state, losses, loader, until=ls.Steps(3))
    store.may_write.set()
    saver.wait()
    checkpoint = store.read()
    assert checkpoint is not None
    assert checkpoint.step == 0
    assert all(torch.equal(checkpoint.tensors["parameters"][name], tensor) for name, tensor in before.items())


def test_a_save_that_fails_ends_a_later_step(tmp_path: Path) -> None:
    state, loader = make()
    (tmp_path / "checkpoints").write_text("in the way")
    saver = ls.Saver(tmp_path)
    saver.save(state, loader)
    with pytest.raises(CheckpointError, match="The checkpoint of step 0 cannot be written"):
        for _ in ls.train_steps(state, losses, loader, until=ls.Steps(10_000)):
            pass


def test_resuming_waits_for_the_checkpoint_in_flight(tmp_path: Path) -> None:
    state, loader = make()
    store = Slow(tmp_path)
    ls.train(state, losses, loader, until=ls.Steps(2))
    ls.Saver(store).save(state, loader)
    threading.Timer(0.05, store.may_write.set).start()
    assert ls.resume(state, loader, store) == 2


def test_an_error_within_is_not_hidden_by_that_of_the_checkpoint(tmp_path: Path) -> None:
    state, loader = make()
    (tmp_path / "checkpoints").write_text("in the way")

    def fail() -> None:
        with ls.Saver(tmp_path) as saver:
            saver.save(state, loader)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        fail()
    assert caught.value.__notes__[0].startswith("Besides: The checkpoint of step 0 cannot be written")


def change_data(weight: Tensor) -> None:
    weight.data.add_(1)


def change_array(weight: Tensor) -> None:
    weight.detach().numpy()[...] += 1


def change_in_place(weight: Tensor) -> None:
    weight.mul_(2)


@pytest.mark.parametrize("change", [change_data, change_array, change_in_place])
def test_what_the_loop_body_writes_after_a_save_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None]
) -> None:
    """However late the thread that writes gets to work."""
    may_begin, write = threading.Event(), BackgroundWriter._write
    monkeypatch.setattr(
        BackgroundWriter, "_write", lambda *arguments: may_begin.wait(HANG_SECONDS) and write(*arguments)
    )
    state, loader = make()
    ls.train(state, losses, loader, until=ls.Steps(1))
    wanted = {
        section: {name: tensor.clone() for name, tensor in members.items()}
        for section, members in state.sections().items()
    }
    with ls.Saver(tmp_path) as saver:
        saver.save(state, loader)
        for members in state.sections().values():
            for tensor in members.values():
                change(tensor)
        may_begin.set()
    found = Store(tmp_path / "checkpoints").read()
    assert found is not None
    for section, members in wanted.items():
        for name, tensor in members.items():
            assert torch.equal(found.tensors[section][name], tensor), f"{section}: {name}"


def test_a_save_that_waits_may_follow_one_that_does_not(tmp_path: Path) -> None:
    state, loader = make()
    for _ in range(10):
        ls.Saver(tmp_path).save(state, loader)
        ls.save(state, loader, tmp_path)
        assert Store(tmp_path / "checkpoints").read() is not None


def test_weights_that_are_changed_before_the_first_step_are_saved_again(tmp_path: Path) -> None:
    state, loader = make()
    ls.save(state, loader, tmp_path)
    ls.warm_start(state, {name: torch.ones_like(t) for name, t in state.model.state_dict().items()})
    ls.save(state, loader, tmp_path)
    found = Store(tmp_path / "checkpoints").read()
    assert found is not None
    assert all((tensor == 1).all() for tensor in found.tensors["parameters"].values())
