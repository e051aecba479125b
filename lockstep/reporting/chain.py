"""`chain.jsonl`: all that a run did, one JSON object a line, each with a link: a hash over it and the link before.

Whoever knows the last link knows whether any line was changed, taken out or put in. There are five kinds of lines:

- an attempt: step, position, losses, rates and gradient norm; of one that `metrics.jsonl` has too (`in_metrics`) all
  that it has there;
- an evaluation, as in `metrics.jsonl`;
- `digests`: of each tensor of the model and the optimizer after a step, by section and name, and of the values of a
  checkpoint: `of` "files" what the hash of the section's file was after the tensor. It may come some attempts later, as
  the thread that writes the checkpoint makes it: it tells its position;
- an `event` that begins or ends a segment, or that lines were lost before it: what the numbers rest on (recipe,
  choices, data, workers), as far as it is not as in the event before;
- the `result` of a run that has ended, as in `result.json`.

Like `metrics.jsonl` it is cut back to where a run goes on from, and a line is safe from a kill once it is written.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.durable import atomic_write
from lockstep.errors import WorkdirError
from lockstep.reporting.append import AppendOnly
from lockstep.reporting.jsonl import facts_of, without_nonfinite
from lockstep.types import StepReport

CHAIN = "chain.jsonl"
_NUM_DIGITS = 32
_FIRST_LINK = "0" * _NUM_DIGITS
_MIDDLE, _END = ', "link": "', '"}\n'
_TAIL_BYTES = len(_MIDDLE) + _NUM_DIGITS + len(_END)
_MAX_LINE_BYTES = 1 << 26
_COPIED_BYTES = 1 << 20
_MORE = ("smoothed", "total", "metrics")
"""Facts that only the lines have that `metrics.jsonl` has too: they follow from the others, or from the weights."""
GROUND = {
    "event": str,
    "history": str,
    "from_position": int,
    "skipped": list,
    "stage": int,
    "workers": int,
    "sums": str,
    "recipe": str,
    "data": str,
    "choices": dict,
}
"""The facts of an event, and their types."""
_ATTEMPT = re.compile(
    rb'\{"step": \d{1,18}, "position": (\d{1,18}), "losses": \{.*, "in_metrics": (?:true|false), '
    rb'"link": "[0-9a-f]{32}"\}\n'
)
_KINDS = ("position", "evaluation", "digests", "event", "result")
_encode = json.JSONEncoder(allow_nan=False).encode


class ChainLine(NamedTuple):
    """A line of a chain, as it was read."""

    number: int
    """Counted from 1."""
    facts: dict[str, Any]
    """An event has all that is as in the event before, too; empty where the line is none of a chain."""
    fits: bool
    """Whether its link is the hash over it and the link before."""
    link: str


class ChainFile:
    """The file, opened to go on from a position: lines of later attempts, and a torn last line, are cut off.

    Digests of a position that is not cut off stay, though they come later. All raise WorkdirError where the file cannot
    be written; opening does where a line is not of this format, and then changes nothing. Attempts before the last one
    are not parsed. Two threads may write at once.
    """

    def __init__(self, path: Path, *, from_position: int) -> None:
        self._lock = threading.Lock()
        self._link = _FIRST_LINK
        self._since: list[dict[str, Any]] = []
        """The last attempt, and the lines after it."""
        self._ground: dict[str, Any] = {}
        self.last_attempt: Mapping[str, Any] = {}
        """The last attempt in the file, as it was opened; empty where it has none."""
        self._file = AppendOnly(path)
        try:
            size_bytes = self._read(path, from_position)
            if late := [*_late_digests(path, size_bytes, from_position)]:
                self._replace(path, size_bytes, late)
            else:
                self._file.cut(size_bytes)
        except BaseException:
            self._file.close()
            raise

    def _replace(self, path: Path, size_bytes: int, lines: Sequence[dict[str, Any]]) -> None:
        """Replace the file by its first part and some lines: at any moment it has the old content or the new one."""
        with atomic_write(path, failure=WorkdirError) as new, path.open("rb") as old:
            for start in range(0, size_bytes, _COPIED_BYTES):
                new.write(old.read(min(_COPIED_BYTES, size_bytes - start)))
            for facts in lines:
                line, link = _line(self._link, _encode(facts))
                new.write(line)
                self._took(facts, link)
        self._file.close()
        self._file = AppendOnly(path)

    def _read(self, path: Path, from_position: int) -> int:
        """Read the part up to a position; returns its size in bytes."""
        size_bytes = 0
        lines = ((line, _is_attempt_until(line, from_position)) for line in chain(_raw_lines(path), [b""]))
        for number, ((line, is_kept), (_, is_next_kept)) in enumerate(pairwise(lines), start=1):
            if is_kept and is_next_kept:
                size_bytes += len(line)  # nothing of it is needed, and to parse a million takes long
                continue
            facts, link = _parsed(line)
            if not facts:
                raise WorkdirError(
                    f"{path}, line {number} is not a line of a chain.",
                    given=line[:80].decode(errors="replace").rstrip(),
                    expected=f'a JSON object with "step" and "link", of up to {_MAX_LINE_BYTES:,} bytes',
                    hint=f"put {path.name} back from a copy; or move it away, and what was done so far cannot be "
                    "verified; nothing was changed",
                )
            if facts.get("position", facts.get("from_position", from_position)) > from_position:
                break
            size_bytes += len(line)
            self._took(facts, link)
            if "event" in facts:
                self._ground |= facts
        if self._since and "position" in self._since[0]:
            self.last_attempt = self._since[0]
        return size_bytes

    @property
    def last_position(self) -> int:
        """Where the last attempt in the file, as it was opened, or an event after it, has left the stream."""
        attempt: int = self.last_attempt.get("position", 0)
        event: int = self._ground.get("from_position", 0)
        return max(attempt, event)

    def write(self, facts: dict[str, Any]) -> None:
        """Append a line, unless it stands there already since the last attempt: a save again, a result.

        An evaluation that is made again by other workers may differ by a bit: the first one stands.
        """
        try:
            text = _encode(facts)
        except ValueError:
            facts = without_nonfinite(facts)
            text = _encode(facts)
        with self._lock:
            if "position" not in facts and any(_encode(line) == text for line in self._since):
                return
            if "evaluation" in facts and any(_evaluated(line) == _evaluated(facts) for line in self._since):
                return
            line, link = _line(self._link, text)
            self._file.write(line)
            self._took(facts, link)

    def write_event(self, facts: Mapping[str, Any]) -> None:
        """Append an event: its step and name, and of the rest what is not as in the event before."""
        new = {name: value for name, value in facts.items() if self._ground.get(name) != value}
        self._ground |= new
        self.write({"step": facts["step"], "event": facts["event"], **new})

    def flush(self) -> None:
        """Have every line on the disk; to be called before a checkpoint that counts on them."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _took(self, facts: dict[str, Any], link: str) -> None:
        self._link = link
        if "position" in facts:
            self._since.clear()
        self._since.append(facts)


