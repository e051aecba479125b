"""Paths of a real object store, S3's as moto plays it, behind a proxy that is at fault."""

from __future__ import annotations

import subprocess
import sys

import pytest
from object_server import Fault, FaultyProxy

from lockstep.storage import retries
from lockstep.storage.remote_path import RemotePath


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.0)


def test_what_was_written_is_there(bucket: RemotePath) -> None:
    file = bucket / "a" / "x.bin"
    assert not file.exists()
    file.write_bytes(b"0123456789")
    assert file.read_bytes() == b"0123456789"
    assert file.read_range(3, 8) == b"89"
    assert [*(bucket / "a").walk_files()] == ["x.bin"]
    before = file.stat()
    file.write_bytes(b"9876543210")
    assert before.st_size == file.stat().st_size == 10
    assert before != file.stat()
    file.unlink()
    file.unlink()
    assert not file.exists()


@pytest.mark.parametrize(
    "fault", [Fault("status", 2, status=503), Fault("status", status=429), Fault("drop", 2), Fault("cut")]
)
def test_requests_are_made_again(bucket: RemotePath, object_store: FaultyProxy, fault: Fault) -> None:
    (bucket / "x").write_bytes(bytes(range(256)))
    object_store.faults = [fault]
    assert (bucket / "x").read_range(16, 32) == bytes(range(32, 48))
    assert fault.num_met > fault.times


def test_no_rights_are_told_at_once(bucket: RemotePath, object_store: FaultyProxy) -> None:
    (bucket / "x").write_bytes(b"x")
    object_store.faults = [Fault("status", 100, status=403)]
    with pytest.raises(PermissionError):
        (bucket / "x").read_range(1, 0)
    assert object_store.num_requests("/x") == 1


@pytest.mark.process
def test_another_process_finds_the_store(bucket: RemotePath, object_store: FaultyProxy) -> None:
    code = f"from lockstep.storage.remote_path import any_path; any_path('{bucket}/y').write_bytes(b'y')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert object_store.num_requests("/y", method="PUT") == 1
    assert (bucket / "y").read_bytes() == b"y"
