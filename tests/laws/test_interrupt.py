"""The law of Ctrl-C in a script: whenever it comes, the state is that of some step of a run that was left in peace."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep import tensors
from lockstep.data.loader import Loader
from lockstep.tensors import reading_waits

pytestmark = pytest.mark.usefixtures("each_device")

STEPS, TOWERS = 40, ls.Towers(2)


class StoppedError(BaseException):
    """What the handler of a script raises."""


def make() -> tuple[ls.TrainState, Loader]:
    torch.manual_seed(2)
    layers = [layer for _ in range(30) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    model = nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = ls.optim.RMSProp(1e-3, momentum=0.9)
    state = ls.TrainState(model, optimizer, average=ls.optim.MovingAverage(0.9))
    fields = {"x": torch.randn(64, 8, generator=torch.Generator().manual_seed(1))}
    return state, Loader(ls.data.Arrays(fields), batch_size=4)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def stop(*_: object) -> None:
    raise StoppedError


HANDLERS = {"Python's": signal.default_int_handler, "own": stop}


def digest(state: ls.TrainState, loader: Loader) -> str:
    """Of all that is saved, but for the step and the position themselves."""
    sha256 = hashlib.sha256()
    for section in state.sections().values():
        for tensor in section.values():
            sha256.update(tensor.numpy().tobytes())
    sha256.update(repr(state.values()).encode())
    return f"{state.step} {loader.position} {sha256.hexdigest()}"


def by_train_steps(state: ls.TrainState, loader: Loader) -> Iterator[None]:
    for _ in ls.train_steps(state, losses, loader, TOWERS, until=ls.Steps(STEPS)):
        yield


def by_batches(state: ls.TrainState, loader: Loader) -> Iterator[None]:
    for batch in ls.batches(loader, TOWERS, until=ls.Steps(STEPS)):
        ls.train_step(state, losses, batch, TOWERS)
        yield


def by_steps_alone(state: ls.TrainState, loader: Loader) -> Iterator[None]:
    for batch in loader.batches(range(2), 2, stop=lambda position: position >= 4 * STEPS):
        ls.train_step(state, losses, batch, TOWERS)
        yield


LOOPS = {"train_steps": by_train_steps, "batches": by_batches, "train_step": by_steps_alone}


def undisturbed(num_steps: int) -> list[str]:
    """The digest at the start and after each step."""
    state, loader = make()
    steps = islice(by_train_steps(state, loader), num_steps)
    return [digest(state, loader), *[digest(state, loader) for _ in steps]]


# At random moments ----------------------------------------------------------------------------------------------------


def trial(loop: Callable[[ls.TrainState, Loader], Iterator[None]], seed: int) -> str:
    """Train while two signals come, from a random step on; returns the digest of what is left then."""
    state, loader = make()
    chance = random.Random(seed)

    def disturb() -> None:
        first = chance.randrange(STEPS)  # not after some time: a busy machine has made no step by then
        while state.step < first:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.005))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(chance.uniform(0, 0.004))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=disturb)
    try:
        thread.start()
        for _ in loop(state, loader):
            pass
    except (KeyboardInterrupt, StoppedError):
        pass
    while True:  # the second one may come as late as here
        try:
            thread.join()
            return digest(state, loader)
        except (KeyboardInterrupt, StoppedError):
            pass


def main(num_trials: int, waits: bool) -> None:
    """Trials of all loops with all handlers, on a device that the host waits for, or not; prints what each leaves."""
    torch.set_num_threads(1)
    if waits:
        tensors.READ_AT_ONCE = frozenset()
    seeds = count()
    expected = undisturbed(STEPS)
    for name, handler in HANDLERS.items():
        signal.signal(signal.SIGINT, handler)
        for kind, loop in LOOPS.items():
            left = []
            for _ in range(num_trials):
                left.append(trial(loop, next(seeds)))
                ls.join().pulse.stop_requested = None
            print(json.dumps([name, kind, [expected.index(d) if d in expected else d for d in left]]), flush=True)


def check_trials(num_trials: int) -> None:
    from worker_processes import HANG_SECONDS  # not where this file is a script, whose path has no other tests

    waits = reading_waits(torch.device("cpu"))
    command = [sys.executable, __file__, str(num_trials), *["waits"] * waits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer[:2] for answer in answers] == [[name, kind] for name in HANDLERS for kind in LOOPS]
    torn = [answer for answer in answers if any(isinstance(left, str) for left in answer[2])]
    assert not torn
    steps = [step for *_, left in answers for step in left]
    assert len(steps) == len(answers) * num_trials
    assert len({*steps} - {0, STEPS}) > 3, "signals came while it trained"


@pytest.mark.process
def test_no_signal_tears_the_state() -> None:
    check_trials(2)


@pytest.mark.slow
def test_no_signal_of_many_tears_the_state() -> None:
    check_trials(60)


# At chosen moments ----------------------------------------------------------------------------------------------------


def interrupt_once(call: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """The same function, with signals before its first call."""
    left = [times]

    def called(*arguments: Any, **named: Any) -> Any:
        while left[0]:
            left[0] -= 1
            signal.raise_signal(signal.SIGINT)
        return call(*arguments, **named)

    return called


def test_the_first_ends_the_loop_after_its_step(caplog: pytest.LogCaptureFixture) -> None:
    # On an accelerator the attempt after this one has been begun by then, and told the others that nobody stops.
    last = 3 if reading_waits(torch.device("cpu")) else 2
    expected = undisturbed(last)
    state, loader = make()
    state._average.update = interrupt_once(state._average.update)  # type: ignore[union-attr, method-assign]
    reports = list(ls.train_steps(state, losses, loader, TOWERS, until=ls.Steps(STEPS)))
    assert [report.stop_requested for report in reports] == [False] * (last - 1) + [True]
    assert digest(state, loader) == expected[last]
    assert [record.message for record in caplog.records if "Ctrl-C" in record.message] == [
        "Ctrl-C: training stops after the next step; Ctrl-C again interrupts it at once",
        f"stopped at step {last} by Ctrl-C",
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(list(ls.train_steps(state, losses, loader, TOWERS, until=ls.Steps(STEPS)))) == 1, "and what comes next"


def test_a_loop_without_steps_stops_too() -> None:
    _, loader = make()
    seen = 0
    for seen, _ in enumerate(ls.batches(loader, TOWERS), start=1):
        if seen == 3:
            signal.raise_signal(signal.SIGINT)
    assert (seen, loader.position) == (3, 12)


def test_the_second_comes_out_of_the_loss_function_at_once() -> None:
    expected = undisturbed(1)[1]
    state, loader = make()
    calls = []

    def interrupted(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        calls.append(batch.position)
        if len(calls) == 4:  # the last tower of the second step
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            calls.append(-1)
        return losses(model, batch)

    with pytest.raises(KeyboardInterrupt):
        ls.train(state, interrupted, loader, TOWERS)
    assert calls == [0, 0, 4, 4]
    assert digest(state, loader) == expected


def test_a_checkpoint_is_taken_over_as_a_whole(tmp_path: Path) -> None:
    state, loader = make()
    ls.train(state, losses, loader, TOWERS, until=ls.Steps(2))
    ls.save(state, loader, tmp_path)
    expected = digest(state, loader)
    state, loader = make()
    state._optimizer.load = interrupt_once(state._optimizer.load)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ls.resume(state, loader, tmp_path)
    assert digest(state, loader) == expected


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_between_update_and_average_it_waits_for_the_end_of_the_step(
    loop: Callable[..., Iterator[None]], handler: Any
) -> None:
    expected = undisturbed(1)[1]
    state, loader = make()
    state._average.update = interrupt_once(state._average.update, 2)  # type: ignore[union-attr, method-assign]
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises((KeyboardInterrupt, StoppedError)), closing(loop(state, loader)) as steps:  # type: ignore[type-var]
            for _ in steps:
                pass
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert digest(state, loader) == expected


if __name__ == "__main__":
    main(int(sys.argv[1]), waits="waits" in sys.argv)
