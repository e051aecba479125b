"""The launcher: one process that starts the workers of this host, watches them, and alone decides when the run ends.

It imports no torch. A plan, made in a process of its own, says how many workers there are; each worker then runs the
same command line again, with its rank in the environment: nothing of the user's is pickled.

Exit codes: 0 the run reached its end; 1 a worker failed; 2 wrong input; 75 preempted, 129, 130 and 143 stopped by
SIGHUP, Ctrl-C or SIGTERM, all four after a final checkpoint; 137 aborted.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from lockstep.errors import InputError, LockstepError, WorkerError
from lockstep.parallel.entry import reference
from lockstep.parallel.forkserver import ForkServer
from lockstep.parallel.supervisor import STOPPED_EARLY, TICK_SECONDS, RunOutcome, Supervisor
from lockstep.screen import Lines, log
from lockstep.terminal import outlive_terminal
from lockstep.workers.channel import Channel
from lockstep.workers.cluster import WorkerEnvironment
from lockstep.workers.signals import notices
from lockstep.workers.watchdog import Limits, root_cause

Plan = Callable[[list[str]], Mapping[str, Any]]
Main = Callable[[list[str]], int | None]

FAILED, WRONG_INPUT, PREEMPTED, ABORTED = 1, 2, 75, 137
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


def launch(
    argv: Sequence[str],
    *,
    plan: Plan,
    main: Main,
    preload: Sequence[str] = ("torch",),
    limits: Limits | None = None,
    requeue: bool = False,
) -> int:
    """Run `main(argv)` on as many workers as `plan(argv)` says; returns the exit code. Call it in the main thread.

    Args:
        argv: the arguments of both functions.
        plan: returns `{"workers": 2}`, with `"threads"` (intra-op threads of a worker, 1 by default) and
            `"hang_seconds"` (in place of that of the limits) where wanted, and `"whole_traceback"`: errors are shown
            with the frames of all packages, not of the user's code alone. An error that it raises is shown, and no
            worker is started. A function at the top level of a module.
        main: what each worker runs; None or 0 is success. A function at the top level of a module.
        preload: modules imported once for all workers; importing them must start no thread and touch no device.
        limits: how long a worker may be silent, stuck, or take to stop.
        requeue: count SIGTERM as a preemption too.
    """
    if sys.platform != "linux":
        return _run_here(list(argv), plan, main)
    outlive_terminal()
    task: dict[str, object] = {"argv": list(argv), "sys_argv": sys.argv}
    try:
        with _collect_signals() as requests, closing(ForkServer(preload)) as server:
            planned = _make_plan(server, {**task, "kind": "plan", "function": reference(plan)}, requests, requeue)
            if isinstance(planned, int):
                return planned
            task |= {"kind": "worker", "function": reference(main)}
            task |= {name: planned.get(name) for name in ("threads", "whole_traceback")}
            limits = limits or Limits()
            limits = replace(limits, hang_seconds=planned.get("hang_seconds", limits.hang_seconds))
            outcome = Supervisor(server, task, planned["workers"], limits, requests).finish()
    except WorkerError as error:
        log.error("%s", error)
        return FAILED
    # Only now are all processes gone, and nothing can write below the last lines.
    return _conclude(outcome, requeue)


def _conclude(outcome: RunOutcome, requeue: bool) -> int:
    """Log why the run ended, if not by itself; returns the exit code."""
    if outcome.aborted:
        log.warning("aborted, without a checkpoint")
        return ABORTED
    if outcome.failures:
        failure = root_cause(outcome.failures)
        log.error("%s", Lines(failure.text))
        return WRONG_INPUT if failure.kind == "input" else FAILED
    if outcome.late:
        log.error("the workers took longer to stop than the time of grace, and were killed; the last checkpoint stands")
    return exit_code_of_stop(outcome.stopped_by, requeue=requeue) if outcome.stopped_by else 0


@contextmanager
def _collect_signals() -> Iterator[list[str]]:
    """Collect the names of SIGINT and notices as they come; the handlers from before are put back at the end."""
    requests: list[str] = []
    numbers = [signal.SIGINT, *notices()]
    before = [signal.signal(number, lambda n, _: requests.append(signal.Signals(n).name)) for number in numbers]
    try:
        yield requests
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _make_plan(
    server: ForkServer, task: Mapping[str, object], requests: list[str], requeue: bool
) -> Mapping[str, Any] | int:
    """Have the plan made in a process of its own; returns it, or the exit code where there is nothing to run."""
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel:
        server.fork("plan", task, [theirs])
        status = _wait_for_exit(server, requests)
        said = next(iter(channel.receive()), {})
    if status is None:
        log.warning(STOPPED_EARLY)
        return exit_code_of_stop(requests[0], requeue=requeue)
    if "plan" in said:
        plan: Mapping[str, Any] = said["plan"]
        return plan
    if "failed" in said:
        log.error("%s", Lines(said["failed"].rstrip()))
    elif status < 0:
        log.error("the process that plans the run was killed by %s", signal.Signals(-status).name)
    return max(status, FAILED) if status else 0


def _wait_for_exit(server: ForkServer, requests: list[str]) -> int | None:
    """Return the exit status of the server's only process, None when a signal comes first."""
    while not requests:
        for event in server.events(TICK_SECONDS):
            if event.status is not None:
                return event.status
    return None


def _run_here(argv: list[str], plan: Plan, main: Main) -> int:
    """Run one worker in this very process, where processes cannot be forked and watched."""
    try:
        num_workers = plan(argv)["workers"]
        if num_workers > 1:
            raise InputError(
                "Several workers need Linux.",
                given=f"{num_workers} workers on {sys.platform}",
                expected="1 worker",
                hint="ask for 1 worker: it runs the towers in turn, and gives the same result",
            )
    except LockstepError as error:
        log.error("%s", error)
        return WRONG_INPUT
    return main(argv) or 0
