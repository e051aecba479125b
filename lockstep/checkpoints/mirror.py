"""The folder of a run on a bucket: a folder of this machine is worked in, and what it holds is uploaded meanwhile.

latest.json                   which checkpoint is the newest that is whole, and which of those before it are kept
checkpoints/step-00001000/    a checkpoint, as in the folder
recipe.toml, metrics.jsonl    and all other files as in the folder, but for hidden ones
.lease-000001                 the process that trains; see `lockstep.runs.lease`

An upload sends the files of the newest checkpoint, then all other files that have changed, then its manifest, then
`latest.json`; only then is deleted what retention keeps no longer. So at any moment there is on the bucket what a run
that was killed could have left behind: a checkpoint, and files that go on beyond it, which a resume cuts off.

The folder knows in a hidden file, `.mirror.json`, what it is the mirror of, and each `latest.json` has a token. Where
the bucket has one that the folder does not know, another machine has gone on, and the folder is filled anew
(`lockstep.checkpoints.fetching`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoints.manifest import MANIFEST, MAX_MANIFEST_BYTES, DamagedError, Manifest
from lockstep.checkpoints.retention import PINNED, Retention
from lockstep.checkpoints.store import BeforeCommit, Store
from lockstep.durable import atomic_write
from lockstep.errors import CheckpointError, LockstepError, WorkdirError
from lockstep.owner import Owner
from lockstep.run_files import CHECKPOINTS, KEPT_HERE, LATEST, MARKER, RESULT, named_step, step_name
from lockstep.screen import log
from lockstep.storage.remote_path import ObjectStat, RemotePath
from lockstep.storage.retries import Ending, ended_by, told

_ASIDE = ".upload.partial"
_STOP_SECONDS = 5.0
"""So long a run that stops goes on to try; what is being sent is sent, if the store answers."""
_FORMAT, _MOST_BYTES, _MOST_CHECKPOINTS = 1, 1 << 20, 10_000
_TOKEN = re.compile(r"[0-9a-f]{32}")


class UploadError(CheckpointError):
    """A run, or a checkpoint, that could not be uploaded; it is whole in the folder of this machine."""


@dataclass(frozen=True)
class Latest:
    """The content of `latest.json`: what there is on the bucket."""

    step: int
    """The newest checkpoint."""
    checkpoints: tuple[int, ...]
    """The steps of all that are kept, ascending."""
    token: str = ""
    """Names this state; where it was found out without the file, `token_of` the newest manifest."""

    def encode(self) -> bytes:
        """The bytes of the file."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Latest:
        """Return what was encoded; ValueError if it is something else."""
        body = json.loads(data)
        steps = body.get("checkpoints") if isinstance(body, dict) and body.get("format") == _FORMAT else None
        if not isinstance(steps, list) or not 0 < len(steps) <= _MOST_CHECKPOINTS:
            raise ValueError(f"not of format {_FORMAT}")
        token, step = body.get("token"), body.get("step")
        if not all(type(each) is int and 0 <= each < 10**18 for each in steps) or steps != sorted({*steps}):
            raise ValueError("checkpoints that are no ascending steps")
        if step != steps[-1] or not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            raise ValueError("another newest step, or no token")
        return cls(steps[-1], tuple(steps), token)


