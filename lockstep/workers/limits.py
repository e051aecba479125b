"""How long the processes of a run wait for each other, in seconds, and why so long: all of them in one place.

Each end of a connection has a limit of its own, and some must be longer than others; their reasons say which.
"""

from __future__ import annotations

from dataclasses import dataclass

# How they meet -------------------------------------------------------------------------------------------------------

START_SECONDS = 300.0
"""How long the hosts and workers of a run look for each other: somebody may start the command on each host by hand."""
RESOLVE_SECONDS = 30.0
"""How long the name of the chief's host may not resolve: a pod gets its name some seconds after it has started."""
REACH_SECONDS = 30.0
"""How long workers and watchers look for each other: they are started together, on hosts that may be busy."""
HANDSHAKE_SECONDS = 5.0
"""How long both ends of a connection take to prove that they know the key: a stranger holds a place no longer."""
HELLO_SECONDS = 1.0
"""How long a watcher waits for the first message on a connection: it is sent at once."""
CONNECT_SECONDS = 5.0
"""How long a worker tries to connect to another host: packets that a firewall drops are sent again after 1 and 3 s."""
TRIAL_SECONDS = 2 * CONNECT_SECONDS
"""How long the supervisor waits for what workers have reached in a trial of the connections."""
TRIAL_PAUSE_SECONDS = 60.0
"""How long it waits for the next trial, where the first has found no connection that is missing."""
STORE_ANSWER_SECONDS = 10.0
"""How long the first answer of a store takes once its port is open: another program may listen there."""

# How they know that others live --------------------------------------------------------------------------------------

BEAT_SECONDS = 0.1
"""How often a worker sends its pulse."""
TICK_SECONDS = 0.1
"""How often launchers of several hosts say that they live, and look after their workers."""
LONGEST_POLL_SECONDS = 0.5
"""How much is counted between two looks at others at most: who was paused himself looks later than he meant to, and
his pause is nobody else's silence."""
HOST_SILENT_SECONDS = 2.0
"""How long the launcher of another host may be silent until that host is lost: 20 of its ticks."""
HANG_SECONDS = 600.0
"""How long a worker may be at one place, where nobody has said how long."""


@dataclass(frozen=True)
class Limits:
    """How long a worker may be silent or stand still, and how long the others may live when one has failed."""

    stopped_seconds: float = 2.0
    """Silent, and the system says that the process is stopped."""
    show_seconds: float = 10.0
    """Silent, or at the same place: its stack is shown, and no later than half of the time until it is killed."""
    silent_seconds: float = 60.0
    """Silent but running: it is killed."""
    hang_seconds: float | None = None
    """At the same place, after its stack was shown: it is killed; 0 for never, None for what workers ask for, or 600 s.
    Six times as long in phases that take long."""
    usual_factor: float = 10.0
    """The stack of a worker at the same place is not shown before this many times the longest such phase so far."""
    grace_seconds: float = 1.0
    """For the others to end by themselves when one has failed."""
    save_seconds: float = 60.0
    """For the chief, if it saves then."""
    regroup_seconds: float = 30.0
    """For all of those that are left to find each other, once all of them have been told of a failure."""
    stop_seconds: float | None = None
    """For all of them to save and end when a signal has asked for it; None: as long as it takes."""


# What follows when one is lost ---------------------------------------------------------------------------------------

VERDICT_SECONDS = 3.0
"""How long a worker whose connection has broken waits to be told whose end it was: longer than `HOST_SILENT_SECONDS`,
and than a stopped worker lives."""
RECONNECT_SECONDS = 2.0
"""How long the launcher looks for who is lost, where workers say that a connection has broken, until it has all of
them connect anew."""
GENERATION_SECONDS = 15.0
"""How long a worker that has lost others waits to be told who goes on: longer than `VERDICT_SECONDS`, for which others
wait before they say so, and `RECONNECT_SECONDS` together."""
MISSED_SECONDS = 2.0
"""How long workers wait for one that has ended without an error until it is to blame: its end takes some time."""
STOP_ANSWER_SECONDS = 0.5
"""How long workers take to say where they are when they are asked to stop: five beats."""
LEAVE_SECONDS = 30.0
"""How long the chief waits at its end for the others to leave: its host has the store and the watcher that decides."""

# How long calls between workers wait ---------------------------------------------------------------------------------

TIMEOUT_SECONDS = 120.0
"""How long a call waits for the others, where nobody says whether they live."""
WATCHED_TIMEOUT_SECONDS = 1800.0
"""The same where it is known that all workers live: one of them may compile, or fetch data, for long."""
LAUNCHED_TIMEOUT_SECONDS = 365 * 86400.0
"""The same where our launcher watches the workers: it ends the wait."""
