"""The list of examples that could not be read, kept in the workdir, and said once in the log.

quarantine.jsonl   a line each: {"example": ..., "reason": ...}, in the order in which the run came upon them
"""

from __future__ import annotations

import json
import logging

from lockstep.data.loader import Loader
from lockstep.runs.workdir import QUARANTINE, Workdir
from lockstep.types import StepReport

log = logging.getLogger("lockstep")


class QuarantineList:
    """A hook of the chief: names each new bad example in the log, and keeps the file as the loader's quarantine is.

    Close it: a run that its bad examples have ended names the last of them then.

    Args:
        workdir: of the run; None writes no file.
        loader: whose quarantine it is. What it holds already is known, and in the file.
    """

    def __init__(self, workdir: Workdir | None, loader: Loader) -> None:
        self._workdir = workdir
        self._loader = loader
        self._known = set(self._names())
        if workdir and (self._known or (workdir.path / QUARANTINE).exists()):
            self._write()

    def __call__(self, report: StepReport) -> None:
        """Look for examples that nobody has named yet."""
        new = {bad.example_id: bad for bad in report.bad if bad.example_id not in self._known}
        for bad in new.values():
            log.warning("%s cannot be read; %s stands in. %s", bad.example_id, bad.replaced_by, bad.reason)
        if new:
            self._known |= new.keys()
            budget = self._loader.quarantine.budget
            log.warning("%d bad examples so far, of at most %d", len(self._known), budget)
            self._write()

    def close(self) -> None:
        """Name those that no report has named."""
        new = {name: reason for name, reason in self._names().items() if name not in self._known}
        for name, reason in new.items():
            log.warning("%s cannot be read. %s", name, reason)
        if new:
            self._known |= new.keys()
            self._write()

    def _names(self) -> dict[str, str]:
        """The reason of each, by its name."""
        reader, reasons = self._loader.reader, self._loader.quarantine.reasons
        return {reader.example_id(index): reason for index, reason in reasons.items()}

    def _write(self) -> None:
        if self._workdir is not None:
            lines = [json.dumps({"example": name, "reason": reason}) + "\n" for name, reason in self._names().items()]
            self._workdir.write(QUARANTINE, "".join(lines))
