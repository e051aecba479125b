from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_processes import HANG_SECONDS

from lockstep.convert.conversion_state import lock_shards
from lockstep.convert.sharding import Settings, SkippedItem, Summary, convert
from lockstep.errors import DataError, InputError, WorkerError
from lockstep.records.record_files import RecordFiles
from lockstep.records.shards import find_shards

ALONE, TWO = Settings(num_processes=1), Settings(num_processes=2)
ITEMS = [f"item {number}" for number in range(20)]


def serialize(item: str) -> bytes | SkippedItem:
    return SkippedItem(item, "odd") if item.endswith("7") else item.encode()


def fail(item: str) -> bytes:
    raise AssertionError(f"{item} is converted again")


def failing_at(wanted: str, action: Callable[[], object]) -> Callable[[str], bytes | SkippedItem]:
    """Does what `serialize` does, and something else at one item."""

    def at(item: str) -> bytes | SkippedItem:
        if item == wanted:
            action()
        return serialize(item)

    return at


def refuse() -> None:
    raise DataError("It cannot be read.", given="nothing", expected="something", hint="look")


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def records_in(folder: Path) -> list[bytes]:
    records = RecordFiles(folder / "train-*")
    return [records.read(index) for index in range(len(records))]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A finished conversion to five shards."""
    convert(ITEMS, serialize, tmp_path / "whole", "train", 5, settings=ALONE)
    return tmp_path / "whole"


def test_the_shards_hold_all_records_in_their_order(whole: Path) -> None:
    assert [path.name for path in find_shards(whole / "train-*")] == [f"train-{n:05d}-of-00005" for n in range(5)]
    assert records_in(whole) == [item.encode() for item in ITEMS if not item.endswith("7")]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_items=st.integers(1, 60))
def test_a_shard_holds_the_items_that_the_reference_puts_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, num_items: int
) -> None:
    num_shards = data.draw(st.integers(1, min(num_items, 7)))
    folder = tmp_path_factory.mktemp("shards")
    convert(range(num_items), lambda item: b"%d" % item, folder, "a", num_shards, settings=ALONE)
    bounds = np.linspace(0, num_items, num_shards + 1).astype(int)
    for number in range(num_shards):
        records = RecordFiles(folder / f"a-{number:05d}-of-{num_shards:05d}")
        found = [int(records.read(index)) for index in range(len(records))]
        assert found == list(range(bounds[number], bounds[number + 1]))


@pytest.mark.process
@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_any_number_of_processes_writes_the_same_bytes(whole: Path, tmp_path: Path, num_processes: int) -> None:
    summary = convert(ITEMS, serialize, tmp_path / "many", "train", 5, settings=Settings(num_processes=num_processes))
    assert shards_in(tmp_path / "many") == shards_in(whole)
    assert (summary.num_shards, summary.num_kept, summary.num_records) == (5, 0, 18)
    assert summary.num_bytes == sum(map(len, shards_in(whole).values()))


@pytest.mark.process
def test_by_default_every_core_has_a_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()

    def note(_: str) -> bytes:
        (pids / str(os.getpid())).touch()
        return b""

    convert(ITEMS, note, tmp_path / "out", "train", 5)
    assert len(list(pids.iterdir())) >= min(2, len(os.sched_getaffinity(0)))


def test_finished_shards_are_kept(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.glob("train-*")}
    summary = convert(ITEMS, fail, whole, "train", 5)
    assert {path: path.stat().st_mtime_ns for path in whole.glob("train-*")} == before
    assert (summary.num_kept, summary.num_records) == (5, 18)
    assert [each.name for each in summary.skipped] == ["item 7", "item 17"]


def test_a_missing_shard_is_written_again(whole: Path) -> None:
    before = shards_in(whole)
    (whole / "train-00002-of-00005").unlink()
    summary = convert(ITEMS, serialize, whole, "train", 5, settings=TWO)
    assert shards_in(whole) == before
    assert (summary.num_kept, summary.num_records) == (4, 18)


@pytest.mark.process
@pytest.mark.parametrize("run", [ALONE, TWO], ids=["alone", "two processes"])
def test_a_stopped_conversion_goes_on(whole: Path, tmp_path: Path, run: Settings) -> None:
    folder = tmp_path / "stopped"
    with pytest.raises(DataError, match="It cannot be read"):
        convert(ITEMS, failing_at("item 18", refuse), folder, "train", 5, settings=run)
    assert not list(folder.glob(".*.partial"))
    assert "train-00004-of-00005" not in shards_in(folder)
    convert(ITEMS, serialize, folder, "train", 5, settings=run)
    assert shards_in(folder) == shards_in(whole)


KILLED = """
import os, sys
from pathlib import Path
from lockstep.convert.sharding import Settings, convert

def serialize(item):
    if item == "item 18":
        Path(sys.argv[1], "gate").read_bytes()
    return item.encode()

