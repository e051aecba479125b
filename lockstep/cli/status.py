"""`lockstep status` and `lockstep runs`: what runs are doing or have come to, from their files alone."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.cli.shared import Command, add_json_argument, run_folder
from lockstep.errors import InputError, WorkdirError
from lockstep.listing import did_you_mean
from lockstep.screen import one_line, write_json, write_lines
from lockstep.terminal import in_columns, is_terminal, num_columns, width_of, wrapped

if TYPE_CHECKING:
    from lockstep.runs.record import RunRecord

_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_WITHOUT_STEP = 120.0
_MAX_REMARKS = 3
_NO_STEP = "no step for "


@dataclass(frozen=True)
class RunStatus:
    """What a run is doing. The names of the fields are those of the JSON; None is what is not known."""

    run: str
    recipe: str | None = None
    state: str = "unreadable"
    step: int = 0
    last_step: int | None = None
    seconds_left: float | None = None
    loss: float | None = None
    score: dict[str, Any] | None = None
    """The best by which the recipe keeps the best checkpoint, else the last: "name", "value", "step", "better"."""
    examples_per_second: float | None = None
    wait_share: float | None = None
    """Share of the last ten seconds in which the chief waited for data, 0 to 1."""
    workers: int | None = None
    host: str | None = None
    checkpoint: int | None = None
    seen_seconds_ago: float | None = None
    """When the run was last known to live, or ended."""
    notes: list[str] = field(default_factory=list)
    """What is wrong, a sentence each."""

    @property
    def without_clock(self) -> RunStatus:
        """The status without what changes while nothing happens."""
        notes = [_NO_STEP if note.startswith(_NO_STEP) else note for note in self.notes]
        return replace(self, seen_seconds_ago=None, notes=notes)


def status_of(record: RunRecord) -> RunStatus:
    """Put together what a run is doing from its record."""
    from lockstep.checkpoints.mirror import shown_path
    from lockstep.runs.record import as_number, seconds_since

    timing, attempt, score = record.last_timing, record.last_attempt, record.main_score
    is_running, seen = record.state == "running", record.seen_unix_seconds
    workers = [event["workers"] for event in record.history if isinstance(event.get("workers"), int)]
    return RunStatus(
        run=shown_path(record.path),
        recipe=record.recipe.name if record.recipe else None,
        state=record.state,
        step=record.step,
        last_step=timing.last_step if timing else None,
        seconds_left=timing.seconds_left if timing and is_running else None,
        loss=as_number(attempt.get("total")) if attempt else None,
        score=score and score._asdict() | {"better": record.better},
        examples_per_second=timing.examples_per_second if timing else None,
        wait_share=timing.wait_share if timing else None,
        workers=workers[-1] if workers else None,
        host=record.holder.owner.host if record.holder else None,
        checkpoint=max(record.checkpoints, default=None),
        seen_seconds_ago=None if seen is None else round(seconds_since(seen), 1),
        notes=[*_notes(record), *record.problems],
    )


def _notes(record: RunRecord) -> Iterator[str]:
    from lockstep.reporting.console import format_duration
    from lockstep.runs.record import as_unix_seconds, seconds_since

    yield from record.attention()
    timing = as_unix_seconds(record.last_timing.time) if record.last_timing else None
    if record.state == "running" and timing is not None and seconds_since(timing) > _SECONDS_WITHOUT_STEP:
        yield f"{_NO_STEP}{format_duration(seconds_since(timing))}: an evaluation, a save or a wait"
    yield from record.remarks[-_MAX_REMARKS:]


COLUMNS = ("run", "state", "step", "left", "loss", "score", "examples/s", "workers", "waits", "saved")


def row_of(status: RunStatus) -> list[str]:
    """Return the texts of a run below the columns."""
    from lockstep.reporting.console import format_duration, format_number, format_rate

    def told(value: Any, text: Any) -> str:
        return "-" if value is None else one_line(text(value))

    of = f" of {status.last_step}" if status.last_step else ""
    return [
        one_line(status.run),
        status.state,
        f"{status.step}{of}",
        told(status.seconds_left, format_duration),
        told(status.loss, format_number),
        told(status.score, lambda score: f"{score['name']} {format_number(score['value'])}"),
        told(status.examples_per_second, format_rate),
        told(status.workers, str),
        told(status.wait_share, lambda share: f"{100 * share:.0f} %"),
        told(status.checkpoint, str),
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lay rows out below their columns; where a terminal is too narrow, each row as a paragraph."""
    lines = in_columns([columns, *rows])
    if width is None or max(map(num_columns, lines)) <= width:
        return lines
    longest = max(map(num_columns, columns))
    return [
        line
        for row in rows
        for line in (row[0], *(f"  {name:<{longest}}  {cell}" for name, cell in zip(columns[1:], row[1:], strict=True)))
    ]


