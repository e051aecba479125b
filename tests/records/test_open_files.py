from __future__ import annotations

import gc
import os
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.records.open_files import OpenFiles, Version
from lockstep.records.record_files import RecordFiles
from lockstep.records.tfrecord import Compression, write_records


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Files that hold their number, ten times."""
    paths = [tmp_path / str(number) for number in range(10)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    return paths


def version(path: Path) -> Version:
    return Version(path.stat().st_size, path.stat().st_mtime_ns)


def open_below(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    targets = [os.readlink(link) for link in links if link.is_symlink()]  # noqa: PTH115
    return sorted(Path(target).name for target in targets if target.startswith(f"{folder}/"))


def test_the_files_read_last_stay_open(paths: list[Path], tmp_path: Path) -> None:
    files = OpenFiles(most=3)
    assert open_below(tmp_path) == []
    for number in (0, 1, 2, 0, 3):
        assert files.read(paths[number], version(paths[number]), 4, 2) == bytes([number]) * 4
    assert open_below(tmp_path) == ["0", "2", "3"]
    assert files.read(paths[1], version(paths[1]), 100, 8) == b"\x01\x01"
    assert open_below(tmp_path) == ["0", "1", "3"]
    del files
    gc.collect()
    assert open_below(tmp_path) == []


def test_a_file_is_not_closed_while_a_thread_reads_it(paths: list[Path]) -> None:
    files = OpenFiles(most=1)
    versions = [version(path) for path in paths]

    def read(seed: int) -> bool:
        numbers = random.Random(seed).choices(range(10), k=200)
        return all(files.read(paths[n], versions[n], 10, 0) == bytes([n]) * 10 for n in numbers)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))


def test_another_file_under_the_name_is_not_read(paths: list[Path]) -> None:
    files = OpenFiles(most=1)
    before = version(paths[0])
    files.read(paths[0], before, 1, 0)
    paths[0].unlink()
    paths[0].write_bytes(bytes(11))
    assert files.read(paths[0], before, 10, 0) == bytes(10)
    files.read(paths[1], version(paths[1]), 1, 0)
    with pytest.raises(DataError, match=f"{paths[0]} has changed since its index was made"):
        files.read(paths[0], before, 1, 0)


def test_pickled_none_is_open(paths: list[Path], tmp_path: Path) -> None:
    files = OpenFiles(most=2)
    files.read(paths[0], version(paths[0]), 1, 0)
    again = pickle.loads(pickle.dumps(files))
    for path in paths:
        again.read(path, version(path), 1, 0)
    assert open_below(tmp_path) == ["0", "8", "9"]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_few_of_many_shards_are_open(tmp_path: Path, compression: Compression | None) -> None:
    for number in range(140):
        write_records(tmp_path / f"{number:03}", [bytes([number])], compression)
    files = RecordFiles(tmp_path / "???")
    assert [files.read(index) for index in range(140)] == [bytes([number]) for number in range(140)]
    assert len(open_below(tmp_path)) == (0 if compression else 128)


def cut_short(path: Path) -> None:
    os.truncate(path, 5)


def written_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * 10)


@pytest.mark.parametrize("change", [cut_short, written_over])
def test_a_file_that_changes_while_it_is_open_is_refused(paths: list[Path], change: Callable[[Path], None]) -> None:
    files = OpenFiles()
    os.utime(paths[1], (10**9, 10**9))
    before = version(paths[1])
    assert files.read(paths[1], before, 4, 0) == b"\x01" * 4
    change(paths[1])
    with pytest.raises(DataError, match=f"{paths[1]} has changed since its index was made"):
        files.read(paths[1], before, 4, 0)
