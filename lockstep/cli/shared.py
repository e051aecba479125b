"""Shared by the commands: flags, the files they write, and workers.

Modules of commands load no torch: `lockstep --help` and the process that only launches workers need none.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.checks import PositiveInt, check_value
from lockstep.cores import usable_cores
from lockstep.errors import InputError, LockstepError
from lockstep.records.shards import check_local
from lockstep.screen import log_new_name, show_log, write_json, write_lines
from lockstep.storage.remote_path import is_url
from lockstep.workers.environment import SHORT_WAITS, WAITS_ALONE
from lockstep.workers.store_server import LAUNCHED

if TYPE_CHECKING:
    from lockstep.launcher.rendezvous import Seat
    from lockstep.workers.rank import Worker

EXIT_CODES = """exit codes:
  0    the run reached its end
  1    a worker failed, or the machine did: a disk that is full, read-only or gone in mid-run
  2    wrong input: a flag, a recipe, a workdir or data that cannot be used
  75   preempted (SIGUSR1; with --requeue also SIGTERM), after a final checkpoint: to be started again
  130  stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP, after a final checkpoint: the same command goes on
  137  aborted by a second Ctrl-C: the last checkpoint stands"""

ENVIRONMENT = f"""environment:
  Workers start with {" ".join(f"{name}={value}" for name, value in WAITS_ALONE.items())}, or where another process
  computes with {" ".join(f"{name}={value}" for name, value in SHORT_WAITS.items() if WAITS_ALONE[name] != value)}, \
for idle threads that spare busy neighbours, and with
  settings of the allocator and of cuBLAS. A variable of yours goes before them; one set
  to nothing leaves it to the library:
    GOMP_SPINCOUNT= lockstep train mnist"""

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended."""
OUTPUT_CLOSED = 141
"""The exit code of a command whose output nobody reads any more, as of others that SIGPIPE ends."""

QUIET_HELP = "tell warnings and errors alone, no progress"


class Command(NamedTuple):
    """A command of `lockstep`: its line in the help, its flags, and the function that runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]
    """Takes the parsed arguments and the command line; returns the exit code."""
    flags: Mapping[str, str] = MappingProxyType({})
    """Flags by the argument of the library that they give: errors name the flags."""
    has_quiet: bool = True

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line, the name of the command first, which `main` has accepted before."""
        parser = argparse.ArgumentParser(prog=f"lockstep {argv[0]}")
        self.add_to(parser)
        return parsed(parser, argv[1:])

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of this command to its parser, and the one that all have but `run`: a script has its own."""
        self.add_arguments(parser)
        for each in _innermost(parser) if self.has_quiet else ():
            each.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help=QUIET_HELP)


def _innermost(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of the commands that a command has, if it has some, else its own."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [leaf for action in inner for each in action.choices.values() for leaf in _innermost(each)] or [parser]


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `arguments` then holds what is after "--" or unknown: the arguments of a script."""
    split = argv.index("--") if "--" in argv else len(argv)
    arguments, unknown = parser.parse_known_args(argv[:split])
    arguments.arguments = [*unknown, *argv[split + 1 :]]
    return arguments


class OldFlag(argparse.Action):
    """A flag that has another name now, `new`: it does the same, and its use is logged. The help leaves it out."""

    def __init__(self, *args: Any, new: str, **options: Any) -> None:
        options |= {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        super().__init__(*args, **options)
        self._new = new

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value under the new name."""
        log_new_name(str(option), self._new)
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def in_words_of_flags(text: str, flags: Mapping[str, str]) -> str:
    """Put flags, by the name of their argument, into the text of an error: `quality=0` becomes `--quality 0`."""
    for name, flag in flags.items():
        text = re.sub(rf"(?<![\w.-]){name}=", f"{flag} ", text)
        text = re.sub(rf"^{name}(?= (?:is|cannot) )|(?<=give ){name}(?= )", flag, text)
    return text


# argparse has no public name for what has arguments.
def add_json_argument(command: argparse._ActionsContainer) -> None:
    """Add the flag of commands that report: what they have found, as one JSON value on the standard output."""
    command.add_argument("--json", action="store_true", help="write JSON, for programs")


def write_found(arguments: argparse.Namespace, facts: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Write what a command has found: its facts where `--json` is given, else lines for people."""
    if arguments.json:
        write_json(facts)
    else:
        write_lines(lines)


def add_settings_argument(command: argparse.ArgumentParser, what: str = "change a field of the recipe") -> None:
    """Add the flag that changes fields of the recipe."""
    command.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help=what)


