"""A model that is no longer the one that the state was made for."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import WorkerError
from lockstep.training import preflight
from lockstep.workers.rank import Worker, leave
from tests.thread_workers import run_threads, thread_workers


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))


def make_loader() -> ls.data.Loader:
    return ls.data.Loader(ls.data.Arrays({"x": torch.arange(48.0).view(16, 3) / 24 - 1}), batch_size=4)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def by_the_loop(state: ls.TrainState) -> None:
    ls.train(state, losses, make_loader(), until=ls.Steps(state.step + 1))


def by_the_step(state: ls.TrainState) -> None:
    ls.train_step(state, losses, next(make_loader().batches(range(1), 1)))


in_every_loop = pytest.mark.parametrize("train", [by_the_loop, by_the_step])
Train = Callable[[ls.TrainState], None]


@in_every_loop
def test_a_parameter_frozen_later_is_named(train: Train) -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    state.model[2].bias.requires_grad_(False)
    with pytest.raises(ls.InputError, match=r"frozen, unfrozen or added.*\n.*given: +2.bias\n"):
        train(state)
    assert state.step == 0


@in_every_loop
def test_a_model_frozen_as_a_whole_is_named(train: Train) -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    state.model.requires_grad_(False)
    with pytest.raises(ls.InputError, match=r"frozen, unfrozen or added.*\n.*0.weight, 0.bias, 2.weight, 2.bias\n"):
        train(state)


@in_every_loop
def test_a_replaced_module_is_named(train: Train) -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    state.model[2] = nn.Linear(4, 1)
    with pytest.raises(
        ls.InputError, match=r"Parameters were replaced.*\n.*given: +2.weight, 2.bias\n.*\n.*new TrainSt"
    ):
        train(state)
    assert state.step == 0


@in_every_loop
def test_a_parameter_tied_later_is_named(train: Train) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    model[1].weight = model[0].weight
    with pytest.raises(ls.InputError, match=r"Parameters were replaced.*\n.*given: +1.weight\n"):
        train(state)


def test_a_module_added_later_is_named() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    state.model.add_module("head", nn.Linear(1, 1))
    with pytest.raises(ls.InputError, match=r"frozen, unfrozen or added.*\n.*head.weight, head.bias\n"):
        by_the_loop(state)


def test_a_replaced_module_that_has_buffers_alone_is_named() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    by_the_loop(state)
    state.model[1] = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(ls.InputError, match=r"Buffers were replaced.*\n.*1.running_mean, 1.running_var, 1.num_batches"):
        by_the_loop(state)


def test_new_values_are_no_change() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    by_the_loop(state)
    state.model.load_state_dict(make_model().state_dict())
    state.model.float()
    by_the_loop(state)
    assert state.step == 2


def test_an_error_of_the_users_own_stays_what_it_is() -> None:
    def failing(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        raise RuntimeError("of mine")

    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    with pytest.raises(RuntimeError, match=r"^of mine$"):
        ls.train_step(state, failing, next(make_loader().batches(range(1), 1)))


@in_every_loop
def test_a_model_left_in_evaluation_mode_is_refused(train: Train) -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    train(state)
    state.model.eval()
    with pytest.raises(
        ls.InputError, match=r"in evaluation mode.*\n.*Sequential after model.eval\(\)\n.*\n.*model.train"
    ):
        ls.train_step(state, losses, next(make_loader().batches(range(1), 1)))
    state.model.train()
    train(state)


def test_submodules_may_be_in_evaluation_mode() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    state.model[1].eval()
    by_the_loop(state)
    assert torch.equal(state.model[1].running_mean, torch.zeros(4))


def test_towers_of_two_memory_formats_train_one_state() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 1))
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9))
    images = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 2, 4, 4)}), batch_size=4)
    for step, towers in enumerate((ls.Towers(1), ls.Towers(1, channels_last=True), ls.Towers(1)), 1):
        ls.train(state, losses, images, towers, until=ls.Steps(step))
    assert state.step == 3
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with pytest.raises(ls.InputError, match=r"another memory format or dtype than when their state was made"):
        ls.train(state, losses, images, ls.Towers(1), until=ls.Steps(4))


def test_another_memory_format_before_the_first_step_is_refused() -> None:
    model = nn.Conv2d(2, 4, 3)
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(ls.InputError, match=r"another memory format or dtype than when their state was made"):
        by_the_loop(state)


def told_of_threads(caplog: pytest.LogCaptureFixture, num_threads: int = 2) -> list[str]:
    """The lines about idle threads of a training on so many threads."""
    caplog.set_level(logging.INFO)
    torch.set_num_threads(num_threads)
    for _ in range(2):
        by_the_loop(ls.TrainState(make_model(), ls.optim.SGD(0.1)))
    return [line for line in caplog.messages if line.startswith("idle threads")]


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had chosen how idle threads wait."""
    for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    preflight.tell_idle_threads.cache_clear()


