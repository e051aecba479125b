"""Start the workers that measure a recipe, and read what they have found."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cores import usable_cores
from lockstep.doctor.disk import above_runs
from lockstep.errors import InputError
from lockstep.launcher.launch import launch_command
from lockstep.owner import scratch_folder
from lockstep.planning.model import RunCosts, Seating
from lockstep.recipes.code import functions_of, with_code
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import from_toml, to_toml
from lockstep.workers.limits import Limits

_REQUEST, _FOUND = "request.json", "costs.json"


@dataclass(frozen=True)
class ProbeRequest:
    """What is to be measured."""

    recipe: Recipe
    num_workers: tuple[int, ...]
    """Numbers of workers for which the model is to be asked; those that the library would refuse are left out."""
    per_host: int | None = None
    """Workers of a host; None: one for each accelerator, or each core."""
    seconds: float = 60.0
    """How long it may take, about, once the workers have started."""

    def seatings(self, per_host: int) -> list[Seating]:
        """Return the seatings that the library takes, that of one worker first.

        Raises:
            InputError: it does not take one worker.
        """
        found = [Seating.of(self.recipe, 1, per_host)]
        for number in self.num_workers:
            try:
                found.append(Seating.of(self.recipe, number, per_host))
            except InputError:
                continue
        return found

    def write(self, folder: Path) -> None:
        """Write it for `read`."""
        rest = {"num_workers": self.num_workers, "per_host": self.per_host, "seconds": self.seconds}
        (folder / _REQUEST).write_text(json.dumps({"recipe": to_toml(self.recipe), **rest}))

    @classmethod
    def read(cls, folder: Path) -> ProbeRequest:
        """Read what `write` has written, in a worker; the code that the recipe names may be called then."""
        saved = json.loads((folder / _REQUEST).read_text())
        recipe = with_code(from_toml(saved["recipe"], "the recipe"))
        return cls(recipe, tuple(saved["num_workers"]), saved["per_host"], saved["seconds"])


def probe_on_workers(request: ProbeRequest) -> RunCosts | int:
    """Measure a recipe on workers of this host, as `lockstep train` would start them; call it in the main thread.

    Returns:
        The costs; or the exit code, where it has failed or was stopped: why is logged then.

    Raises:
        InputError: the recipe names a function that may not be called, or the system refuses files or processes.
    """
    for function in functions_of(request.recipe):
        function.check()
    # Measuring one thing may take long, and is no hang.
    limits = Limits(show_seconds=3600.0, hang_seconds=0.0, stop_seconds=1.0)
    try:
        with scratch_folder(".lockstep-plan-", _place_for_saves()) as folder:
            request.write(folder)
            code = launch_command([str(folder)], plan=plan_probe, main=probe_in_worker, preload=_PRELOAD, limits=limits)
            return code or RunCosts.read(json.loads((folder / _FOUND).read_text()))
    except OSError as error:
        raise InputError(
            "The system refuses what a measurement takes.",
            given=str(error),
            expected="room for two checkpoints beside the runs, and processes",
            hint="make room, or measure from a folder that has some",
        ) from error


def _place_for_saves() -> Path | None:
    """Where a save is measured: beside the runs, in none of them; None among the temporary files."""
    places = map(above_runs, (Path.cwd() / "runs", Path.cwd()))
    return next((place for place in places if place.is_dir() and os.access(place, os.W_OK | os.X_OK)), None)


_PRELOAD = ("torch", "lockstep.planning.probe")


def plan_probe(argv: list[str]) -> dict[str, Any]:
    """Decide how many workers measure, for the launcher: as many as a host of the plan has, if this one can."""
    request = ProbeRequest.read(Path(argv[0]))
    per_host, most = _places(request)
    seatings = request.seatings(per_host)
    workers = min(most, max(each.num_local for each in seatings))
    # An exchange takes two, also where each host of the plan has one.
    if any(each.num_workers > 1 for each in seatings):
        workers = max(workers, min(2, most))
    return {"workers": workers, "hang_seconds": 0.0}


def _places(request: ProbeRequest) -> tuple[int, int]:
    """The workers of a host in the plan, and how many there may be on this one."""
    from lockstep.workers.devices import num_accelerators

    recipe = request.recipe
    on_devices = 0 if recipe.device == "cpu" else num_accelerators() * (recipe.workers_per_device or 1)
    most = on_devices or max(2, usable_cores())
    return request.per_host or on_devices or usable_cores(), most


def probe_in_worker(argv: list[str]) -> int:
    """Measure on one worker; the chief writes what was found."""
    from lockstep.planning.probe import probe_run
    from lockstep.screen import show_log
    from lockstep.workers.rank import join

    folder = Path(argv[0])
    request = ProbeRequest.read(folder)
    recipe = request.recipe
    worker = join(recipe.device, workers_per_device=recipe.workers_per_device)
    show_log(None if worker.is_chief else worker.name)
    per_host, _ = _places(request)
    costs = probe_run(recipe, request.seatings(per_host), per_host, request.seconds, worker, folder)
    if worker.is_chief:
        (folder / _FOUND).write_text(json.dumps(costs.as_json()))
    return 0