@dataclass(frozen=True)
class OnBucket:
    """What a bucket holds of a run."""

    listing: dict[str, ObjectStat]
    """All objects by their names within the run's folder."""
    latest: Latest | None
    """None where there is no checkpoint that is whole."""

    @classmethod
    def look(cls, bucket: RemotePath) -> OnBucket:
        """List the objects, and read which checkpoints are whole: where `latest.json` does not say, by the listing."""
        bucket.invalidate()
        try:
            listing = bucket.walk_files()
        except FileNotFoundError:
            listing = {}
        if (there := listing.get(LATEST)) is not None:
            try:
                if not 0 < there.st_size <= _MOST_BYTES:
                    raise ValueError(f"{there.st_size:,} bytes")
                return cls(listing, Latest.decode((bucket / LATEST).read_range(_MOST_BYTES, 0)))
            except (ValueError, RecursionError) as error:
                log.warning("%s is damaged (%s): the checkpoints are looked through", bucket / LATEST, error)
        steps = steps_listed(listing)
        for count in range(len(steps), 0, -1):
            if newest := _whole_manifest(bucket, steps[count - 1], listing):
                return cls(listing, Latest(newest.step, tuple(steps[:count]), token_of(newest)))
        return cls(listing, None)

    def manifest(self, bucket: RemotePath, step: int) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            DamagedError: it is none.
        """
        path = bucket / CHECKPOINTS / step_name(step) / MANIFEST
        found = self.listing.get(f"{CHECKPOINTS}/{step_name(step)}/{MANIFEST}")
        if found is None or not 0 < found.st_size <= MAX_MANIFEST_BYTES:
            given = "no such object" if found is None else f"{found.st_size:,} bytes"
            raise broken(path, given, f"a manifest of at most {MAX_MANIFEST_BYTES:,} bytes")
        manifest = Manifest.decode(path.read_range(MAX_MANIFEST_BYTES + 1, 0), path)
        if manifest.step != step:
            raise broken(path, f"step {manifest.step}", f"step {step}")
        return manifest

    def check_files(self, bucket: RemotePath, manifest: Manifest) -> Manifest:
        """Compare the sizes of a checkpoint's files with its manifest, and return that.

        Raises:
            DamagedError: a file is missing, or of another size.
        """
        name = f"{CHECKPOINTS}/{step_name(manifest.step)}"
        for entry in manifest.files:
            there = self.listing.get(f"{name}/{entry.name}")
            if there is None or there.st_size != entry.size_bytes:
                given = "no such object" if there is None else f"{there.st_size:,} bytes"
                raise broken(bucket / name / entry.name, given, f"{entry.size_bytes:,} bytes, as the manifest says")
        return manifest


def _whole_manifest(bucket: RemotePath, step: int, listing: dict[str, ObjectStat]) -> Manifest | None:
    try:
        found = OnBucket(listing, None)
        return found.check_files(bucket, found.manifest(bucket, step))
    except DamagedError as damage:
        log.warning("%s It is left out: %s", damage.what, damage.given)
        return None


def token_of(manifest: Manifest) -> str:
    """The token of a bucket without a `latest.json` that can be read, whose newest checkpoint has this manifest."""
    return hashlib.sha256(manifest.encode()).hexdigest()[:32]


def broken(path: RemotePath, given: object, expected: object) -> DamagedError:
    """The error for an object of a checkpoint that is not what was uploaded."""
    hint = "delete this checkpoint on the bucket; the one before it is used"
    return DamagedError(f"{path} is damaged.", given=given, expected=expected, hint=hint)


def steps_listed(listing: dict[str, ObjectStat]) -> list[int]:
    """The steps of which there are objects, ascending."""
    folders = {parts[1] for name in listing if len(parts := name.split("/")) == 3 and parts[0] == CHECKPOINTS}
    return sorted(step for name in folders if (step := named_step(name)) is not None)


@dataclass(frozen=True)
class KnownBucket:
    """What a folder of this machine knows of the bucket that it mirrors; a copy of the folder mirrors nothing."""

    url: str
    tokens: tuple[str, ...] = ()
    """Names of the states of the bucket that the folder goes on from."""
    owner: Owner | None = None
    """The process that uploads."""
    files: Mapping[str, list[int]] = field(default_factory=dict)
    """What was downloaded, by name: size and version of the object, then size and time of change of the file here."""

    @classmethod
    def read(cls, folder: Path) -> KnownBucket | None:
        """Read what a folder knows; None where it is no mirror."""
        try:
            body = json.loads((folder / MARKER).read_bytes())
            if body["folder"] != os.path.realpath(folder):
                return None
            owner = Owner.decode(body["owner"].encode()) if body["owner"] else None
            files = {name: [*map(int, facts)] for name, facts in body.get("files", {}).items()}
            return cls(str(body["url"]), tuple(map(str, body["tokens"])), owner, files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        """Write it into the folder."""
        owner = self.owner.encode().decode() if self.owner else None
        place = os.path.realpath(folder)
        body = {"folder": place, "url": self.url, "tokens": self.tokens, "owner": owner, "files": self.files}
        with atomic_write(folder / MARKER, parents=True) as file:
            file.write(json.dumps(body).encode())

    def goes_on_from(self, latest: Latest) -> bool:
        """Whether the folder goes on from this state of the bucket."""
        return latest.token in self.tokens

    @property
    def is_held(self) -> bool:
        """Whether another process of this machine, or this one, works in the folder and uploads it."""
        return self.owner is not None and self.owner.state() == "alive"


def shown_path(folder: Path) -> str:
    """What a folder is called in messages: by its URL where it is the mirror of one."""
    origin = KnownBucket.read(folder)
    return origin.url if origin else str(folder)


def is_stopped() -> bool:
    """Whether a signal, whichever, has asked this process for a stop."""
    from lockstep.workers.rank import join

    return join().pulse.stop_requested is not None


_mirrors: dict[Path, Mirror] = {}


def mirror_of(folder: Path) -> Mirror | None:
    """The mirror of a folder, one in a process; None where the folder is none."""
    place = folder.absolute()
    if place not in _mirrors and (origin := KnownBucket.read(place)):
        _mirrors[place] = Mirror(place, RemotePath(origin.url))
    return _mirrors.get(place)


def store_in(workdir: Path, retention: Retention | None = None) -> Store:
    """The checkpoints of a run's folder, which are uploaded where it is a mirror."""
    mirror, kept = mirror_of(workdir), retention or Retention()
    return MirroredStore(mirror, kept) if mirror else Store(workdir / CHECKPOINTS, kept)