@pytest.mark.usefixtures("_no_waits")
def test_a_plain_script_on_several_threads_is_advised_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.training.preflight.short_waits_here", lambda: {"GOMP_SPINCOUNT": "1000"})
    monkeypatch.setattr("sys.argv", ["nets/mine.py", "--fast"])
    assert told_of_threads(caplog) == [
        "idle threads spin, and beside another busy process a step takes many times as long: start with "
        "GOMP_SPINCOUNT=1000 python nets/mine.py, or with lockstep run, which sets it"
    ]


@pytest.mark.usefixtures("_no_waits")
def test_one_thread_needs_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    assert told_of_threads(caplog, num_threads=1) == []


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"])
def test_who_has_chosen_needs_no_advice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "")
    assert told_of_threads(caplog) == []


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(
    ("environment", "how"),
    [
        ({"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}, "GOMP_SPINCOUNT=1000 KMP_BLOCKTIME=1"),
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=active"),
        ({}, "the default of OpenMP"),
    ],
)
def test_a_launched_worker_tells_what_holds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], how: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ls.join("cpu").pulse, "launched", True)
    assert told_of_threads(caplog) == [f"idle threads wait by {how}"]


def test_workers_of_other_versions_are_refused_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [ls.TrainState(make_model(), ls.optim.SGD(0.1)) for _ in range(3)]  # whose values differ, too
    usual = preflight._versions

    def versions(worker: Worker) -> dict[str, str]:
        return {**usual(worker), **({"python": "3.9.1"} if worker.rank == 2 else {})}

    def start(worker: Worker) -> str:
        with pytest.raises(WorkerError) as caught:
            preflight.check_start(states[worker.rank], worker)
        return str(caught.value)

    monkeypatch.setattr(preflight, "_versions", versions)
    for said in run_threads(start, 3):
        assert "The workers do not agree on versions: worker 2 differs." in said
        assert 'worker 2: python: "3.9.1" instead of "3.' in said


def test_values_that_one_worker_cannot_train_with_are_told_by_all() -> None:
    states = [ls.TrainState(make_model(), ls.optim.SGD(0.1)) for _ in range(3)]
    with torch.no_grad():
        next(states[1].model.parameters())[0] = torch.nan

    def start(worker: Worker) -> str:
        with pytest.raises(ls.InputError) as caught:
            preflight.check_start(states[worker.rank], worker)
        return str(caught.value)

    for said in run_threads(start, 3):
        assert said.startswith("'0.weight' cannot be trained.\n  given:    not finite, on worker 1\n")


def test_hosts_compare_their_files_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, apart = thread_workers(2)[0], thread_workers(2, num_local_workers=1)[0]
    script = tmp_path / "mine.py"
    script.write_text("1")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert list(preflight._versions(here)) == ["python", "torch", "numpy", "lockstep"]
    before = preflight._versions(apart)
    assert list(before)[-2:] == ["the files of lockstep", "the file mine.py"]
    script.write_text("2")
    after = preflight._versions(apart)
    assert [name for name in before if before[name] != after[name]] == ["the file mine.py"]


def test_workers_on_unlike_machines_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(worker: Worker) -> str:
        preflight.check_exact(ls.AllReduce(), worker)
        with pytest.raises(WorkerError) as caught:
            preflight.check_exact(ls.AllReduce(exact=True), worker)
        return str(caught.value)

    kinds = iter(["x86_64 AVX512", "x86_64 AVX2", "x86_64 AVX512"])
    monkeypatch.setattr(preflight, "describe_cpu", lambda: next(kinds))
    for said in run_threads(start, 3):
        assert "The workers do not agree on the machine, on which exact bits depend: worker" in said
        assert 'cpu: "x86_64 AVX2" instead of "x86_64 AVX512"' in said


def test_a_worker_that_has_left_is_not_kept() -> None:
    group = weakref.ref(ls.join("cpu").group)
    by_the_loop(ls.TrainState(make_model(), ls.optim.SGD(0.1)))
    leave()
    gc.collect()
    assert group() is None, "its connections stay open"


@in_every_loop
def test_a_sparse_buffer_is_refused_by_name_before_the_first_step(train: Train) -> None:
    model = make_model()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    with pytest.raises(ls.CheckpointError) as refusal:
        train(state)
    assert refusal.value.what == "The tensor 'adjacency' of 'buffers' is of a kind that cannot be saved."
    assert refusal.value.given == "torch.float32, torch.sparse_coo, on cpu"
    assert state.step == 0
