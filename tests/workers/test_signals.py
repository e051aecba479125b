from __future__ import annotations

import os
import signal

import pytest

from lockstep.workers.pulse import Pulse
from lockstep.workers.signals import pass_on_sigterm, stop_on_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_requests_a_stop_and_the_next_would_end_the_process(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    pulse = Pulse()
    with stop_on_signals(pulse):
        assert pulse.stop_requested is None
        signal.raise_signal(number)
        assert pulse.stop_requested == number.name
        assert [signal.getsignal(each) for each in NUMBERS] == [signal.SIG_DFL] * 2
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


def test_sigterm_is_passed_on_however_often_it_comes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    pulse = Pulse(launched=True)
    try:
        pass_on_sigterm(pulse)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert pulse.stop_requested == "SIGTERM"


def test_a_forked_child_is_not_kept_alive_by_the_handler_it_inherits() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        pass_on_sigterm(Pulse())
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
