"""What the tests of runs on a bucket share: machines with folders of their own, and a store that fails on cue."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lockstep.checkpoints import mirror
from lockstep.checkpoints.mirror import MirroredStore, store_in
from lockstep.storage.remote_path import RemotePath

WRITES = ("write_bytes", "write_new", "upload", "unlink")


def new_place() -> RemotePath:
    """The folder of a run in a store of this process, which has nothing in it."""
    return RemotePath(f"memory://{uuid.uuid4().hex}/runs/mine")


class Machines:
    """Machines that see the same stores, and have folders of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch

    def use(self, name: str) -> None:
        """Go on at the machine of this name, in a process of its own as it were."""
        self._monkeypatch.setenv("XDG_CACHE_HOME", str(self._folder / name))
        self._monkeypatch.setattr(mirror, "_mirrors", {})


def mirrored(folder: Path) -> MirroredStore:
    store = store_in(folder)
    assert isinstance(store, MirroredStore)
    return store


def on_each_write(monkeypatch: pytest.MonkeyPatch, called: Callable[[], None], *, after: bool = False) -> None:
    """Call a function before each request that changes the store, when it may raise, or after it."""
    for name in WRITES:
        right = getattr(RemotePath, name)

        def write(self: RemotePath, *arguments: Any, right: Any = right, **options: Any) -> Any:
            if not after:
                called()
            done = right(self, *arguments, **options)
            if after:
                called()
            return done

        monkeypatch.setattr(RemotePath, name, write)


def objects(place: RemotePath) -> dict[str, bytes]:
    """All objects below a place, leases left out."""
    names = [name for name in place.walk_files() if not name.startswith(".lease-")]
    return {name: (place / name).read_bytes() for name in names}


def copied(place: RemotePath) -> RemotePath:
    """What a store holds now, at another place, where whoever trained is gone."""
    other = new_place()
    fs = fsspec.filesystem("memory")
    source, target = (str(path).partition("://")[2] for path in (place, other))
    for path in fs.find(source):
        if "/.lease-" not in path:
            fs.pipe_file(path.replace(source, target, 1), fs.cat_file(path))
    return other


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run's folder, hidden ones left out."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {
        name.as_posix(): (folder / name).read_bytes()
        for name in sorted(names)
        if not any(part.startswith(".") for part in name.parts)
    }
