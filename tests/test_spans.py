from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lockstep import spans
from lockstep.errors import InputError
from lockstep.spans import Recorder, Span, add_source, recording, remove_source, span
from lockstep.tracing import measure_stages, timed


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    spans.record_into(None)


def names(recorder: Recorder) -> list[str]:
    return [each.name for each in recorder.spans]


def test_where_nobody_records_a_name_takes_no_memory() -> None:
    assert recording() is None
    assert span("forward", 3, on_device=True) is span("update", lane=("checkpoint", 0))


def test_blocks_lie_within_each_other() -> None:
    recorder = Recorder()
    recorder.start()
    with span("hooks"), span("forward", 3):
        pass
    recorder.stop()
    inner, outer = recorder.spans
    assert (inner.name, outer.name) == ("forward, tower 3", "hooks")
    assert outer.began <= inner.began <= inner.ended <= outer.ended
    assert inner.lane == outer.lane == ("main thread", threading.get_ident())
    with span("later"):
        pass
    assert len(recorder.spans) == 2


def test_what_is_under_way_at_the_end_is_cut_off_there() -> None:
    recorder = Recorder()
    with span("before"):
        recorder.start()
        with span("write", lane=("checkpoint", 0)):
            recorder.stop()
    assert names(recorder) == ["write"]


def test_what_is_too_much_is_counted() -> None:
    recorder = Recorder(most=2, mark=object)
    recorder.start()
    for _ in range(5):
        with span("a", on_device=True):
            pass
    recorder.stop()
    assert (len(recorder.spans), recorder.num_dropped, len(recorder.on_device)) == (2, 3, 1)


def test_two_traces_at_once_are_refused() -> None:
    first = Recorder()
    first.start()
    with pytest.raises(InputError, match=r"Two traces of one process cannot be recorded at the same time\.\n"):
        Recorder().start()
    assert recording() is first


def test_threads_have_lanes_of_their_own() -> None:
    recorder = Recorder()
    recorder.start()

    def work() -> None:
        with span("write"):
            pass

    thread = threading.Thread(target=work, name="checkpoint of step 3")
    thread.start()
    thread.join()
    recorder.stop()
    assert [each.lane[0] for each in recorder.spans] == ["checkpoint of step 3"]


def test_stages_of_the_input_are_spans_side_by_side() -> None:
    recorder = Recorder()
    recorder.start()
    with measure_stages(), timed("read"), timed("decode"):
        pass
    recorder.stop()
    assert names(recorder) == ["read", "decode", "read"]
    assert recorder.spans[0].ended == recorder.spans[1].began


def test_only_what_waits_for_a_device_is_marked_there() -> None:
    marks: list[int] = []
    recorder = Recorder(mark=lambda: marks.append(len(marks)) or len(marks) - 1)
    recorder.start()
    with span("forward", 0, on_device=True), span("wait"):
        pass
    recorder.stop()
    assert recorder.on_device == [("forward, tower 0", 0, 1)]


class Source:
    """Has a span from before the trace, and one that is in it."""

    def __init__(self) -> None:
        self.is_on: list[bool] = []

    def record(self, *, on: bool) -> None:
        self.is_on.append(on)

    def recorded(self) -> Iterator[Span]:
        yield Span(("loader process 0", 0), "read", -2.0, -1.0)
        yield Span(("loader process 0", 0), "decode", 1e9, 1e9 + 1)


def test_other_processes_record_while_this_one_does() -> None:
    early, late, gone = Source(), Source(), Source()
    add_source(early)
    recorder = Recorder()
    recorder.start()
    add_source(late)
    add_source(gone)
    remove_source(gone)
    recorder.stop()
    assert (early.is_on, late.is_on, gone.is_on) == ([True, False], [True, False], [True])
    assert names(recorder) == ["decode"] * 3
    remove_source(early)
