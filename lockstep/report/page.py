"""The page of a report: one HTML file with everything in it, that loads nothing and can be opened from a disk."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lockstep.listing import format_size
from lockstep.recipes.tasks import Classification, Detection
from lockstep.report.by_class import NUMBERS, ClassTable, Drawn, class_table, precision_curves
from lockstep.report.curves import (
    MOST_POINTS,
    SPEED,
    WAITING,
    Chart,
    Mark,
    Points,
    add_point,
    charts_of,
    charts_of_several,
    points_of,
)
from lockstep.report.facts import FieldValues, Overview, RunFacts, facts_of_run, in_words
from lockstep.report.pictures import Confusion, ReportPicture, Summarised, confusion, summarised, worst_mistakes
from lockstep.reporting.console import format_duration, format_number, format_rate
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.run_files import CONFUSION, CURVES, MISTAKES
from lockstep.runs.record import RunRecord
from lockstep.screen import Lines, one_line
from lockstep.version import __version__

GENERATOR = "lockstep report"
"""The name of its maker in the head of each page: a file that has it may be written anew."""
_STATES = {"finished": "✔", "running": "▶", "stopped": "❚❚", "failed": "✖", "killed": "✖", "not started": "○"}
_SCRIPTS, _STYLES = ("uplot.min.js", "page.js"), ("uplot.min.css", "page.css")


@dataclass(frozen=True)
class RunReport:
    """All that a report shows of a run."""

    facts: RunFacts
    points: dict[str, Points]
    marks: tuple[Mark, ...]
    summarised: Summarised
    by_class: ClassTable | None
    precision: dict[str, Drawn]
    """Precision over recall of a detector by class."""
    confusion: Confusion | None
    mistakes: ReportPicture | None
    examples: tuple[ReportPicture, ...]
    """Examples as they are augmented, read anew from the data."""
    missing: tuple[tuple[str, str], ...]
    """What the run has not left to look at, and the command that makes it."""


def run_report(record: RunRecord, name: str, examples: Sequence[ReportPicture] = ()) -> RunReport:
    """Read all that a report shows of a run, which it calls `name`."""
    refused: list[int] = []
    points = points_of(_noting_refused(record.metrics(), refused))
    problems: list[str] = []
    summaries = record.folders("summaries") + record.folders("summaries-evaluation/*")
    shown = summarised([record.path / name for name in summaries], problems)
    is_detector = record.recipe is not None and isinstance(record.recipe.chosen_task, Detection)
    worst = (
        "the images with the most false and missed objects" if is_detector else "the examples with the largest losses"
    )
    matrix, mistakes = confusion(record.path, problems), worst_mistakes(record.path, worst, problems)
    by_class, precision = class_table(record.evaluations), precision_curves(record.path, problems)
    record.problems.extend(problems)
    facts = facts_of_run(record, name, len(refused))
    marks = [Mark(segment.first_step, segment.event) for segment in facts.course.segments[1:]]
    missing = tuple(_missing(record, shown, matrix))
    points |= _speeds(record, shown)
    details = (by_class, precision, matrix, mistakes)
    return RunReport(facts, points, tuple(marks), shown, *details, tuple(examples), missing)


def _noting_refused(lines: Iterator[dict[str, Any]], refused: list[int]) -> Iterator[dict[str, Any]]:
    """Pass lines of metrics on, of which there may be millions, and note the steps of attempts that were not finite."""
    for line in lines:
        if line.get("refused") is True:
            refused.append(line["step"])
        yield line


def _missing(record: RunRecord, shown: Summarised, matrix: Confusion | None) -> Iterator[tuple[str, str]]:
    task, path = record.recipe.chosen_task if record.recipe else None, shlex.quote(str(record.path))
    if isinstance(task, Classification | Detection) and matrix is None:
        curves = f" --curves {path}/{CURVES}" if isinstance(task, Detection) else ""
        files = f"--confusion {path}/{CONFUSION}{curves} --mistakes {path}/{MISTAKES}"
        what = (
            "Which classes are taken for which, precision over recall"
            if curves
            else "Which classes are taken for which"
        )
        yield f"{what}, and the worst mistakes", f"lockstep evaluate {path} {files}"
    if isinstance(task, Detection) and not shown.detections:
        yield "Pictures of detections", f"lockstep evaluate {path}"


def _speeds(record: RunRecord, shown: Summarised) -> dict[str, Points]:
    """Return throughput and waiting by step: of the timings, or for a run without them of its summaries."""
    if not record.timings:
        return shown.speeds
    speeds: dict[str, Points] = {SPEED: {}, WAITING: {}}
    for timing in record.timings:
        add_point(speeds[SPEED], SPEED.lower(), timing.step, timing.examples_per_second)
        add_point(speeds[WAITING], WAITING.lower(), timing.step, timing.wait_share)
    return speeds


def report_json(runs: Sequence[RunReport], differing: Sequence[FieldValues]) -> dict[str, Any]:
    """Return the facts of a report as JSON; numbers that are not finite are text, as in `metrics.jsonl`."""
    whole = [
        run.facts.as_json() | {"curves": run.points, "by_class": run.by_class and asdict(run.by_class)} for run in runs
    ]
    plain: dict[str, Any] = _plain(
        {"lockstep": __version__, "differences": list(map(asdict, differing)), "runs": whole}
    )
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else without_nonfinite(value)


def report_page(runs: Sequence[RunReport], differing: Sequence[FieldValues], made: str) -> bytes:
    """Make the page of one run, or of several side by side, with the fields in which their recipes differ.

    `made` says in words when.
    """
    alone = runs[0] if len(runs) == 1 else None
    charts = (
        charts_of(alone.points, alone.marks) if alone else charts_of_several({r.facts.name: r.points for r in runs})
    )
    scripts = list(map(_carried, _SCRIPTS))
    page = (
        _environment()
        .get_template("page.html")
        .render(
            title=" / ".join(run.facts.name for run in runs),
            generator=GENERATOR,
            version=__version__,
            made=made,
            policy=_policy(scripts),
            scripts=scripts,
            styles=list(map(_carried, _STYLES)),
            alone=alone,
            runs=runs,
            differences=differing,
            charts=charts,
            drawn=list(map(_drawn, charts)),
            most_points=MOST_POINTS,
            side_by_side=_side_by_side(runs),
        )
    )
    return page.lstrip().encode(errors="backslashreplace")


def _side_by_side(runs: Sequence[RunReport]) -> list[list[str]]:
    """Return rows of a table: what the runs came to, and the environments in which they differ."""
    glances = [run.facts.overview for run in runs]
    kinds: dict[str, Callable[[Overview], str]] = {
        "state": lambda each: each.state,
        "recipe": lambda each: each.recipe or "–",
        "steps": lambda each: f"{each.step:,}",
        "loss": lambda each: _or_dash(format_number)(each.loss),
        "examples a second": lambda each: _or_dash(format_rate)(each.examples_per_second),
        "time": lambda each: _or_dash(format_duration)(each.seconds),
        "workers": lambda each: _or_dash(str)(each.workers),
    }
    rows = [[name, *map(text, glances)] for name, text in kinds.items()]
    for named, text in (
        # Of a score with several origins the run's own goes before what was scored later, maybe on other examples.
        ([{each.name: each.value for each in reversed(run.facts.scores)} for run in runs], format_number),
        ([run.facts.environment for run in runs], str),
    ):
        for name in dict.fromkeys(name for each in named for name in each):
            values = [_or_dash(text)(each.get(name)) for each in named]
            if text is format_number or len({*values}) > 1:
                rows.append([name, *values])
    return rows


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lockstep.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_printable,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "number": _or_dash(format_number),
        "rate": _or_dash(format_rate),
        "duration": _or_dash(format_duration),
        "count": _or_dash("{:,}".format),
        "whole": _or_dash("{:,.0f}".format),
        "percent": _or_dash("{:.1%}".format),
        "size": _or_dash(format_size),
        "words": _or_dash(str),
        "listed": in_words,
        "quoted": shlex.quote,
        "columns": lambda rows, *names: [[row[name] for name in names] for row in rows],
    }
    environment.globals |= {"states": _STATES, "class_numbers": NUMBERS}
    return environment


def _or_dash(text: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a filter that formats a value, or shows a dash for one that is not known."""
    return lambda value: "–" if value is None else text(value)


def _printable(value: Any) -> Any:
    """Escape what is not printable in texts from files, but for line breaks; the template escapes HTML after it."""
    return Lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _carried(name: str) -> Markup:
    return Markup(files("lockstep.report").joinpath(name).read_text(encoding="utf-8"))


def _policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: these scripts run and no others, nothing is loaded, nothing is sent."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'"


def _drawn(chart: Chart) -> dict[str, Any]:
    curves = [{"name": one_line(curve.name), "steps": curve.steps, "values": curve.values} for curve in chart.curves]
    marks = [mark._asdict() for mark in chart.marks]
    return {"curves": curves, "marks": marks, "from_zero": chart.from_zero}
