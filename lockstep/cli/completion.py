"""What other programs make of the parser of all commands: completion in shells, and the manual page.

`lockstep completion` writes a script by which a shell completes commands, flags, recipes, fields of `--set` and runs;
`lockstep man` the page for `man lockstep`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lockstep.cli.shared import Command
from lockstep.cli.train import SHIPPED_RECIPES
from lockstep.errors import InputError
from lockstep.version import __version__

SHELLS = ("bash", "zsh", "fish")
_RUNS = "ls -d runs/*/ 2>/dev/null"
_RECIPES = f"printf '%s\\n' {' '.join(SHIPPED_RECIPES)}; ls *.toml 2>/dev/null; {_RUNS}"
_LISTED = {"recipe": _RECIPES, "source": _RECIPES, "what": _RECIPES, "run": _RUNS, "runs": _RUNS, "paths": _RUNS}
"""What the shell runs to complete an argument, by its name; where nothing fits, files are completed."""
_BASH = """
_lockstep_fields_without_space() {
  _shtab_lockstep "$@"
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _lockstep_fields_without_space lockstep
"""


def completion_command(make_parser: Callable[[], argparse.ArgumentParser]) -> Command:
    """Make the command, for the parser of all commands."""

    def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
        sys.stdout.write(_script(make_parser(), arguments.shell))
        return 0

    return Command("write a script by which a shell completes command lines", _add_arguments, run)


def _add_arguments(completion: argparse.ArgumentParser) -> None:
    completion.add_argument(
        "shell", choices=SHELLS, help="the shell; docs/reference/command-line.md says where to put it"
    )


def _script(parser: argparse.ArgumentParser, shell: str) -> str:
    try:
        import shtab
    except ImportError:
        raise _not_installed("shtab") from None
    from lockstep.recipes.fields import all_fields

    fields = sorted(all_fields())
    for action in _actions(parser):
        if action.dest == "settings" and "--set" in action.option_strings:
            action.choices = [f"{field}=" for field in fields]
        elif action.dest == "field":
            action.choices = fields
        elif action.dest in _LISTED and not action.option_strings and not action.choices:
            action.complete = shtab.cmd(_LISTED[action.dest])
    script: str = shtab.complete(parser, shell=shell)
    return script + (_BASH if shell == "bash" else "")


def man_command(make_parser: Callable[[], argparse.ArgumentParser]) -> Command:
    """Make the command that writes the manual page, for the parser of all commands."""

    def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
        try:
            from argparse_manpage.manpage import Manpage
        except ImportError:
            raise _not_installed("argparse-manpage") from None
        parser = make_parser()
        page = Manpage(parser, format="single-commands-section")
        page.description, page.manual, page.source = parser.description, "User Commands", f"lockstep {__version__}"
        sys.stdout.write(str(page))
        return 0

    return Command("write the page that `man lockstep` shows", lambda man: None, run)


def _not_installed(library: str) -> InputError:
    return InputError(
        "The library that writes this is not installed.",
        given=f"no {library}",
        expected=f"{library}, which is small and needs nothing else",
        hint="pip install 'lockstep-train[completion]'",
    )


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from _actions(command)
