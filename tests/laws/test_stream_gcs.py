"""The law of the stream over Google Cloud Storage, as the package gcp-storage-emulator plays it, by gcsfs.

It is no part of [dev]: `pip install gcsfs gcp-storage-emulator`. The emulator has no conditional writes, so it proves
nothing of leases.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_stream_files import BATCH_SIZE, NUM_IMAGES, stream
from test_stream_stored import AUGMENT, NUM_BATCHES, STREAMS

from lockstep.data.loader import Loader
from lockstep.errors import DataError
from lockstep.readers.reader import Reader
from lockstep.storage import cached_ranges
from lockstep.storage.remote_path import RemotePath, forget_credentials

_SERVER = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
print(server._api._httpd.server_address[1], flush=True)
sys.stdin.read()
"""
MISSING = [name for name in ("gcsfs", "gcp_storage_emulator") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed"),
]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RemotePath]:
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdin
        assert server.stdout
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{int(server.stdout.readline())}")
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which asks by gRPC what kind a bucket is
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        forget_credentials()
        yield RemotePath("gs://bucket")
        forget_credentials()
        server.kill()


@pytest.mark.parametrize("name", STREAMS)
def test_the_stream_is_that_of_local_files(
    bucket: RemotePath, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    make, opened = STREAMS[name]
    (tmp_path / "data").mkdir()
    local = make(tmp_path / "data")
    for file in (tmp_path / "data").rglob("*"):
        if file.is_file():
            (bucket / file.relative_to(tmp_path / "data").as_posix()).upload(file)
    stored = opened(str(bucket))

    def loader(reader: Reader, num_processes: int) -> Loader:
        return Loader(reader, batch_size=BATCH_SIZE, seed=11, augment=AUGMENT, num_processes=num_processes)

    whole = stream(loader(local, 0), 1, NUM_BATCHES)
    for step, num_processes in enumerate((0, 1, 2)):
        resumed = loader(stored, num_processes)
        resumed.load_state({**resumed.state(), "position": step * BATCH_SIZE})
        assert stream(resumed, 1 + step, NUM_BATCHES - step) == whole[step * BATCH_SIZE :]
    again = opened(str(bucket))
    for path in bucket.walk_files():
        (bucket / path).write_bytes((bucket / path).read_bytes() + b"more")
    if name == "folder":  # the others' files are small: their indices have read all of them
        monkeypatch.setattr(cached_ranges, "open_block_cache", lambda *_: None)
        with pytest.raises(DataError, match=rf"{bucket}/.* has changed since it was listed"):
            again.read_batch(np.arange(NUM_IMAGES))
