from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from chrome_trace import Lanes, names_of, read_trace
from device_calls import accelerator
from thread_workers import thread_workers
from torch import Tensor, nn

import lockstep as ls
from lockstep import spans
from lockstep.errors import PeerLostError
from lockstep.readers.reader import Arrays
from lockstep.reporting import trace as traces
from lockstep.spans import Recorder, Span
from lockstep.tracing import timed
from lockstep.types import StepRange


class Slow(Arrays):
    """Examples that have to be decoded."""

    cost = "decode"

    def read_batch(self, indices: Any) -> dict[str, Any]:
        with timed("decode"):
            return super().read_batch(indices)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def make_state(width: int = 3) -> ls.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width))
    return ls.TrainState(model, ls.optim.SGD(0.1), average=ls.optim.MovingAverage(0.9))


def make_loader(**options: Any) -> ls.data.Loader:
    reader = Slow if options else Arrays
    return ls.data.Loader(reader({"x": torch.ones(40, 3)}), batch_size=4, **options)


def train(
    folder: Path, steps: Any, until: int = 8, state: ls.TrainState | None = None, start: int = 0, **options: Any
) -> None:
    with ls.Trace(folder, steps, start=start) as trace:
        for report in ls.train_steps(
            state or make_state(), losses, make_loader(**options), ls.Towers(2), until=ls.Steps(until)
        ):
            trace(report)


def trace_in(folder: Path, name: str = "steps-3-6") -> Lanes:
    return read_trace(folder / "traces" / f"{name}.json")


@pytest.mark.parametrize("steps", ["3:6", range(3, 6), StepRange(3, 6)])
def test_the_steps_of_a_range_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: Any) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path, steps)
    lanes = trace_in(tmp_path)
    assert {lane for _, lane in lanes} == {"steps", "phases", "main thread"}
    assert names_of(lanes, "steps") == ["step 3", "step 4", "step 5"]
    assert {event["args"]["step"] for event in lanes[1, "phases"]} == {3, 4, 5, 6}
    towers = [f"{what}, tower {tower}" for tower in (0, 1) for what in ("forward", "backward")]
    assert names_of(lanes, "main thread") == ["read", *towers, "exchange", "update", "moving average"] * 3
    assert "tracing steps 3 to 5" in caplog.text
    assert f"the trace is in {tmp_path}/traces/steps-3-6.json: open it at ui.perfetto.dev" in caplog.text
    assert os.listdir(tmp_path / "traces") == ["steps-3-6.json"]  # noqa: PTH208
    assert spans.recording() is None
    assert ls.join().pulse.on_phase is None


def test_each_phase_lies_within_its_step(tmp_path: Path) -> None:
    train(tmp_path, "3:6")
    lanes = trace_in(tmp_path)
    for step in lanes[1, "steps"]:
        within = [e for e in lanes[1, "main thread"] if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
        assert [event["name"] for event in within][:2] == ["read", "forward, tower 0"]
        assert sum(event["dur"] for event in within) <= step["dur"]


def test_a_trace_from_the_first_step_on_begins_with_it(tmp_path: Path) -> None:
    train(tmp_path, ":2")
    assert names_of(trace_in(tmp_path, "steps-0-2"), "steps") == ["step 0", "step 1"]


def test_a_loop_that_goes_on_within_the_range_records_the_rest(tmp_path: Path) -> None:
    state = make_state()
    train(tmp_path / "before", "100:110", 4, state)
    train(tmp_path, "3:6", state=state, start=4)
    assert names_of(trace_in(tmp_path, "steps-4-6"), "steps") == ["step 4", "step 5"]


def test_a_loop_that_ends_within_the_range_has_its_trace(tmp_path: Path) -> None:
    train(tmp_path, "3:6", 4)
    assert names_of(trace_in(tmp_path), "steps") == ["step 3"]


@pytest.mark.parametrize(
    ("until", "start", "said"),
    [
        (3, 0, "no step of 5:9 is traced yet: the loop ended at step 3"),
        (5, 0, "no step of 5:9 is traced yet: the loop ended at step 5"),
        (3, 9, "steps 5:9 are not traced: they were over before step 9"),
    ],
)
def test_a_trace_of_no_step_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, until: int, start: int, said: str
) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path, "5:9", until, start=start)
    assert said in caplog.text
    assert [*(tmp_path / "traces").iterdir()] == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "lane"), [({"num_threads": 1}, "loader thread 0"), ({"num_processes": 1}, "loader process 0 (pid")]
)
def test_what_reads_ahead_has_lanes_of_its_own(tmp_path: Path, options: dict[str, int], lane: str) -> None:
    train(tmp_path, "1:6", **options)
    lanes = trace_in(tmp_path, "steps-1-6")
    [found] = [name for _, name in lanes if name.startswith(lane)]
    assert {"read", "decode"} <= {*names_of(lanes, found)}
    assert "read" not in names_of(lanes, "main thread")


