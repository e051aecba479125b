"""What a step asks of an accelerator beside the model itself, counted on CPU tensors: launches, and waits.

A ResNet-50's layout has 161 parameters and 53 batch norms: whatever is done for each of them alone shows at once.
"""

from __future__ import annotations

import cProfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any
from weakref import WeakSet

import pytest
import torch
from device_calls import DeviceCalls, accelerator, counted
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.optim import rules
from lockstep.optim.from_torch import FromTorch
from lockstep.optim.gradients import Gradients
from lockstep.optim.optimizers import FTRL, Adadelta
from lockstep.readers.reader import Arrays
from lockstep.training import state as training_state

BATCH_SIZE, CLASSES = 8, 10
RESNET_50, SMALL = (3, 4, 6, 3), (1,)
"""Blocks of each stage."""
MORE_LAUNCHES = 40
MORE_CALLS = 1200
"""Functions called, of Python and C, beyond a loop by hand: the host must keep ahead of a fast device."""


@pytest.fixture(autouse=True)
def _no_other_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that tests before left behind, in a cycle say, would have their buffers kept in each step."""
    monkeypatch.setattr(training_state, "_states", WeakSet())


class Bottleneck(nn.Module):
    """The block of ResNet-50: kernels of 1, 3 and 1 pixels beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, width, 1), nn.ReLU(), *convolution(width, width, 3, stride), nn.ReLU()
        ).extend(convolution(width, 4 * width, 1))
        is_first = inputs != 4 * width
        self.shortcut = nn.Sequential(*convolution(inputs, 4 * width, 1, stride)) if is_first else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


def make_model(blocks: Sequence[int] = RESNET_50) -> nn.Sequential:
    """A residual net, a sixteenth as wide."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers, inputs = [*convolution(3, 4, 3), nn.ReLU()], 4
        for stage, count in enumerate(blocks):
            for index in range(count):
                layers.append(Bottleneck(inputs, 4 << stage, 2 if stage and not index else 1))
                inputs = 16 << stage
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def make_loader() -> Loader:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(32, 3, 8, 8, generator=generator)
    return Loader(Arrays({"image": images, "label": torch.arange(32) % CLASSES}), batch_size=BATCH_SIZE, seed=5)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"])}


def steps_by_hand(towers: ls.Towers) -> Iterator[None]:
    """The plain loop: accumulated gradients, torch's fused SGD, a moving average."""
    model = make_model()
    if towers.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    for batch in ls.batches(make_loader(), towers):
        optimizer.zero_grad()
        for tower in range(towers.count):
            size = BATCH_SIZE // towers.count
            images, labels = (batch[name][tower * size : (tower + 1) * size] for name in ("image", "label"))
            if towers.channels_last:
                images = images.to(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=towers.precision == "bf16"):
                loss = F.cross_entropy(model(images), labels)
            (loss / towers.count).backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 0.01)
        yield


def steps(towers: ls.Towers) -> Iterator[ls.StepReport]:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.99))
    return ls.train_steps(state, losses, make_loader(), towers)


def of_one_step(run: Iterator[object]) -> DeviceCalls:
    """What the fourth step costs: the first ones allocate, and an accelerator reads each of them during the next."""
    for _ in islice(run, 3):
        pass
    with counted() as calls:
        next(run)
    return calls


TOWERS = {
    "one": ls.Towers(1),
    "channels_last in bf16": ls.Towers(1, channels_last=True, precision="bf16"),
    "two in channels_last": ls.Towers(2, channels_last=True),
    "last statistics": ls.Towers(2, batch_norm="last"),
}


@pytest.mark.parametrize(
    "towers",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] * ("channels_last" in name))
        for name, each in TOWERS.items()
    ],
)
def test_a_step_launches_little_beside_its_model(towers: ls.Towers) -> None:
    with accelerator():
        by_hand = of_one_step(steps_by_hand(towers)).num_launches
        ours = of_one_step(steps(towers))
    assert not ours.mixed
    assert ours.num_launches <= by_hand + MORE_LAUNCHES, ours.by_line()


def num_calls_of_one_step(run: Iterator[object]) -> int:
    """How many functions the fourth step calls on the host."""
    for _ in islice(run, 3):
        pass
    with cProfile.Profile() as profiled:
        next(run)
    return sum(entry.callcount for entry in profiled.getstats())


