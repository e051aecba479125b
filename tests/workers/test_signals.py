from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.workers import signals
from lockstep.workers.pulse import Pulse
from lockstep.workers.signals import (
    NOTICES,
    interruptible,
    pass_on_notices,
    stop_on_interrupt,
    stop_on_signals,
    stops_handled_by,
    uninterrupted,
)

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_requests_a_stop_and_the_next_ctrl_c_would_end_the_process(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    pulse = Pulse()
    with stop_on_signals(pulse):
        assert pulse.stop_requested is None
        signal.raise_signal(number)
        assert pulse.stop_requested == number.name
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        for notice in NOTICES:
            signal.raise_signal(notice)
        assert pulse.stop_requested == number.name, "the first one says why"
    assert [signal.getsignal(each) for each in NUMBERS] == before


def test_at_a_prompt_the_request_is_forgotten_and_the_next_ctrl_c_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    pulse = Pulse()
    with stop_on_signals(pulse):
        signal.raise_signal(signal.SIGINT)
        assert pulse.stop_requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert pulse.stop_requested is None


def test_handlers_are_put_back_after_an_error() -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    with pytest.raises(ZeroDivisionError), stop_on_signals(Pulse()):
        _ = 1 / 0
    assert [signal.getsignal(each) for each in NUMBERS] == before


def test_stops_are_handled_as_wanted_and_the_handlers_put_back() -> None:
    before, requests = signal.getsignal(signal.SIGTERM), list[str]()
    with stops_handled_by(lambda number, _: requests.append(signal.Signals(number).name)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert requests == ["SIGTERM", "SIGINT"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_a_launcher_listens_signals_are_its_own_affair() -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    with stop_on_signals(Pulse(launched=True)):
        assert [signal.getsignal(each) for each in NUMBERS] == before


@pytest.fixture
def passing_on() -> Iterator[Pulse]:
    before = {number: signal.getsignal(number) for number in NOTICES}
    pulse = Pulse(launched=True)
    pass_on_notices(pulse)
    yield pulse
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_hangup_is_left_alone_where_it_was_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(Pulse()):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_is_passed_on_however_often_it_comes(passing_on: Pulse, number: signal.Signals) -> None:
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert passing_on.stop_requested == number.name


@pytest.mark.process
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 0)])
def test_a_forked_child_can_be_ended_and_is_not_by_a_notice_of_preemption(
    passing_on: Pulse, number: signal.Signals, status: int
) -> None:
    child = os.fork()
    if not child:
        signal.raise_signal(number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    assert passing_on.stop_requested is None


PYTHONS = signal.default_int_handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def handler_now() -> object:
    return signal.getsignal(signal.SIGINT)


def test_within_a_loop_the_first_is_a_wish_and_the_second_raises() -> None:
    pulse = Pulse()
    with stop_on_interrupt(pulse):
        ctrl_c()
        assert pulse.stop_requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert handler_now() is PYTHONS
    assert pulse.stop_requested == "SIGINT", "what is trained next stops too"


def test_at_a_prompt_the_wish_is_forgotten_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    pulse = Pulse()
    with stop_on_interrupt(pulse):
        ctrl_c()
        assert pulse.stop_requested == "SIGINT"
    assert pulse.stop_requested is None


def loop_of(pulse: Pulse) -> Iterator[int]:
    with stop_on_interrupt(pulse):
        yield from range(9)


def test_of_loops_that_overlap_the_last_one_puts_back() -> None:
    pulse = Pulse()
    first, second = loop_of(pulse), loop_of(pulse)
    next(first), next(second)
    del first
    ctrl_c()
    assert pulse.stop_requested == "SIGINT"
    del second
    assert handler_now() is PYTHONS


class Clock:
    """The time that `signals` sees."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(signals, "monotonic", clock := Clock())
    return clock


def ctrl_c_raises() -> bool:
    try:
        ctrl_c()
    except KeyboardInterrupt:
        return True
    return False


def make_loader() -> ls.data.Loader:
    return ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 3)}), batch_size=4)


def train_steps(loss: Callable[[], None] = lambda: None) -> Iterator[ls.StepReport]:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        loss()
        return {"y": model(batch["x"]).mean()}

    return ls.train_steps(ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1)), losses, make_loader())


@pytest.mark.parametrize("loop", [train_steps, lambda: ls.batches(make_loader())], ids=["train_steps", "batches"])
def test_a_loop_that_nobody_goes_on_with_leaves_ctrl_c_to_python(clock: Clock, loop: Callable[[], Any]) -> None:
    steps = loop()
    next(steps)
    clock.seconds += 11
    assert ctrl_c_raises()
    next(steps)
    clock.seconds += 9
    assert not ctrl_c_raises()
    assert len(list(steps)) <= 1, "it stops after the next step"


def test_a_long_step_and_a_long_wait_for_data_are_no_loop_body(clock: Clock) -> None:
    raised = []

    def wait() -> None:
        clock.seconds += 60
        raised.append(ctrl_c_raises())

    steps = train_steps(wait)
    next(steps)
    assert raised == [False]
    steps.close()  # type: ignore[attr-defined]
    pulse = Pulse()
    with stop_on_interrupt(pulse):
        signals.enter_body()
        pulse.at(1, "data")
        clock.seconds += 60
        assert not ctrl_c_raises()


def test_a_new_loop_does_not_count_from_the_body_of_an_earlier_one(clock: Clock) -> None:
    with stop_on_interrupt(Pulse()):
        signals.enter_body()
    clock.seconds += 60
    with stop_on_interrupt(Pulse()):
        assert not ctrl_c_raises()


def test_a_loop_says_that_ctrl_c_has_ended_it(caplog: pytest.LogCaptureFixture) -> None:
    reports = []
    for report in train_steps():
        reports.append(report)
        if report.step == 2:
            ctrl_c()
    assert [report.stop_requested for report in reports] == [False, False, True]
    assert caplog.messages[-1] == "stopped at step 3 by Ctrl-C"


def test_a_loop_that_ends_in_another_thread_leaves_ctrl_c_as_it_was() -> None:
    pulse = Pulse()
    loop = loop_of(pulse)
    next(loop)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(list, loop).result()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    assert pulse.stop_requested is None
    next(again := loop_of(pulse))
    ctrl_c()
    assert pulse.stop_requested == "SIGINT"
    del again
    assert handler_now() is PYTHONS


def test_in_another_thread_and_where_a_launcher_listens_it_is_their_affair() -> None:
    with ThreadPoolExecutor(1) as thread:
        loop = loop_of(Pulse())
        thread.submit(next, loop).result()
        assert handler_now() is PYTHONS
    with stop_on_interrupt(Pulse(launched=True)):
        assert handler_now() is PYTHONS


def test_a_handler_of_ones_own_is_left_alone() -> None:
    seen = []

    def own(number: int, _: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, own)
    pulse = Pulse()
    try:
        with stop_on_interrupt(pulse):
            assert handler_now() is own
            with uninterrupted():
                ctrl_c()
                ctrl_c()
                assert not seen
                with interruptible():
                    assert seen == [signal.SIGINT] * 2
                    ctrl_c()
                    assert len(seen) == 3
                ctrl_c()
                assert len(seen) == 3
            assert (len(seen), handler_now(), pulse.stop_requested) == (4, own, None)
    finally:
        signal.signal(signal.SIGINT, PYTHONS)


def interrupted_block(done: list[int], error: Exception | None = None) -> None:
    with uninterrupted():
        ctrl_c()
        ctrl_c()
        done.append(1)
        if error:
            raise error


def test_one_that_is_installed_within_the_loop_is_kept() -> None:
    def own(*_: object) -> None:
        raise ZeroDivisionError

    pulse = Pulse()
    try:
        with stop_on_interrupt(pulse):
            signal.signal(signal.SIGINT, own)
            with pytest.raises(ZeroDivisionError):
                interrupted_block(done := [])
            assert done == [1]
        assert handler_now() is own
    finally:
        signal.signal(signal.SIGINT, PYTHONS)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_of_pythons_stays(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    try:
        with stop_on_interrupt(Pulse()), uninterrupted(), interruptible():
            assert handler_now() is handler
        assert handler_now() is handler
    finally:
        signal.signal(signal.SIGINT, PYTHONS)


def test_an_interrupt_comes_before_the_block_or_after_it() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_block(done, ValueError())
    assert done == [1]
    assert isinstance(caught.value.__context__, ValueError)
    assert handler_now() is PYTHONS
    with uninterrupted():
        done.append(2)
    assert done == [1, 2], "both signals made one interrupt"


def test_commands_are_told_after_the_block_too() -> None:
    pulse = Pulse()
    with stop_on_signals(pulse):
        with uninterrupted():
            ctrl_c()
            assert pulse.stop_requested is None
        assert pulse.stop_requested == "SIGINT"
        assert handler_now() == signal.SIG_DFL, "the next one ends the process"
        with uninterrupted():
            assert handler_now() == signal.SIG_DFL
    assert handler_now() is PYTHONS
