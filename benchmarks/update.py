"""Our update against the same by hand in PyTorch: clip, finite check, optimizer and moving average; and each alone.

    python benchmarks/update.py [--rounds 11] [--quick]

The parameters are those of a ResNet-101 of three quarters of its width: 25 million in 314 tensors. Both sides get equal
gradients before each round, outside the time, and end with the same parameters and averages, or are not measured.
Ratios of neighbouring rounds count, with one thread and with two. The result is printed and appended to
benchmarks/results/update.jsonl.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring import compared, interleave, record, report, run_part, show
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import lockstep as ls
from lockstep.losses.regularization import L2
from lockstep.optim.gradients import Gradients
from lockstep.optim.optimizers import FTRL, Adadelta
from lockstep.optim.rules import Optimizer
from lockstep.training.attempt import Attempt

Parameters = Sequence[nn.Parameter]
MakeTorch = Callable[[Parameters], torch.optim.Optimizer]

LR, WEIGHT_DECAY, AVERAGE_DECAY = 1e-3, 1e-4, 0.9999
GRADIENT_SIZE = 1e-3
"""Standard deviation of each element; the global norm is 5."""
CLIPPING, NOT_CLIPPING = 1.0, 100.0
MOMENTUM = {"lr": LR, "momentum": 0.9, "nesterov": True, "weight_decay": WEIGHT_DECAY}
DECAYED = {"lr": LR, "weight_decay": WEIGHT_DECAY}
OPTIMIZERS: dict[str, tuple[Optimizer, MakeTorch | None]] = {
    "SGD, Nesterov": (ls.optim.SGD(**MOMENTUM), partial(torch.optim.SGD, **MOMENTUM, fused=True)),
    "Adam": (ls.optim.Adam(**DECAYED), partial(torch.optim.Adam, **DECAYED, fused=True)),
    "AdamW": (ls.optim.AdamW(**DECAYED), partial(torch.optim.AdamW, **DECAYED, fused=True)),
    "Adagrad": (ls.optim.Adagrad(**DECAYED), partial(torch.optim.Adagrad, **DECAYED, fused=True)),
    "RMSProp, momentum": (
        ls.optim.RMSProp(**DECAYED, momentum=0.9),
        partial(torch.optim.RMSprop, **DECAYED, momentum=0.9, foreach=True),
    ),
    "Adadelta": (Adadelta(**DECAYED), partial(torch.optim.Adadelta, **DECAYED, foreach=True)),
    "FTRL": (FTRL(lr=LR), None),
    "LARS": (ls.optim.LARS(**DECAYED), None),
    "LAMB": (ls.optim.LAMB(**DECAYED), None),
}
"""Ours, and torch's fastest of the same rule; its RMSprop differs in where epsilon and the rate stand."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="three rounds: does it run?")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    if arguments.part:
        PARTS[arguments.part](rounds)
        return
    lines = []
    for part in PARTS:
        for threads in (1, 2):
            measured = run_part(__file__, part, rounds, threads=threads)
            for line in measured:
                show(line)
            lines += measured
    if not arguments.quick:
        record(__file__, lines)


# Parameters and gradients -------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    """The layers of the network in a row: it is never run."""
    torch.manual_seed(2)
    layers: list[nn.Module] = []
    channels = width = 48

    def convolution(num_in: int, num_out: int, size: int) -> None:
        layers.extend([nn.Conv2d(num_in, num_out, size, bias=False), nn.BatchNorm2d(num_out)])

    convolution(3, width, 7)
    for stage, num_blocks in enumerate((3, 4, 23, 3)):
        inner, outer = width << stage, 4 * width << stage
        for block in range(num_blocks):
            if block == 0:
                convolution(channels, outer, 1)
            convolution(outer if block else channels, inner, 1)
            convolution(inner, inner, 3)
            convolution(inner, outer, 1)
        channels = outer
    return nn.Sequential(*layers, nn.Linear(channels, 1000))


