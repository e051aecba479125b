from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from lockstep.errors import PeerLostError
from lockstep.workers.membership import Generation, Generations

FAILURE = Generation(1, (0, 2), "worker 1", "worker 1 (pid 7) was killed by SIGKILL at step 3 (phase compute)")
END: dict[str, Any] = {"lost": "worker 0", "why": "worker 0 failed"}


def test_a_generation_is_told_in_a_message() -> None:
    assert Generation.of_message(FAILURE.message()) == FAILURE


def test_a_failure_ends_what_this_worker_waits_in_and_is_raised_until_the_next_generation() -> None:
    generations, ended = Generations(2), list[str]()
    generations.check()
    generations.on_failure(lambda: ended.append("exchange"))
    generations.receive(FAILURE.message())
    assert ended == ["exchange"]
    with pytest.raises(PeerLostError, match=r"worker 2 lost worker 1\.\n.*SIGKILL at step 3"):
        generations.check()
    generations.on_failure(lambda: ended.append("begun too late"))
    assert ended[1:] == ["begun too late"]
    assert generations.next() == FAILURE
    generations.check()
    assert generations.failure() is None


def test_what_ends_an_exchange_is_forgotten_with_its_generation() -> None:
    generations, ended = Generations(2), list[str]()
    generations.on_failure(lambda: ended.append("of generation 0"))
    generations.receive(Generation(1, (0, 1, 2)).message())
    generations.next()
    generations.receive(FAILURE._replace(number=2).message())
    assert ended == []


def test_newcomers_ask_for_a_generation_and_end_nothing() -> None:
    generations, ended = Generations(0), list[str]()
    generations.on_failure(lambda: ended.append("exchange"))
    assert not generations.regroup_requested
    generations.receive(Generation(1, (0, 1)).message())
    assert generations.regroup_requested
    generations.check()
    assert ended == []
    generations.next()
    assert not generations.regroup_requested


def test_a_failure_goes_before_newcomers() -> None:
    generations = Generations(0)
    generations.receive(Generation(1, (0, 1, 2)).message())
    generations.receive(FAILURE._replace(number=2).message())
    assert not generations.regroup_requested
    assert generations.next().number == 2, "that in between never was"


def test_the_launcher_is_told_that_a_newcomer_is_ready_and_when_it_takes_part() -> None:
    told: list[Mapping[str, object]] = []
    generations = Generations(3, told.append, is_newcomer=True)
    said = threading.Timer(0.05, lambda: generations.receive(Generation(4, (0, 3)).message()))
    said.start()
    assert generations.next().number == 4
    generations.confirm()
    assert told == [{"ready": True}, {"joined": 4}]
    assert not generations.is_newcomer


def test_a_connection_that_broke_without_a_word_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.workers.membership.VERDICT_SECONDS", 0.01)
    monkeypatch.setattr("lockstep.workers.membership.GENERATION_SECONDS", 0.01)
    told: list[Mapping[str, object]] = []
    generations = Generations(1, told.append)
    assert "connection reset" in str(generations.connection_lost("connection reset"))
    with pytest.raises(PeerLostError, match=r"lost another worker\.\n.*has not said whom"):
        generations.next()
    assert told == [{"broken": 0}]


def test_where_the_launcher_ends_all_there_is_no_next_generation() -> None:
    generations = Generations(1)
    generations.receive(END)
    with pytest.raises(PeerLostError, match="worker 1 lost worker 0"):
        generations.next()


def test_who_has_lost_a_connection_waits_for_the_name_of_the_lost() -> None:
    generations = Generations(2)
    said = threading.Timer(0.05, lambda: generations.receive(FAILURE.message()))
    said.start()
    assert "lost worker 1." in str(generations.connection_lost("connection reset"))


def test_where_nobody_can_join_any_more_newcomers_wait_in_vain() -> None:
    told = list[Mapping[str, object]]()
    generations = Generations(0, told.append)
    generations.receive(Generation(1, (0, 1)).message())
    generations.dismiss_newcomers()
    assert told == [{"dismiss": True}]
    assert not generations.regroup_requested
