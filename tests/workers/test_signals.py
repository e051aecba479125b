from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lockstep.workers.pulse import Pulse
from lockstep.workers.signals import NOTICES, pass_on_notices, stop_on_signals

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


def test_handlers_are_put_back_after_an_error() -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    with pytest.raises(ZeroDivisionError), stop_on_signals(Pulse()):
        _ = 1 / 0
    assert [signal.getsignal(each) for each in NUMBERS] == before


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
