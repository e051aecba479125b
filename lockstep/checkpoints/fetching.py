"""A run that is on a bucket, in a folder of this machine: filled where the bucket has what the folder does not.

The folder is among the user's cached files, at a place that follows from the URL. What is new is downloaded beside it,
verified by the sizes and hashes of the manifests, and then takes its name: a kill at any moment leaves the folder as it
was, or whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.checkpoints.manifest import MANIFEST, DamagedError, FileEntry, Manifest
from lockstep.checkpoints.mirror import (
    CHECKPOINTS,
    KEPT_HERE,
    LATEST,
    KnownBucket,
    Latest,
    OnBucket,
    broken,
    link_or_copy,
    steps_listed,
)
from lockstep.checkpoints.retention import PINNED
from lockstep.checkpoints.store import Store, step_name
from lockstep.durable import atomic_write, sync_folder
from lockstep.errors import CheckpointError, LockstepError, WorkdirError
from lockstep.records.index_cache import cache_folder
from lockstep.screen import log
from lockstep.storage.remote_path import RemotePath
from lockstep.storage.retries import told

try:
    import fcntl
except ImportError:  # elsewhere than on Linux and macOS one process at a time is the user's part
    fcntl = None  # type: ignore[assignment]

_NUM_AT_ONCE = 4
_NUM_LOOKS = 5
_LEASE = re.compile(r"\.lease-\d{6,}")
_LONGEST_NAME = 255


def local_folder(url: str | RemotePath) -> Path:
    """The folder of this machine in which the run of a URL is worked in: a place among the user's cached files.

    Raises:
        WorkdirError: the user has no home, or the URL names a whole bucket.
    """
    bucket, cache = RemotePath(str(url)), cache_folder()
    if cache is None or len(bucket.parts) < 2:
        raise WorkdirError(
            f"{bucket} cannot be a workdir.",
            given="no place for its copy on this machine" if cache is None else "a bucket without a folder",
            expected="a folder on a bucket, and a home, or XDG_CACHE_HOME, on this machine",
            hint="name a folder: s3://bucket/runs/mnist" if cache else "set XDG_CACHE_HOME to a folder on a local disk",
        )
    return cache / "runs" / f"{bucket.name}-{hashlib.sha256(str(bucket).encode()).hexdigest()[:12]}"


def fetch_run(url: str | RemotePath, *, contents: bool = True) -> Path:
    """Bring the folder of a run up to date with the bucket, and return it.

    A folder that is as new as the bucket, or in which a process of this machine works, stays as it is. Where the bucket
    holds no run yet, the folder becomes the place of a new one.

    Args:
        url: of the run's folder on the bucket.
        contents: with the checkpoints. Without, a folder beside it is made with all else, in which a checkpoint is
            its manifest alone: enough to tell what a run does.

    Raises:
        WorkdirError: the bucket cannot be reached or read, or the folder there holds something else.
        CheckpointError: all checkpoints on the bucket are damaged.
    """
    bucket, home = RemotePath(str(url)), local_folder(url)
    with reached(bucket), _locked(home):
        origin = KnownBucket.read(home)
        if origin and origin.is_held:
            return home
        found = OnBucket.look(bucket)
        if found.latest is None:
            _check_is_free(bucket, found)
            if contents and origin and origin.tokens and all(name.startswith(".lease-") for name in found.listing):
                aside = _set_aside(home)
                log.warning("%s has been deleted on the bucket; the copy here is kept as %s", bucket, aside)
                origin = None
            if origin is None:
                KnownBucket(str(bucket)).write(home)
            return home
        is_current = origin is not None and bool(Store(home / CHECKPOINTS).steps())
        if contents and origin and is_current and found.latest.token in origin.tokens:
            return home
        target = home if contents else home.with_name(f"{home.name}.records")
        _Filling(bucket, found, found.latest, target, contents).fill()
        return target


@contextlib.contextmanager
def reached(bucket: RemotePath) -> Iterator[None]:
    """Turn what a store refuses into a WorkdirError that says what to do."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        is_here = isinstance(error, OSError) and error.filename and not str(error.filename).startswith(str(bucket))
        hint = "see that the bucket can be reached from this machine; nothing was changed"
        if isinstance(error, PermissionError):
            hint = "give credentials that may read and write there, the way the provider's own tools take them"
        elif isinstance(error, FileNotFoundError):
            hint = "make the bucket, or name another"
        raise WorkdirError(
            f"{bucket} cannot be used.",
            given=f"{type(error).__name__}: {told(error)}",
            expected="a folder on a bucket that this user may read and write",
            hint="make space, or set XDG_CACHE_HOME to a folder that can be written" if is_here else hint,
        ) from error


