"""Compare disturbed runs with the undisturbed one, and report what became of them, as text and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from lockstep.chaos.command import json_lines
from lockstep.chaos.trial import Injected, Trial
from lockstep.run_files import CHECKPOINTS, METRICS
from lockstep.version import __version__


def run_differences(undisturbed: Path, disturbed: Path, *, bits: bool) -> list[str]:
    """Compare two runs by their workdirs; returns in what the disturbed one differs.

    With `bits` every byte of the last checkpoint and of metrics.jsonl counts, not only how far they have come.
    """
    of_all, of_this = _results(undisturbed), _results(disturbed)
    found = [
        f"{name}: {of_this.get(name, 'missing')} in place of {value}"
        for name, value in of_all.items()
        if of_this.get(name) != value
    ]
    found += [f"{path.name} is left behind" for path in disturbed.rglob(".*.partial")]
    if bits and not found:
        ours, theirs = _digests(undisturbed), _digests(disturbed)
        found += [f"{name} has other bytes" for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]
    return found


def _results(workdir: Path) -> dict[str, Any]:
    attempts = [line for line in json_lines(workdir / METRICS) if "position" in line]
    last = attempts[-1] if attempts else {}
    positions = [line["position"] for line in attempts]
    return {
        "last step": last.get("step", 0),
        "examples": last.get("position", 0),
        "attempts in metrics.jsonl": len(set(positions)),
        "attempts that stand there twice": len(positions) - len(set(positions)),
        "last checkpoint": max((path.name for path in (workdir / CHECKPOINTS).glob("step-*")), default="none"),
    }


def _digests(workdir: Path) -> dict[str, str]:
    """Return digests of the files with what a run has learned; the manifest holds a time, and is left out."""
    newest = max((workdir / CHECKPOINTS).glob("step-*"))
    found = {path.name: path.read_bytes() for path in newest.iterdir() if path.name != "manifest.json"}
    found[METRICS] = _without_arrivals(workdir / METRICS)
    return {name: sha256(content).hexdigest() for name, content in found.items()}


def _without_arrivals(metrics: Path) -> bytes:
    """Return metrics.jsonl without what is left to chance: whose gradients came first, where the chief serves."""
    content = metrics.read_bytes()
    if b'"arrivals"' not in content:
        return content
    return b"".join(json.dumps(line | {"arrivals": None}).encode() for line in json_lines(metrics))


@dataclass(frozen=True)
class Round:
    """A run that was disturbed, and in what it differs from the undisturbed one."""

    trial: Trial
    lost: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether it has survived, and nothing is lost."""
        return not self.trial.problems and not self.lost

    def describe(self) -> Iterator[str]:
        """Yield lines about what went wrong."""
        yield from self.trial.problems
        yield from (f"lost: {line}" for line in self.lost)


@dataclass
class Report:
    """All rounds, and what became of them."""

    recipe: str
    faults: Sequence[str]
    seed: int
    steps: int
    undisturbed_seconds: float
    promised: bool
    """Whether the bits of a disturbed run are to be those of the undisturbed one."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Faults that cannot be injected here, and why."""
    rounds: list[Round] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every run has survived, and nothing was lost."""
        return all(round_.ok for round_ in self.rounds)

    @property
    def promise(self) -> str:
        """What is compared, in words."""
        if self.promised:
            return "its weights, slots and metrics are compared byte by byte with those of each disturbed run"
        return "this exchange promises no bits: compared is how far each disturbed run has come, and what it has used"

    def _by_fault(self) -> dict[str, list[Injected]]:
        found: dict[str, list[Injected]] = {}
        for round_ in self.rounds:
            for injected in round_.trial.faults:
                found.setdefault(injected.fault, []).append(injected)
        return found

    def table(self) -> Iterator[str]:
        """Yield the report as text: a line for each fault, also for those that did not come, and the verdict."""
        of = self._by_fault()
        yield f"{'fault':<12}{'times':>6}{'seconds to the next new step':>30}{'longest':>9}{'steps again':>13}"
        for name in self.faults:
            seconds = [each.seconds for each in of.get(name, []) if each.seconds is not None]
            again = max((each.steps_again for each in of.get(name, [])), default=0)
            times = f"{statistics.median(seconds):>30.1f}{max(seconds):>9.1f}{again:>13}" if seconds else ""
            yield f"{name:<12}{len(of.get(name, [])):>6}{times}"
        yield from (f"{name} was left out: {why}" for name, why in self.left_out.items())
        if missing := [name for name in self.faults if name not in of and name not in self.left_out]:
            yield f"did not come, for lack of time: {', '.join(missing)}; give more --minutes, or --steps"
        good, what = sum(round_.ok for round_ in self.rounds), "bytes" if self.promised else "steps and examples"
        yield f"{good} of {len(self.rounds)} disturbed runs ended with the {what} of the undisturbed one"

    def as_json(self) -> str:
        """Return the report as JSON: all but the seconds is the same again with the same seed."""
        facts = {
            "lockstep": __version__,
            "recipe": self.recipe,
            "seed": self.seed,
            "steps": self.steps,
            "undisturbed_seconds": round(self.undisturbed_seconds, 3),
            "bits_are_promised": self.promised,
            "left_out": dict(self.left_out),
            "ok": self.ok,
            "rounds": [
                {
                    "ok": round_.ok,
                    "lost": list(round_.lost),
                    "problems": round_.trial.problems,
                    "seconds": round(round_.trial.seconds, 3),
                    "faults": [_facts(injected) for injected in round_.trial.faults],
                }
                for round_ in self.rounds
            ],
        }
        return json.dumps(facts, indent=1) + "\n"


def _facts(injected: Injected) -> dict[str, Any]:
    return {name: value for name, value in asdict(injected).items() if name != "began"}