def gradients_of(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.empty_like(p).normal_(0, GRADIENT_SIZE, generator=generator) for p in model.parameters()]


@dataclass
class Contender:
    run: Callable[[], object]
    gradients: list[Tensor]
    """Filled before each run, which uses them up."""
    results: Sequence[Tensor] = ()
    """What must be equal to the other's at the end."""


def measure(comparison: str, contenders: dict[str, Contender], fresh: list[Tensor], rounds: int) -> None:
    def refill(name: str) -> None:
        torch._foreach_copy_(contenders[name].gradients, fresh)

    times = interleave({name: each.run for name, each in contenders.items()}, rounds, before=refill)
    for ours, *theirs in zip(*(each.results for each in contenders.values()), strict=True):
        assert not theirs or torch.allclose(ours, theirs[0], rtol=1e-4, atol=1e-6), f"{comparison}: unlike results"
    report(comparison, compared(times))


# The whole update ---------------------------------------------------------------------------------------------------


def whole(rounds: int) -> None:
    fresh = gradients_of(network())
    for what, name, max_norm, owned in (
        ("clipped", "SGD, Nesterov", CLIPPING, True),
        ("not clipped", "SGD, Nesterov", NOT_CLIPPING, True),
        ("clipped, others read the gradients", "SGD, Nesterov", CLIPPING, False),
        ("clipped", "AdamW", CLIPPING, True),
    ):
        optimizer, make = OPTIMIZERS[name]
        assert make is not None
        contenders = {"ours": ours(optimizer, max_norm, owned=owned), "theirs": by_hand(make, max_norm)}
        measure(f"{name}; {what}", contenders, fresh, rounds)


def ours(optimizer: Optimizer, max_norm: float, *, owned: bool) -> Contender:
    model = network()
    state = ls.TrainState(
        model,
        optimizer,
        gradient_transforms=[ls.optim.ClipGlobalNorm(max_norm)],
        average=ls.optim.MovingAverage(AVERAGE_DECAY),
    )
    gradients = [torch.empty_like(p) for p in state.parameters.values()]

    def update() -> None:
        outcome = state.apply(Attempt(gradients, (), {"loss": 1.0}, owned=owned))
        assert not outcome.skipped

    return Contender(update, gradients, [*state.parameters.values(), *state.averaged().values()])


def by_hand(make: MakeTorch, max_norm: float) -> Contender:
    parameters, gradients = with_gradients(network())
    optimizer = make(parameters)
    averages = [p.detach().clone() for p in parameters]
    step = 0

    def update() -> None:
        nonlocal step
        norm = clip_grad_norm_(parameters, max_norm)
        assert math.isfinite(norm.item())
        optimizer.step()
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1 - min(AVERAGE_DECAY, (1 + step) / (10 + step)))

    return Contender(update, gradients, [*parameters, *averages])


