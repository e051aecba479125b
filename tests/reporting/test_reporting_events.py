from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lockstep.errors import WorkdirError
from lockstep.records.tfrecord import frame, read_all
from lockstep.reporting.events import EventFile, cut_events, event_paths, scalar_summary


def write_steps(folder: Path, steps: range) -> Path:
    file = EventFile(folder)
    for step in steps:
        file.write(scalar_summary({"loss": 1 / (1 + step), "rate": 5.0}), step)
    file.close()
    return event_paths(folder)[-1]


def steps_in(path: Path) -> list[int]:
    """As TensorBoard reads them."""
    first, *events = LegacyEventFileLoader(str(path)).Load()
    assert first.file_version == "brain.Event:2"
    return [event.step for event in events]


def test_tensorboard_reads_what_we_write(tmp_path: Path) -> None:
    path = write_steps(tmp_path, range(5))
    assert path.name.startswith("events.out.tfevents.")
    assert steps_in(path) == [0, 1, 2, 3, 4]


def test_two_files_of_one_second_are_two(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1))
    write_steps(tmp_path, range(1))
    assert len(event_paths(tmp_path)) == 2


@pytest.mark.parametrize("from_step", [0, 3, 9, 20])
def test_a_cut_drops_later_steps(tmp_path: Path, from_step: int) -> None:
    path = write_steps(tmp_path, range(10))
    tags = cut_events(path, from_step)
    assert steps_in(path) == list(range(min(10, from_step + 1)))
    assert tags == ({"loss", "rate"} if from_step < 10 else set())


def test_what_another_writer_wrote_is_cut_too(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer = EventFileWriter(str(tmp_path))
    for step in range(5):
        writer.add_event(Event(step=step, summary=scalar_summary({"loss": 0.5})))
    writer.close()
    (path,) = event_paths(tmp_path)
    cut_events(path, 2)
    assert steps_in(path) == [0, 1, 2]


@given(num_bytes=st.integers(0, 400))
@settings(max_examples=30)
def test_a_torn_file_is_cut_to_its_last_whole_event(tmp_path_factory: pytest.TempPathFactory, num_bytes: int) -> None:
    path = write_steps(tmp_path_factory.mktemp("torn"), range(20))
    ends = [end for end, _ in read_all(path)]
    size = ends[0] + num_bytes
    os.truncate(path, size)
    cut_events(path, 100)
    assert path.stat().st_size == max(end for end in ends if end <= size)


def test_a_damaged_record_ends_the_file_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_steps(tmp_path, range(10))
    ends = [end for end, _ in read_all(path)]
    damaged = bytearray(path.read_bytes())
    damaged[ends[4] + 20] ^= 1
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "lockstep"):
        cut_events(path, 100)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{path}: no event after byte {ends[4]} can be read (")
    assert steps_in(path) == [0, 1, 2, 3]


def test_a_damaged_length_asks_for_no_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_steps(tmp_path, range(2))
    ends = [end for end, _ in read_all(path)]
    damaged = bytearray(path.read_bytes())
    damaged[ends[1] + 7] = 0x7F
    path.write_bytes(damaged)
    cut_events(path, 100)
    assert "no event after byte" in caplog.text
    assert steps_in(path) == [0]


@pytest.mark.parametrize("content", [b"a text that is no event file", b"", frame(b"\xff\xff\xff")])
def test_what_is_no_event_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "my.tfevents.notes"
    path.write_bytes(content)
    assert event_paths(tmp_path) == [path]
    assert cut_events(path, 0) == set()
    assert path.read_bytes() == content


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkdirError, match=r"The folder .*nowhere is not there\."):
        EventFile(tmp_path / "nowhere")
