"""The command `lockstep`: parses the command line and runs one of its commands. Loads no torch before one needs it."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from lockstep.cli import (
    benchmark,
    chaos,
    convert,
    doctor,
    evaluate,
    explain,
    export,
    importing,
    inspect,
    plan,
    predict,
    recipes,
    report,
    run,
    show,
    status,
    train,
    verify,
)
from lockstep.cli.completion import completion_command, man_command
from lockstep.cli.meant import command_meant, rest_meant
from lockstep.cli.shared import EXIT_CODES, INTERRUPTED, OUTPUT_CLOSED, QUIET_HELP, in_words_of_flags, parsed
from lockstep.errors import LockstepError
from lockstep.lazy import import_lazily
from lockstep.screen import QUIET, Lines, log, one_line, show_log
from lockstep.terminal import width_of, wrapped
from lockstep.version import __version__

EXAMPLES = """examples:
  lockstep train photos                                   train on a folder with a folder of images for each class
  lockstep train mnist --towers 2 --workdir runs/mnist    train by a recipe; the same again resumes
  lockstep train mnist --set optimizer.lr.initial=0.02    change one field of the recipe
  lockstep recipes                                        the recipes that come with it
  lockstep explain optimizer.lr                           what a field of recipes means, takes and is by default
  lockstep train mnist --print-recipe > mine.toml         a recipe of your own: lockstep train mine.toml
  lockstep evaluate runs/mnist                            score its newest checkpoint
  lockstep predict runs/flowers photos --to out           the classes of images in files and folders
  lockstep run my_script.py --workers 4                   your own script on four workers
  lockstep report runs/mnist                              what a run did, on one page: curves, scores, what happened
  lockstep status runs                                    what runs are doing, how long they take, what is wrong
  lockstep runs runs --show optimizer.lr.initial          runs by their scores, with fields of their recipes
  lockstep convert images photos --to shards              sharded records of folders of images
  lockstep benchmark input mnist                          what limits the run, and what to change
  lockstep plan mnist --workers 1,2                       how long it takes with more workers, by a short measurement
  lockstep doctor mnist                                   whether this machine can train it, and what would limit it
  lockstep chaos mnist --minutes 5                        kill its workers, fill its disk, and see that nothing is lost
  lockstep show photos/train --augment crop --to page.html    examples, before and after they are augmented
  lockstep inspect runs/mnist                             what is in a checkpoint or a record file, and what is damaged
  lockstep verify runs/mnist                              that a run is what its recipe gives, and nothing was changed
  lockstep import checkpoint net.ckpt --to net.safetensors    weights of another system, TensorFlow's among them
  lockstep import pipeline ssd.config --to ssd.toml       a recipe of a config of TensorFlow Object Detection
  lockstep export runs/mnist --to model.pt2               the model, for plain torch"""

COMMANDS = {
    "train": train.COMMAND,
    "evaluate": evaluate.COMMAND,
    "predict": predict.COMMAND,
    "run": run.COMMAND,
    "report": report.COMMAND,
    "status": status.COMMAND,
    "runs": status.RUNS_COMMAND,
    "convert": convert.COMMAND,
    "benchmark": benchmark.COMMAND,
    "plan": plan.COMMAND,
    "doctor": doctor.COMMAND,
    "chaos": chaos.COMMAND,
    "show": show.COMMAND,
    "inspect": inspect.COMMAND,
    "verify": verify.COMMAND,
    "import": importing.COMMAND,
    "export": export.COMMAND,
    "recipes": recipes.COMMAND,
    "explain": explain.COMMAND,
    "completion": completion_command(lambda: parser()),
    "man": man_command(lambda: parser()),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str, hint: str = "") -> NoReturn:
        """Say what is wrong and what was meant, not all flags, among which it would not be seen."""
        lines = (line.partition("  ")[0] for line in EXAMPLES.replace("\n  ", "\n").splitlines())
        example = next((line for line in lines if f"{line} ".startswith(f"{self.prog} ")), "")
        way = f"  hint:     {hint}\n" if hint else f"  such as:  {example}\n" if example else ""
        # The shell expands a pattern to names of files, which may hold anything.
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n{way}  help:     {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status, message and _fitted(message, sys.stderr))

    def format_help(self) -> str:
        return _fitted(super().format_help(), sys.stdout)


def _fitted(text: str, stream: TextIO) -> str:
    """Break the lines that are too long for a terminal: argparse leaves examples and messages as they are."""
    width = width_of(stream)
    return "\n".join(part for line in text.split("\n") for part in wrapped(line, width))


def parser() -> _Parser:
    """Make the parser of all commands."""
    top = _Parser(
        prog="lockstep",
        description="Train vision models on many devices as if they were one.",
        epilog=f"{EXAMPLES}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--quiet", action="store_true", help=QUIET_HELP)
    top.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_to(commands.add_parser(name, help=command.help))
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. For `run`, `arguments` holds the arguments of the script."""
    top = parser()
    if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
        top.error(f"there is no command {argv[0]}", command_meant(argv, COMMANDS, train.SHIPPED_RECIPES))
    arguments = parsed(top, argv)
    if (rest := arguments.arguments) and arguments.command != "run":
        command = _Parser(prog=f"lockstep {arguments.command}")
        COMMANDS[arguments.command].add_to(command)
        hint = rest_meant(arguments.command, getattr(arguments, "recipe", ""), rest, command._option_string_actions)
        command.error(f"unrecognized arguments: {' '.join(rest)}", hint)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # of argparse, after its help
            _flush_output()
            raise
        _flush_output()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not _has_lost_reader(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written, and nowhere
        return OUTPUT_CLOSED
    return code


def _flush_output() -> None:
    if sys.stdout:
        sys.stdout.flush()


def _has_lost_reader(stream: TextIO) -> bool:
    """Whether nobody reads any more what is written to a stream, as of a command before `| head`."""
    try:
        watched = select.poll()
        watched.register(stream, 0)  # that a pipe has no other end is told without being asked for
        return bool(watched.poll(0))
    except (OSError, ValueError):  # it is none of the system's
        return False


def _run(argv: list[str]) -> int:
    arguments = parse(argv)
    command = COMMANDS[arguments.command]
    if arguments.quiet:
        os.environ[QUIET] = "1"
    argv = argv[argv.index(arguments.command) :]  # workers parse what is of the command
    if arguments.command != "run":  # a script decides on its own where log lines go, and what is imported when
        show_log()
        import_lazily("torch", "numpy")  # what can be refused without them is refused at once
    try:
        return command.run(arguments, argv)
    except LockstepError as error:
        sys.last_value = error  # as where the interpreter shows it: a worker that leaves its run tells the others
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])  # what a lost worker has said, for one
        log.error("%s", Lines(in_words_of_flags(text, command.flags)))
        return error.exit_code
