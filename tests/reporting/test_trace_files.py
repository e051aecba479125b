from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chrome_trace import names_of, read_trace
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import WorkdirError
from lockstep.reporting.trace_files import ClockOffset, TracePart, clock_offset, merge_parts, part_path
from lockstep.spans import Span

MAIN, WRITER = ("main thread", 71), ("checkpoint", 0)
NAME = "steps-3-6"


def make_part(worker: int = 0, num_workers: int = 1, began: float = 10.0, **more: Any) -> TracePart:
    spans = [
        Span(MAIN, "forward, tower 0", began + 0.1, began + 0.2),
        Span(MAIN, "hooks", began, began + 1.0, {"step": 3}),
        Span(WRITER, "write checkpoint", began + 0.05, began + 1.5),
    ]
    return TracePart(worker, f"worker {worker} (pid 9)", num_workers, spans, **{"boot": "here", **more})


def write(folder: Path, *parts: TracePart, name: str = NAME) -> None:
    for part in parts:
        part.write(part_path(folder, name, part.worker))


# Clocks ---------------------------------------------------------------------------------------------------------------


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=9),
)
def test_the_offset_of_a_clock_is_within_its_bound(offset: float, rounds: list[tuple[float, ...]]) -> None:
    """Each barrier ends on both workers when the later one has come, some time later on each."""
    own, chief, now = [], [], 100.0
    for my_delay, chief_delay, my_way, chief_way in rounds:
        met = now + max(my_delay, chief_delay)
        own.append((now + my_delay, met + my_way))
        chief.append((now + chief_delay + offset, met + chief_way + offset))
        now = met + 2
    found = clock_offset(own, chief)
    assert abs(found.seconds - offset) <= found.bound_seconds + 1e-6
    assert found.bound_seconds <= min(my_way + chief_way for *_, my_way, chief_way in rounds) / 2 + 1 + 1e-6


def test_the_shortest_way_bounds_the_offset() -> None:
    own = [(0.0, 1.0), (2.0, 2.5), (4.0, 9.0)]
    chief = [(100.5, 101.5), (102.0, 102.5), (104.0, 109.0)]
    assert clock_offset(own, chief) == ClockOffset(100.0, 0.5)


# Parts ----------------------------------------------------------------------------------------------------------------


def test_a_part_is_read_as_it_was_written(tmp_path: Path) -> None:
    part = make_part(2, 3, num_dropped=4, clock=ClockOffset(0.5, 1e-4), epoch_seconds=1.7e9)
    write(tmp_path, part)
    assert TracePart.read(part_path(tmp_path, NAME, 2)) == part


def test_workers_of_one_host_have_one_clock(tmp_path: Path) -> None:
    write(tmp_path, make_part(0, 2), make_part(1, 2, began=10.25))
    [merged] = merge_parts(tmp_path)
    assert merged == (tmp_path / f"{NAME}.json", [], 0.0, 0)
    assert merged.describe() == f"the trace is in {tmp_path}/{NAME}.json: open it at ui.perfetto.dev"
    lanes = read_trace(merged.path)
    assert {lane for _, lane in lanes} == {"main thread", "checkpoint"}
    assert names_of(lanes, "main thread", 2) == ["hooks", "forward, tower 0"]
    assert lanes[1, "main thread"][0]["args"] == {"step": 3}
    assert [lanes[process, "main thread"][0]["ts"] for process in (1, 2)] == [10.0e6, 10.25e6]
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.json"], "the parts are gone"
    assert merge_parts(tmp_path) == []


def test_clocks_of_hosts_are_brought_together(tmp_path: Path) -> None:
    there = make_part(1, 2, began=1000.0, boot="there", clock=ClockOffset(-989.5, 2e-4))
    write(tmp_path, make_part(0, 2, clock=ClockOffset(0.0, 0.0)), there)
    [merged] = merge_parts(tmp_path)
    assert merged.describe().endswith("; the clocks of its hosts differ by at most 200 us")
    assert read_trace(merged.path)[2, "main thread"][0]["ts"] == 10.5e6
    assert json.loads(merged.path.read_text())["otherData"]["clock_bound_us"] == pytest.approx(200)


def test_where_workers_have_not_met_the_time_of_day_is_taken(tmp_path: Path) -> None:
    write(tmp_path, make_part(0, 3, epoch_seconds=400.0), make_part(2, 3, boot="there", epoch_seconds=500.0))
    [merged] = merge_parts(tmp_path)
    said = "; its hosts are compared by their time of day; worker 1 left no part of it"
    assert merged.describe().endswith(said)
    assert read_trace(merged.path)[3, "main thread"][0]["ts"] == 110.0e6
    assert json.loads(merged.path.read_text())["otherData"]["missing"] == ["worker 1"]


def test_each_trace_is_merged_by_itself(tmp_path: Path) -> None:
    write(tmp_path, make_part())
    write(tmp_path, make_part(num_dropped=7), name="steps-6-8")
    first, second = merge_parts(tmp_path)
    assert (first.path.name, second.path.name) == ("steps-3-6.json", "steps-6-8.json")
    assert second.describe().endswith("; it is not complete: 7 spans at its end were too many")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"spans"', '"spam"'),
        ("10.1", "NaN"),
        ("10.2", "-Infinity"),
        ("10.2", "10.05"),
        ("10.2", '"soon"'),
        ("10.2", "null"),
        ("[0, ", "[7, "),
        ("[0, ", "[-1, "),
        ('{"step": 3}', '["step"]'),
        ('"num_workers": 2', '"num_workers": "many"'),
        ('"worker": 1', '"worker": 0'),
        ("{", "[" * 100_000),
    ],
)
def test_a_part_that_is_damaged_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, old: str, new: str
) -> None:
    write(tmp_path, make_part(0, 2), make_part(1, 2))
    path = part_path(tmp_path, NAME, 1)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    [merged] = merge_parts(tmp_path)
    assert merged.missing == ["worker 1"]
    assert {process for process, _ in read_trace(merged.path)} == {1}
    assert f"{NAME}.worker-1.part is left out of the trace: it cannot be read (" in caplog.text


def test_a_part_that_is_torn_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, make_part(0, 2), make_part(1, 2))
    path = part_path(tmp_path, NAME, 0)
    path.write_bytes(path.read_bytes()[:-40])
    assert merge_parts(tmp_path)[0].missing == ["worker 0"]


def test_of_nothing_but_damaged_parts_no_trace_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part_path(tmp_path, NAME, 0).write_bytes(b"\xff\xfe{")
    (tmp_path / "notes.part").write_text("not a part of ours")
    assert merge_parts(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes.part"]


def test_what_a_part_says_beside_numbers_and_texts_is_left_out(tmp_path: Path) -> None:
    part = make_part()
    odd: dict[str, Any] = {"step": 3, "more": [1], "loss": math.nan, "word": "a\x1b<b>"}
    write(tmp_path, replace(part, spans=[part.spans[1]._replace(arguments=odd)]))
    [merged] = merge_parts(tmp_path)
    [event] = read_trace(merged.path)[1, "main thread"]
    assert event["args"] == {"step": 3, "word": "a\x1b<b>"}


def test_a_trace_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match=r"cannot be written\.\n"):
        make_part().write(part_path(tmp_path / "file", NAME, 0))
