"""The launcher: one process that starts the workers of this host, watches them, and alone decides when the run ends.

Of several hosts each has a launcher: that of the chief's host decides for all, and the others are its agents there.
It imports no torch. A plan, made in a process of its own, says how many workers there are; each worker then runs the
same command line again, with its rank in the environment: nothing of the user's is pickled.

Which module decides what: `supervisor` starts and ends the workers; `watchdog` says who is silent or stuck, `survival`
who goes on when some are lost, `lockstep.workers.stragglers` who is slow, and `lockstep.workers.limits` how long others
are waited for. Hosts meet in `rendezvous`, and are `hosts` to the supervisor. What other launchers tell a process is
read by `lockstep.workers.cluster`; `watcher` watches the workers that they start.

Exit codes: 0 the run reached its end; 1 a worker failed; 2 wrong input; 75 preempted, 129, 130 and 143 stopped by
SIGHUP, Ctrl-C or SIGTERM, all four after a final checkpoint; 137 aborted.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, pairwise
from logging import ERROR, WARNING
from typing import Any

from lockstep.cores import openmp_threads_are_named, share_of_cores
from lockstep.errors import InputError, LockstepError, WorkerError
from lockstep.launcher.entry import reference
from lockstep.launcher.forkserver import ForkServer
from lockstep.launcher.hosts import Agent, Conclusion, LocalHost, RemoteHost
from lockstep.launcher.rendezvous import Rendezvous, Seat, meet_chief, network_towards, turn_away
from lockstep.launcher.supervisor import STOPPED_EARLY, RunOutcome, Supervisor
from lockstep.launcher.survival import Restarts, Survival
from lockstep.launcher.watchdog import Failure, root_cause
from lockstep.screen import log
from lockstep.terminal import outlive_terminal
from lockstep.workers.channel import Channel
from lockstep.workers.cluster import WorkerEnvironment
from lockstep.workers.connections import run_key
from lockstep.workers.limits import TICK_SECONDS, Limits
from lockstep.workers.signals import stops_handled_by
from lockstep.workers.store_server import StoreServer

Plan = Callable[[list[str]], Mapping[str, Any]]
Main = Callable[[list[str]], int | None]

FAILED, WRONG_INPUT, PREEMPTED, ABORTED = 1, 2, 75, 137
TOO_LATE = "the workers took longer to stop than the time of grace, and were killed; what was saved before stands"
STOPPED = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, "SIGUSR1": PREEMPTED}


def is_worker() -> bool:
    """Whether a launcher, ours or another, has started this process as a worker: it then joins, and launches none."""
    place = WorkerEnvironment.read(os.environ)
    return place is not None and not place.one_a_host


def exit_code_of_stop(by: str, *, requeue: bool = False) -> int:
    """The exit code of a run that a signal has stopped.

    75 is EX_TEMPFAIL of sysexits.h, "try again later". SIGUSR1 is sent for no other reason. SIGTERM may also come from
    somebody who wants the run to end: it counts as a preemption only with `requeue`.
    """
    return PREEMPTED if requeue and by == "SIGTERM" else STOPPED[by]


def launch_command(
    argv: Sequence[str],
    *,
    plan: Plan,
    main: Main,
    check: Callable[[], None] | None = None,
    preload: Sequence[str] = ("torch",),
    spares: Sequence[str] = (),
    limits: Limits | None = None,
    requeue: bool = False,
    seat: Seat | None = None,
) -> int:
    """Run `main(argv)` on as many workers as `plan(argv)` says; returns the exit code. Call it in the main thread.

    Args:
        argv: the arguments of both functions.
        plan: returns `{"workers": 2}`, and where wanted `"hang_seconds"` (in place of that of the limits, if not None),
            `"restarts"` (how often all workers start again when some are lost: killed, stopped, silent, or their host
            gone; 0 by default), `"survival"` (`"min_workers"` and `"replacements"` of `Survival`: the others go on
            where they can), and `"whole_traceback"`: errors are shown with the frames of all packages, not of the
            user's code alone. An error that it raises is shown, and no worker is started. A function at the top level
            of a module. Torch has as many threads in each worker as OMP_NUM_THREADS says, without it the worker's
            share of this host's usable cores.
        main: what each worker runs; None or 0 is success. A function at the top level of a module.
        check: refuses what can be refused here, by a LockstepError, while a process beside this one imports `preload`.
        preload: modules imported once for all workers; importing them must start no thread and touch no device.
        spares: further ones, imported once a step is made, where others take the place of lost workers.
        limits: how long a worker may be silent, stuck, or take to stop.
        requeue: count SIGTERM as a preemption too.
        seat: the place of this host among several, on each of which the plan says how many workers it has; their
            environment holds the run's key.
    """
    if sys.platform != "linux":
        if check:
            check()
        return _run_here(list(argv), plan, main, num_hosts=seat.num_hosts if seat else 1)
    outlive_terminal()
    with closing(ForkServer(preload)) as server:
        if check:
            check()
        conclusion = conduct(server, argv, plan, main, spares=spares, limits=limits, requeue=requeue, seat=seat)
    conclusion.show()
    return conclusion.code


def conduct(
    server: ForkServer,
    argv: Sequence[str],
    plan: Plan | Mapping[str, Any],
    main: Main,
    *,
    spares: Sequence[str] = (),
    limits: Limits | None = None,
    requeue: bool = False,
    seat: Seat | None = None,
) -> Conclusion:
    """Run `main(argv)` on workers that a server forks, as `launch_command` does, and close the server.

    The plan may be made already. Nothing is shown of why the run has ended: only then are all processes gone, and
    nothing can write below the last lines.
    """
    requests: list[str] = []
    with stops_handled_by(lambda number, _: requests.append(signal.Signals(number).name)), closing(server):
        launcher = _Launcher(server, list(argv), requests, requeue, spares)
        return _conduct(launcher, plan, main, limits or Limits(), seat)


def _conduct(
    launcher: _Launcher, plan: Plan | Mapping[str, Any], main: Main, limits: Limits, seat: Seat | None
) -> Conclusion:
    """Plan and supervise a run on this host, and lead or follow the other hosts."""
    try:
        key = run_key(os.environ) if seat else b""
        planned = launcher.make(plan) if callable(plan) else plan
        if seat and not seat.is_chief:
            return launcher.follow(seat, key, planned, main)
        if not isinstance(planned, Conclusion):
            return launcher.lead(seat, key, planned, main, limits)
        if seat and planned.text:
            planned.show()
            turn_away(seat, key, planned.text)
            return planned._replace(text="")
        return planned
    except (WorkerError, InputError) as error:
        return _conclusion_of(error)


class _Launcher:
    """The launcher of one host, while its fork server lives."""

    def __init__(
        self, server: ForkServer, argv: list[str], requests: list[str], requeue: bool, spares: Sequence[str] = ()
    ) -> None:
        self._server, self._requests, self._requeue, self._spares = server, requests, requeue, spares
        self._task: dict[str, object] = {"argv": argv, "sys_argv": sys.argv}

    def make(self, plan: Plan) -> Mapping[str, Any] | Conclusion:
        """Have the plan made in a process of its own; returns it, or why there is nothing to run."""
        ours, theirs = socket.socketpair()
        with closing(Channel(ours)) as channel:
            self._server.fork("plan", {**self._task, "kind": "plan", "function": reference(plan)}, [theirs])
            status = _wait_for_exit(self._server, self._requests)
            answer = next(iter(channel.receive()), {})
        if status is None:
            return self._stopped_early()
        if "plan" in answer:
            made: Mapping[str, Any] = answer["plan"]
            return made
        text = answer.get("failed", "").rstrip()
        if status < 0:
            text = f"the process that plans the run was killed by {signal.Signals(-status).name}"
        return Conclusion(max(status, FAILED) if status else 0, ERROR, text)

    def lead(self, seat: Seat | None, key: bytes, plan: Mapping[str, Any], main: Main, limits: Limits) -> Conclusion:
        """Supervise the workers of all hosts, of which this is the only one, or that of the chief."""
        if plan.get("hang_seconds") is not None:
            limits = replace(limits, hang_seconds=plan["hang_seconds"])
        task, spares = self._worker_task(plan, main), self._spares_of(plan)
        with closing(StoreServer()) as store:
            if seat is None:
                with closing(LocalHost(self._server, task, store.connect, spares=spares)) as here:
                    return self._supervise(here, None, store, plan, limits)
            with closing(Rendezvous(seat, key, store)) as rendezvous:
                name = socket.gethostname()
                local = LocalHost(self._server, task, store.connect, rendezvous.network, name, spares)
                try:
                    with closing(local) as here:
                        conclusion = self._supervise(here, rendezvous, store, plan, limits)
                except (WorkerError, InputError) as error:
                    conclusion = _conclusion_of(error)
                for host in rendezvous.hosts.values():
                    host.end(*conclusion)
                return conclusion

    def _supervise(
        self,
        here: LocalHost,
        rendezvous: Rendezvous | None,
        store: StoreServer,
        plan: Mapping[str, Any],
        limits: Limits,
    ) -> Conclusion:
        """Supervise workers on all hosts, and others in their place where some are lost, to the end of the run."""
        began, restarts = time.monotonic(), Restarts(plan.get("restarts", 0))
        while True:
            others = rendezvous.gather(self._requests) if rendezvous else []
            if self._requests:
                return self._stopped_early(has_begun=restarts.count > 0)
            hosts: list[LocalHost | RemoteHost] = [here, *others]
            num_workers = [plan["workers"], *(host.num_workers for host in others)]
            ranks = [range(*ends) for ends in pairwise(accumulate(num_workers, initial=0))]
            survival = Survival(num_workers=sum(num_workers), **plan["survival"]) if plan.get("survival") else None
            supervisor = Supervisor(
                hosts,
                ranks,
                limits,
                self._requests,
                survival=survival,
                take_hosts=rendezvous.take_hosts if rendezvous else lambda: (),
            )
            outcome = supervisor.finish()
            failure = root_cause(outcome.failures) if outcome.failures else None
            if failure is None or failure.kind != "lost" or outcome.stopped_by or not restarts.may_start(outcome.step):
                return self._conclude(outcome, failure)
            again = "all workers start again, from the last checkpoint or, where there is none, from the beginning"
            for host in [here, *(rendezvous.hosts.values() if rendezvous else ())]:
                host.log(WARNING, f"{failure.text}\n{again}: {restarts}")
            self._pause(restarts.pause_seconds, rendezvous)
            store.clear()
            here.earlier_seconds = time.monotonic() - began

    def _conclude(self, outcome: RunOutcome, failure: Failure | None) -> Conclusion:
        """Why the run has ended, if not by itself."""
        if outcome.aborted:
            return Conclusion(ABORTED, WARNING, "aborted, without a checkpoint")
        if failure:
            return Conclusion(WRONG_INPUT if failure.kind == "input" else FAILED, ERROR, failure.text)
        code = exit_code_of_stop(outcome.stopped_by, requeue=self._requeue) if outcome.stopped_by else 0
        return Conclusion(code, ERROR, TOO_LATE if outcome.late else "")

    def _pause(self, seconds: float, rendezvous: Rendezvous | None) -> None:
        """Wait, unless a signal asks for a stop; the launchers of other hosts hear meanwhile that this one lives."""
        ends = time.monotonic() + seconds
        while not self._requests and time.monotonic() < ends:
            time.sleep(TICK_SECONDS)
            if rendezvous:
                rendezvous.attend(self._requests)

    def follow(self, seat: Seat, key: bytes, plan: Mapping[str, Any] | Conclusion, main: Main) -> Conclusion:
        """Serve the supervisor on the chief's host; it is told, too, where this host has nothing to run."""
        if isinstance(plan, Conclusion):
            if plan.code and not self._requests:
                meet_chief(seat, key, 0, self._requests, failed=plan.text)
            return plan
        met = meet_chief(seat, key, plan["workers"], self._requests)
        if met is None:
            return self._stopped_early()
        channel, address, port = met
        task = self._worker_task(plan, main) | {"store": [address, port, key.decode()]}
        network = network_towards(address, port)
        here = LocalHost(self._server, task, None, network, socket.gethostname(), self._spares_of(plan))
        with closing(channel), closing(here):
            return Agent(channel, here, self._requests).serve()

    def _spares_of(self, plan: Mapping[str, Any]) -> Sequence[str]:
        """Modules for those that take the place of lost workers, where the plan lets others do so."""
        return self._spares if plan.get("survival") or plan.get("restarts") else ()

    def _worker_task(self, plan: Mapping[str, Any], main: Main) -> dict[str, object]:
        share = None if openmp_threads_are_named() else share_of_cores(plan["workers"])
        from_plan = {"whole_traceback": plan.get("whole_traceback"), "shared_threads": share}
        return {**self._task, **from_plan, "kind": "worker", "function": reference(main)}

    def _stopped_early(self, *, has_begun: bool = False) -> Conclusion:
        text = (
            "stopped before the workers had started again; what was saved before stands" if has_begun else STOPPED_EARLY
        )
        return Conclusion(exit_code_of_stop(self._requests[0], requeue=self._requeue), WARNING, text)


def _conclusion_of(error: LockstepError) -> Conclusion:
    return Conclusion(error.exit_code, ERROR, str(error))


def _wait_for_exit(server: ForkServer, requests: list[str]) -> int | None:
    """Return the exit status of the server's only process, None when a signal comes first."""
    while not requests:
        for event in server.events(TICK_SECONDS):
            if event.status is not None:
                return event.status
    return None


def _run_here(argv: list[str], plan: Plan, main: Main, num_hosts: int) -> int:
    """Run one worker in this very process, where processes cannot be forked and watched."""
    try:
        num_workers = plan(argv)["workers"]
        if num_workers > 1 or num_hosts > 1:
            raise several_need_linux(f"{num_workers} workers" if num_hosts == 1 else f"{num_hosts} hosts")
    except LockstepError as error:
        log.error("%s", error)
        return WRONG_INPUT
    return main(argv) or 0


def several_need_linux(given: str) -> InputError:
    """Return the error for workers that cannot be forked and watched here."""
    return InputError(
        "Several workers need Linux.",
        given=f"{given} on {sys.platform}",
        expected="1 worker",
        hint="ask for 1 worker: it runs the towers in turn, and gives the same result",
    )
