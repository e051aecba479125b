"""Batches that were not finite, and examples that could not be read, kept in the workdir.

refused/position-000000123/
  report.json           why, where it came from, what came of making it again, and the names of all examples of the
                        batch; written by the chief
  worker-0.safetensors  the tensors of a worker that hosts a nonfinite tower, rows in the order of the stream; of a
                        ragged field NAME two: NAME.values, and NAME.lengths; of a list of tensors, such as images
                        of several sizes, NAME.0, NAME.1, ...
  worker-0.json         its towers, and the fields that are no tensors
quarantine.jsonl        a line for each unreadable example, in the order of the run: {"example": ..., "reason": ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoints.encoding import encode_tensors
from lockstep.data.loader import Loader
from lockstep.durable import atomic_write, make_folder
from lockstep.ragged import Ragged, tensors_of
from lockstep.recipes.tasks import ASSIGNED
from lockstep.run_files import QUARANTINE
from lockstep.runs.workdir import Workdir
from lockstep.screen import log
from lockstep.types import Batch, NonFiniteReport, StepReport
from lockstep.workers.rank import Worker

MAX_KEPT = 20
"""Most folders; later batches are not kept."""


def keep_batch(folder: Path, nonfinite: NonFiniteReport, step: int, loader: Loader, worker: Worker) -> None:
    """Write this worker's part of a batch that was not finite after `step` updates; the chief writes the report, too.

    An error in writing is a line in the log.
    """
    kept = folder / f"position-{nonfinite.position:09d}"
    try:
        if not kept.exists() and len(list(folder.glob("position-*"))) >= MAX_KEPT:
            if worker.is_chief:
                log.info("%s holds %d nonfinite batches; this one is not kept", folder, MAX_KEPT)
        elif worker.is_chief or nonfinite.batch is not None:
            _write(kept, nonfinite, step, loader, worker)
    except Exception as error:  # must not hide the nonfinite attempt itself
        log.warning("the nonfinite batch cannot be kept in %s: %r", kept, error)


def _write(folder: Path, nonfinite: NonFiniteReport, step: int, loader: Loader, worker: Worker) -> None:
    make_folder(folder)
    if nonfinite.batch is not None:
        _write_batch(folder, f"worker-{worker.rank}", nonfinite.batch)
    if worker.is_chief:
        report = {
            "step": step,
            "position": nonfinite.position,
            "reasons": nonfinite.reasons,
            "culprits": nonfinite.culprits,
            "verdict": nonfinite.verdict and nonfinite.verdict._asdict(),
            "examples": loader.example_ids(nonfinite.position, loader.batch_size),
        }
        _write_json(folder / "report.json", report)
        log.info("the nonfinite batch is kept in %s", folder)


def _write_batch(folder: Path, name: str, batch: Batch) -> None:
    fields = {field: value for field, value in batch.items() if field != ASSIGNED}
    lists = {field: value for field, value in fields.items() if _is_list_of_tensors(value)}
    listed = {f"{field}.{row}": each for field, rows in lists.items() for row, each in enumerate(rows)}
    rest = {
        field: value for field, value in fields.items() if field not in lists and not isinstance(value, Tensor | Ragged)
    }
    with atomic_write(folder / f"{name}.safetensors") as file:
        file.writelines(encode_tensors({**tensors_of(fields), **listed}))
    about = {"position": batch.position, "batch_size": batch.batch_size, "towers": list(batch.towers)}
    _write_json(folder / f"{name}.json", {**about, "fields": rest})


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Tensor) for row in value)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1, default=_plain) + "\n").encode())


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else repr(value)


class QuarantineList:
    """A hook of the chief that logs each new bad example, and writes the loader's quarantine to the workdir.

    `close` logs the last ones of a run that its bad examples have ended. Examples that are in the quarantine at the
    start are not logged again. Without a workdir no file is written.
    """

    def __init__(self, workdir: Workdir | None, loader: Loader) -> None:
        self._workdir = workdir
        self._loader = loader
        self._known = set(self._names())
        if workdir and (self._known or (workdir.path / QUARANTINE).exists()):
            self._write()

    def __call__(self, report: StepReport) -> None:
        """Log the bad examples of a report that are new."""
        new = {bad.example_id: bad for bad in report.bad if bad.example_id not in self._known}
        for bad in new.values():
            log.warning("%s cannot be read; %s stands in. %s", bad.example_id, bad.replaced_by, bad.reason)
        if new:
            self._known |= new.keys()
            budget = self._loader.quarantine.budget
            log.warning("%d bad examples so far, of at most %d", len(self._known), budget)
            self._write()

    def close(self) -> None:
        """Log the bad examples that were in no report."""
        new = {name: reason for name, reason in self._names().items() if name not in self._known}
        for name, reason in new.items():
            log.warning("%s cannot be read. %s", name, reason)
        if new:
            self._known |= new.keys()
            self._write()

    def _names(self) -> dict[str, str]:
        """Return the reason why each example in quarantine cannot be read, by its name."""
        reader, reasons = self._loader.reader, self._loader.quarantine.reasons
        return {reader.example_id(index): reason for index, reason in reasons.items()}

    def _write(self) -> None:
        if self._workdir is not None:
            lines = [json.dumps({"example": name, "reason": reason}) + "\n" for name, reason in self._names().items()]
            self._workdir.write(QUARANTINE, "".join(lines))