def test_the_thread_that_writes_a_checkpoint_has_a_lane(tmp_path: Path) -> None:
    state, loader = make_state(), make_loader()
    with ls.Trace(tmp_path, "1:3") as trace, ls.Saver(tmp_path) as saver:
        for report in ls.train_steps(state, losses, loader, until=ls.Steps(3)):
            if report.step == 2:
                saver.save(state, loader)
                saver.wait()
            trace(report)
    lanes = trace_in(tmp_path, "steps-1-3")
    assert names_of(lanes, "checkpoint") == ["write checkpoint"]
    assert "copy the state" in names_of(lanes, "main thread")
    assert "save" in names_of(lanes, "phases")


def test_a_huge_range_is_cut_off_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(traces, "Recorder", lambda **more: Recorder(most=30, **more))
    train(tmp_path, "0:1000000")
    lanes = trace_in(tmp_path, "steps-0-1000000")
    assert sum(map(len, lanes.values())) == 30
    assert "it is not complete: " in caplog.text


def test_an_error_leaves_what_there_is(tmp_path: Path) -> None:
    def fail(report: ls.StepReport) -> None:
        if report.step == 3:
            raise KeyError("the loop body's")

    def train_with_errors() -> None:
        with ls.Trace(tmp_path, "0:9") as trace:
            ls.train(make_state(), losses, make_loader(), hooks=[fail, trace])

    with pytest.raises(KeyError):
        train_with_errors()
    assert names_of(trace_in(tmp_path, "steps-0-9"), "steps") == ["step 0", "step 1"]
    assert spans.recording() is None


# What cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("110:100", "There is no step in this range."),
        ("5:5", "There is no step in this range."),
        ("100:", "'100:' is no range of steps."),
        ("-3:5", "'-3:5' is no range of steps."),
        ("1:9:2", "'1:9:2' is no range of steps."),
        ("all", "'all' is no range of steps."),
        (range(1, 9, 2), "'range(1, 9, 2)' is no range of steps."),
        (range(9, 1), "There is no step in this range."),
        (7, "steps is of the wrong type."),
    ],
)
def test_what_is_no_range_is_refused(tmp_path: Path, steps: Any, said: str) -> None:
    with pytest.raises(ls.InputError) as caught:
        ls.Trace(tmp_path, steps)
    assert caught.value.what == said
    assert [*tmp_path.iterdir()] == []


def test_a_second_trace_at_the_same_time_leaves_the_first_alone(tmp_path: Path) -> None:
    with ls.Trace(tmp_path, "0:9") as first:
        with pytest.raises(ls.InputError, match=r"Two traces of one process cannot be recorded"):
            train(tmp_path / "other", "0:9")
        ls.train(make_state(), losses, make_loader(), until=ls.Steps(2), hooks=[first])
    assert names_of(trace_in(tmp_path, "steps-0-9"), "steps") == ["step 0", "step 1"]


def test_a_trace_is_entered_before_the_steps_begin(tmp_path: Path) -> None:
    report: Any = None
    with pytest.raises(ls.InputError, match=r"A trace has to be entered before the steps begin\.\n"):
        ls.Trace(tmp_path, "3:6")(report)


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("mine")
    with pytest.raises(ls.WorkdirError, match=r"No trace can be written: there is no folder .*traces\.\n"):
        train(tmp_path, "3:6")
    assert (tmp_path / "traces").read_text() == "mine"


def test_a_folder_that_is_lost_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = make_state()
    with ls.Trace(tmp_path, "1:3") as trace:
        (tmp_path / "traces").rmdir()
        (tmp_path / "traces").write_text("mine")
        for report in ls.train_steps(state, losses, make_loader(), until=ls.Steps(5)):
            trace(report)
    assert state.step == 5
    assert "this worker's part of the trace is lost: " in caplog.text
    assert "the trace is not written: " in caplog.text


# On a device ----------------------------------------------------------------------------------------------------------


class Clock:
    """A device, half a second behind what the host enqueues: each event comes 0.1 s after the one before."""

    def __init__(self) -> None:
        self.seconds, self.waits = 0.0, 0

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        clock = self

        class Event:
            def record(self, stream: object) -> None:
                assert stream == "the current one"
                self.seconds = clock.seconds
                clock.seconds += 0.1

            def synchronize(self) -> None:
                clock.waits += 1

            def elapsed_time(self, later: Any) -> float:
                return 1e3 * (later.seconds - self.seconds)

        return Event()

    def current_stream(self, device: torch.device) -> str:
        return "the current one"

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1


