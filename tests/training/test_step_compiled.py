"""Towers that run through torch.compile: one compilation, the plain names, the plain model's training."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_calls import accelerator
from torch import Tensor, nn
from torch._dynamo import config, lookup_backend, reset
from torch._dynamo.utils import counters
from torch.nn import functional as F

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.exchange.tree import TreeSum
from lockstep.readers.reader import Arrays
from lockstep.towers import backward, hosting

NUM_STEPS = 5
BAD_POSITION = 24


def make_loader() -> Loader:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 6, 6, generator=generator)
    return Loader(Arrays({"image": images, "label": torch.arange(64) % 5}), batch_size=8, seed=5)


def make_model(*, dropout: float = 0.2) -> nn.Sequential:
    """Buffers, random numbers, and a kernel of one pixel, whose strides channels_last leaves open."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout), nn.Conv2d(8, 4, 1)]
        return nn.Sequential(*body, nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def make_state(**options: Any) -> ls.TrainState:
    model = make_model(dropout=options.pop("dropout", 0.2))
    return ls.TrainState(model, ls.optim.SGD(0.05, momentum=0.9), average=ls.optim.MovingAverage(0.9), **options)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(batch["image"]), batch["label"])
    return {"cross_entropy": loss * torch.nan if batch.position == BAD_POSITION else loss}


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"top1": (model(batch["image"]).argmax(1) == batch["label"]).float()}


@pytest.fixture(autouse=True)
def _a_second_compilation_is_refused() -> Iterator[None]:
    """For other strides, buffers or contexts than those of the first one, it raises."""
    reset()
    counters.clear()
    with config.patch(error_on_recompile=True):
        yield
    reset()


@pytest.mark.parametrize(
    ("towers", "options"),
    [
        (ls.Towers(1, compile=True), {}),
        (ls.Towers(4, compile=True, channels_last=True), {}),
        (ls.Towers(2, compile=True, channels_last=True, precision="bf16"), {}),
        (ls.Towers(2, compile=True, precision="fp16"), {}),
        (ls.Towers(2, compile=True, batch_norm="last"), {}),
        (ls.Towers(2, compile=True, batch_norm="frozen"), {}),
        (ls.Towers(2, compile=True), {"frozen": ["^0", "^1"], "freeze_statistics": True}),
    ],
    ids=["one tower", "channels_last", "bf16", "fp16", "last statistics", "frozen statistics", "frozen layers"],
)
@pytest.mark.parametrize("device", [nullcontext, accelerator], ids=["cpu", "accelerator"])
def test_a_run_compiles_once_and_saves_plain_names(
    towers: ls.Towers,
    options: Any,
    device: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What makes torch compile again is the same for every backend: this one costs no C++ compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with device():
        state = make_state(nonfinite="skip", **options)
        names = list(state.model.state_dict())
        reports = ls.train_steps(state, losses, make_loader(), towers, until=ls.Steps(NUM_STEPS))
        for report in reports:
            if report.step == 2:
                ls.evaluate(state, score, make_loader())
                state.load(state.sections(), state.values())
    assert (state.step, state.num_skipped) == (NUM_STEPS, 1)
    assert counters["stats"]["unique_graphs"] == 1
    sections = state.sections()
    assert sorted([*sections["parameters"], *sections["buffers"]]) == sorted(names)
    assert list(sections["average"]) == list(state.parameters)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_trains_as_the_plain_one_does() -> None:
    states = [make_state(dropout=0.0) for _ in range(2)]
    for state, compiled in zip(states, (False, True), strict=True):
        towers = ls.Towers(2, compile=compiled, channels_last=True)
        ls.train(state, losses, make_loader(), towers, until=ls.Steps(3))
    plain, compiled_too = (dict(state.sections()) for state in states)
    torch.testing.assert_close(compiled_too, plain, rtol=1e-3, atol=1e-5)


NO_CPP = shutil.which("c++") is None and shutil.which("g++") is None
CPP = [pytest.mark.slow, pytest.mark.process, pytest.mark.skipif(NO_CPP, reason="there is no C++ compiler")]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=CPP)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_in_buckets_a_backward_pass_gives_gradients_on_its_way(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch cuts a net before a backend sees its parts: without C++ the same is known at the same time."""
    monkeypatch.setattr(hosting, "_compiler_in_buckets", hosting._compiler_in_buckets.__wrapped__)
    if backend != "inductor":
        compiler = lookup_backend(backend)
        without_options = {"inductor": lambda graph, inputs, **_options: compiler(graph, inputs)}
        monkeypatch.setattr(
            torch._dynamo, "lookup_backend", lambda name: without_options.get(name) or lookup_backend(name)
        )
    model = nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 600), nn.Linear(600, 600), nn.BatchNorm1d(600))
    state, x = copy.deepcopy(model.state_dict()), torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    model.load_state_dict(state)  # the running statistics, too
    parameters, passes, known = tuple(model.parameters()), [], {}
    total = hosting.compiled(model, "default", in_buckets=True)(x).square().sum()
    for node in backward.nodes(total):
        if node.name() == "CompiledFunctionBackward":
            node.register_hook(lambda *_: passes.append(len(known)))
    hooks = {index: partial(known.__setitem__, index) for index in range(len(parameters))}
    found = backward.hooked_gradients(total, parameters, torch.ones(()), hooks)
    assert passes == [0, 4], "those of the last layers are known before the second part begins"
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_it_is_compiled_in_buckets_where_gradients_are_sent_early(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(hosting, "compiled", lambda model, mode, *, in_buckets: calls.append(in_buckets) or model)

    class Sending:
        def connect(self, worker: object, num_towers: int) -> Any:
            return SimpleNamespace(total=TreeSum.total, close=lambda: None, start=lambda sums, last: {})

    for exchange in (ls.Alone(), Sending()):
        ls.train_step(make_state(), losses, next(iter(ls.batches(make_loader()))), ls.Towers(compile=True), exchange)
    assert calls == [False, True]


def test_a_compiled_model_keeps_torchs_batch_norm() -> None:
    with pytest.raises(ls.InputError, match=r"compiled model keeps torch's own batch norm.*\n.*sync"):
        ls.Towers(2, compile=True, batch_norm="sync")


def test_its_mode_is_torchs_and_graphs_may_take_memory_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, marks = [], []

    def compiled(model: nn.Module, *, mode: str) -> nn.Module:
        modes.append(mode)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(len(modes)))
    for device, mode in ((nullcontext, "reduce-overhead"), (accelerator, "default"), (accelerator, "max-autotune")):
        with device():
            towers = ls.Towers(2, compile=True, compile_mode=mode)
            ls.train(make_state(), losses, make_loader(), towers, until=ls.Steps(3))
    assert modes == ["reduce-overhead", "default", "max-autotune"]
    assert marks == [3] * 3


def test_a_mode_without_a_compiled_model_is_refused() -> None:
    with pytest.raises(ls.InputError, match="the model is not compiled"):
        ls.Towers(2, compile_mode="reduce-overhead")