def _evaluated(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    return facts["step"], facts.get("evaluation")


def _late_digests(path: Path, size_bytes: int, position: int) -> Iterator[dict[str, Any]]:
    """Yield the facts of digests, after the first part of a chain, of a position that is not behind the one given."""
    link = b""
    for line in _raw_lines(path, size_bytes):
        before, link = link, line[-_TAIL_BYTES + len(_MIDDLE) : -len(_END)]
        if line.startswith(b'{"step": ') and b', "digests": ' in line:
            facts, own = _parsed(line)
            is_late = "digests" in facts and facts.get("at", position + 1) <= position
            if is_late and _link(before.decode(errors="replace"), line[:-_TAIL_BYTES]) == own:
                yield facts


def attempt_facts(report: StepReport, *, in_metrics: bool) -> dict[str, Any]:
    """Return the facts of an attempt, as its line in the chain has them."""
    facts = facts_of(report)
    if not in_metrics:
        for name in _MORE:
            del facts[name]
    facts["in_metrics"] = in_metrics
    return facts


def read_chain(path: Path) -> Iterator[ChainLine]:
    """Yield the whole lines of a chain, whatever they hold; a torn last line is left out."""
    before = _FIRST_LINK
    ground: dict[str, Any] = {}
    for number, line in enumerate(_raw_lines(path), start=1):
        facts, link = _parsed(line)
        fits = bool(facts) and _link(before, line[:-_TAIL_BYTES]) == link
        if "event" in facts:
            facts = ground = {**ground, **facts}
        yield ChainLine(number, facts, fits, link)
        before = link


def as_read(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts as they would be read back from a line."""
    read: dict[str, Any] = json.loads(json.dumps(without_nonfinite(facts)))
    return read


def _link(before: str, body: bytes) -> str:
    return blake2b(before.encode() + body, digest_size=_NUM_DIGITS // 2).hexdigest()


def _line(before: str, text: str) -> tuple[bytes, str]:
    """Return the line after a link, of facts as JSON, and its own link."""
    body = text[:-1].encode()
    link = _link(before, body)
    return body + f"{_MIDDLE}{link}{_END}".encode(), link


def _raw_lines(path: Path, start_bytes: int = 0) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start_bytes)
        for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
            if line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES:
                yield line


def _is_attempt_until(line: bytes, position: int) -> bool:
    """Whether a line looks like an attempt that has left the stream there, or before."""
    found = _ATTEMPT.fullmatch(line)
    return found is not None and int(found[1]) <= position


def _parsed(line: bytes) -> tuple[dict[str, Any], str]:
    """Parse a line; returns its facts without the link, which are empty where it is none of a chain."""
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        return {}, ""
    if not isinstance(facts, dict) or not isinstance(link := facts.pop("link", None), str):
        return {}, ""
    return (facts, link) if _is_ours(facts) else ({}, link)


def _is_ours(facts: dict[str, Any]) -> bool:
    """Whether it is one of the five kinds, of which the first has the types that a reader counts on."""
    if type(facts.get("step")) is not int or sum(kind in facts for kind in _KINDS) != 1:
        return False
    if "position" in facts:
        return (
            type(facts["position"]) is int
            and isinstance(facts.get("losses"), dict)
            and type(facts.get("refused")) is bool
            and type(facts.get("in_metrics")) is bool
        )
    if "digests" in facts:
        sections = facts["digests"]
        return (
            type(facts.get("at", 0)) is int  # of a run that was made before they came late: where they stand
            and isinstance(sections, dict)
            and all(isinstance(each, dict) for each in sections.values())
        )
    if "event" in facts:
        return (
            all(type(facts[name]) is kind for name, kind in GROUND.items() if name in facts)
            and all(type(position) is int for position in facts.get("skipped", ()))
            and facts.get("workers", 1) > 0
        )
    if "result" in facts:
        return isinstance(facts["result"], dict)
    return isinstance(facts.get("evaluation"), str)
