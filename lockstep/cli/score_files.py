"""Where the scores of `lockstep evaluate` are written: for TensorBoard, as a list in the workdir, as a file of JSON.

summaries-evaluation/SPLIT-WEIGHTS/   what TensorBoard shows of them, by step
evaluations.jsonl                     a line each: what was scored, and how well; no times

Nothing else in the workdir is touched, and the run itself may go on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.durable import atomic_write, make_folder
from lockstep.errors import InputError, WorkdirError
from lockstep.evaluation.evaluate import Evaluation
from lockstep.reporting.append import append_line
from lockstep.reporting.events import EventFile, scalar_summary
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.screen import log

SUMMARIES, EVALUATIONS = "summaries-evaluation", "evaluations.jsonl"


def facts(result: Evaluation, split: str) -> dict[str, Any]:
    """What was scored, and how well: the same for the same weights and examples; "nan" and "inf" are text."""
    found: dict[str, Any] = without_nonfinite({"step": result.step, "split": split, **result.facts})
    return found


def reference_names(means: Mapping[str, float]) -> dict[str, float]:
    """Shares by the names that the inception trainer shows them under: "Precision @ 1", "Recall @ 5"."""
    numbers = {int(name.removeprefix("top")): mean for name, mean in means.items() if name.startswith("top")}
    return {f"{'Precision' if k == 1 else 'Recall'} @ {k}": mean for k, mean in sorted(numbers.items())}


def write_json(result: Evaluation, split: str, path: Path) -> None:
    """The result alone, in a file of its own.

    Raises:
        InputError: it cannot be written.
    """
    with atomic_write(path, failure=InputError) as file:
        file.write(json.dumps(facts(result, split), indent=1).encode() + b"\n")


class ScoreFiles:
    """What the workdir keeps of evaluations. A file that cannot be written is no reason to end: it is said."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._events: dict[Path, EventFile] = {}

    def write(self, result: Evaluation, split: str) -> None:
        """Add the scores of an evaluation."""
        line = json.dumps(facts(result, split))
        list_path, folder = self._workdir / EVALUATIONS, self._workdir / SUMMARIES / f"{split}-{result.weights}"
        with _said_where_refused(list_path):
            append_line(list_path, line)
        with _said_where_refused(folder):
            ours = {f"evaluation/{split}/{name}": mean for name, mean in result.means.items()}
            self._opened(folder).write(scalar_summary({**reference_names(result.means), **ours}), result.step)

    def close(self) -> None:
        """Close what has been opened."""
        for file in self._events.values():
            file.close()

    def _opened(self, folder: Path) -> EventFile:
        """One file of events, for all that is scored in this process."""
        if folder not in self._events:
            make_folder(folder)
            self._events[folder] = EventFile(folder)
        return self._events[folder]


@contextmanager
def _said_where_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, WorkdirError) as error:
        why = error.what if isinstance(error, WorkdirError) else f"{path} cannot be written: {error.strerror}."
        log.warning("the scores are not written down. %s", why)