def test_what_a_device_does_is_on_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch, "get_device_module", lambda device: clock)
    monkeypatch.setattr(traces.time, "perf_counter", lambda: 50.0)
    device = traces.DeviceClock(torch.device("meta"))
    assert clock.waits == 2
    recorder = Recorder(mark=device.mark)
    recorder.start()
    with spans.span("forward", 1, on_device=True):
        pass
    recorder.stop()
    [found] = device.spans(recorder.on_device)
    assert found._replace(began=0, ended=0) == Span(("meta", 0), "forward, tower 1", 0, 0)
    assert [found.began, found.ended] == pytest.approx([50.1, 50.2])
    assert clock.waits == 3


def test_where_steps_are_read_late_the_one_before_is_there_too(tmp_path: Path) -> None:
    with accelerator():
        train(tmp_path, "3:6")
    lanes = trace_in(tmp_path)
    assert names_of(lanes, "steps") == ["step 2", "step 3", "step 4", "step 5"]
    forwards = [event["name"] for event in lanes[1, "main thread"] if event["name"] == "forward, tower 0"]
    assert len(forwards) >= 4
    assert "read back" in names_of(lanes, "main thread")


# Several workers ------------------------------------------------------------------------------------------------------


def trace_together(folder: Path) -> None:
    state = make_state(600)
    with ls.Trace(folder, "2:4") as trace:
        for report in ls.train_steps(
            state, losses, make_loader(), ls.Towers(2), ls.AllReduce("gloo"), until=ls.Steps(5)
        ):
            trace(report)


@pytest.mark.process
def test_workers_are_in_one_trace(tmp_path: Path, run_workers: Any) -> None:
    """Through shared memory it is in the law of towers."""
    run_workers(trace_together, 2, tmp_path)
    lanes = trace_in(tmp_path, "steps-2-4")
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["steps-2-4.json"]
    for process in (1, 2):
        assert names_of(lanes, "steps", process) == ["step 2", "step 3"]
        main = names_of(lanes, "main thread", process)
        assert main.count(f"forward, tower {process - 1}") == 2
        assert "wait for other workers" in main
    buckets = sorted((process, lane) for process, lane in lanes if lane.startswith("bucket"))
    assert buckets == [(process, f"bucket {number}") for process in (1, 2) for number in range(3)]
    begun = [[event["ts"] for event in lanes[process, "steps"]] for process in (1, 2)]
    ended = [[e["ts"] + e["dur"] for e in lanes[process, "steps"]] for process in (1, 2)]
    assert begun[0][1] < ended[1][1], "the same step, on one clock"
    assert begun[1][1] < ended[0][1]


def test_clocks_of_hosts_are_compared_by_barriers() -> None:
    """Here they are one clock: it is found to be, within the bound."""
    with ThreadPoolExecutor(2) as pool:
        chief, other = pool.map(traces.compare_clocks, thread_workers(2, num_local_workers=1))
        assert [*pool.map(traces.compare_clocks, thread_workers(2))] == [(0.0, 0.0)] * 2, "one host"
    assert chief == (0.0, 0.0)
    assert abs(other.seconds) <= other.bound_seconds


def test_a_host_that_is_lost_when_clocks_are_compared_leaves_the_parts_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(worker: Any) -> Any:
        raise PeerLostError("worker 1 is lost.", given="", expected="", hint="")

    monkeypatch.setattr(traces, "compare_clocks", lose)
    with pytest.raises(PeerLostError):
        train(tmp_path, "2:4", 6)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["steps-2-4.worker-0.part"]
    train(tmp_path, "2:4", 5, start=4)
    assert names_of(trace_in(tmp_path, "steps-2-4"), "steps") == ["step 2", "step 3"]


def lose_a_worker(folder: Path) -> None:
    with ls.Trace(folder, "2:9") as trace:
        for report in ls.train_steps(make_state(), losses, make_loader(), ls.Towers(2), until=ls.Steps(12)):
            trace(report)
            if report.step == 4 and ls.join().rank == 1:
                os._exit(1)


def meet_a_loss(folder: Path) -> None:
    with pytest.raises(PeerLostError):
        lose_a_worker(folder)


@pytest.mark.process
def test_a_worker_that_is_killed_is_named_when_the_run_goes_on(
    tmp_path: Path, run_workers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run_workers(meet_a_loss, 2, tmp_path, lost={1})
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["steps-2-9.worker-0.part"]
    train(tmp_path, "2:9", 5, start=4)
    assert "steps-2-9.json: open it at ui.perfetto.dev; worker 1 left no part of it" in caplog.text
    assert names_of(trace_in(tmp_path, "steps-2-9"), "steps") == ["step 2", "step 3"]
