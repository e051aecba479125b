"""A run that is on a bucket, in a folder of this machine: filled where the bucket has what the folder does not.

The folder is among the user's cached files, at a place that follows from the URL. What has changed is downloaded beside
it, verified by the sizes and hashes of the manifests, and then put into it: new checkpoints first, then each file in
the place of the one before, and what is gone last. So other processes may read in the folder meanwhile, as in that of a
run that goes on. A kill leaves it as it was, or so that the next fetch goes on from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from glob import escape
from pathlib import Path, PurePosixPath

from lockstep.checkpoints.manifest import MANIFEST, DamagedError, FileEntry, Manifest
from lockstep.checkpoints.mirror import (
    KnownBucket,
    Latest,
    OnBucket,
    broken,
    files_in,
    is_stopped,
    link_or_copy,
    steps_listed,
)
from lockstep.checkpoints.retention import PINNED
from lockstep.checkpoints.store import Store
from lockstep.durable import atomic_write, make_folder, sync_and_close, sync_folder
from lockstep.errors import CheckpointError, LockstepError, WorkdirError
from lockstep.records.index_cache import cache_folder
from lockstep.run_files import CHECKPOINTS, KEPT_HERE, LATEST, LEASE, LEASE_NAME, OF_WORKERS, step_name
from lockstep.screen import log
from lockstep.storage.remote_path import ObjectStat, RemotePath
from lockstep.storage.retries import at_once, is_refused, told, wait_before_try

_NUM_LOOKS, _SECONDS_BETWEEN_LOOKS = 5, 0.1
_MOST_LEASE_BYTES = 1 << 12
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

    A folder that is as new as the bucket, or in which a process of this machine works, stays as it is, but for
    checkpoints that are damaged here. Where the bucket holds no run yet, the folder becomes the place of a new one.

    Args:
        url: of the run's folder on the bucket.
        contents: with the checkpoints. Without, a folder beside it is made with all else, in which a checkpoint is
            its manifest alone: enough to tell what a run does.

    Raises:
        WorkdirError: the bucket cannot be reached or read, the folder there holds something else, or, without
            `contents`, no run.
        CheckpointError: all checkpoints on the bucket are damaged.
    """
    bucket, home = RemotePath(str(url)), local_folder(url)
    # A download goes on while others look at the records, which are fetched into a folder of their own.
    with reached(bucket), _locked(home, bucket) if contents else contextlib.nullcontext():
        origin = KnownBucket.read(home)
        if origin and origin.is_held:
            return home
        found = _looked(bucket)
        if found.latest is None:
            _check_is_free(bucket, found)
            if contents:
                _make_place(bucket, found, home, origin)
            elif origin is None:
                raise no_run_on(bucket)
            return home
        if not contents:
            return _fetched_records(bucket, found, found.latest, home)
        filling = _Filling(bucket, found, found.latest, home, True, origin or KnownBucket(str(bucket)))
        if filling.known.goes_on_from(found.latest) and Store(home / CHECKPOINTS).steps():
            filling.mend()
        else:
            filling.fill()
        return home


def _make_place(bucket: RemotePath, found: OnBucket, home: Path, origin: KnownBucket | None) -> None:
    """Make the folder of a run that the bucket does not hold yet, or no longer."""
    if origin and origin.tokens and all(name.startswith(LEASE) for name in found.listing):
        aside = home.rename(_free_name(home))
        log.warning("%s has been deleted on the bucket; the copy here is kept as %s", bucket, aside)
        origin = None
    if origin is None:
        KnownBucket(str(bucket)).write(home)


def _fetched_records(bucket: RemotePath, found: OnBucket, latest: Latest, home: Path) -> Path:
    """Fetch all but the contents of checkpoints."""
    target = home.with_name(f"{home.name}.records")
    with _locked(target, bucket):
        known = KnownBucket.read(target) or KnownBucket(str(bucket))
        _Filling(bucket, found, latest, target, False, known).fill()
    return target