def test_a_step_calls_few_functions_beside_its_model() -> None:
    """A walk through the model's modules, or the handling of each parameter or buffer in Python, shows."""
    with accelerator():
        by_hand = num_calls_of_one_step(steps_by_hand(ls.Towers(1)))
        ours = num_calls_of_one_step(steps(ls.Towers(1)))
    assert ours <= by_hand + MORE_CALLS


def test_a_model_in_16_bits_launches_little_more_and_waits_for_nothing() -> None:
    """Its update is computed in 32 bits; batch norm stays in 32 bits throughout, so that all lists are mixed."""

    def in_16_bits(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"cross_entropy": F.cross_entropy(model(batch["image"].bfloat16()).float(), batch["label"])}

    model = make_model().bfloat16()
    for norm in [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]:
        norm.float()
    with accelerator():
        by_hand = of_one_step(steps_by_hand(ls.Towers(1))).num_launches
        state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.99))
        ours = of_one_step(ls.train_steps(state, in_16_bits, make_loader()))
    assert (ours.waits, ours.mixed) == ([], [])
    assert ours.num_launches <= by_hand + 3 * MORE_LAUNCHES, ours.by_line()


def test_an_update_that_the_device_may_put_back_launches_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def launches() -> int:
        state = ls.TrainState(make_model(), ls.optim.RMSProp(1e-3, momentum=0.9))
        return of_one_step(ls.train_steps(state, losses, make_loader())).num_launches

    with accelerator():
        held_back = launches()
        monkeypatch.setattr(rules, "can_put_back", lambda _: False)
        assert held_back <= launches() + MORE_LAUNCHES