def with_gradients(model: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return parameters, [p.grad for p in parameters if p.grad is not None]


# Each part alone ----------------------------------------------------------------------------------------------------


def parts(rounds: int) -> None:
    fresh = gradients_of(network())
    for comparison, contenders in (*gradient_parts(), *optimizer_parts()):
        measure(comparison, contenders, fresh, rounds)


def gradient_parts() -> Iterator[tuple[str, dict[str, Contender]]]:
    """What happens to gradients, and the average."""
    model = network()
    named = dict(model.named_parameters())
    theirs, their_gradients = with_gradients(network())
    our_gradients = [torch.empty_like(g) for g in their_gradients]

    def pair(run: Callable[[Gradients], object], by_hand: Callable[[], object] | None) -> dict[str, Contender]:
        contenders = {"ours": Contender(lambda: run(Gradients(list(named), our_gradients, owned=True)), our_gradients)}
        return contenders | ({"theirs": Contender(by_hand, their_gradients)} if by_hand else {})

    def transform(value: Any, by_hand: Callable[[], object] | None = None) -> dict[str, Contender]:
        bound = value.bind(named)
        return pair(no_grad(lambda gradients: bound(gradients, 0)), by_hand)

    def clip_each() -> None:
        norms = torch.stack(torch._foreach_norm(their_gradients))
        torch._foreach_mul_(their_gradients, list((GRADIENT_SIZE / norms).clamp_(max=1.0).unbind()))

    def decay() -> None:
        weights = [p for p in theirs if p.ndim > 1]
        torch.stack(torch._foreach_norm(weights)).square().sum().item()
        torch._foreach_add_([g for g in their_gradients if g.ndim > 1], weights, alpha=WEIGHT_DECAY)

    penalty, average = L2(WEIGHT_DECAY).bind(named), ls.optim.MovingAverage(AVERAGE_DECAY).bind(named, {})
    their_averages = [p.detach().clone() for p in theirs]
    yield (
        "norm and finite check",
        pair(lambda gradients: math.isfinite(gradients.norm), lambda: math.isfinite(get_total_norm(their_gradients))),
    )
    yield (
        "ScaleGradients, all weights",
        transform(
            ls.optim.ScaleGradients({r"weight$": 0.5}),
            lambda: torch._foreach_mul_([g for g in their_gradients if g.ndim > 1], 0.5),
        ),
    )
    yield "ClipNorm", transform(ls.optim.ClipNorm(GRADIENT_SIZE), no_grad(clip_each))
    yield "ClipValue", transform(ls.optim.ClipValue(GRADIENT_SIZE), lambda: clip_grad_value_(theirs, GRADIENT_SIZE))
    yield "AdaptiveClip", transform(ls.optim.AdaptiveClip(0.01))
    yield (
        "L2 penalty",
        pair(lambda g: (penalty.loss(), penalty.add_gradients(g.tensors, owned=True)), no_grad(decay)),
    )
    yield (
        "moving average",
        pair(
            no_grad(lambda gradients: average.update(1_000_000)),
            no_grad(lambda: torch._foreach_lerp_(their_averages, theirs, 1 - AVERAGE_DECAY)),
        ),
    )


def optimizer_parts() -> Iterator[tuple[str, dict[str, Contender]]]:
    """Each optimizer alone; and SGD with the clip that it makes on the way, beside one that comes before it."""
    for name, (optimizer, make) in OPTIMIZERS.items():
        yield name, stepping(optimizer, make)
    optimizer, make = OPTIMIZERS["SGD, Nesterov"]
    yield "SGD, Nesterov, dividing by a given norm", stepping(optimizer, make, divisor=5.0)


def stepping(optimizer: Optimizer, make: MakeTorch | None, divisor: float = 1.0) -> dict[str, Contender]:
    named = dict(network().named_parameters())
    bound = optimizer.bind(named)
    our_gradients = [torch.empty_like(p) for p in named.values()]
    alike = not isinstance(optimizer, ls.optim.RMSProp)
    step = 0

    @torch.no_grad()
    def update() -> None:
        nonlocal step
        bound.update(Gradients(list(named), our_gradients, divisor=divisor, owned=True), step)
        step += 1

    contenders = {"ours": Contender(update, our_gradients, list(named.values()) if alike else ())}
    if make:
        theirs, their_gradients = with_gradients(network())
        their_optimizer = make(theirs)

        def their_update() -> None:
            if divisor != 1.0:
                torch._foreach_mul_(their_gradients, 1 / divisor)
            their_optimizer.step()

        contenders["theirs"] = Contender(their_update, their_gradients, theirs if alike else ())
    return contenders


def no_grad(function: Callable[..., object]) -> Callable[..., object]:
    decorated: Callable[..., object] = torch.no_grad()(function)
    return decorated


PARTS: dict[str, Callable[[int], None]] = {"whole": whole, "parts": parts}


if __name__ == "__main__":
    main()
