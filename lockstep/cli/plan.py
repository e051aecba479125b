"""`lockstep plan`: how long a run would take with other numbers of workers, from a short measurement and a model."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from lockstep.checks import Hint, PositiveFloat, PositiveInt, Range, check_value
from lockstep.cli.shared import (
    Command,
    add_code_argument,
    add_json_argument,
    add_settings_argument,
    add_towers_argument,
    check_linux,
    write_found,
)
from lockstep.errors import InputError
from lockstep.listing import format_size
from lockstep.reporting.console import flowed, format_duration, format_rate
from lockstep.terminal import in_columns, num_columns, width_of

if TYPE_CHECKING:
    from lockstep.planning.model import Prediction, RunCosts
    from lockstep.planning.start import ProbeRequest
    from lockstep.recipes.recipe import Recipe

_NUMBERS = "1,2,4,8"
_MOST_WORKERS = 4096


class _Row(NamedTuple):
    """One number of workers: what is predicted, or why there is nothing to predict."""

    num_workers: int
    prediction: Prediction | None
    refused: str = ""


def _add_arguments(plan: argparse.ArgumentParser) -> None:
    plan.description = (
        "Measure for a minute what a step of the recipe costs on this machine, and tell by a model what it would take "
        "with other numbers of workers. Nothing is trained, and nothing is left on the disk."
    )
    plan.add_argument("recipe", help="a shipped recipe, a file.toml, or the folder of a run, which is left as it is")
    plan.add_argument(
        "--workers", dest="numbers", default=_NUMBERS, metavar="N,N", help=f"how many (default: {_NUMBERS})"
    )
    plan.add_argument(
        "--workers-per-host",
        type=int,
        metavar="N",
        help="workers of each host (default: one for each accelerator here, on a CPU one for each core)",
    )
    plan.add_argument("--latency", type=float, metavar="MS", help="of the network between the hosts, one way")
    plan.add_argument(
        "--bandwidth", type=float, metavar="GBIT", help="of each host's network, in Gbit/s (default: as in one host)"
    )
    plan.add_argument("--seconds", type=float, default=60.0, metavar="N", help="to measure, about (default: 60)")
    add_towers_argument(plan)
    end = plan.add_mutually_exclusive_group()
    end.add_argument("--steps", type=int, metavar="N", help="plan so many updates")
    end.add_argument("--epochs", type=float, metavar="N", help="plan so many passes over the data")
    plan.add_argument("--threads", type=int, metavar="N", help="torch's threads in each worker")
    plan.add_argument("--device", choices=["cpu"], help="leave the accelerators alone")
    add_settings_argument(plan)
    add_code_argument(plan)
    add_json_argument(plan)
    plan.set_defaults(forever=False, hours=None, workers=None, workers_per_device=None)


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from lockstep.planning.start import probe_on_workers

    request = _request(arguments)
    costs = probe_on_workers(request)
    if isinstance(costs, int):
        return costs
    if arguments.latency is not None or arguments.bandwidth is not None:
        milliseconds, gigabits = arguments.latency, arguments.bandwidth
        costs = costs.over(milliseconds and milliseconds / 1e3, gigabits and gigabits * 1e9)
    rows = [_row(costs, request.recipe, number) for number in request.num_workers]
    assumed = list(assumptions(costs, request.recipe))
    text = _as_text(arguments.recipe, costs, rows, assumed, has_end=request.recipe.end is not None)
    write_found(arguments, _as_json(arguments.recipe, costs, rows, assumed), text)
    return 0


def _request(arguments: argparse.Namespace) -> ProbeRequest:
    from lockstep.planning.model import Seating
    from lockstep.planning.start import ProbeRequest

    numbers = _given_numbers(arguments.numbers)
    _check(arguments)
    request = ProbeRequest(_recipe(arguments), tuple(numbers), arguments.workers_per_host, arguments.seconds)
    if len(request.seatings(max(numbers))) == 1:  # that of one worker alone, for which nobody may have asked
        Seating.of(request.recipe, numbers[0], numbers[0])
    return request


def _given_numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text, re.ASCII):
        raise InputError(
            "These are no numbers of workers.",
            given=f"--workers {text}",
            expected="whole numbers with commas between them",
            hint=f"--workers {_NUMBERS}",
        )
    numbers = list(dict.fromkeys(map(int, text.split(","))))
    for number in numbers:
        hint = Hint(f"give numbers such as {_NUMBERS}")
        check_value("--workers", number, Annotated[int, Range(ge=1, le=_MOST_WORKERS), hint])
    return numbers


def _check(arguments: argparse.Namespace) -> None:
    check_value("--workers-per-host", arguments.workers_per_host, PositiveInt | None)
    for flag in ("latency", "bandwidth"):
        check_value(f"--{flag}", getattr(arguments, flag), PositiveFloat | None)
    check_value("--seconds", arguments.seconds, Annotated[float, Range(ge=1, le=3600)])
    check_linux("A plan is measured on Linux alone.")


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from lockstep.cli.given_run import given_recipe
    from lockstep.runs.inputs import check_inputs
    from lockstep.runs.workdir import located

    folder = Path(arguments.recipe)
    recipe = located(given_recipe(arguments), folder if folder.is_dir() else None)
    # Without a workdir there is nothing to roll back to; and what starts from which weights is no matter of time.
    recipe = replace(recipe, num_workers=None, warm_start=None, nonfinite="skip", loggers=())
    check_inputs(recipe, None)
    return recipe


def _row(costs: RunCosts, recipe: Recipe, number: int) -> _Row:
    from lockstep.planning.model import predict_step

    try:
        return _Row(number, predict_step(costs, recipe, number))
    except InputError as error:
        return _Row(number, None, f"{error.what} {error.hint}".strip())


# What is told -------------------------------------------------------------------------------------------------------

_HEADS = ("workers", "hosts", "towers", "ms a step", "examples/s", "efficiency", "a worker", "limit")


def _as_text(
    what: str, costs: RunCosts, rows: Sequence[_Row], assumed: Sequence[str], *, has_end: bool
) -> Iterator[str]:
    yield f"{what}: {costs.batch_size} examples an update, {costs.gradient_bytes / 1e6:.1f} MB of gradients"
    yield f"measured on {costs.machine}, {costs.num_cores} cores, with {costs.num_probed} at once"
    yield ""
    heads = [*_HEADS, "to finish" if has_end else "an epoch"]
    told = [(row, _cells(row.prediction, has_end=has_end)) for row in rows if row.prediction]
    yield from _table(heads, [cells for _, cells in told])
    yield ""
    for refused in dict.fromkeys(row.refused for row in rows if row.refused):
        numbers = [row.num_workers for row in rows if row.refused == refused]
        yield f"{', '.join(map(str, [*numbers[:-1], _workers(numbers[-1])]))}: {refused}"
    for row, _ in told:
        if row.prediction:
            yield from _remarks(row.prediction)
    yield "What this assumes:"
    yield from (f"- {line}" for line in assumed)


def _cells(found: Prediction, *, has_end: bool) -> list[str]:
    seating = found.seating
    towers = {seating.fewest_towers, seating.most_towers}
    seconds = found.finish_seconds if has_end else found.epoch_seconds
    return [
        str(seating.num_workers),
        str(seating.num_hosts),
        " or ".join(map(str, sorted(towers))),
        f"{1e3 * found.step_seconds:.3g}" if found.step_seconds < 1 else f"{1e3 * found.step_seconds:.0f}",
        format_rate(found.examples_per_second),
        f"{100 * found.efficiency:.0f} %",
        format_size(found.memory_bytes),
        found.limit,
        "?" if seconds is None else format_duration(seconds),
    ]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield columns, or where the terminal is too narrow for them a paragraph for each row."""
    lines, columns = in_columns([heads, *rows], to_the_right=True), width_of(sys.stdout)
    if columns is None or num_columns(lines[0]) + 2 <= columns:
        yield from lines
        return
    for row in rows:
        yield from flowed([f"{head} {cell}" for head, cell in zip(heads, row, strict=True)], columns)


