"""`metrics.jsonl`: what each attempt did, one JSON object a line, the same bytes however often the run was killed.

A line holds facts alone, never times or rates. Numbers are written as Python's repr, which reads back to the same
number; those that JSON does not know are the strings "nan", "inf" and "-inf", which `float` reads.

The place of a line is the position of the stream after its attempt, for a step that was refused has more than one
line. An evaluation belongs to the attempt before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import WorkdirError
from lockstep.reporting.append import AppendOnly
from lockstep.types import StepReport

_MAX_LINE_BYTES = 1 << 20


class MetricsFile:
    """The file, opened to go on from a position: lines of later attempts, and a torn last line, are cut off.

    A run resumed from a checkpoint thus writes the file that it would have written without the interruption, if the
    evaluations of a step are written before its checkpoint is. `write` is a hook. All raise WorkdirError where the
    file cannot be written; opening does where a line is not of this format, and then changes nothing.
    """

    def __init__(self, path: Path, *, from_position: int) -> None:
        self.path, self._file = path, AppendOnly(path)
        try:
            self._content, size_bytes = _kept(path, from_position)
            self._file.cut(size_bytes)
        except BaseException:
            self._file.close()
            raise
        self.last_position = self._content.last_position
        """Position of the last attempt in the file, as it was opened; -1 where it has none."""

    def write(self, report: StepReport) -> None:
        """Append the facts of an attempt."""
        self._append(facts_of(report))

    def write_evaluation(self, step: int, name: str, scores: Mapping[str, float]) -> None:
        """Append the scores of an evaluation, unless it stands there already: the same weights give the same scores."""
        if not self.is_evaluated(step, name):
            self._append({"step": step, "evaluation": name, "scores": dict(scores)})

    def is_evaluated(self, step: int, name: str) -> bool:
        """Whether the scores of an evaluation after the last attempt stand there."""
        return (step, name) in self._content.evaluated

    def evaluations(self, name: str) -> list[tuple[int, Mapping[str, float]]]:
        """Return step and scores of each evaluation of that name in the file, in their order."""
        return [(step, scores) for step, other, scores in self._content.evaluations if other == name]

    @property
    def num_lines(self) -> int:
        """Number of lines of the file."""
        return self._content.num_lines

    def flush(self) -> None:
        """Have every line on the disk; to be called before a checkpoint that counts on them."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, facts: dict[str, Any]) -> None:
        try:
            line = json.dumps(facts, allow_nan=False)
        except ValueError:
            line = json.dumps(without_nonfinite(facts), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._content.add(facts)


def facts_of(report: StepReport) -> dict[str, Any]:
    """Return the facts of an attempt, as its line has them."""
    rates = {"learning_rates": dict(report.learning_rates)} if len(report.learning_rates) > 1 else {}
    return {
        "step": report.step,
        "position": report.progress.position,
        "losses": dict(report.losses),
        "smoothed": dict(report.smoothed),
        "total": report.total,
        "metrics": dict(report.metrics),
        "learning_rate": report.learning_rate,
        **rates,
        "gradient_norm": report.gradient_norm,
        "refused": report.skipped,
        **({"bad_examples": len(report.bad)} if report.bad else {}),
        **({"arrivals": report.arrivals._asdict()} if report.arrivals else {}),
    }


def scalars_of(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by tag, as TensorBoard shows them; a refused attempt is no step and has none."""
    if "evaluation" in facts:
        return {evaluation_tag(facts["evaluation"], name): float(score) for name, score in facts["scores"].items()}
    if facts["refused"]:
        return {}
    numbers = {
        **{f"losses/{name}": value for name, value in facts["losses"].items()},
        "losses/total": facts["total"],
        **{f"losses_smoothed/{name}": value for name, value in facts["smoothed"].items()},
        **{f"metrics/{name}": value for name, value in facts["metrics"].items()},
        "learning_rate": facts["learning_rate"],
        **{f"learning_rate/{pattern}": rate for pattern, rate in facts.get("learning_rates", {}).items()},
        "gradient_norm": facts["gradient_norm"],
    }
    return {tag: float(value) for tag, value in numbers.items()}


def evaluation_tag(name: str, score: str) -> str:
    """Return the tag of a score of an evaluation."""
    return f"evaluation/{name}/{score}"


def without_nonfinite(value: Any) -> Any:
    """Replace numbers that JSON does not know, in a value or a dict of dicts, by text that `float` reads."""
    if isinstance(value, dict):
        return {name: without_nonfinite(inner) for name, inner in value.items()}
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class _Content:
    num_lines: int = 0
    last_position: int = -1
    evaluated: set[tuple[int, str]] = field(default_factory=set)
    """Step and name of the evaluations after the last attempt."""
    evaluations: list[tuple[int, str, Mapping[str, float]]] = field(default_factory=list)

    def add(self, facts: Mapping[str, Any]) -> None:
        self.num_lines += 1
        if "position" in facts:
            self.last_position = facts["position"]
            self.evaluated.clear()
        else:
            step, name = facts["step"], facts["evaluation"]
            self.evaluated.add((step, name))
            self.evaluations.append((step, name, {score: float(value) for score, value in facts["scores"].items()}))


def _kept(path: Path, from_position: int) -> tuple[_Content, int]:
    """Read the part of a file up to a position; returns its size in bytes, too."""
    content, size_bytes, is_kept = _Content(), 0, True
    for end, facts in _lines(path):
        is_kept = is_kept and facts.get("position", from_position) <= from_position
        if is_kept:
            size_bytes = end
            content.add(facts)
    return content, size_bytes


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the facts of each whole line of a file."""
    return (facts for _, facts in _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the whole lines of a file, each with its end in bytes."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                return
            yield file.tell(), _facts(line, path, number)


def _facts(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not is_metrics_line(facts):
        raise WorkdirError(
            f"{path}, line {number} is not a line of metrics.",
            given=line[:80].decode(errors="replace").rstrip(),
            expected='a JSON object with "step" and "position", or with "step" and "evaluation"',
            hint=f"move {path.name} away, or give another workdir; nothing was changed",
        )
    return facts


def is_metrics_line(facts: Mapping[str, Any]) -> bool:
    """Whether an object of JSON is a line of metrics."""
    if not isinstance(facts.get("step"), int):
        return False
    if "position" in facts:
        return isinstance(facts["position"], int)
    scores = facts.get("scores")
    return (
        isinstance(facts.get("evaluation"), str) and isinstance(scores, dict) and all(map(_is_number, scores.values()))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")
