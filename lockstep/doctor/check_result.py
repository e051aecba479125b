"""Results of checks: what was looked at, what was found, whether a run can live with it, and what mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Verdict = Literal["OK", "warn", "fails"]

_INDENT = len("fails  ")


@dataclass(frozen=True)
class CheckResult:
    """One thing that was checked."""

    checked: str
    found: str
    """What there is in words, with its numbers and their units."""
    verdict: Verdict = "OK"
    """"warn" where a run trains, but slowly or at a risk; "fails" where it cannot train."""
    mend: str = ""
    """What to do about it; of what is OK advice, or ""."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The same numbers for programs; units are in the names."""

    def lines(self) -> list[str]:
        """Return it as text: the verdict in words first, so that no colour is needed, and the mend below."""
        first = f"{self.verdict:<{_INDENT}}{self.checked}: {self.found}"
        label = "advice" if self.verdict == "OK" else "mend"
        return [first, f"{'':{_INDENT}}{label}: {self.mend}"] if self.mend else [first]


Check = Callable[[], Iterator[CheckResult]]


def judged(
    checked: str, found: str, numbers: Mapping[str, float] = MappingProxyType({}), *, is_bad: bool, mend: str
) -> CheckResult:
    """Return a warning with its mend where something is bad, else a result that is OK."""
    return CheckResult(checked, found, "warn" if is_bad else "OK", mend if is_bad else "", numbers)


def results_of(checks: Mapping[str, Check]) -> Iterator[CheckResult]:
    """Yield what the checks find, each by its name; one that the system does not let look is a finding of its own."""
    for name, check in checks.items():
        try:
            yield from check()
        except (OSError, ValueError, RuntimeError) as error:
            yield CheckResult(name, f"cannot be looked at: {type(error).__name__}: {error}", "warn", "see what it says")


def can_train(findings: Sequence[CheckResult]) -> bool:
    """Whether nothing fails; warnings are allowed."""
    return all(finding.verdict != "fails" for finding in findings)


def summary(findings: Sequence[CheckResult]) -> str:
    """Return the verdict over all in a sentence."""
    count = {verdict: sum(each.verdict == verdict for each in findings) for verdict in ("fails", "warn")}
    warned = f"{count['warn']} warning{'' if count['warn'] == 1 else 's'}"
    if can_train(findings):
        return f"It can train: {len(findings)} things were checked, with {warned}."
    names = ", ".join(dict.fromkeys(each.checked for each in findings if each.verdict == "fails"))
    return f"It cannot train: {count['fails']} of {len(findings)} checks fail ({names}), with {warned}."


def as_json(findings: Sequence[CheckResult]) -> dict[str, Any]:
    """Return all of it for programs."""
    return {
        "can_train": can_train(findings),
        "summary": summary(findings),
        "findings": [{**vars(each), "numbers": dict(each.numbers)} for each in findings],
    }
