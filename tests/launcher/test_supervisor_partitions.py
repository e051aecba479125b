"""Hosts that reach that of the chief, but not each other: how it is found, and who goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_supervisor import FakeServer, FakeWorker, texts

from lockstep.launcher import supervisor
from lockstep.launcher.forkserver import ForkServer
from lockstep.launcher.hosts import LocalHost
from lockstep.launcher.supervisor import RunOutcome, Supervisor
from lockstep.launcher.survival import Survival
from lockstep.launcher.watchdog import Limits
from lockstep.workers.channel import Message
from lockstep.workers.network import ConnectionTrial, Gap, left_out

GAP = "worker 1 on host1 does not reach worker 2 on host2, though both reach the launcher of host 0: timed out"


def gaps(*pairs: tuple[int, int]) -> list[Gap]:
    return [Gap(*pair, "timed out") for pair in pairs]


@pytest.mark.parametrize(
    ("found", "leave"),
    [
        ([], []),
        (gaps((1, 2)), [2]),
        (gaps((1, 2), (2, 1)), [2]),
        (gaps((0, 1)), [1]),
        (gaps((1, 2), (1, 3)), [1]),
        (gaps((3, 1), (2, 1), (2, 3)), [3, 2]),
    ],
)
def test_few_are_left_out_and_never_the_first(found: list[Gap], leave: list[int]) -> None:
    assert left_out(found, [0, 1, 2, 3]) == leave


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1])))
def test_hosts_that_go_on_reach_each_other(pairs: set[tuple[int, int]]) -> None:
    leave = left_out(gaps(*sorted(pairs)), range(8))
    assert 0 not in leave
    assert all(one in leave or other in leave for one, other in pairs)
    assert len(leave) == len({*leave}) <= len({frozenset(pair) for pair in pairs})


def test_a_trial_asks_each_for_its_place_and_then_for_the_others() -> None:
    trial = ConnectionTrial([0, 4], 100.0)
    assert trial.begin() == [(0, {"trial": "listen"}), (4, {"trial": "listen"})]
    assert trial.take(4, {"listens": ["b", 7]}) == []
    assert trial.take(0, {"listens": ["a", 8]}) == [
        (0, {"trial": "connect", "places": [[4, "b", 7]]}),
        (4, {"trial": "connect", "places": [[0, "a", 8]]}),
    ]
    assert trial.take(0, {"unreached": [[4, "timed out"]]}) == []
    assert not trial.is_over(101.0)
    assert trial.is_over(111.0), "one that says nothing is not waited for"
    trial.take(4, {"unreached": []})
    assert trial.is_over(101.0)
    assert trial.gaps == [Gap(0, 4, "timed out")]
    assert trial.end() == [(0, {"trial": "end"}), (4, {"trial": "end"})]


def test_in_a_trial_a_host_whose_network_is_gone_reaches_none_of_the_others() -> None:
    trial = ConnectionTrial([0, 4, 5], 100.0)
    assert trial.take(0, {"listens": ["a", 8]}) == []
    assert trial.take(4, {"listens": [], "why": "its network is gone"}) == []
    assert trial.take(5, {"listens": ["c", 9]}) == [
        (0, {"trial": "connect", "places": [[5, "c", 9]]}),
        (5, {"trial": "connect", "places": [[0, "a", 8]]}),
    ]
    trial.take(0, {"unreached": []})
    trial.take(5, {"unreached": []})
    assert trial.is_over(101.0)
    assert trial.gaps == [Gap(4, 0, "its network is gone"), Gap(4, 5, "its network is gone")]
    assert left_out(trial.gaps, trial.numbers) == [4]


def stand_still(
    unreached: Sequence[tuple[int, int]], survival: Survival | None, **limits: Any
) -> tuple[RunOutcome, list[FakeServer]]:
    """Supervise three workers on a host each that wait in the exchange, until those that are left are told to go on."""
    servers = [FakeServer() for _ in range(3)]
    hosts = [
        LocalHost(cast(ForkServer, server), {}, lambda: Pipe()[0], name=f"host{host}")
        for host, server in enumerate(servers)
    ]

    def answer(worker: FakeWorker, order: Message) -> None:
        own = int(worker.name.removeprefix("worker "))
        if order["trial"] == "listen":
            worker.channel.send({"listens": [f"10.0.0.{own}", 1000 + own]})
        elif order["trial"] == "connect":
            assert [place[0] for place in order["places"]] == [rank for rank in range(3) if rank != own]
            worker.channel.send({"unreached": [[other, "timed out"] for one, other in unreached if one == own]})

    def script(server: FakeServer) -> Iterator[None]:
        while True:
            for worker in [each for each in server.workers if each.alive]:
                if worker.generation:
                    server.end(worker, says=0)
                elif worker.told:
                    server.end(worker, 1)
                else:
                    worker.beat(phase="exchange", waits=True)
            yield

    def play(hosts: Any, timeout_seconds: float) -> None:
        for server in servers:
            server.play(timeout_seconds)

    for server in servers:
        server.answer, server.turns = answer, script(server)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "wait", play)
        ranks = [[rank] for rank in range(3)]
        run = Supervisor(hosts, ranks, Limits(**limits), [], lambda: servers[0].now, survival)
        outcome = run.finish()
    for host in hosts:
        host.close()
    for server in servers:
        for worker in server.workers:
            worker.channel.close()
    return outcome, servers


def test_where_two_hosts_do_not_reach_each_other_the_run_ends_with_that_in_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcome, servers = stand_still([(1, 2), (2, 1)], None)
    assert texts(outcome)[0] == f"{GAP}. Let no firewall stand between the hosts, at any port"
    assert outcome.failures[0].kind == "error", "to start again would not help"
    assert servers[0].now < 115.0, "it began at 100"
    assert caplog.messages == [], "stacks would say less"


def test_where_the_others_go_on_they_do_so_without_one_side(caplog: pytest.LogCaptureFixture) -> None:
    outcome, servers = stand_still([(1, 2), (2, 1)], Survival(1, 3, 3))
    assert texts(outcome) == []
    said = list(dict.fromkeys(caplog.messages))
    remedy = "mend the network, then stop the run, and start it again"
    nobody = f"nobody takes the place of worker 2: others do not reach host2; {remedy}"
    assert said == [
        f"{GAP}. Host host2 is left out of the run\n2 of 3 workers are left\n{nobody}",
        "2 of 3 workers go on",
    ]
    assert [[worker.generation for worker in server.workers] for server in servers[:2]] == [[[0, 1]]] * 2
    assert [worker.signals for worker in servers[2].workers] == [["SIGKILL"]], "nobody is started anew there"


def test_where_all_hosts_reach_each_other_the_stacks_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    outcome, _ = stand_still([], None, hang_seconds=25.0)
    assert "has been at step 1 (phase exchange) for 25 s, and was killed" in texts(outcome)[0]
    shown = [message for message in dict.fromkeys(caplog.messages) if "its stack follows" in message]
    assert len(shown) == 3