def counts(batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": (batch["label"] >= 0).sum()}


def with_numbers(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**losses(model, batch), "nothing": 0}, {"half": 0.5}


ROWS: dict[str, tuple[ls.Towers, dict[str, Any]]] = {
    "one tower": (ls.Towers(1), {}),
    "four towers": (ls.Towers(4), {}),
    "bf16": (ls.Towers(2, precision="bf16", channels_last=True), {}),
    "fp16": (ls.Towers(2, precision="fp16"), {}),
    **{
        f"statistics {kind}": (ls.Towers(2, batch_norm=kind), {})
        for kind in ("first", "last", "none", "frozen", "sync")
    },
    "L2": (ls.Towers(1), {"regularization": [ls.losses.L2(1e-4)]}),
    "global clip": (ls.Towers(1), {"gradient_transforms": [ls.optim.ClipGlobalNorm(1.0)]}),
    "clip of values": (ls.Towers(1), {"gradient_transforms": [ls.optim.ClipValue(0.1)]}),
    "clip of each": (ls.Towers(1), {"gradient_transforms": [ls.optim.ClipNorm(0.1)]}),
    "adaptive clip": (ls.Towers(1), {"gradient_transforms": [ls.optim.AdaptiveClip(0.01)]}),
    "adaptive clip of towers in fp16": (
        ls.Towers(2, precision="fp16"),
        {"tower_gradient_transforms": [ls.optim.AdaptiveClip(0.01)]},
    ),
    "clip of towers": (ls.Towers(2), {"tower_gradient_transforms": [ls.optim.ClipGlobalNorm(1.0)]}),
    "average": (ls.Towers(1), {"average": ls.optim.MovingAverage(0.99, statistics=True)}),
    "AdamW": (ls.Towers(1), {"optimizer": ls.optim.AdamW(1e-3)}),
    "RMSProp": (ls.Towers(1), {"optimizer": ls.optim.RMSProp(1e-3, momentum=0.9)}),
    "Adadelta": (ls.Towers(1), {"optimizer": Adadelta(1.0)}),
    "FTRL": (ls.Towers(1), {"optimizer": FTRL(0.1)}),
    "LARS": (ls.Towers(1), {"optimizer": ls.optim.LARS(0.1)}),
    "LAMB": (ls.Towers(1), {"optimizer": ls.optim.LAMB(0.1)}),
    "FromTorch, fused": (ls.Towers(1), {"optimizer": FromTorch(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)}),
    "skip": (ls.Towers(1), {"nonfinite": "skip"}),
    "off": (ls.Towers(1), {"nonfinite": "off"}),
    "counts": (ls.Towers(1), {"counts": counts}),
    "counts of four towers": (ls.Towers(4), {"counts": counts}),
    "plain numbers": (ls.Towers(2), {"losses": with_numbers}),
}


COMMON = {
    *("one tower", "four towers", "fp16", "statistics last", "RMSProp", "global clip", "skip"),
    *("adaptive clip of towers in fp16", "counts of four towers"),
}


@pytest.mark.parametrize(
    ("towers", "options"),
    [pytest.param(*row, id=name, marks=[pytest.mark.slow] * (name not in COMMON)) for name, row in ROWS.items()],
)
def test_a_step_is_read_while_the_next_one_is_computed(towers: ls.Towers, options: dict[str, Any]) -> None:
    options = {"optimizer": ls.optim.SGD(0.1, momentum=0.9), "losses": losses, "counts": None, **options}
    function, counted_by = options.pop("losses"), options.pop("counts")
    with accelerator():
        state, loader = ls.TrainState(make_model(SMALL), **options), make_loader()
        in_a_run = of_one_step(ls.train_steps(state, function, loader, towers, counts=counted_by))
        alone = of_one_step(
            ls.train_step(state, function, batch, towers, counts=counted_by) for batch in ls.batches(loader, towers)
        )
    assert (in_a_run.waits, in_a_run.mixed) == ([], [])
    assert [call.line.partition(":")[0] for call in alone.waits] == ["tensors.py"]
    assert alone.mixed == []


def left_alone(gradients: Gradients, step: int) -> None:
    """A transform of the user's own."""


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"optimizer": FromTorch(torch.optim.SGD, lr=0.1)}, "no flag on the device holds back SGD of torch kernels"),
        ({"gradient_transforms": [left_alone]}, "left_alone reads the gradients"),
    ],
    ids=["FromTorch", "function"],
)
def test_what_cannot_be_held_back_waits_once_and_says_so(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with accelerator():
        state = ls.TrainState(make_model(SMALL), **{"optimizer": ls.optim.SGD(0.1), **options})
        calls = of_one_step(ls.train_steps(state, losses, make_loader()))
    assert [call.line.partition(":")[0] for call in calls.waits] == ["tensors.py"]
    assert f"each step waits for the device before its update: {why}" in caplog.text


def waits_among_workers(has_unused: bool) -> tuple[int, int]:
    """The waits of a step over torch.distributed, and its lists of two dtypes; some parameters may have no gradient."""
    options: Any = {"regularization": [ls.losses.L2(1e-4)], "gradient_transforms": [ls.optim.ClipGlobalNorm(1.0)]}
    with accelerator():
        model = make_model(SMALL)
        if has_unused:
            model.register_module("head", nn.Linear(3, 1))
            model.forward = lambda x: nn.Sequential(*list(model)[:-1])(x)  # type: ignore[method-assign]
        state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), **options)
        exchange = ls.AllReduce(transport="gloo")
        calls = of_one_step(ls.train_steps(state, losses, make_loader(), ls.Towers(4), exchange, counts=counts))
    return len(calls.waits), len(calls.mixed)


@pytest.mark.process
@pytest.mark.parametrize(
    "has_unused", [pytest.param(False, marks=pytest.mark.slow), True], ids=["all are used", "some have no gradient"]
)
def test_a_step_over_collectives_waits_for_nothing(has_unused: bool, run_workers: Callable[..., list[Any]]) -> None:
    assert run_workers(waits_among_workers, 2, has_unused) == [(0, 0), (0, 0)]


def test_an_overflow_in_fp16_is_explained_in_one_read_more() -> None:
    def overflowing(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {name: loss * 1e38 for name, loss in losses(model, batch).items()}

    towers = ls.Towers(1, precision="fp16")
    with accelerator():
        state = ls.TrainState(make_model(SMALL), ls.optim.SGD(0.1))
        calls = of_one_step(
            ls.train_step(state, overflowing, batch, towers) for batch in ls.batches(make_loader(), towers)
        )
    assert state.loss_scale.value == 2.0**12
    assert state.num_skipped == 0
    assert [call.line.partition(":")[0] for call in calls.waits] == ["tensors.py", "tensors.py"]