def no_run_on(bucket: str | RemotePath) -> WorkdirError:
    """The error for a folder on a bucket that holds no run."""
    return WorkdirError(
        f"There is no run in {bucket}.",
        given="no checkpoint that is whole",
        expected="the folder of a run on a bucket",
        hint=f"check the URL, or train first: lockstep train mnist --workdir {bucket}",
    )


def _looked(bucket: RemotePath) -> OnBucket:
    """Look what there is; again, where a run that goes on has named a checkpoint that came after the listing."""
    for _ in range(_NUM_LOOKS):
        found = OnBucket.look(bucket)
        if found.latest is None or f"{CHECKPOINTS}/{step_name(found.latest.step)}/{MANIFEST}" in found.listing:
            break
    return found


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


class Outages:
    """Outages of a store that is looked at again and again: each is told once, and outlived."""

    def __init__(self) -> None:
        self._is_away = False

    @contextlib.contextmanager
    def outlived(self) -> Iterator[None]:
        """Go on after a block that could not reach a store; where that has refused, or all else is wrong, it raises."""
        try:
            yield
            self._is_away = False
        except WorkdirError as error:
            if error.__cause__ is None or is_refused(error.__cause__):
                raise
            if not self._is_away and not is_stopped():
                log.warning("%s Given: %s; %s. It is looked at again", error.what, error.given, error.hint)
            self._is_away = True


