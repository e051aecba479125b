"""Flags of torch's backends: set on CUDA devices alone, put back, and deterministic where the exchange is exact."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.backends import cuda, cudnn

import lockstep as ls
from lockstep.towers import backends, hosting
from lockstep.towers.backends import backends_of_steps, chosen_by_timing
from lockstep.towers.towers import Towers
from lockstep.training import preflight

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DEFAULTS = {
    "cudnn_benchmark": False,
    "conv_tf32": True,
    "float32_matmul_precision": "highest",
    "cudnn_deterministic": False,
    "deterministic": 0,
    "fill_uninitialized_memory": True,
}
EXACT = {
    "cudnn_benchmark": False,
    "conv_tf32": False,
    "float32_matmul_precision": "highest",
    "cudnn_deterministic": True,
    "deterministic": 2,
    "fill_uninitialized_memory": False,
}


def flags() -> dict[str, Any]:
    return {name: flag.get() for name, flag in backends._FLAGS.items()}


@pytest.fixture(autouse=True)
def _cublas_is_told_and_flags_are_as_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert flags() == DEFAULTS
    yield
    assert flags() == DEFAULTS
    # The older flags of torch, which fail where they disagree with the newer.
    assert (cudnn.allow_tf32, cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()) == (True, False, "highest")


@pytest.fixture
def software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "describe_accelerator", lambda device: {"gpu": "Accelerator X"})


@pytest.mark.parametrize(
    ("towers", "changed"),
    [
        (Towers(), {}),
        (Towers(cudnn_benchmark=True), {"cudnn_benchmark": True}),
        (Towers(conv_tf32=False), {"conv_tf32": False}),
        (Towers(conv_tf32=True, matmul_tf32=True), {"float32_matmul_precision": "high"}),
    ],
)
def test_the_flags_of_the_towers_hold_within(towers: Towers, changed: dict[str, Any]) -> None:
    with backends_of_steps(towers, GPU, exact=False):
        assert flags() == DEFAULTS | changed
        assert cuda.matmul.allow_tf32 == (
            torch.get_float32_matmul_precision() == "high"
        )  # which disagreeing flags refuse


def test_backend_flags_are_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), backends_of_steps(Towers(matmul_tf32=True), GPU, exact=True):
        1 / 0  # noqa: B018


def test_an_exact_exchange_has_deterministic_algorithms_and_no_tf32() -> None:
    with backends_of_steps(Towers(), GPU, exact=True):
        assert flags() == EXACT
    with backends_of_steps(Towers(conv_tf32=True), GPU, exact=True):
        assert flags() == EXACT | {"conv_tf32": True}


def test_a_cpu_has_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    on_cpu = backends_of_steps(Towers(cudnn_benchmark=True, conv_tf32=False), CPU, exact=True)
    with on_cpu:
        assert flags() == DEFAULTS
    assert on_cpu.described() == {}


def test_off_is_off_where_all_of_torch_has_tf32() -> None:
    torch.backends.fp32_precision = "tf32"
    try:
        with backends_of_steps(Towers(conv_tf32=False, matmul_tf32=False), GPU, exact=False):
            assert (cudnn.conv.fp32_precision, cuda.matmul.fp32_precision) == ("ieee", "ieee")  # type: ignore[attr-defined]
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_precision_that_the_user_has_set_is_back_afterwards(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        with backends_of_steps(Towers(), GPU, exact=True):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_so_is_one_set_by_the_newer_flag_alone() -> None:
    cuda.matmul.fp32_precision = "tf32"
    try:
        with backends_of_steps(Towers(matmul_tf32=False), GPU, exact=False):
            assert cuda.matmul.fp32_precision == "ieee"
        assert cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("software")
def test_described_is_what_holds_within() -> None:
    assert backends_of_steps(Towers(matmul_tf32=True), GPU, exact=False).described() == {
        "gpu": "Accelerator X",
        "cudnn_benchmark": "off",
        "conv_tf32": "on",
        "float32_matmul_precision": "high",
        "cudnn_deterministic": "off",
        "deterministic": "off",
    }
    assert backends_of_steps(Towers(), GPU, exact=True).described()["deterministic"] == "on"


@pytest.mark.parametrize(("config", "given"), [(None, "no CUBLAS_WORKSPACE_CONFIG"), (":16:1", "..._CONFIG=:16:1")])
def test_exact_is_refused_where_cublas_was_not_told_in_time(
    monkeypatch: pytest.MonkeyPatch, config: str | None, given: str
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    if config:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    with pytest.raises(ls.InputError) as caught:
        backends_of_steps(Towers(), GPU, exact=True)
    assert str(caught.value.given).endswith(given.removeprefix("..."))
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment; lockstep train and lockstep run do" in caught.value.hint
    backends_of_steps(Towers(), GPU, exact=False)


@pytest.mark.parametrize("flag", ["cudnn_benchmark", "compile"])
def test_exact_is_refused_where_kernels_are_chosen_by_timing(flag: str) -> None:
    with pytest.raises(ls.InputError, match="not chosen by timing") as caught:
        backends_of_steps(Towers(**{flag: True}), GPU, exact=True)
    assert flag in caught.value.hint


def losses(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    outputs = model(batch["image"])
    # Refused in deterministic mode, on a CPU too.
    outputs.detach().clone().put_(torch.tensor([0]), torch.ones(1))
    return {"loss": outputs.square().mean()}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, software: None) -> None:
    """Let the steps of a CPU have the flags of a GPU."""
    for module in (hosting, preflight):
        monkeypatch.setattr(
            module, "backends_of_steps", lambda towers, device, exact: backends_of_steps(towers, GPU, exact=exact)
        )


def make_run() -> tuple[ls.TrainState, ls.data.Loader]:
    images = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    state = ls.TrainState(torch.nn.Linear(4, 2), ls.optim.SGD(lr=0.1))
    return state, ls.data.Loader(ls.data.Arrays({"image": images}), batch_size=4)


def test_what_lets_a_process_time_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = Towers(cudnn_benchmark=True, compile=True)
    assert chosen_by_timing(towers, GPU, exact=False) == ["cudnn_benchmark", "compile"]
    assert chosen_by_timing(towers, CPU, exact=False) == chosen_by_timing(Towers(), GPU, exact=False) == []
    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "benchmark", True)  # a script's own, which holds where the towers say nothing
        assert chosen_by_timing(Towers(), GPU, exact=False) == ["cudnn_benchmark"]
        assert chosen_by_timing(Towers(), GPU, exact=True) == []


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_names_an_operator_that_is_not_deterministic() -> None:
    state, loader = make_run()
    before = state.parameters["weight"].detach().clone()
    with pytest.raises(ls.InputError) as caught:
        ls.train(state, losses, loader, exchange=ls.AllReduce(exact=True), until=ls.Steps(1))
    assert caught.value.what == "The operator put_ has no deterministic algorithm on this device."
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert state.step == 0
    assert torch.equal(state.parameters["weight"], before)


def test_what_the_user_has_asked_torch_for_is_said_by_torch() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have"), backends_of_steps(Towers(), GPU, exact=False):
            torch.ones(2).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_that_is_not_exact_takes_any_operator_and_its_towers_flags() -> None:
    seen = []

    def watched(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        seen.append(flags())
        return losses(model, batch)

    state, loader = make_run()
    ls.train(state, watched, loader, Towers(matmul_tf32=True), until=ls.Steps(1))
    assert seen == [DEFAULTS | {"float32_matmul_precision": "high"}]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("exact", [True, False])
def test_a_script_that_resumes_on_another_gpu_is_refused_where_it_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exact: bool
) -> None:
    def square(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        return {"loss": model(batch["image"]).square().mean()}

    def train(steps: int) -> None:
        ls.train(state, square, loader, exchange=ls.AllReduce(exact=exact), until=ls.Steps(steps))

    caplog.set_level("INFO", "lockstep")
    state, loader = make_run()
    train(1)
    ls.save(state, loader, tmp_path)
    monkeypatch.setattr(backends, "describe_accelerator", lambda device: {"gpu": "Accelerator Y"})
    state, loader = make_run()
    ls.resume(state, loader, tmp_path)
    said = "accelerator['gpu']: saved 'Accelerator X', given 'Accelerator Y'"
    if exact:
        with pytest.raises(ls.InputError, match=re.escape(said)):
            train(2)
    else:
        train(2)
        assert f"changed since the checkpoint: {said}" in caplog.messages