items = [f"item {number}" for number in range(20)]
convert(items, serialize, Path(sys.argv[1], "killed"), "train", 5, settings=Settings(num_processes=int(sys.argv[2])))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("everybody", "num_processes"),
    [(True, "2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, "1"), (False, "1"), (False, "2")))],
)
def test_a_conversion_that_was_killed_goes_on_to_the_same_bytes(
    tmp_path: Path, num_processes: str, everybody: bool
) -> None:
    convert(ITEMS, str.encode, tmp_path / "whole", "train", 5, settings=ALONE)
    os.mkfifo(tmp_path / "gate")
    command = [sys.executable, "-c", KILLED, str(tmp_path), num_processes]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with (tmp_path / "gate").open("wb"):  # It is open once a process is in the middle of the last shard.
        if everybody:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    said, _ = process.communicate(timeout=HANG_SECONDS)  # All that hold the pipe have ended.
    assert process.returncode == -signal.SIGKILL, said
    folder = tmp_path / "killed"
    assert "train-00004-of-00005" not in shards_in(folder)
    assert bool(list(folder.glob(".train-*.partial"))) == (everybody or num_processes == "1")
    summary = convert(ITEMS, str.encode, folder, "train", 5, settings=TWO)
    assert shards_in(folder) == shards_in(tmp_path / "whole")
    assert not list(folder.glob(".*.partial"))
    if num_processes == "1":
        assert summary.num_kept == 4


def test_only_partial_shards_of_its_own_are_deleted(tmp_path: Path) -> None:
    end = f"{'0' * 32}.partial"
    own = [tmp_path / f".train-00001-of-00005.{end}", tmp_path / f"..train.conversion.json.{end}"]
    others = [tmp_path / f".train-old-00001-of-00005.{end}", tmp_path / "train.partial"]
    for path in own + others:
        path.touch()
    convert(ITEMS, serialize, tmp_path, "train", 5, settings=ALONE)
    assert [path.exists() for path in own + others] == [False, False, True, True]


OTHERS: dict[str, Callable[[Path], Summary]] = {
    "items": lambda folder: convert(ITEMS[1:], serialize, folder, "train", 5, settings=ALONE),
    "order": lambda folder: convert(ITEMS[::-1], serialize, folder, "train", 5, settings=ALONE),
    "options": lambda folder: convert(ITEMS, serialize, folder, "train", 5, options={"quality": 90}, settings=ALONE),
    "shards": lambda folder: convert(ITEMS, serialize, folder, "train", 4, settings=ALONE),
}


@pytest.mark.parametrize("other", OTHERS)
def test_shards_of_another_conversion_are_left_alone(whole: Path, other: str) -> None:
    before = shards_in(whole)
    message = (
        r"There are shards in .*whole already: train-00000-of-00005, train-00001-of-00005, train-00002-of-00005 and "
        r"2 more\n  given:    shards that are made of something else\n.*\n  hint:     name another folder"
    )
    with pytest.raises(DataError, match=message):
        OTHERS[other](whole)
    assert shards_in(whole) == before
    assert convert(ITEMS, fail, whole, "train", 5).num_kept == 5


def test_shards_of_unknown_origin_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00005").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"of unknown origin"):
        convert(ITEMS, serialize, tmp_path, "train", 5)
    assert shards_in(tmp_path) == {"train-00000-of-00005": b"mine"}


def test_a_shard_that_has_changed_is_left_alone(whole: Path) -> None:
    before = shards_in(whole)
    (whole / "train-00003-of-00005").write_bytes(b"mine")
    message = r"train-00003-of-00005\n  given:    shards that are changed since it was finished with 92 bytes"
    with pytest.raises(DataError, match=message):
        convert(ITEMS, serialize, whole, "train", 5)
    assert (whole / "train-00003-of-00005").read_bytes() == b"mine"
    summary = convert(ITEMS, serialize, whole, "train", 5, settings=Settings(num_processes=1, overwrite=True))
    assert summary.num_kept == 4
    assert shards_in(whole) == before


def test_overwrite_replaces_the_shards_of_another_conversion(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Settings(num_processes=1, overwrite=True)
    with caplog.at_level(logging.WARNING, "lockstep"):
        summary = convert(ITEMS, str.encode, whole, "train", 4, settings=run)
    assert (summary.num_kept, summary.num_records) == (0, 20)
    assert f"Left in {whole}, and of another conversion: train-00000-of-00005, " in caplog.text
    assert len(shards_in(whole)) == 9
    assert convert(ITEMS, fail, whole, "train", 4, settings=run).num_kept == 4


def test_conversions_of_two_names_share_a_folder(whole: Path) -> None:
    convert(ITEMS, serialize, whole, "train-small", 2, settings=ALONE)
    convert(ITEMS, serialize, whole, "validation", 2, settings=ALONE)
    assert convert(ITEMS, fail, whole, "train", 5).num_kept == 5
    assert len(shards_in(whole)) == 9


@pytest.mark.process
def test_skipped_items_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lockstep"):
        summary = convert(ITEMS, serialize, tmp_path, "train", 5, settings=TWO)
    assert summary.skipped == (SkippedItem("item 7", "odd"), SkippedItem("item 17", "odd"))
    assert sorted(record.getMessage() for record in caplog.records) == ["Skipped item 17: odd", "Skipped item 7: odd"]
    assert '"name": "item 17"' in (tmp_path / ".train.conversion.json").read_text()


def test_no_more_are_skipped_than_allowed(tmp_path: Path) -> None:
    message = (
        r"Too many items .*, at last item 17\.\n  given:    2 skipped; item 17: odd\n  expected: at most 1 skipped"
    )
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            convert(ITEMS, serialize, tmp_path, "train", 5, settings=Settings(num_processes=1, max_skipped=1))
    assert convert(ITEMS, serialize, tmp_path, "train", 5, settings=Settings(max_skipped=2)).num_kept == 4


def test_something_must_be_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"at last b\.\n  given:    all 2 items skipped; b: odd"):
        convert("ab", lambda item: SkippedItem(item, "odd"), tmp_path, "train", 1)


def test_progress_counts_all_items(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run = Settings(num_processes=1, progress=lambda done, total: seen.append((done, total)))
    convert(ITEMS, serialize, tmp_path, "train", 5, settings=run)
    assert seen == [(done, 20) for done in range(1, 21)]
    (tmp_path / "train-00004-of-00005").unlink()
    seen.clear()
    convert(ITEMS, serialize, tmp_path, "train", 5, settings=run)
    assert seen == [(done, 20) for done in range(17, 21)]


@pytest.mark.process
def test_an_error_in_a_process_comes_through_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="It cannot be read") as raised:
        convert(ITEMS, failing_at("item 3", refuse), tmp_path, "train", 5, settings=TWO)
    assert "In a converting process:" in raised.value.__notes__[0]
    assert "in refuse" in raised.value.__notes__[0]


@pytest.mark.process
def test_an_error_of_something_else_is_named(tmp_path: Path) -> None:
    message = r"A converting process failed\.\n  given:    AssertionError: item \d+ is converted again"
    with pytest.raises(WorkerError, match=message):
        convert(ITEMS, fail, tmp_path, "train", 5, settings=TWO)


@pytest.mark.process
@pytest.mark.parametrize(
    ("action", "end"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"), (lambda: os._exit(3), "code 3")],
    ids=["killed", "ended"],
)
def test_a_process_that_is_gone_is_missed(tmp_path: Path, action: Callable[[], None], end: str) -> None:
    with pytest.raises(WorkerError, match=rf"A converting process \(pid \d+\) .*{end}\.\n.*\n.*\n.*it goes on"):
        convert(ITEMS, failing_at("item 3", action), tmp_path, "train", 5, settings=TWO)


@pytest.mark.process
def test_two_at_once_are_refused(tmp_path: Path) -> None:
    message = r"are being written in .* already\.\n  given:    .*\.train\.lock, held by another process"
    with lock_shards(tmp_path, "train"), pytest.raises(DataError, match=message):
        convert(ITEMS, serialize, tmp_path, "train", 5)
    with lock_shards(tmp_path, "validation"):
        convert(ITEMS, serialize, tmp_path, "train", 5)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"fingerprint": "", "finished": {"a": {}}}', '{"fingerprint": "", "finished": {"0": {}}}'],
)
def test_a_damaged_manifest_is_named(whole: Path, text: str) -> None:
    (whole / ".train.conversion.json").write_text(text)
    message = r"\.train\.conversion\.json does not say which shards are finished\.\n.*\n.*\n  hint:     delete it"
    with pytest.raises(DataError, match=message):
        convert(ITEMS, serialize, whole, "train", 5, settings=ALONE)


