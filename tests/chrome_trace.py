"""A strict reading of Chrome's trace format, as Perfetto takes it: what is not in it, or out of place, is an error."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}

Lanes = dict[tuple[int, str], list[dict[str, Any]]]


def read_trace(path: Path) -> Lanes:
    """The slices of a trace that is as the format has it, by process and name of the lane, in the order of time."""
    trace = json.loads(path.read_bytes(), parse_constant=lambda word: _fail(f"{word} is no JSON"))
    assert trace.keys() == {"displayTimeUnit", "traceEvents", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[tuple[str, int], str] = {}
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert type(event["args"][field]) is kind
            assert event.keys() == {"ph", "name", "pid", "args"} | ({"tid"} if "thread" in event["name"] else set())
            if event["name"].endswith("_name"):
                key = event["name"].removesuffix("_name"), event.get("tid", event["pid"])
                assert key not in names, "named twice"
                names[key] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert event.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert all(type(event[field]) is str and event[field] for field in ("name", "cat"))
        assert all(type(event[field]) is int and event[field] > 0 for field in ("pid", "tid"))
        assert all(type(event[field]) in (int, float) and event[field] >= 0 for field in ("ts", "dur"))
        assert all(type(value) in (int, float, str) for value in event["args"].values())
        slices[event["pid"], event["tid"]].append(event)
    lanes: Lanes = {}
    for (process, thread), events in slices.items():
        assert ("process", process) in names
        lane = process, names["thread", thread]
        assert lane not in lanes, "two lanes of one name"
        lanes[lane] = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
        _check_nesting(lanes[lane])
    return lanes


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Each slice of a lane lies within the one before, or begins when that has ended; in whole nanoseconds."""
    ends: list[int] = []
    for event in events:
        began, ended = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        while ends and ends[-1] <= began:
            ends.pop()
        assert not ends or ended <= ends[-1], f"{event} goes on after the slice around it"
        ends.append(ended)


def _fail(words: str) -> None:
    raise AssertionError(words)


def names_of(lanes: Lanes, lane: str, process: int = 1) -> list[str]:
    """The names of the slices of a lane, in the order of time."""
    return [event["name"] for event in lanes[process, lane]]