def status_lines(statuses: Sequence[RunStatus], width: int | None, height: int | None = None) -> list[str]:
    """Return the table of runs, those at work first, and what is wrong with each below it.

    The width is that of the terminal, in columns; None breaks no line. Where there are more lines than the height,
    those that are not at work become a line; None shows all.
    """
    ordered = sorted(statuses, key=lambda status: status.state != "running")
    notes = [f"{one_line(status.run)}: {one_line(note)}" for status in ordered for note in status.notes]
    lines = [*table(COLUMNS, list(map(row_of, ordered)), width), *([""] if notes else []), *notes]
    at_work = [status for status in ordered if status.state == "running"]
    if height is None or at_work == ordered or sum(len(wrapped(line, width)) for line in lines) <= height:
        return lines
    counts = Counter(status.state for status in ordered[len(at_work) :])
    others = ", ".join(f"{count} {state}" for state, count in counts.items())
    return [*table(COLUMNS, list(map(row_of, at_work)), width), f"and {others}", *([""] if notes else []), *notes]


# lockstep status -----------------------------------------------------------------------------------------------------


def _add_status_arguments(status: argparse.ArgumentParser) -> None:
    status.add_argument(
        "paths", nargs="*", default=["runs"], metavar="RUN|FOLDER", help="a run, or a folder with runs (default: runs)"
    )
    status.add_argument("--follow", action="store_true", help="show it anew every two seconds, until none is running")
    add_json_argument(status)
    status.description = "Say what runs are doing, from their files alone: also over a network disk, and of dead runs."