def _check_is_free(bucket: RemotePath, found: OnBucket) -> None:
    """Refuse a folder without a checkpoint that is whole if it holds something else, or what is left of a run.

    Of a first upload that was cut off there is no manifest.
    """
    steps, ours = steps_listed(found.listing), (".lease-", f"{CHECKPOINTS}/")
    manifests = [step for step in steps if f"{CHECKPOINTS}/{step_name(step)}/{MANIFEST}" in found.listing]
    if manifests or LATEST in found.listing:
        raise _all_damaged(bucket, f"no checkpoint of step {', '.join(map(str, steps))} is whole")
    others = [name for name in found.listing if not name.startswith(ours)]
    if others and not steps:
        raise WorkdirError(
            f"{bucket} holds something that is not a run.",
            given=f"{len(others)} objects, {others[0]!r} among them",
            expected="a folder without objects, or one of a run",
            hint="name another folder; nothing in this one was touched",
        )


def _all_damaged(bucket: RemotePath, given: str) -> CheckpointError:
    return CheckpointError(
        f"Every checkpoint in {bucket} is damaged.",
        given=given,
        expected="at least one that is as it was uploaded",
        hint="put one back from a copy, or name another --workdir to start afresh",
    )


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one process of this machine at a time look at a folder and fill it."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_name(f".{home.name}.lock").open("ab") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class _Filling:
    """One filling of a folder, which the process that makes it has locked."""

    bucket: RemotePath
    found: OnBucket
    latest: Latest
    target: Path
    contents: bool

    def fill(self) -> None:
        """Download what the target lacks beside it, and let that take its name."""
        for left in self.target.parent.glob(f".{self.target.name}.*.partial"):  # of processes that were killed
            shutil.rmtree(left, ignore_errors=True)
        staging = self.target.with_name(f".{self.target.name}.{uuid.uuid4().hex}.partial")
        (staging / CHECKPOINTS).mkdir(parents=True)
        try:
            self._fetch(staging)._take_place(staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _fetch(self, staging: Path) -> _Filling:
        """Download it, and look again where something is gone, as a run that goes on deletes; returns what it was."""
        filling = self
        for looks_left in reversed(range(_NUM_LOOKS)):
            try:
                filling._check_room()
                filling._fetch_files(staging)
                filling._fetch_checkpoints(staging)
                KnownBucket(str(self.bucket), (filling.latest.token,)).write(staging)
                return filling
            except FileNotFoundError:
                found = OnBucket.look(self.bucket)
                if not looks_left or found.latest is None:
                    raise
                filling = replace(self, found=found, latest=found.latest)
        raise AssertionError("the last look returns or raises")

    def _check_room(self) -> None:
        names = [name for name in self.found.listing if self.contents or not name.startswith(f"{CHECKPOINTS}/")]
        needed, free = sum(self.found.listing[name].st_size for name in names), shutil.disk_usage(self.target.parent)
        if needed > free.free:
            raise WorkdirError(
                f"{self.bucket} does not fit on this machine.",
                given=f"{needed:,} bytes, and {free.free:,} free in {self.target.parent}",
                expected="room for all of the run",
                hint="make space, or set XDG_CACHE_HOME to a folder on a larger disk",
            )
        if self.contents:
            log.info("downloading %d files, %.1f MB, of %s to %s", len(names), needed / 1e6, self.bucket, self.target)

    def _fetch_files(self, staging: Path) -> None:
        """Download all files but those of checkpoints; names that would lead elsewhere are left out."""
        for left in staging.iterdir():  # of an earlier look
            if left.is_dir() and left.name != CHECKPOINTS:
                shutil.rmtree(left)
            elif left.is_file():
                left.unlink()
        names = [name for name in self.found.listing if not name.startswith(f"{CHECKPOINTS}/") and name != LATEST]
        for name in names:
            if name.split("/")[0] in KEPT_HERE:
                continue
            if _is_name(name):
                file = staging / name
                file.parent.mkdir(parents=True, exist_ok=True)
                (self.bucket / name).download(file)
            elif not name.startswith(".lease-"):
                log.warning("left out of the copy: %r is no name of a file of a run", f"{self.bucket}/{name}")
        if not self.contents and (leases := sorted(filter(_LEASE.fullmatch, self.found.listing))):
            object_ = self.bucket / leases[-1]
            with atomic_write(staging / leases[-1]) as copy:
                copy.write(object_.read_range(1 << 12, 0))
            changed = object_.changed_unix_seconds()
            os.utime(staging / leases[-1], (changed, changed))

    def _fetch_checkpoints(self, staging: Path) -> None:
        """Download the checkpoints that are whole, and tell those that are not."""
        damages = []
        named = {*map(step_name, self.latest.checkpoints)}
        for left in (staging / CHECKPOINTS).iterdir():  # of an earlier look
            if left.name not in named or not (left / MANIFEST).exists():
                shutil.rmtree(left)
        for step in reversed(self.latest.checkpoints):
            folder = staging / CHECKPOINTS / step_name(step)
            try:
                manifest = self.found.manifest(self.bucket, step)
                folder.mkdir(exist_ok=True)
                if self.contents and not _holds(folder, manifest):
                    self._fetch_checkpoint(manifest, folder)
                (folder / MANIFEST).write_bytes(manifest.encode())
                if f"{CHECKPOINTS}/{folder.name}/{PINNED}" in self.found.listing:
                    (folder / PINNED).touch()
            except DamagedError as damage:
                shutil.rmtree(folder, ignore_errors=True)
                log.warning("%s Given: %s; expected: %s. It is left out.", damage.what, damage.given, damage.expected)
                damages.append(f"{damage.what} ({damage.given})")
        if self.contents and len(damages) == len(self.latest.checkpoints):
            raise _all_damaged(self.bucket, "; ".join(damages))

    def _fetch_checkpoint(self, manifest: Manifest, folder: Path) -> None:
        """Download the files of a checkpoint, or take them from the folder that there is, and verify them."""
        here, there = self.target / CHECKPOINTS / folder.name, self.bucket / CHECKPOINTS / folder.name
        with contextlib.suppress(OSError, CheckpointError):
            if Manifest.read(here).files == manifest.files:
                for entry in manifest.files:
                    link_or_copy(here / entry.name, folder / entry.name)
                    _verify(entry, folder, there)
                return
        shutil.rmtree(folder)
        folder.mkdir()

        def fetch(entry: FileEntry) -> None:
            (there / entry.name).download(folder / entry.name)
            _verify(entry, folder, there)

        threads = ThreadPoolExecutor(_NUM_AT_ONCE)
        try:
            list(threads.map(fetch, manifest.files))
        except Exception:
            threads.shutdown(cancel_futures=True)
            raise
        finally:  # Ctrl-C waits for nobody
            threads.shutdown(wait=False, cancel_futures=True)

    def _take_place(self, staging: Path) -> None:
        """Give what was downloaded the name of the folder; a folder with checkpoints that nobody else has is kept."""
        if self.target.exists():
            for name in KEPT_HERE:
                if (self.target / name).exists():
                    (self.target / name).rename(staging / name)
            before = self.target.with_name(f".{self.target.name}.{uuid.uuid4().hex}.partial")
            steps = Store(self.target / CHECKPOINTS).steps() if self.contents else []
            unsent = [step for step in steps if step > self.latest.step]
            if unsent:
                before = _set_aside(self.target)
                log.warning(
                    "%s has been taken further elsewhere, to step %d; the copy here, with step %d, is kept as %s",
                    self.bucket,
                    self.latest.step,
                    unsent[-1],
                    before,
                )
            else:
                self.target.rename(before)
            staging.rename(self.target)
            if not unsent:
                shutil.rmtree(before, ignore_errors=True)
        else:
            staging.rename(self.target)
        sync_folder(self.target.parent)


def _set_aside(home: Path) -> Path:
    """Give a folder another name, with the time in it, and return that."""
    aside = home.with_name(f"{home.name}.before-{time.strftime('%Y%m%dT%H%M%S')}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:4]}")
    home.rename(aside)
    return aside


def _verify(entry: FileEntry, folder: Path, there: RemotePath) -> None:
    with (folder / entry.name).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if found != entry.sha256:
        raise broken(there / entry.name, f"sha256 {found}", f"sha256 {entry.sha256}, as the manifest says")


def _holds(folder: Path, manifest: Manifest) -> bool:
    """Whether a checkpoint that was verified is there, with the same manifest."""
    return (folder / MANIFEST).exists() and Manifest.read(folder) == manifest


def _is_name(name: str) -> bool:
    """Whether a name leads to a file below a folder, and is none that the mirror keeps for itself."""
    parts = name.split("/")
    return all(
        part and not part.startswith(".") and len(os.fsencode(part)) <= _LONGEST_NAME and not set(part) & {"\\", "\0"}
        for part in parts
    )