class MirroredStore(Store):
    """The checkpoints of a folder that is a mirror: each is uploaded once it is on the disk, while the run goes on."""

    def __init__(self, mirror: Mirror, retention: Retention) -> None:
        super().__init__(mirror.folder / CHECKPOINTS, retention)
        self.mirror = mirror

    def write(self, step: int, *arguments: Any, before_commit: BeforeCommit | None = None) -> Path:
        """Save a checkpoint, as `Store.write` does, and begin to upload it."""
        path = super().write(step, *arguments, before_commit=before_commit)
        self.mirror.begin(step, self.retention)
        return path


class Mirror:
    """Uploads a run's folder, in a thread: of states that come faster than they can be sent, the newest.

    An upload that fails is told once, and tried again with the next checkpoint.

    Args:
        folder: on this machine.
        bucket: where it is uploaded.
    """

    def __init__(self, folder: Path, bucket: RemotePath) -> None:
        self.folder, self.bucket = folder, bucket
        self.check: Callable[[], None] = self.check_latest
        """Is called before each object is written or deleted; raises a WorkdirError where another process has the run.

        While a lease is held it is that of the lease.
        """
        self.is_fetched = False
        """Whether a script of this process has brought the folder up to date, and goes on in it."""
        self._lock, self._uploading = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_asked = False
        self._failure: Exception | None = None
        """Why the last upload has failed, if it has."""
        self._is_unsettled = False
        """Whether `settle` has failed in this process, which has told it, and has waited long enough."""
        self._stop = Ending(is_stopped, _STOP_SECONDS)
        self._lost: WorkdirError | None = None
        self._newest, self._retention = -1, Retention()
        self._latest: Latest | None = None
        self._sent: dict[int, Manifest] | None = None
        """The checkpoints that are whole on the bucket; None before it was looked at."""
        self._there: set[int] = set()
        """The steps of which the bucket has objects."""
        self._pinned: set[int] = set()
        """The checkpoints that are known to be pinned there."""
        self._files: dict[str, tuple[int, int]] = {}
        """Sizes and times of change of the files that were sent."""

    def begin(self, step: int, retention: Retention) -> None:
        """Begin to upload the folder, whose checkpoint of the step is whole, and return at once."""
        with self._lock:
            self._newest, self._retention, self._is_asked = step, retention, True
            if self._thread is None:
                self._stop = Ending(is_stopped, _STOP_SECONDS)
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()

    def raise_if_lost(self) -> None:
        """Raise the error of an upload that has found that another process has taken the run over."""
        if self._lost:
            raise self._lost

    def settle(self, *, stops: bool = False) -> None:
        """Wait until all of the folder is on the bucket.

        Once the run was asked to stop, before or meanwhile, what fails is tried again for `_STOP_SECONDS` alone. Where
        it `stops`, an upload that fails is told, and no error.

        Raises:
            UploadError: it cannot be uploaded.
            WorkdirError: another process has taken the run over.
        """
        if stops:
            self._stop.set()
        if thread := self._thread:
            log.info("waiting for the upload to %s", self.bucket)
            thread.join()
        self.raise_if_lost()
        if stops and self._is_unsettled:
            return
        try:
            if self._failure and self._stop.is_set():
                raise self._failure
            with ended_by(self._stop):
                self._upload()
        except WorkdirError:
            raise
        except Exception as error:
            self._is_unsettled = True
            failure = self._not_settled(error)
            if not stops:
                raise failure from error
            log.warning("%s Given: %s; %s", failure.what, failure.given, failure.hint)
        else:
            self._failure, self._is_unsettled = None, False

    def _not_settled(self, error: Exception) -> UploadError:
        return UploadError(
            f"The run is not on the bucket as it is here: {self.bucket}.",
            given=_told(error),
            expected="a bucket that can be reached, with credentials that are valid and may write",
            hint=f"the run is whole in {self.folder}, up to step {self._newest}: the same command on this machine goes "
            "on from there, and uploads it",
        )

    def close(self) -> None:
        """Upload what can be uploaded when a run ends with an error, and give the folder free."""
        try:
            if self._newest >= 0 and not self._lost and not self._is_unsettled:
                self.settle()
        except LockstepError as error:
            log.error("%s Given: %s; %s", error.what, error.given, error.hint)
        with suppress(OSError):
            self._note(owner=None)

    def hold(self, owner: Owner) -> None:
        """Note that the owner, this process, works here; raises WorkdirError if the bucket has gone on without it."""
        self._is_unsettled = False
        self.forget()
        self._note(owner=owner)
        self._learn()

    def forget(self) -> None:
        """Look anew at the bucket before the next upload, as where the folder has been fetched again."""
        self._lost, self._sent = None, None

    def check_latest(self) -> None:
        """Check, without a lease, that `latest.json` is none of another process; raises WorkdirError."""
        with suppress(FileNotFoundError, ValueError, RecursionError):
            self._check_known(Latest.decode((self.bucket / LATEST).read_range(_MOST_BYTES, 0)))

    def _check_known(self, latest: Latest) -> None:
        origin = KnownBucket.read(self.folder)
        if origin is None or not origin.goes_on_from(latest):
            raise WorkdirError(
                f"The run in {self.bucket} has been taken further by another process than this start's.",
                given=f"step {latest.step}, which was not uploaded from {self.folder}",
                expected="one start of a run at a time",
                hint="let the other one go on; or start again, and what is there is taken up",
            )

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._is_asked:
                    self._thread = None
                    return
                self._is_asked = False
            try:
                with ended_by(self._stop):
                    self._upload()
            except WorkdirError as error:
                with self._lock:
                    self._lost, self._thread, self._is_asked = error, None, False
                return
            except Exception as error:
                self._tell(error)
            else:
                if self._failure:
                    log.info("%s can be written again: all up to step %d is there", self.bucket, self._newest)
                self._failure = None

    def _tell(self, error: Exception) -> None:
        self._sent = None  # who knows what was written
        if not self._failure:
            what = (
                "see that the credentials are valid and may write there"
                if isinstance(error, PermissionError)
                else "see that the bucket can be reached"
            )
            log.error(
                "the checkpoint of step %d is not uploaded to %s: %s; the run goes on, and the next checkpoint is "
                "another try: %s",
                self._newest,
                self.bucket,
                _told(error),
                what,
            )
        self._failure = error

    # One upload -------------------------------------------------------------------------------------------------------

    def _upload(self) -> None:
        """Make the bucket what the folder is; what is there already is not sent again."""
        with self._uploading:
            newest = self._newest
            if newest < 0:
                return
            self.check()
            sent = self._learn()
            self._send_checkpoint(newest, sent, with_files=True)
            self._switch(newest, sent)
            for step in Store(self.folder / CHECKPOINTS).steps():
                if step < newest:
                    with suppress(DamagedError):
                        self._send_checkpoint(step, sent)
            self._switch(newest, sent)
            self._delete_surplus(newest)

    def _learn(self) -> dict[int, Manifest]:
        """Look, once, which checkpoints the bucket has."""
        if self._sent is None:
            found = OnBucket.look(self.bucket)
            sent: dict[int, Manifest] = {}
            for step in found.latest.checkpoints if found.latest else ():
                with suppress(DamagedError):
                    sent[step] = found.check_files(self.bucket, found.manifest(self.bucket, step))
            if found.latest:
                self._check_known(found.latest)
            listed = {step: f"{CHECKPOINTS}/{step_name(step)}/{PINNED}" for step in sent}
            self._pinned = {step for step, name in listed.items() if name in found.listing}
            self._latest, self._there, self._sent, self._files = found.latest, {*steps_listed(found.listing)}, sent, {}
            if RESULT in found.listing:  # the one file of a run that a new start takes away
                self._files[RESULT] = -1, -1
        return self._sent

    def _send_checkpoint(self, step: int, sent: dict[int, Manifest], *, with_files: bool = False) -> None:
        """Send what the bucket does not have of a checkpoint; one that retention has just deleted is left out.

        All other files go before its manifest: a checkpoint that is whole is not alone.
        """
        with self._kept_aside(step) as aside:
            manifest, before = Manifest.read(aside) if aside else None, sent.get(step)
            folder = self.bucket / CHECKPOINTS / step_name(step)
            for entry in manifest.files if aside and manifest else ():
                if aside and (before is None or entry not in before.files):
                    self.check()
                    self._there.add(step)
                    sent.pop(step, None)
                    (folder / entry.name).upload(aside / entry.name)
            if with_files:
                self._send_files()
            if aside and manifest and manifest != before:
                self.check()
                self._note_tokens(token_of(manifest))
                (folder / MANIFEST).write_bytes(manifest.encode())
                sent[step] = manifest
            if aside and step not in self._pinned and (aside / PINNED).exists():
                self.check()
                (folder / PINNED).write_bytes(b"")
                self._pinned.add(step)

    @contextmanager
    def _kept_aside(self, step: int) -> Iterator[Path | None]:
        """Yield a folder with the files of a checkpoint, which stay there though it may be deleted; None if it is."""
        aside = self.folder / _ASIDE
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            try:
                for file in (self.folder / CHECKPOINTS / step_name(step)).iterdir():
                    link_or_copy(file, aside / file.name)
                is_whole = True
            except FileNotFoundError:
                is_whole = False
            yield aside if is_whole else None
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _send_files(self) -> None:
        """Send the files that have changed, and delete those that are no longer there."""
        there = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in files_in(self.folder)}
        for name, version in there.items():
            if self._files.get(name) != version and (self.folder / name).exists():
                self.check()
                (self.bucket / name).upload(self.folder / name)
                self._files[name] = version
        for name in [*self._files]:
            if name not in there:
                self.check()
                (self.bucket / name).unlink()
                del self._files[name]

    def _switch(self, newest: int, sent: dict[int, Manifest]) -> None:
        """Have `latest.json` name what is kept now."""
        latest = Latest(newest, self._kept(newest, sent), uuid.uuid4().hex)
        if newest not in sent or (self._latest and replace(latest, token=self._latest.token) == self._latest):
            return
        self.check()
        # Known before it is there: the answer may be lost, or this process killed.
        self._note_tokens(latest.token)
        (self.bucket / LATEST).write_bytes(latest.encode(), before_repeat=self.check)
        self._note(tokens=(latest.token, *(token_of(sent[step]) for step in latest.checkpoints)))
        self._latest = latest

    def _kept(self, newest: int, sent: dict[int, Manifest]) -> tuple[int, ...]:
        """The checkpoints on the bucket that are in the folder, too, or that retention keeps, or that are pinned."""
        here = {*Store(self.folder / CHECKPOINTS).steps()}
        up_to = {step: manifest for step, manifest in sorted(sent.items()) if step <= newest}
        best = self._retention.best
        surplus = self._retention.surplus(
            {step: manifest.saved_unix_seconds for step, manifest in up_to.items()},
            {step: each.scores[best] for step, each in up_to.items() if best is not None and each.best_by == best},
        )
        return tuple(step for step in up_to if step in here or step not in surplus or self._is_pinned(step))

    def _is_pinned(self, step: int) -> bool:
        return (self.bucket / CHECKPOINTS / step_name(step) / PINNED).exists()

    def _delete_surplus(self, newest: int) -> None:
        """Delete the checkpoints before the newest that `latest.json` does not name, the manifest of each first."""
        kept = self._latest.checkpoints if self._latest and self._latest.step == newest else None
        surplus = {step for step in self._there if step < newest and step not in kept} if kept is not None else set()
        for step in sorted(surplus):
            if not self._is_pinned(step):
                folder = self.bucket / CHECKPOINTS / step_name(step)
                folder.invalidate()
                for name in sorted(folder.walk_files(), key=lambda name: name != MANIFEST):
                    self.check()
                    (folder / name).unlink()
                self._there.discard(step)
                if self._sent:
                    self._sent.pop(step, None)

    def _note_tokens(self, *more: str) -> None:
        origin = KnownBucket.read(self.folder)
        self._note(tokens=(*(origin.tokens if origin else ()), *more))

    def _note(self, **changes: Any) -> None:
        before = KnownBucket.read(self.folder) or KnownBucket(str(self.bucket))
        replace(before, **changes).write(self.folder)


def _told(error: Exception) -> str:
    return told(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {told(error)}"


def link_or_copy(file: Path, target: Path) -> None:
    """Let a file have another name, too; where the disk has no links, copy it."""
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(file, target)


def files_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of a run but for its checkpoints, by their names within the folder, hidden ones left out."""
    for root, folders, names in os.walk(folder):
        here = Path(root).relative_to(folder)
        folders[:] = [each for each in sorted(folders) if not each.startswith(".") and here / each != Path(CHECKPOINTS)]
        for name in sorted(names):
            path = Path(root) / name
            if (here / name).parts[0] in KEPT_HERE:
                continue
            if not name.startswith(".") and path.is_file() and not path.is_symlink() and name != LATEST:
                with suppress(FileNotFoundError):
                    yield (here / name).as_posix(), path.stat()
