"""The list of examples that could not be read, kept in the workdir, and said once in the log.

quarantine.jsonl   a line each: {"example": ..., "reason": ...}, in the order in which the run came upon them
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from lockstep.data.loader import Loader
from lockstep.durable import replacing
from lockstep.errors import WorkdirError
from lockstep.types import StepReport

log = logging.getLogger("lockstep")


class QuarantineList:
    """A hook of the chief: names each new bad example in the log, and keeps the file as the loader's quarantine is.

    Close it: a run that its bad examples have ended names the last of them then.

    Args:
        path: of the file; None writes none.
        loader: whose quarantine it is. What it holds already is known, and in the file.
    """

    def __init__(self, path: Path | None, loader: Loader) -> None:
        self._path = path
        self._loader = loader
        self._known = set(self._names())
        if path and (self._known or path.exists()):
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
        path = self._path
        if path is None:
            return
        lines = [json.dumps({"example": name, "reason": reason}) + "\n" for name, reason in self._names().items()]
        try:
            with replacing(path) as file:
                file.write("".join(lines).encode())
        except OSError as error:
            raise WorkdirError(
                f"{path} cannot be written: {error.strerror}.",
                given=f"{path} ({error.strerror})",
                expected="a workdir that can be written, on a disk with space left",
                mend="make space; what was written before is intact",
            ) from error