def add_towers_argument(command: argparse.ArgumentParser) -> None:
    """Add the flag that says over how many towers the batch is split."""
    command.add_argument("--towers", type=int, metavar="N", help="slices of the batch (default: those of the recipe)")


def add_machine_arguments(
    command: argparse.ArgumentParser, threads: str = "its share of the cores; exact: one"
) -> None:
    """Add the flags that say how many workers are started, and where; `threads` says how many threads by default."""
    command.add_argument("--workers", type=int, metavar="N", help="processes, one a device (default: what there is)")
    command.add_argument(
        "--workers-per-device", type=int, metavar="N", help="workers that share an accelerator, over gloo (default: 1)"
    )
    command.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help=f"torch's threads in each worker, on which exact bits depend (default: {threads})",
    )
    command.add_argument("--device", choices=["cpu"], help="leave the accelerators alone")


def add_host_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of a run on several hosts."""
    command.add_argument("--hosts", type=int, metavar="N", help="the same command runs on N hosts, as one run")
    command.add_argument("--host-rank", type=int, metavar="K", help="which of them this is, from 0, the chief's host")
    command.add_argument("--chief", metavar="HOST:PORT", help="where the chief's host listens for the others")


def add_code_argument(command: argparse.ArgumentParser) -> None:
    """Add the flag that lets a run's code be called whoever has written it."""
    command.add_argument(
        "--allow-code",
        action="store_true",
        help="call the functions of your own that a run names, though others may have written to its folder",
    )


