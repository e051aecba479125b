"""`lockstep report`: what runs did, on one page or as JSON."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.checks import Range, check_value
from lockstep.cli.shared import Command, check_target, run_folder
from lockstep.durable import atomic_write
from lockstep.errors import InputError, LockstepError
from lockstep.run_files import RECIPE
from lockstep.screen import write_json, write_lines

if TYPE_CHECKING:
    from lockstep.report.pictures import ReportPicture
    from lockstep.runs.record import RunRecord

_USUAL = Path("report.html")
_SIDE_PIXELS, _MOST_EXAMPLES = 224, 100
_HEAD_BYTES = 4096


def _add_arguments(report: argparse.ArgumentParser) -> None:
    report.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run; several are shown side by side")
    target = report.add_mutually_exclusive_group()
    target.add_argument("--to", type=Path, metavar="FILE", help="the page (default: report.html in the current folder)")
    target.add_argument("--json", action="store_true", help="write JSON instead, for programs")
    report.add_argument("--force", action="store_true", help="overwrite the file though it is no report")
    report.add_argument(
        "--examples", type=int, metavar="N", help="also show the first N examples of the data, as the run augments them"
    )
    report.description = "Show what runs did, on one page that holds all of it. Nothing is written into their folders."


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    paths = [*dict.fromkeys(run_folder(run, contents=False) for run in arguments.runs)]
    target = arguments.to or _USUAL
    if not arguments.json:
        _check_place(target, paths, is_named=arguments.to is not None, overwrite=arguments.force)
    check_value("examples", arguments.examples, Annotated[int | None, Range(ge=1, le=_MOST_EXAMPLES)])
    from lockstep.checkpoints.mirror import shown_path
    from lockstep.report.facts import recipe_differences
    from lockstep.report.page import report_json, report_page, run_report
    from lockstep.runs.record import RunRecord, format_time

    if wrong := next((path for path in paths if not os.path.lexists(path / RECIPE)), None):
        from lockstep.cli.given_run import no_run_in

        raise no_run_in(wrong)
    records = list(map(RunRecord, paths))
    examples = [_examples(record, arguments.examples) if arguments.examples else [] for record in records]
    runs = list(map(run_report, records, _names(paths), examples))
    differing = recipe_differences([record.recipe for record in records])
    if arguments.json:
        write_json(report_json(runs, differing))
        return 0
    with atomic_write(target, failure=InputError) as file:
        file.write(report_page(runs, differing, format_time(time.time())))
    write_lines([f"{target}: {', '.join(map(shown_path, paths))}; open it in a browser"])
    return 0


def _check_place(target: Path, runs: Sequence[Path], *, is_named: bool, overwrite: bool) -> None:
    """Refuse a file that is no report, and to write into the folder of a run unless the user has named it."""
    check_target(target, [".html"], "A report is a page of HTML.", overwrite=overwrite or _is_report(target))
    here = Path.cwd()
    if not is_named and any(here.is_relative_to(run.resolve()) for run in runs):
        raise InputError(
            "The current folder is that of the run, which a report leaves as it is.",
            given=f"no --to, in {here}",
            expected="a file for the page",
            hint="--to ../report.html",
        )


def _is_report(path: Path) -> bool:
    from lockstep.report.page import GENERATOR

    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return f'<meta name="generator" content="{GENERATOR} '.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def _names(runs: Sequence[Path]) -> list[str]:
    """Call runs by their folders, or where these have the same name, by their paths."""
    from lockstep.checkpoints.mirror import shown_path

    names = [Path(shown_path(run)).resolve().name for run in runs]
    return names if len({*names}) == len(names) else list(map(shown_path, runs))


def _examples(record: RunRecord, count: int) -> list[ReportPicture]:
    from lockstep.cli.cards import card
    from lockstep.cli.source import stream_of_recipe
    from lockstep.report.pictures import picture_of
    from lockstep.runs.showing import examples
    from lockstep.runs.workdir import located, with_code_of_run

    pictures: list[ReportPicture] = []
    try:
        if record.recipe is None:
            return pictures
        stream = stream_of_recipe(with_code_of_run(located(record.recipe, record.path), record.path, allow_code=False))
        shown = examples(stream.reader, range(count), order=stream.order, seed=stream.seed, pipeline=stream.pipeline)
        for each in (card(example, _SIDE_PIXELS) for example in shown):
            tiles = each.tiles[:1] + each.tiles[1:][-1:]
            named = ", ".join(filter(None, (f"position {each.position}", each.details)))
            pictures += [picture_of(tile.image, f"{named}: {tile.caption}") for tile in tiles]
            if each.problem:
                record.problems.append(f"{each.example_id} cannot be shown: {each.problem}")
    except LockstepError as error:
        record.problems.append(f"No examples are shown: {error.what}")
    return pictures


COMMAND = Command("show what runs did, on one page", _add_arguments, _run, flags={"examples": "--examples"})