@pytest.mark.parametrize(
    ("items", "num_shards", "message"),
    [
        (ITEMS, 21, r"too few items for 21 shards of train\.\n  given:    20 items\n.*\n  hint:     ask for fewer"),
        ([], 1, r"given:    0 items\n.*\n  hint:     check where the items come from"),
        (ITEMS, 0, r"num_shards is out of range\.\n  given:    num_shards=0"),
        (ITEMS, 2.0, r"num_shards is of the wrong type"),
    ],
    ids=["many shards", "no items", "no shards", "no whole number"],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, items: list[str], num_shards: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(items, serialize, tmp_path / "out", "train", num_shards)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["num_processes", "max_skipped"])
def test_settings_are_checked(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is out of range"):
        Settings(**{field: -1})  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path / 'file'))} cannot be written\.\n.*\n.*\n.*another"):
        convert(ITEMS, serialize, tmp_path / "file", "train", 1)


def test_a_folder_elsewhere_is_refused() -> None:
    with pytest.raises(DataError, match="not on this machine"):
        convert(ITEMS, serialize, Path("gs:/bucket"), "train", 1)


def test_summaries_add_up() -> None:
    one, two = (
        Summary(2, 1, 10, 100, (SkippedItem("a", "odd"),), 1.5),
        Summary(3, 0, 20, 300, (SkippedItem("b", "odd"),), 2.0),
    )
    assert one + two == Summary(5, 1, 30, 400, (SkippedItem("a", "odd"), SkippedItem("b", "odd")), 3.5)
