"""A certificate: what was verified of a run, as JSON that another machine can check beside a copy of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from lockstep.checkpoints.manifest import hash_of_json
from lockstep.errors import InputError
from lockstep.readers.fingerprint import checksum
from lockstep.recipes.code import functions_of
from lockstep.reporting.chain import CHAIN, read_chain
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.runs.examination import Examination
from lockstep.runs.replay import Replayed
from lockstep.version import __version__

FORMAT = "lockstep certificate 1"
_MAX_BYTES = 1 << 24
_FIELDS = {"format": str, "run": str, "verdict": str, "chain": dict, "sha256": str}


def certificate_of(found: Examination, replayed: Replayed | None, why_not: str) -> dict[str, Any]:
    """Return what was found of a run: the verdict, what it rests on, and the versions and fingerprints of all of it.

    `replayed` is what came of a window; None where none was made again, and `why_not`.
    """
    last = found.events[-1]
    problems = [*found.problems, *(replayed.data_changed if replayed else ())]
    if replayed and replayed.difference:
        problems.append(replayed.difference)
    body: dict[str, Any] = {
        "format": FORMAT,
        "run": found.path.name,
        "verdict": "differs" if problems else replayed.verdict if replayed else "as written down",
        "problems": problems,
        "notes": found.notes,
        "checked": found.checked,
        "chain": {"lines": found.num_lines, "head": found.head},
        "replay": _replay_of(replayed) if replayed else {"none": why_not},
        "result": found.result,
        "recipe": f"sha256 {sha256(found.recipe.encode()).hexdigest()}",
        "data": last.get("data"),
        "code": _code(found),
    }
    return body | {"sha256": hash_of_json(body)}


def _replay_of(replayed: Replayed) -> dict[str, Any]:
    facts = {
        "steps": [replayed.window.first, replayed.window.last],
        "from_checkpoint": replayed.window.checkpoint,
        "workers": replayed.workers,
        "attempts": replayed.num_compared,
        "tensors_compared_at": replayed.digests_at,
        "bit_identical": replayed.has_same_bits,
        "largest_relative_difference": replayed.largest,
        "tolerance": replayed.tolerance,
        "environment_differs": replayed.environment,
        "choices": dict(replayed.choices),
    }
    return {name: without_nonfinite(value) for name, value in facts.items()}


def _code(found: Examination) -> dict[str, Any]:
    """The version of Lockstep and the checksum of its source, and the functions of the user's own with theirs."""
    folder = Path(__file__).parents[1]
    files = sorted(folder.rglob("*.py"))
    parts = [part for file in files for part in (str(file.relative_to(folder)).encode(), file.read_bytes())]
    return {
        "lockstep": __version__,
        "source": checksum(*parts),
        "functions": {each.full_name: each.source for each in functions_of(found.made_with)},
    }


def read_certificate(path: Path) -> dict[str, Any]:
    """Read a certificate, and refuse one that was changed; raises InputError."""
    try:
        with path.open("rb") as file:
            body = json.loads(file.read(_MAX_BYTES))
        given = "no certificate of a run" if not _is_certificate(body) else ""
    except (OSError, ValueError, RecursionError) as error:
        body, given = {}, str(error)
    if not given and hash_of_json({name: value for name, value in body.items() if name != "sha256"}) != body["sha256"]:
        given = "a certificate that was changed: its own hash is another one"
    if given:
        raise InputError(
            f"{path} cannot be checked against.",
            given=given,
            expected="what `lockstep verify RUN --certificate FILE` has written",
            hint="name its file, as it was written",
        )
    found: dict[str, Any] = body
    return found


def _is_certificate(body: Any) -> bool:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        return False
    if not all(type(body.get(name)) is kind for name, kind in _FIELDS.items()) or type(body.get("replay")) is not dict:
        return False
    steps = body["replay"].get("steps", [1, 1])
    return (
        type(body["chain"].get("lines")) is int
        and isinstance(steps, list)
        and len(steps) == 2
        and all(type(step) is int for step in steps)
    )


def steps_of(certificate: Mapping[str, Any]) -> tuple[int, int] | None:
    """The first and last update that a certificate says were made again; None where none was."""
    steps = certificate["replay"].get("steps")
    return (steps[0], steps[1]) if steps else None


def differences_from(certificate: Mapping[str, Any], found: Examination) -> list[str]:
    """Compare a run with its certificate: the link of the last line that the certificate knows stands for all of it."""
    wanted, number = certificate["chain"].get("head"), certificate["chain"]["lines"]
    link = next((line.link for line in read_chain(found.path / CHAIN) if line.number == number), "none")
    if link == wanted:
        return []
    return [f"the certificate is of another run: link {number} of its chain is {wanted}, and here it is {link}"]
