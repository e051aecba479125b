"""The libraries that Lockstep needs or can use: which of them load, and why others do not.

A library that does not fit its system can end the process that loads it, or leave it half broken. So they are loaded
by a process of their own, which says each name before and after: the one that it was at when it ended is to blame.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import NamedTuple

from lockstep.doctor.check_result import CheckResult, Verdict
from lockstep.screen import log

_DISTRIBUTION = "lockstep-train"
_REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)(?:; extra == ['\"](\w+)['\"])?")
_MODULES = {"pillow": "PIL", "pyyaml": "yaml"}
"""Modules whose name is not that of what is installed, but for hyphens."""
_TIMEOUT_SECONDS = 300.0
"""For all libraries: from a network disk that is slow, torch alone may take a minute."""
_LONGEST = 300
_REPLACED = {"simplejpeg"}
"""Needed libraries in whose place another one does the same, slower."""


class Requirement(NamedTuple):
    """A library that is asked for."""

    name: str
    """Its name where it is installed from."""
    least: str
    """Its oldest version that will do."""
    extra: str
    """The optional part of Lockstep that needs it; "" where all of it does."""

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        return _MODULES.get(self.name, self.name.replace("-", "_"))


class LoadResult(NamedTuple):
    """What became of loading a library."""

    problem: str
    """Why it does not load; "" if it does."""
    seconds: float


def library_results() -> Iterator[CheckResult]:
    """Load what Lockstep needs and what it can use, in another process, and tell what became of it."""
    asked = _requirements()
    needed = [each for each in asked if not each.extra]
    there = [each for each in asked if not each.extra or find_spec(each.module)]
    log.info("loading %s, in another process", ", ".join(each.name for each in there))
    loaded = load_apart([each.module for each in there])
    yield from (_of_library(each, loaded[each.module]) for each in there if each.name == "torch" or each.extra)
    others = [_of_library(each, loaded[each.module]) for each in needed if each.name != "torch"]
    yield from (finding for finding in others if finding.verdict != "OK")
    if good := [finding.found for finding in others if finding.verdict == "OK"]:
        yield CheckResult("libraries", "; ".join(good), numbers={"load": len(good), "needed": len(others)})
    if missing := [each for each in asked if each not in there]:
        extras = ",".join(dict.fromkeys(each.extra for each in missing))
        verb = "is" if len(missing) == 1 else "are"
        found = (
            f"{', '.join(each.name for each in missing)} {verb} not installed (pip install 'lockstep-train[{extras}]')"
        )
        yield CheckResult("optional libraries", found, numbers={"missing": len(missing)})


def _requirements() -> list[Requirement]:
    """Read from what was installed what Lockstep asks for; of a checkout that was not, torch is known."""
    try:
        lines = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [Requirement("torch", "0", "")]
    parts = [match.groups(default="") for match in map(_REQUIREMENT.match, lines) if match]
    return [Requirement(*each) for each in parts if each[2] != "dev"]


def _of_library(asked: Requirement, loaded: LoadResult) -> CheckResult:
    checked = "torch" if asked.name == "torch" else f"library {asked.name}"
    try:
        version = metadata.version(asked.name)
    except metadata.PackageNotFoundError:
        version = "of an unknown version"
    what = f"lockstep-train[{asked.extra}]" if asked.extra else asked.name
    if loaded.problem:
        verdict: Verdict = "warn" if asked.extra or asked.name in _REPLACED else "fails"
        mend = f"pip install --force-reinstall '{what}', of the build that fits this system and this torch"
        return CheckResult(checked, f"{version} does not load: {loaded.problem}", verdict, mend)
    numbers = {"load_seconds": loaded.seconds}
    if _numbers(version) < _numbers(asked.least):
        mend = f"pip install '{asked.name}>={asked.least}'"
        return CheckResult(checked, f"{asked.name} {version}, older than {asked.least}", "warn", mend, numbers)
    return CheckResult(checked, f"{asked.name} {version}", numbers=numbers)


def _numbers(version: str) -> list[int]:
    """Return the numbers that a version begins with; none where it begins with another word."""
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # type: ignore[index]


def load_apart(modules: Sequence[str]) -> dict[str, LoadResult]:
    """Load modules in turn in another process, and in a new one where one of them has ended it; returns what became."""
    found: dict[str, LoadResult] = {}
    while left := [module for module in modules if module not in found]:
        said, end = _told_by_process(left)
        at = left[0]
        for line in said.splitlines():
            with suppress(ValueError):  # the last line may be torn
                at, *became = json.loads(line)
                if became:
                    found[at] = LoadResult(*became)
        found.setdefault(at, LoadResult(end, 0.0))
    return found


def _told_by_process(modules: Sequence[str]) -> tuple[str, str]:
    """Return what a process that loads modules says, and in words how it ended."""
    words = [sys.executable, "-m", __name__, *modules]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"not done after {_TIMEOUT_SECONDS:.0f} s"
    how = f"by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"with exit code {done.returncode}"
    return done.stdout.decode(errors="replace"), f"it ended its process {how}"


def _load(module: str) -> None:
    if module in ("torchvision", "timm"):  # some of whose operators may be missing
        from lockstep.models.torchvision_models import imported

        imported("torchvision.models" if module == "torchvision" else module)
    else:
        import_module(module)


def _load_in_turn(modules: Sequence[str]) -> None:
    """Load modules in this process, and write a line of JSON before and after each; nothing else is printed."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for module in modules:
            print(json.dumps([module]), file=out, flush=True)
            began, problem = time.perf_counter(), ""
            try:
                _load(module)
            except BaseException as error:  # some exit
                problem = f"{type(error).__name__}: {error}"[:_LONGEST]
            print(json.dumps([module, problem, time.perf_counter() - began]), file=out, flush=True)
    os._exit(0)  # the end of an interpreter with so many libraries may crash


if __name__ == "__main__":
    _load_in_turn(sys.argv[1:])