def _check_is_free(bucket: RemotePath, found: OnBucket) -> None:
    """Refuse a folder without a checkpoint that is whole if it holds something else, or what is left of a run.

    Of a first upload that was cut off there is no manifest.
    """
    steps, ours = steps_listed(found.listing), (LEASE, f"{CHECKPOINTS}/")
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
def _locked(folder: Path, bucket: RemotePath) -> Iterator[None]:
    """Let one process of this machine at a time look at a folder and fill it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("ab") as file:
        is_told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not is_told:
                    log.info("another process of this machine downloads %s to %s: it is waited for", bucket, folder)
                is_told = True
                wait_before_try(_SECONDS_BETWEEN_LOOKS, error)
        yield


@dataclass(frozen=True)
class _Filling:
    """One filling of a folder, which the process that makes it has locked."""

    bucket: RemotePath
    found: OnBucket
    latest: Latest
    target: Path
    contents: bool
    known: KnownBucket
    """What the target knows."""
    staged: dict[str, ObjectStat] = field(default_factory=dict)
    """The objects that lie beside the target, whole."""
    whole: dict[int, Manifest] = field(default_factory=dict)
    """The checkpoints that the target is to have."""

    def fill(self) -> None:
        """Download what the target lacks beside it, and put that into it."""
        with self._staging() as staging:
            self._fetched(staging)._put_in_place(staging)

    def mend(self) -> None:
        """Download again what is damaged of the checkpoints here; of one that is damaged there, too, say so."""
        store = Store(self.target / CHECKPOINTS)
        if not (steps := [step for step in self.latest.checkpoints if self._is_to_mend(store, step)]):
            return
        with self._staging() as staging:
            for step in steps:
                try:
                    manifest = self.found.check_files(self.bucket, self.found.manifest(self.bucket, step))
                    self._fetch_checkpoint(manifest, staging / _folder_of(manifest))
                except DamagedError as damage:
                    _tell_damaged(damage)
                    continue
                log.warning("%s is damaged or gone; it is downloaded again from %s", store.path(step), self.bucket)
                if store.path(step).exists():
                    store.discard(step)
                self._put_checkpoint(store, manifest, staging / CHECKPOINTS)

    def _is_to_mend(self, store: Store, step: int) -> bool:
        """Whether a checkpoint is damaged here, or gone although none is newer; the newest one is read."""
        folder = store.path(step)
        if not folder.exists():
            return (store.newest() or 0) <= self.latest.step
        try:
            for entry in Manifest.read(folder).files:
                entry.check_size(folder)
                path = folder / entry.name
                if step == self.latest.step and _hash_of(path, path.stat().st_mtime_ns) != entry.sha256:
                    return True
        except DamagedError:
            return True
        return False

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """Make a folder beside the target, which is gone at the end; what others have left goes, too."""
        # Those of processes that were killed; that of the records beside the target has another name.
        for left in self.target.parent.glob(f".{escape(self.target.name)}.{'[0-9a-f]' * 32}.partial"):
            shutil.rmtree(left, ignore_errors=True)
        staging = self.target.with_name(f".{self.target.name}.{uuid.uuid4().hex}.partial")
        (staging / CHECKPOINTS).mkdir(parents=True)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _fetched(self, staging: Path) -> _Filling:
        """Download it, and look again where something is gone, as a run that goes on deletes; returns what it was."""
        filling = self
        for looks_left in reversed(range(_NUM_LOOKS)):
            try:
                filling._fetch(staging)
                return filling
            except FileNotFoundError:
                found = _looked(self.bucket)
                if not looks_left or found.latest is None:
                    raise
                filling = replace(self, found=found, latest=found.latest)
        raise AssertionError("the last look returns or raises")

    def _fetch(self, staging: Path) -> None:
        damages = self._read_manifests()
        files = [name for name in self._names() if not self._is_here(name) and not self._is_staged(name)]
        places = self.target, staging
        lacking = [
            manifest for manifest in self.whole.values() if not any(self._has(each, manifest) for each in places)
        ]
        parts = [f"{_folder_of(manifest)}/{entry.name}" for manifest in lacking for entry in manifest.files]
        self._check_room([*files, *(parts if self.contents else ())])

        def fetch(name: str) -> None:
            self._fetch_file(name, staging / name)

        at_once(fetch, files)
        for manifest in lacking:
            try:
                self._fetch_checkpoint(manifest, staging / _folder_of(manifest))
            except DamagedError as damage:
                del self.whole[manifest.step]
                damages.append(damage)
        for each in damages:
            _tell_damaged(each)
        if self.contents and not self.whole:
            raise _all_damaged(self.bucket, "; ".join(f"{each.what} ({each.given})" for each in damages))

    def _names(self) -> list[str]:
        """The names of all files but those of checkpoints; those that would lead elsewhere are left out."""
        found = []
        for name in self.found.listing:
            if name.split("/")[0] in (CHECKPOINTS, LATEST, *KEPT_HERE) or name.startswith(LEASE):
                continue
            if _is_name(name):
                found.append(name)
            else:
                _tell_left_out(f"{f'{self.bucket}/{name}'!r} is no name of a file of a run.")
        folders = {str(above) for name in found for above in PurePosixPath(name).parents}
        for name in filter(folders.__contains__, found):
            _tell_left_out(f"{self.bucket}/{name} is a file, and a folder with others.")
        found = [name for name in found if name not in folders]
        leases = [] if self.contents else sorted(filter(LEASE_NAME.fullmatch, self.found.listing))
        return found + leases[-1:]

    def _is_here(self, name: str) -> bool:
        """Whether the target has an object as it is now; of a lease the time of change counts, which is not listed."""
        facts = None if name.startswith(LEASE) else self._facts(name)
        return facts is not None and self.known.files.get(name) == facts

    def _is_staged(self, name: str) -> bool:
        return self.staged.get(name) == self.found.listing[name]

    def _facts(self, name: str) -> list[int] | None:
        """What is kept of an object that was downloaded; None where its file here is not what was listed."""
        there = self.found.listing[name]
        with contextlib.suppress(OSError):
            here = (self.target / name).stat()
            if here.st_size == there.st_size:
                return [*there, here.st_size, here.st_mtime_ns]
        return None

    def _read_manifests(self) -> list[DamagedError]:
        """Read the manifests of the checkpoints that are to be there, the newest first; returns what is damaged."""

        def read(step: int) -> Manifest | DamagedError:
            name = f"{CHECKPOINTS}/{step_name(step)}"
            try:
                manifest = None
                if f"{name}/{MANIFEST}" in self.found.listing and self._is_here(f"{name}/{MANIFEST}"):
                    with contextlib.suppress(CheckpointError):
                        manifest = Manifest.read(self.target / name)
                manifest = manifest or self.found.manifest(self.bucket, step)
                is_whole_here = self.contents and self._has(self.target, manifest)
                return manifest if is_whole_here else self.found.check_files(self.bucket, manifest)
            except DamagedError as damage:
                return damage

        self.whole.clear()
        found = at_once(read, reversed(self.latest.checkpoints))
        self.whole.update({each.step: each for each in found if isinstance(each, Manifest)})
        return [each for each in found if isinstance(each, DamagedError)]

    def _has(self, folder: Path, manifest: Manifest) -> bool:
        """Whether a checkpoint is in a folder of this machine, its files of the right sizes; readers verify hashes."""
        here = folder / _folder_of(manifest)
        try:
            if Manifest.read(here).files != manifest.files:
                return False
            for entry in manifest.files if self.contents else ():
                entry.check_size(here)
        except CheckpointError:
            return False
        return True

    def _check_room(self, names: Sequence[str]) -> None:
        needed, free = sum(self.found.listing[name].st_size for name in names), shutil.disk_usage(self.target.parent)
        if needed > free.free:
            raise WorkdirError(
                f"{self.bucket} does not fit on this machine.",
                given=f"{needed:,} bytes, and {free.free:,} free in {self.target.parent}",
                expected="room for all of the run",
                hint="make space, or set XDG_CACHE_HOME to a folder on a larger disk",
            )
        if self.contents and names:
            log.info("downloading %d files, %.1f MB, of %s to %s", len(names), needed / 1e6, self.bucket, self.target)

    def _fetch_file(self, name: str, file: Path) -> None:
        object_ = self.bucket / name
        _make_way(file)
        if name.startswith(LEASE):
            file.write_bytes(object_.read_range(_MOST_LEASE_BYTES, 0))
            changed = object_.changed_unix_seconds()
            os.utime(file, (changed, changed))
        else:
            object_.download(file)
            sync_and_close(os.open(file, os.O_RDWR))  # before the state of the bucket is written down
        self.staged[name] = self.found.listing[name]

    def _fetch_checkpoint(self, manifest: Manifest, folder: Path) -> None:
        """Download the files of a checkpoint, and verify them."""
        shutil.rmtree(folder, ignore_errors=True)  # half of it, of an earlier look
        folder.mkdir()
        there = self.bucket / CHECKPOINTS / folder.name

        def fetch(entry: FileEntry) -> None:
            (there / entry.name).download(folder / entry.name)
            _verify(entry, folder, there)

        at_once(fetch, manifest.files if self.contents else ())
        with atomic_write(folder / MANIFEST) as file:
            file.write(manifest.encode())

    def _put_in_place(self, staging: Path) -> None:
        """Put what was downloaded into the target, name by name: who reads there meanwhile reads on.

        What is no longer there goes once all else has come. The state of the bucket is written down last, so that the
        next fetch makes good what a kill cuts off here.
        """
        store = Store(self.target / CHECKPOINTS)
        damaged = {*self.latest.checkpoints} - {*self.whole}
        only_here = [step for step in store.steps() if step > self.latest.step or step in damaged]
        if only_here and self.contents:
            self._keep_aside(only_here, staging / "aside")
        make_folder(store.folder)
        for manifest in self.whole.values():
            self._put_checkpoint(store, manifest, staging / CHECKPOINTS)
        names = self._names()
        for name in filter(self._is_staged, names):
            (staging / name).replace(_make_way(self.target / name))
        leases = [path.name for path in self.target.glob(f"{LEASE}*")] if not self.contents else []
        for name in {*leases, *(name for name, _ in files_in(self.target))} - {*names}:
            if name.split("/")[0] not in OF_WORKERS:
                (self.target / name).unlink(missing_ok=True)
        for step in {*store.steps()} - {*self.whole}:
            store.discard(step)
        for folder in (store.folder, self.target):
            sync_folder(folder)
        names += [f"{_folder_of(manifest)}/{MANIFEST}" for manifest in self.whole.values()]
        files = {name: facts for name in names if (facts := self._facts(name))}
        KnownBucket(str(self.bucket), (self.latest.token,), files=files).write(self.target)

    def _put_checkpoint(self, store: Store, manifest: Manifest, staged: Path) -> None:
        """Put a checkpoint in place; where it is there, its scores, which may have come later; and its pin."""
        folder = store.path(manifest.step)
        if not self._has(self.target, manifest):
            if folder.exists():
                store.discard(manifest.step)
            (staged / folder.name).rename(folder)
        if Manifest.read(folder) != manifest:
            with atomic_write(folder / MANIFEST) as file:
                file.write(manifest.encode())
        if f"{_folder_of(manifest)}/{PINNED}" in self.found.listing:
            (folder / PINNED).touch()
        else:
            (folder / PINNED).unlink(missing_ok=True)

    def _keep_aside(self, only_here: Sequence[int], staged: Path) -> None:
        """Copy a folder with checkpoints that nobody else has; under its name it is whole."""

        def copy(source: str, target: str) -> None:
            is_of_checkpoint = Path(source).parent.parent.name == CHECKPOINTS  # whose files never change
            (link_or_copy if is_of_checkpoint else shutil.copy2)(Path(source), Path(target))

        shutil.copytree(self.target, staged, copy_function=copy)
        aside = staged.rename(_free_name(self.target))
        log.warning(
            "%s has been taken further elsewhere, to step %d; the copy here, with step %s, is kept as %s",
            *(self.bucket, self.latest.step, " and ".join(map(str, only_here)), aside),
        )


def _folder_of(manifest: Manifest) -> str:
    return f"{CHECKPOINTS}/{step_name(manifest.step)}"


@cache
def _tell_left_out(what: str) -> None:
    """Say so once, though a run that is followed is looked at again and again."""
    log.warning("%s It is left out.", what)


def _tell_damaged(damage: DamagedError) -> None:
    _tell_left_out(f"{damage.what} Given: {damage.given}; expected: {damage.expected}.")


def _free_name(home: Path) -> Path:
    """A name for a folder that is kept, with the time in it."""
    aside = home.with_name(f"{home.name}.before-{time.strftime('%Y%m%dT%H%M%S')}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:4]}")
    return aside


def _verify(entry: FileEntry, folder: Path, there: RemotePath) -> None:
    path = folder / entry.name
    sync_and_close(os.open(path, os.O_RDWR))
    if (found := _hash_of(path, path.stat().st_mtime_ns)) != entry.sha256:
        raise broken(there / entry.name, f"sha256 {found}", f"sha256 {entry.sha256}, as the manifest says")


def _make_way(file: Path) -> Path:
    """Return the path of a file that is to be written, once there is its folder, and no folder of its name."""
    for above in [*file.parents]:
        if above.is_file():
            above.unlink()
    if file.is_dir():
        shutil.rmtree(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


@lru_cache(64)
def _hash_of(path: Path, changed_ns: int) -> str:
    """The SHA-256 of a file; one that has not changed since is not read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_name(name: str) -> bool:
    """Whether a name leads to a file below a folder, and is none that the mirror keeps for itself."""
    parts = name.split("/")
    return all(
        part and not part.startswith(".") and len(os.fsencode(part)) <= _LONGEST_NAME and not set(part) & {"\\", "\0"}
        for part in parts
    )