# argparse has no public name for the group that is returned.
def add_weights_arguments(command: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the flags that choose the weights of a run; returns the group of those that choose the checkpoint."""
    command.add_argument("run", metavar="RUN[@STEP]", help="the folder of a run, and a step (default: the newest)")
    weights = command.add_mutually_exclusive_group()
    weights.add_argument("--average", action="store_true", help="take the moving averages of the parameters")
    weights.add_argument("--raw", action="store_true", help="take the parameters themselves (default: as the recipe)")
    add_code_argument(command)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step, as RUN@STEP")
    which.add_argument(
        "--best", action="store_true", help="the best one, by the score that the recipe keeps the best by"
    )
    return which


def given_seat(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Seat | None:
    """Return the place of this host among those of a run, by the flags or by what a launcher of hosts says.

    None where the run has one host alone.

    Raises:
        InputError: a flag is missing or out of range.
    """
    from lockstep.launcher.rendezvous import Seat
    from lockstep.workers.cluster import hosts_of_environment

    flags = {"--hosts": arguments.hosts, "--host-rank": arguments.host_rank, "--chief": arguments.chief}
    given = {flag: value for flag, value in flags.items() if value is not None}
    if not given or given == {"--hosts": 1}:
        place = None if given else hosts_of_environment(environment)
        if place is None:
            return None
        given = dict(zip(flags, place, strict=True))
    told = " ".join(f"{flag} {value}" for flag, value in given.items())
    missing = [flag for flag in flags if flag not in given]
    if missing:
        raise InputError(
            f"A run on several hosts also needs {' and '.join(missing)}.",
            given=told,
            expected="the number of hosts, the rank of this one, and the address of the first",
            hint="--hosts 4 --host-rank 0 --chief node0:29500; on the next host --host-rank 1, and all else the same",
        )
    num_hosts, host_rank = int(given["--hosts"]), int(given["--host-rank"])
    name, _, port = str(given["--chief"]).rpartition(":")
    is_place = _may_resolve(name) and port.isdecimal() and 0 < int(port) < 1 << 16
    if not 0 <= host_rank < num_hosts or not is_place:
        raise InputError(
            "The place of this host among those of the run cannot be used.",
            given=told,
            expected="a rank below the number of hosts, from 0, and a name or address with a port from 1 to 65535",
            hint="--hosts 4 --host-rank 0 --chief node0:29500",
        )
    return Seat(num_hosts, host_rank, name.strip("[]"), int(port)) if num_hosts > 1 else None


def _may_resolve(name: str) -> bool:
    """Whether a text has the form of a host's name or address."""
    with suppress(UnicodeError):
        return bool(name.encode("idna"))
    return False


def run_folder(text: str, *, contents: bool = True) -> Path:
    """Return the folder of a run that the user names, which one on a bucket is brought to; `contents` as `fetch_run`.

    Workers find what the process that has launched them has brought here.
    """
    if is_url(text):
        from lockstep.checkpoints.fetching import fetch_run, local_folder

        return local_folder(text) if LAUNCHED in os.environ else fetch_run(text, contents=contents)
    check_local(text)
    return Path(text)


def check_linux(what: str) -> None:
    """Refuse what is only done where a launcher starts workers; `what` is a sentence that says so."""
    if sys.platform != "linux":
        raise InputError(
            what,
            given=sys.platform,
            expected="Linux, where workers are processes of a launcher",
            hint="give the command there, on the machine of the run",
        )


def check_target(path: Path, endings: Collection[str], what: str, *, overwrite: bool, flag: str = "--to") -> None:
    """Refuse a file with another ending, in no folder, or there already, before any work is done.

    `what` is a sentence for the error: what is written, as which kind of file.
    """
    if path.suffix not in endings:
        raise InputError(
            what,
            given=f"{flag} {path}",
            expected=f"a file whose name ends in {' or '.join(endings)}",
            hint=f"{flag} {path.with_suffix(next(iter(endings)))}" if path.name else "name a file",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"There is no folder {path.parent} to write to.",
            given=f"{flag} {path}",
            expected="a file in a folder that is there",
            hint=f"make it: mkdir -p {path.parent}",
        )
    if path.is_dir() or (path.exists() and not overwrite):
        kind = "folder" if path.is_dir() else "file"
        raise InputError(
            f"There is a {kind} {path} already.",
            given=f"{flag} {path}",
            expected="a name that is free",
            hint="give another name" + ("" if path.is_dir() else ", or --force to overwrite it"),
        )


def check_output_folder(path: Path, *, overwrite: bool | None, flag: str = "--to") -> None:
    """Refuse a folder to write to that is a file, may not be written, or is not empty, before any work is done.

    It may hold files if `overwrite` (`--force`); None is for commands that never overwrite any.
    """
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(
            f"The folder {path} cannot be written.",
            given=f"{flag} {path}" + ("" if above == path else f", and {above}"),
            expected="a folder that may be written, or the name of a new one",
            hint="name another folder",
        )
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise InputError(
            f"The folder {path} is not empty.",
            given=f"{flag} {path}",
            expected="an empty folder, or the name of a new one",
            hint="give another name"
            + ("" if overwrite is None else ", or --force to overwrite what has the same name in it"),
        )


def check_no_flag_of_weights(arguments: argparse.Namespace, holds: str, examples: str) -> None:
    """Refuse the flags of `lockstep inspect` that are for weights, beside a path that `holds` something else."""
    for flag in ("diff", "values"):
        if getattr(arguments, flag) is not None:
            raise InputError(
                f"--{flag} is for weights.",
                given=f"{arguments.path}, {holds}",
                expected="a checkpoint, or a run",
                hint=f"leave --{flag} out; lockstep show shows the examples of {examples}",
            )


def damage_lines(problems: Sequence[str]) -> list[str]:
    """Return lines that list what is damaged, if anything is."""
    return ["damaged:", *(f"  {problem}" for problem in problems)] if problems else []


def format_error(error: LockstepError) -> str:
    """Format an error on one line, without its hint."""
    return f"{error.what} Given: {error.given}; expected: {error.expected}."


def choose_num_workers(
    wanted: int | None,
    device: str | None,
    num_towers: int | None,
    workers_per_device: int | None = None,
    seat: Seat | None = None,
    *,
    num_servers: int = 0,
) -> int:
    """Return the number of workers to start on this host; a number wanted that is out of range is refused.

    By default one for each accelerator, or as many as may share it; on a CPU one for each tower and at most one a core;
    never more than towers; one on other systems than Linux. Workers and towers are those of all hosts, of which each
    takes as even a share as can be. Workers that serve the others, and compute no tower, come on top of these on the
    first host, and need no accelerator; but where a single one would compute on one, it is alone.
    """
    from lockstep.exchange.tree import assign_towers
    from lockstep.workers.devices import num_accelerators

    check_value("--workers-per-device", workers_per_device, PositiveInt | None)
    if seat:
        for number, what in ((wanted, "workers"), (num_towers, "towers")):
            if number is not None and number < seat.num_hosts:
                raise InputError(
                    f"There are fewer {what} than hosts.",
                    given=f"{number} {what} over {seat.num_hosts} hosts",
                    expected=f"at least one of the {what} for each host",
                    hint=f"--{what} counts those of all hosts: --{what} {seat.num_hosts} or more; or fewer hosts",
                )
        wanted, num_towers = (
            number if number is None else len(assign_towers(number, seat.num_hosts)[seat.host_rank])
            for number in (wanted, num_towers)
        )
    most = 0 if device == "cpu" else num_accelerators() * (workers_per_device or 1)
    serving = num_servers if seat is None or seat.host_rank == 0 else 0
    if wanted is None:
        computing = min(most or usable_cores(), num_towers or most or 1) if sys.platform == "linux" else 1
        return 1 if most and computing == 1 and seat is None else computing + serving
    if most:
        most += serving
    if wanted < 1 or 0 < most < wanted:
        raise InputError(
            "That many workers cannot be started here.",
            given=f"{wanted} workers",
            expected=f"1 to {most}, {workers_per_device or 1} a device{' and one that serves' if serving else ''}"
            if most
            else "1 or more",
            hint="leave --workers out to let Lockstep choose, or add --device cpu; several share a device with "
            "--workers-per-device",
        )
    return wanted


@contextmanager
def join_workers(
    device: str | None, workers_per_device: int | None = None, *, shows_log: bool = True, chief_serves: bool = False
) -> Iterator[Worker]:
    """Make this process a worker: a signal ends the run after the step.

    The chief's log is shown, and the warnings of other workers below their names; a script's log is its own.
    """
    from lockstep.workers.rank import join
    from lockstep.workers.signals import stop_on_signals

    worker = join(device, workers_per_device=workers_per_device, chief_serves=chief_serves)
    if shows_log:
        show_log(None if worker.is_chief else worker.name, level=logging.INFO if worker.is_chief else logging.WARNING)
    if worker.pulse.launched:
        yield worker
    else:
        with stop_on_signals(worker.pulse):
            yield worker


def worker_exit_code(worker: Worker, *, requeue: bool = False) -> int:
    """Return the exit code of workers that were stopped: 0 under our launcher, which returns the signal's code.

    All workers call it, and get the code of the same signal, whichever of them it was sent to. As some launchers end
    all processes with the first one that ends, it waits for the chief, which may still be saving.
    """
    from lockstep.launcher.launch import exit_code_of_stop

    if worker.pulse.launched:
        return 0
    signals = [name for name in worker.group.gather(worker.pulse.stop_requested) if name]
    return exit_code_of_stop(signals[0] if signals else "SIGTERM", requeue=requeue)
