"""Ranges of objects are read in few requests, are of the version that was listed, and name what fails."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from object_server import Fault, FaultyProxy

from lockstep.errors import DataError, StoreError, StoreRefusedError
from lockstep.storage import ranges, retries
from lockstep.storage.ranges import ObjectRange, RemoteFile, fetch_ranges
from lockstep.storage.remote_path import DataPath, RemotePath

CONTENT = random.Random(0).randbytes(1 << 20)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.0)


@pytest.fixture
def file(bucket: RemotePath) -> DataPath:
    path = DataPath(f"{bucket}/folder/x.bin")
    path.write_bytes(CONTENT)
    return path.looked_up()


def parts(file: DataPath, *places: tuple[int, int]) -> list[ObjectRange]:
    return [ObjectRange(file, file.stat(), offset, size) for offset, size in places]


def test_ranges_near_each_other_are_one_request(file: DataPath, object_store: FaultyProxy) -> None:
    places = [(1 << 19, 100), (0, 10), (50_000, 1000), (20, 5), (0, 10), (len(CONTENT) - 3, 10), (5, 0)]
    object_store.requests.clear()
    assert fetch_ranges(parts(file, *places)) == [CONTENT[offset : offset + size] for offset, size in places]
    asked = sorted(told for _, _, told in object_store.requests)
    assert asked == ["bytes=0-50999", "bytes=1048573-1048575", "bytes=524288-524387"]


def test_large_ranges_are_cut(file: DataPath, object_store: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_LARGEST_REQUEST_BYTES", 300_000)
    assert fetch_ranges(parts(file, (7, 1 << 21), (400_000, 9))) == [CONTENT[7:], CONTENT[400_000:400_009]]
    assert object_store.num_requests("x.bin") == 4


def test_connections_are_bounded(
    bucket: RemotePath, object_store: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        (bucket / f"{number}").write_bytes(bytes([number]) * 10)
    files = [DataPath(f"{bucket}/{number}") for number in range(40)]
    wanted = [ObjectRange(file, file.stat(), 2, 3) for file in files]
    object_store.reset()
    open_before = object_store.num_open
    monkeypatch.setattr(ranges, "MOST_CONNECTIONS", 4)
    with ThreadPoolExecutor(3) as pool:  # several waves at once
        found = [*chain(*pool.map(fetch_ranges, (wanted[:13], wanted[13:26], wanted[26:])))]
    assert found == [bytes([number]) * 3 for number in range(40)]
    assert object_store.most_open <= open_before + 4


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", 2, status=500),
        Fault("status", status=429),
        Fault("drop", 2),
        Fault("cut"),
        Fault("short", 2),
    ],
)
def test_what_fails_is_asked_for_again(
    file: DataPath, object_store: FaultyProxy, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    fault.num_met = 0
    object_store.faults = [fault]
    with caplog.at_level("INFO"):
        assert fetch_ranges(parts(file, (16, 32), (600_000, 5))) == [CONTENT[16:48], CONTENT[600_000:600_005]]
    assert object_store.num_requests("x.bin") == 2 + fault.times
    # A connection that ends without an answer is tried again by the library for HTTP itself.
    assert fault.kind == "drop" or f"{file}, bytes " in caplog.text


def test_in_the_end_file_and_offset_are_named(file: DataPath, object_store: FaultyProxy) -> None:
    object_store.faults = [Fault("status", 100, status=500)]
    with pytest.raises(StoreError) as caught:
        fetch_ranges(parts(file, (16, 32)))
    assert caught.value.what == f"{file}, bytes 16 to 48 cannot be read."
    assert caught.value.exit_code == 1
    assert object_store.num_requests("x.bin") == retries.NUM_TRIES


def test_no_rights_are_told_at_once(file: DataPath, object_store: FaultyProxy) -> None:
    object_store.faults = [Fault("status", 100, status=403)]
    with pytest.raises(StoreRefusedError, match=r"may not be read[\s\S]*FSSPEC_S3_ANON"):
        fetch_ranges(parts(file, (16, 32)))
    assert object_store.num_requests("x.bin") == 1


@pytest.mark.parametrize("change", ["etag", "content", "gone", "shorter"])
def test_an_object_that_has_changed_is_named(file: DataPath, object_store: FaultyProxy, change: str) -> None:
    wanted = parts(file, (16, 32))
    if change == "etag":
        object_store.faults = [Fault("etag")]
    elif change == "content":
        file.write_bytes(CONTENT[::-1])
    elif change == "shorter":
        file.write_bytes(b"short")
    else:
        file.unlink()
    with pytest.raises(DataError, match=r"x\.bin has changed since it was listed"):
        fetch_ranges(wanted)
    assert object_store.num_requests("x.bin") == 1


def test_new_credentials_are_waited_for(
    file: DataPath,
    object_store: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    named = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(named))
    waits: list[float] = []

    def renew(seconds: float) -> None:
        waits.extend([seconds] if seconds else [])  # the proxy waits for nothing
        named.write_text("[default]\naws_access_key_id=of-no-account\naws_secret_access_key=new-secret\n")

    renew(0)
    ranges.forget_credentials()
    monkeypatch.setattr(retries.time, "sleep", renew)
    object_store.faults = [Fault("status", 3, status=400)]
    assert fetch_ranges(parts(file, (16, 32))) == [CONTENT[16:48]]
    assert waits == [5, 5, 5]
    assert caplog.text.count("the credentials have expired") == 1
    monkeypatch.setattr(retries, "_CREDENTIALS_WAIT_SECONDS", 10.0)
    object_store.faults = [Fault("status", 1000, status=400)]
    with pytest.raises(
        StoreError, match=r"credentials have expired[\s\S]*aws sso login[\s\S]*last checkpoint"
    ) as caught:
        fetch_ranges(parts(file, (16, 32)))
    assert waits[3:] == [5, 5]
    assert "secret" not in caplog.text + str(caught.value)


def test_a_file_is_read_ahead(file: DataPath, object_store: FaultyProxy) -> None:
    object_store.requests.clear()
    opened = RemoteFile(file)
    assert opened.read(10) == CONTENT[:10]
    assert b"".join(iter(lambda: opened.read(1000), b"")) == CONTENT[10:]
    assert opened.read(5) == b""
    assert opened.seek(-4, os.SEEK_END) == len(CONTENT) - 4
    assert opened.read() == CONTENT[-4:]
    assert [told for _, _, told in object_store.requests] == [
        "bytes=0-65535",
        "bytes=65536-327679",
        "bytes=327680-1048575",
    ]


def test_far_places_are_read_alone(file: DataPath, object_store: FaultyProxy) -> None:
    object_store.requests.clear()
    opened = RemoteFile(file)
    for offset in (0, 400_000, 100, 900_000):
        assert opened.read_at(512, offset) == CONTENT[offset : offset + 512]
    assert all(method == "GET" for method, _, _ in object_store.requests)
    assert object_store.num_bytes < 5 * (1 << 16)


@pytest.mark.process
def test_forked_processes_read_after_the_parent_has(file: DataPath, object_store: FaultyProxy) -> None:
    wanted = parts(file, (16, 32))

    def read(pipe: Connection) -> None:
        pipe.send(fetch_ranges(wanted)[0])

    for _ in range(2):
        assert fetch_ranges(wanted) == [CONTENT[16:48]]
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(target=read, args=(theirs,))
        process.start()
        assert ours.poll(60)
        assert ours.recv() == CONTENT[16:48]
        process.join()


def test_a_store_that_tells_no_version_with_its_answer(bucket: RemotePath) -> None:
    file = DataPath("memory://versions/x")
    file.write_bytes(b"0123456789")
    wanted = parts(file, (2, 3), (8, 9))
    assert fetch_ranges(wanted) == [b"234", b"89"]
    file.write_bytes(b"9876543210")
    with pytest.raises(DataError, match="memory://versions/x has changed"):
        fetch_ranges(wanted)


def test_a_change_is_seen_where_the_file_system_keeps_what_it_has_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of huggingface_hub does, which also leaves the version out unless it is to tell more; once an object."""
    file = DataPath("memory://kept/x")
    file.write_bytes(b"0123456789")
    kept, right, looks = MemoryFileSystem().info("kept/x"), MemoryFileSystem.info, []

    def info(self: MemoryFileSystem, path: str, *, refresh: bool = False, expand_info: bool = False) -> dict[str, Any]:
        if not refresh:
            return dict(kept)
        looks.append(path)
        found: dict[str, Any] = right(self, path)
        return found if expand_info else {name: found[name] for name in ("name", "size", "type")}

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    monkeypatch.setattr(ranges, "_LARGEST_REQUEST_BYTES", 2)
    wanted = parts(file, (2, 3), (8, 9))
    assert fetch_ranges(wanted) == [b"234", b"89"]
    assert len(looks) == 1
    MemoryFileSystem().pipe_file("kept/x", b"9876543210")
    with pytest.raises(DataError, match="memory://kept/x has changed"):
        fetch_ranges(wanted)
