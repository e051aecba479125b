"""The launcher of a host that is not the chief's: it starts, signals and hears its workers for the supervisor.

The supervisor on the chief's host decides; see `lockstep.launcher.hosts.RemoteHost` for its end of the channel. This
end decides one thing alone: where the supervisor is gone, the run is, and no worker stays behind.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import NamedTuple

from lockstep.errors import WorkerError
from lockstep.launcher.hosts import SILENT_SECONDS, TICK_SECONDS, Host, Silence
from lockstep.workers.channel import Channel, Message


class Conclusion(NamedTuple):
    """How a launcher ends: its exit code, and its last lines, if there is anything to say."""

    code: int
    level: int = 0
    text: str = ""


class Agent:
    """Serves the supervisor of another host.

    Args:
        channel: to the supervisor.
        host: this one.
        requests: names of the signals that have reached this launcher; the supervisor gets them.
        clock: seconds that only grow.
    """

    def __init__(
        self, channel: Channel, host: Host, requests: list[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._host, self._requests = channel, host, requests
        self._places: dict[int, tuple[int, str]] = {}
        """Step and phase of each worker."""
        self._silence = Silence(clock)

    def serve(self) -> Conclusion:
        """Do what the supervisor says until it says how the run has ended.

        Raises:
            WorkerError: the supervisor is gone.
        """
        while True:
            wait([self._channel.fileno(), self._host.fileno()], TICK_SECONDS)
            orders = self._channel.receive()
            if orders:
                self._silence.end()
            for order in orders:
                if "end" in order:
                    return Conclusion(int(order["end"]), int(order["level"]), str(order["log"]))
                self._obey(order)
            self._report()
            seconds = self._silence.seconds()
            if self._channel.ended:
                raise self._lost("its launcher has ended, or was killed")
            if seconds > SILENT_SECONDS:
                raise self._lost(f"no sign of life for {seconds:.1f} s: it is down, or the network to it is")

    def _obey(self, order: Message) -> None:
        if "start" in order:
            self._host.start(order["start"], order["environment"])
            self._places[order["start"]] = (0, "start")
        elif "to" in order:
            self._host.send(order["to"], order["message"])
        elif "kill" in order:
            self._host.kill(order["kill"], signal.Signals(order["signal"]))
        elif "log" in order:
            self._host.log(order["level"], order["log"])

    def _report(self) -> None:
        """Tell the supervisor what workers have said, and that this host lives."""
        said = self._host.receive()
        for rank, message in said:
            if "phase" in message:
                self._places[rank] = message["step"], message["phase"]
        stopped = [rank for rank in self._places if self._host.is_stopped(rank)]
        requests = [*self._requests]
        del self._requests[: len(requests)]
        self._channel.send({"said": said, "stopped": stopped, "requests": requests})

    def _lost(self, why: str) -> WorkerError:
        places = ", ".join(
            f"worker {rank} at step {step} (phase {phase})" for rank, (step, phase) in self._places.items()
        )
        return WorkerError(
            "Host 0, which decides for all of them, is gone.",
            given=why,
            expected="it to live as long as the run",
            hint="read the last lines on its screen; the workers of this host are ended" + (places and f": {places}"),
        )