def _run_status(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if not arguments.follow:
        _show(_look(arguments.paths), as_json=arguments.json)
        return 0
    if not arguments.json and is_terminal(sys.stdout):
        _follow(arguments.paths)
        return 0
    before = None
    for found in _looks(arguments.paths):
        now = [status.without_clock for status in found]
        if now != before:
            _show(found, as_json=arguments.json, in_one_line=True)
            sys.stdout.flush()
        before = now
    return 0


def _looks(paths: Sequence[str]) -> Iterator[list[RunStatus]]:
    """Look at runs again and again, until none is running; a bucket that is away for a while is told, and outlived."""
    from lockstep.checkpoints.fetching import Outages

    found, outages = _look(paths), Outages()
    yield found
    while any(status.state == "running" for status in found):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        with outages.outlived():
            found = _look(paths)
        yield found


def _look(paths: Sequence[str]) -> list[RunStatus]:
    return [status for status, _ in _looked(paths)]


def _looked(paths: Sequence[str]) -> list[tuple[RunStatus, RunRecord | None]]:
    """Look at the runs in some folders, or at these runs; of one that cannot be read, the status says why.

    Raises:
        InputError: there is none.
        WorkdirError: a folder is not there or cannot be read, or is that of such a run, or all runs are such.
    """
    from lockstep.runs.record import RunRecord, find_runs

    named = [run_folder(path, contents=False) for path in paths]
    runs = dict.fromkeys(run for path in named for run in find_runs(path))
    found, problems = list[tuple[RunStatus, RunRecord | None]](), list[WorkdirError]()
    for run in runs:
        try:
            record = RunRecord(run)
        except WorkdirError as error:
            if run in named:
                raise
            problems.append(error)
            found.append((RunStatus(str(run), notes=[f"left out: {error.given}"]), None))
        else:
            found.append((status_of(record), record))
    if not found:
        from lockstep.cli.meant import run_meant

        raise InputError(
            "There are no runs there.",
            given=", ".join(paths),
            expected="the workdir of a run, or a folder with some in it",
            hint=run_meant(named[0]),
        )
    if len(problems) == len(found):
        raise problems[0]
    return found


def _show(statuses: Sequence[RunStatus], *, as_json: bool, in_one_line: bool = False) -> None:
    if as_json:
        from lockstep.reporting.jsonl import without_nonfinite

        write_json({"runs": [without_nonfinite(asdict(status)) for status in statuses]}, in_one_line=in_one_line)
    else:
        write_lines(status_lines(statuses, width_of(sys.stdout)))


def _follow(paths: Sequence[str]) -> None:
    """Show the runs anew in the same place, until none is running or Ctrl-C is pressed."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for statuses in _looks(paths):
            is_running = any(status.state == "running" for status in statuses)
            # What is shown last stays, and is not cut.
            lines = status_lines(statuses, width_of(sys.stdout), console.height if is_running else None)
            live.update(Text("\n".join(lines)), refresh=True)


COMMAND = Command("say what runs are doing, or have come to", _add_status_arguments, _run_status)


# lockstep runs -------------------------------------------------------------------------------------------------------


def _add_runs_arguments(runs: argparse.ArgumentParser) -> None:
    runs.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="with runs in it (default: runs)")
    runs.add_argument(
        "--where", action="append", default=[], metavar="FIELD=VALUE", help="runs whose recipe has this value alone"
    )
    runs.add_argument(
        "--show", action="append", default=[], metavar="FIELD", help="a column with this field of recipes"
    )
    runs.add_argument("--sort", choices=["name", "score", "loss", "time"], default="score", help="default: score")
    add_json_argument(runs)
    runs.description = "List runs, the best first, with fields of their recipes."


def _run_runs(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    conditions = list(map(_condition, arguments.where))
    names = list(dict.fromkeys([*(name for name, _ in conditions), *arguments.show]))
    found = [(status, _fields(record)) for status, record in _looked(arguments.folders)]
    for name in names:
        _check_field(name, [fields for _, fields in found])
    listed = [
        (status, {name: fields.get(name) for name in names})
        for status, fields in found
        if all(_is_value(fields.get(name), text) for name, text in conditions)
    ]
    listed.sort(key=lambda each: _sort_key(each[0], arguments.sort))
    if arguments.json:
        from lockstep.reporting.jsonl import without_nonfinite

        write_json({"runs": [without_nonfinite({**asdict(status), "fields": fields}) for status, fields in listed]})
        return 0
    columns = ("run", "recipe", "state", "step", "score", "loss", *names)
    rows = [_runs_row(status, fields) for status, fields in listed]
    write_lines(table(columns, rows, width_of(sys.stdout)) if rows else ["No run is like that."])
    return 0


def _runs_row(status: RunStatus, fields: Mapping[str, Any]) -> list[str]:
    texts = dict(zip(COLUMNS, row_of(status), strict=True))
    own = [texts["run"], one_line(status.recipe or "-"), *(texts[name] for name in ("state", "step", "score", "loss"))]
    return [*own, *(one_line(_told(value)) for value in fields.values())]


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InputError(
            "This is no condition on a field of recipes.",
            given=f"--where {text}",
            expected="FIELD=VALUE, such as optimizer.lr.initial=0.05",
            hint="lockstep train mnist --print-recipe shows the fields",
        )
    return name.strip(), value.strip().strip("\"'")


def _is_value(value: Any, text: str) -> bool:
    """Whether a value of a recipe is the one that a condition names: of numbers, however they are written."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(text) == value
    return _told(value) == text


def _check_field(name: str, of_all: Sequence[Mapping[str, Any]]) -> None:
    if any(name in fields for fields in of_all):
        return
    known = sorted({field for fields in of_all for field in fields})
    raise InputError(
        "No recipe of these runs has this field.",
        given=name,
        expected=f"one of {', '.join(known[:12])}, ..." if known else "a field of a recipe that can be read",
        hint=did_you_mean(name, known) or "lockstep train mnist --print-recipe shows the fields",
    )


def _fields(record: RunRecord | None) -> dict[str, Any]:
    from lockstep.recipes.recipe import Recipe
    from lockstep.recipes.toml import FieldPath, write

    return dict(_flat(write(Recipe, record.recipe, FieldPath("recipe")))) if record and record.recipe else {}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if inner is None or not value:
        yield path, value
        return
    if isinstance(value, list):
        yield path, value
    for name, each in inner:
        yield from _flat(each, f"{path}.{name}" if path else str(name))


def _told(value: Any) -> str:
    """Return a value of a recipe as `--set` takes it, without quotes."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"[{', '.join(map(_told, value))}]" if isinstance(value, list) else str(value)


def _sort_key(status: RunStatus, by: str) -> Any:
    if by == "name":
        return status.run
    if by == "time":
        return status.seen_seconds_ago if status.seen_seconds_ago is not None else float("inf")
    is_loss, score = by == "loss", status.score or {}
    value = status.loss if is_loss else score.get("value")
    is_known = value is not None and value == value
    worth = value if is_loss or score.get("better") == "lower" else -(value or 0.0)
    return not is_known, "" if is_loss else score.get("name", ""), worth if is_known else 0.0, status.run


RUNS_COMMAND = Command("list runs, the best first, by fields of their recipes", _add_runs_arguments, _run_runs)
