from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import image_folder, image_shards, photo

from lockstep import tracing as stages
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.reader import OneByOne, TorchDataset
from lockstep.readers.schemas import ImageNetSchema
from lockstep.readers.tar_shards import TarShards
from lockstep.tracing import listen, measure_stages, now_reading, reading_listener, sum_seconds, timed


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is one second after the one before."""
    ticks: Iterator[float] = iter(range(1000))
    monkeypatch.setattr(stages.time, "perf_counter", lambda: float(next(ticks)))


def test_a_stage_within_another_takes_its_time_from_it() -> None:
    with measure_stages() as seconds, timed("augment"), timed("decode"):
        pass
    assert seconds == {"augment": 2.0, "decode": 1.0}


def test_the_same_stage_again_adds_up() -> None:
    with measure_stages() as seconds:
        for _ in range(3):
            with timed("read"):
                pass
    assert seconds == {"read": 3.0}


def test_an_error_ends_its_stages() -> None:
    with measure_stages() as seconds:
        with pytest.raises(ValueError, match="torn"), timed("augment"), timed("decode"):
            raise ValueError("torn")
        with timed("read"):
            pass
    assert seconds == {"augment": 2.0, "decode": 1.0, "read": 1.0}


def test_where_nobody_measures_nothing_is_kept() -> None:
    with timed("read"):
        pass
    with measure_stages() as seconds:
        pass
    assert seconds == {}


def test_threads_are_measured_apart() -> None:
    with measure_stages() as here, timed("read"):
        other = threading.Thread(target=timed("decode").__enter__)
        other.start()
        other.join()
    assert here == {"read": 1.0}


def test_seconds_add_by_stage() -> None:
    assert sum_seconds({"read": 1.0, "decode": 2.0}, {"decode": 0.5, "collate": 1.0}) == {
        "read": 1.0,
        "decode": 2.5,
        "collate": 1.0,
    }


class Examples:
    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> dict[str, Any]:
        return {"x": torch.zeros(1)}

    __getitem__ = read

    def example_id(self, index: int) -> str:
        return f"example {index}"


def folder(path: Path) -> tuple[Any, list[str]]:
    images = image_folder(path)
    return ImageFolder(images), [f"{images}/green/0.jpg", f"{images}/blue/0.jpg"]


def records(path: Path) -> tuple[Any, list[str]]:
    reader = ImageRecords(image_shards(path, "train", [1, 2, 3, 1]), ImageNetSchema())
    return reader, [reader.example_id(2), reader.example_id(0)]


def archive(path: Path) -> tuple[Any, list[str]]:
    with tarfile.open(path / "a.tar", "w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(photo(0, number))
            tar.addfile(member, io.BytesIO(photo(0, number)))
    reader = TarShards(str(path / "a.tar"), {"image": "jpg"})
    return reader, [f"{path}/a.tar: 2.jpg", f"{path}/a.tar: 0.jpg"]


def single(path: Path) -> tuple[Any, list[str]]:
    return OneByOne(Examples()), ["example 2", "example 0"]


def dataset(path: Path) -> tuple[Any, list[str]]:
    return TorchDataset(Examples()), ["2", "0"]  # type: ignore[arg-type]


def told_by(read: Callable[[], object]) -> list[str]:
    """What a thread that reads tells."""
    names: list[str] = []

    def run() -> None:
        listen(names.append)
        read()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return names


@pytest.mark.parametrize("make", [folder, records, archive, single, dataset])
def test_readers_name_each_example_that_they_begin(make: Callable[[Path], Any], tmp_path: Path) -> None:
    reader, expected = make(tmp_path)
    assert told_by(lambda: reader.read_batch(np.array([2, 0]))) == expected


def test_only_the_thread_that_listens_is_told() -> None:
    now_reading("nobody")
    assert told_by(lambda: now_reading("a")) == ["a"]
    now_reading("nobody")


def test_a_loop_may_ask_once_who_listens() -> None:
    names: list[str] = []

    def ask() -> list[Callable[[str], None] | None]:
        found = [reading_listener()]
        listen(names.append)
        return [*found, reading_listener()]

    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(ask()))
    thread.start()
    thread.join()
    assert answers[0] is None
    answers[1]("a.jpg")
    assert names == ["a.jpg"]