def _remarks(found: Prediction) -> Iterator[str]:
    seating = found.seating
    if seating.fewest_towers < seating.most_towers:
        yield (
            f"{_workers(seating.num_workers)}: the towers cannot be dealt evenly, {seating.fewest_towers} or "
            f"{seating.most_towers} each; those that have fewer wait for the others."
        )


_AS_HERE = ", as {} between two processes of this machine; a network is slower: --latency MS --bandwidth GBIT."


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def assumptions(costs: RunCosts, recipe: Recipe) -> Iterator[str]:
    """Yield what the numbers rest on, a sentence each."""
    per_host = _workers(costs.per_host)
    yield f"All hosts are like this one, {per_host} on each, and do nothing else."
    measured = sorted({each.num_local for each in costs.workers})
    yield (
        f"A worker is as fast as {' or '.join(map(str, measured))} at once were here"
        + (f"; more than {max(measured)} on a host share its {costs.num_cores} cores." if costs.is_cpu else ".")
    )
    link = costs.network or costs.messages
    if link:
        yield (
            f"A message between hosts takes {1e3 * link.latency_seconds:.2g} ms and its bytes at "
            f"{8 / max(link.seconds_per_byte, 1e-15) / 1e9:.3g} Gbit/s"
            + (f", {costs.backend} and the network together." if costs.network else _AS_HERE.format(costs.backend))
        )
    yield (
        f"A save of {format_size(costs.save.num_bytes)} takes {costs.save.seconds:.2g} s, every "
        f"{recipe.checkpoints.every}, beside the steps."
        if recipe.checkpoints.every.amount
        else "Nothing is saved."
    )
    yield "Scores, starts, restarts and examples that come from storage for the first time are not counted."
    if recipe.stages:
        yield "All stages are like the first."
    if recipe.towers.joined:
        yield "What synchronised batch norm exchanges is not counted."


def _as_json(what: str, costs: RunCosts, rows: Sequence[_Row], assumed: list[str]) -> dict[str, Any]:
    workers = [
        {"workers": row.num_workers, "refused": row.refused or None}
        | (asdict(row.prediction) if row.prediction else {})
        for row in rows
    ]
    return {"what": what, "plan": workers, "measured": costs.as_json(), "assumed": assumed}


COMMAND = Command(
    "say how long a run would take with more workers, by a short measurement and a model",
    _add_arguments,
    _run,
    flags={"seconds": "--seconds", "num_towers": "--towers"},
)
