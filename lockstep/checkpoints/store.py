"""The checkpoints of a run: a folder each, there as a whole or not at all.

A checkpoint is written under another name, every file and the folder are brought to the disk, and only then does it get
its name; only after that are older ones deleted. So a kill, a full disk or a loss of power at any moment leaves those
that were there before. `docs/reference/checkpoint-format.md` describes the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias, TypeVar

from lockstep.checkpoints.encoding import (
    FROZEN,
    JSON,
    Tensors,
    check_saveable,
    decode_values,
    encode_tensors,
    encode_values,
    find_nonfinite,
    names_in_file,
    read_tensors,
    size_bytes,
)
from lockstep.checkpoints.manifest import (
    MANIFEST,
    SUFFIX,
    VALUES,
    DamagedError,
    Manifest,
    RunningHash,
    damaged,
    write_files,
)
from lockstep.checkpoints.retention import PINNED, CheckpointRatings, Retention, set_scores
from lockstep.durable import make_folder, sync_folder
from lockstep.errors import CheckpointError, InputError, NotFoundError
from lockstep.listing import shorten
from lockstep.owner import host_name, start_ticks
from lockstep.run_files import STEP_NAME, named_step, step_name
from lockstep.screen import log

if TYPE_CHECKING:
    from torch import Tensor

_USUAL = Retention()
_writing = threading.Lock()
ABANDONED_SECONDS = 3600.0
"""An unfinished folder of another host, whose processes cannot be seen, is abandoned if untouched for so long."""

_UNFINISHED = re.compile(rf"\.{STEP_NAME.pattern}\.(?:new|old)\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<started>\d+)")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_START_AFRESH = "move the folder away to start the run afresh"

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; its tensors are contiguous, on the CPU, and share memory with none."""

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]


Check: TypeAlias = "Callable[[Checkpoint], object]"
Digests: TypeAlias = Mapping[str, Mapping[str, str]]
"""Section -> name -> the first 64 bits, in hexadecimal, of the SHA-256 of the section's file up to the tensor's end."""
BeforeCommit: TypeAlias = Callable[[Digests, str], object]
"""Is given the digests of a checkpoint's tensors, and the SHA-256 of its `values.json`."""
_NUM_DIGITS = 16


class Store:
    """The checkpoints in one folder, of one run; one process writes, any number read.

    Making a store touches nothing.

    Args:
        folder: created by the first write.
        retention: which older checkpoints a write leaves.
    """

    def __init__(self, folder: Path, retention: Retention = _USUAL) -> None:
        self.folder = folder
        self.retention = retention

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """The steps that have checkpoints, ascending; a checkpoint may turn out to be damaged."""
        try:
            found = [named_step(path.name) for path in self.folder.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self.folder} cannot be listed: {error.strerror}.",
                given=f"{self.folder} ({error.strerror})",
                expected="a folder that can be read",
                hint="give the workdir of a run, and let this user read it",
            ) from error
        return sorted(step for step in found if step is not None)

    def newest(self) -> int | None:
        """The last step that has a checkpoint, or None; it may turn out to be damaged."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the best checkpoint by the score of the retention; None where none is known to be."""
        return next(iter(self.retention.ranked(self._ratings(self.steps()).best_scores)), None)

    def is_among_best(self, step: int, scores: Mapping[str, float]) -> bool:
        """Whether a checkpoint of the step with these scores is one of the best of all up to it."""
        by = self.retention.best
        if by is None or by not in scores:
            return False
        others = self._ratings(other for other in self.steps() if other < step).best_scores
        return self.retention.is_among_best(scores[by], others)

    def write(
        self,
        step: int,
        tensors: Tensors,
        values: Mapping[str, JSON],
        scores: Mapping[str, float] | None = None,
        *,
        before_commit: BeforeCommit | None = None,
    ) -> Path:
        """Save a checkpoint, and delete those that are no longer to be kept.

        Where the step has a checkpoint of the same tensors already, that one stays; another, or a damaged one, is
        replaced. Checkpoints of later steps (left by a run that fell back from them) are neither counted nor deleted.

        Args:
            step: completed updates.
            tensors: by section and name.
            values: what is no tensor; `FROZEN` in it tells which parameters are not trained.
            scores: of these tensors, by name, where they are known; they may be given later, with the same tensors.
            before_commit: called once the files are on the disk, before they have the checkpoint's name.

        Returns:
            The checkpoint's folder; it is on the disk.

        Raises:
            CheckpointError: it cannot be written; trained parameters, averages or slots are not finite, or others hold
                NaN. The checkpoints that were there are as they were, and nothing is left over.
        """
        check_saveable(tensors)
        frozen: Any = values.get(FROZEN, {})
        if bad := find_nonfinite(tensors, frozen):
            raise CheckpointError(
                f"The checkpoint of step {step} was not written: nothing could go on from it.",
                given=f"values that are not finite: {shorten(bad)}",
                expected="finite trained parameters, averages and slots, and no NaN elsewhere",
                hint="go on from the checkpoint before it, with a lower learning rate or clipped gradients; "
                "older checkpoints are as they were",
            )
        encoded_values = encode_values(values)
        finite = {name: float(score) for name, score in (scores or {}).items() if math.isfinite(score)}
        # One thread of a process writes at a time: unfinished folders are named after the process.
        with _writing:
            try:
                make_folder(self.folder)
                sweep(self.folder)
                best_by = self.retention.best if self.is_among_best(step, finite) else None
                draft = Manifest(step, int(time.time()), (), finite, best_by)
                if kept := self._kept(step, tensors):
                    if before_commit:
                        before_commit(*kept)
                    set_scores(self.path(step), draft)
                else:
                    self._write_new(draft, tensors, encoded_values, before_commit)
                sync_folder(self.folder)
            except OSError as error:
                raise self._not_written(step, size_bytes(tensors) + len(encoded_values), error) from error
            self._prune(step)
        return self.path(step)

    def read(
        self, step: int | None = None, check: Check | None = None, *, before: int | None = None
    ) -> Checkpoint | None:
        """Load a checkpoint, verified: the newest that is intact, or the one of `step`.

        A damaged one is named in a warning, and so is one with values that are not finite, which older versions wrote;
        the one before it is read instead. Unless it was asked for.

        Args:
            step: the one that is asked for.
            check: raises an InputError about values that no run has saved: a hash can be made anew, so it does not
                tell. Such a checkpoint is damaged.
            before: leave out those of this step and later ones.

        Returns:
            The checkpoint, or None where no step was asked for and there is none at all, or no intact one `before`.

        Raises:
            CheckpointError: all are damaged, the one asked for is damaged or missing, or the format is unknown.
        """
        if step is not None:
            return self._read_step(step, check)
        return self.newest_intact(lambda each: self._load_finite(each, check), before=before)

    def newest_intact(
        self, load: Callable[[int], Loaded], *, before: int | None = None, otherwise: str = _START_AFRESH
    ) -> Loaded | None:
        """What `load` makes of the newest checkpoint for which it raises no DamagedError; as `read` says.

        Where all are damaged, `otherwise` is what the hint says to do without a copy.
        """
        damages: list[str] = []  # in words: an error holds the frames it went through, and what had been read
        for step in reversed([each for each in self.steps() if before is None or each < before]):
            try:
                return load(step)
            except DamagedError as damage:
                if not self.path(step).exists():  # deleted while it was read: there is a newer one
                    return self.newest_intact(load, before=before, otherwise=otherwise)
                log.warning(
                    "%s Given: %s; expected: %s. Trying the one before.", damage.what, damage.given, damage.expected
                )
                damages.append(f"{damage.what} ({damage.given})")
        if damages and before is None:
            raise CheckpointError(
                f"Every checkpoint in {self.folder} is damaged.",
                given="; ".join(damages),
                expected="at least one that is as it was written",
                hint=f"put one back from a copy, or {otherwise}",
            )
        return None

    def _read_step(self, step: int, check: Check | None) -> Checkpoint:
        there = self.steps()
        expected = f"one of the steps there are: {', '.join(map(str, there)) or 'none'}"
        hint = "ask for one of these, or for no step to get the newest that is intact"
        if step not in there:
            what = f"{self.folder} has no checkpoint of step {step}."
            raise NotFoundError(what, given=f"step {step}", expected=expected, hint=hint)
        try:
            return self._load(step, check)
        except DamagedError as damage:
            given = f"step {step}: {damage.given}, not {damage.expected}"
            raise CheckpointError(damage.what, given=given, expected=expected, hint=hint) from damage

    def _load(self, step: int, check: Check | None = None) -> Checkpoint:
        folder = self.path(step)
        manifest = Manifest.read(folder)
        if manifest.step != step:
            raise damaged(folder / MANIFEST, f"step {manifest.step}", f"step {step}, as the folder's name says")
        tensors: dict[str, dict[str, Tensor]] = {}
        values: dict[str, Any] = {}
        for name, content in manifest.read_files(folder, _read).items():
            if name == VALUES:
                values = content
            else:
                tensors[name.removesuffix(SUFFIX)] = content
        frozen: Any = values.get(FROZEN, {})
        if not isinstance(frozen, dict) or not all(_are_names(names) for names in frozen.values()):
            raise damaged(folder / VALUES, f"{FROZEN}: {frozen!r:.80}", "names of parameters by section")
        checkpoint = Checkpoint(step, folder, tensors, values)
        if check:
            try:
                check(checkpoint)
            except InputError as error:
                raise damaged(folder / VALUES, error.given, error.expected) from error
        return checkpoint

    def _load_finite(self, step: int, check: Check | None) -> Checkpoint:
        checkpoint = self._load(step, check)
        if bad := find_nonfinite(checkpoint.tensors, checkpoint.values.get(FROZEN, {})):
            raise damaged(checkpoint.path, f"values that are not finite: {shorten(bad)}", "finite ones")
        return checkpoint

    def _kept(self, step: int, tensors: Tensors) -> tuple[Digests, str] | None:
        """Return the digests of these tensors and the hash of the values, if the step has an intact checkpoint."""
        if not self.path(step).exists():
            return None
        try:
            self._load(step)
            files = {file.name: file.sha256 for file in Manifest.read(self.path(step)).files}
        except DamagedError as damage:
            log.warning("%s Given: %s; expected: %s. It is replaced.", damage.what, damage.given, damage.expected)
            return None
        hashes = {section: RunningHash(encode_tensors(members)) for section, members in tensors.items()}
        wanted = {f"{section}{SUFFIX}": running.after[-1] for section, running in hashes.items()}
        if files != wanted | {VALUES: files[VALUES]}:
            log.warning("%s holds other tensors than are to be saved now. It is replaced.", self.path(step))
            return None
        return {section: _named(members, hashes[section]) for section, members in tensors.items()}, files[VALUES]

    def _write_new(
        self, draft: Manifest, tensors: Tensors, encoded_values: bytes, before_commit: BeforeCommit | None
    ) -> None:
        final = self.path(draft.step)
        temporary = unfinished_path(final, "new")
        delete(temporary)
        try:
            temporary.mkdir()
            contents = {f"{section}{SUFFIX}": encode_tensors(members) for section, members in tensors.items()}
            written = write_files(temporary, {**contents, VALUES: [encoded_values]})
            manifest = dataclasses.replace(draft, files=tuple(entry for entry, _ in written.values()))
            write_files(temporary, {MANIFEST: [manifest.encode()]})
            if before_commit:
                digests = {section: _named(tensors[section], written[f"{section}{SUFFIX}"][1]) for section in tensors}
                before_commit(digests, written[VALUES][0].sha256)
            if (final / PINNED).exists():
                (temporary / PINNED).touch()
            sync_folder(temporary)
            if final.exists():
                self.discard(draft.step)
            temporary.rename(final)
        except BaseException:
            delete(temporary)
            raise

    def discard(self, step: int) -> None:
        """Rename a checkpoint, then delete it: a kill cannot leave half of it under its name."""
        aside = unfinished_path(self.path(step), "old")
        self.path(step).rename(aside)
        delete(aside)

    def _prune(self, written: int) -> None:
        there = self._ratings(step for step in self.steps() if step <= written)
        for step in self.retention.surplus(there.saved_seconds, there.best_scores, there.pinned):
            try:
                self.discard(step)
            except OSError as error:
                log.warning("the old checkpoint %s cannot be deleted: %s", self.path(step), error.strerror)

    def _ratings(self, steps: Iterable[int]) -> CheckpointRatings:
        return CheckpointRatings.read({step: self.path(step) for step in steps}, self.retention.best)

    def _not_written(self, step: int, needed_bytes: int, error: OSError) -> CheckpointError:
        free = "an unknown number of"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(self.folder).free:,}"
        hint = (
            "make space there, raise the quota, keep fewer checkpoints, or give a workdir on another disk"
            if error.errno in _NO_SPACE
            else "let this user write there, or give another workdir"
        )
        return CheckpointError(
            f"The checkpoint of step {step} cannot be written: {error.strerror}.",
            given=f"{error.filename or self.folder} on a disk with {free} bytes free",
            expected=f"a folder that can be written, with room for {needed_bytes:,} bytes",
            hint=f"{hint}; older checkpoints are as they were",
        )


def _read(name: str, file: BinaryIO, size_bytes: int) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    if name != VALUES:
        return read_tensors(file, size_bytes)
    data = file.read(size_bytes)
    return decode_values(data), [data]


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def digests_of(tensors: Tensors) -> Digests:
    """The digests that a checkpoint of these tensors has."""
    return {section: _named(members, RunningHash(encode_tensors(members))) for section, members in tensors.items()}


def _named(members: Mapping[str, Tensor], running: RunningHash) -> dict[str, str]:
    """The digest of each tensor, from what the hash of its file was after each part: its header, then the tensors."""
    digests = zip(names_in_file(members), running.after[1:], strict=True)
    return {name: sha256[:_NUM_DIGITS] for name, sha256 in digests}


def unfinished_path(final: Path, kind: Literal["new", "old"]) -> Path:
    """Where this process writes a folder before it is called `final`, or keeps it while it is being deleted."""
    pid = os.getpid()
    return final.with_name(f".{final.name}.{kind}.{host_name()}.{pid}.{start_ticks(pid)}")


def sweep(folder: Path) -> None:
    """Delete the unfinished folders whose process no longer lives; all else is left alone."""
    for path in list(folder.iterdir()):
        match = _UNFINISHED.fullmatch(path.name)
        if match and not _is_owned(path, match):
            log.info("deleting %s: the process that was at work on it is gone", path)
            delete(path)


def delete(path: Path) -> None:
    """Delete a folder; where the disk refuses, say so and go on."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be deleted (%s); delete it by hand, nothing uses it", path, error.strerror)


def _is_owned(path: Path, match: re.Match[str]) -> bool:
    if match["host"] == host_name() and Path("/proc/self/stat").exists():
        return start_ticks(int(match["pid"])) == match["started"]
    return time.time() - _last_touched(path) < ABANDONED_SECONDS


def _last_touched(path: Path) -> float:
    touched = 0.0
    for entry in (path, *path.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            touched = max(touched, entry.stat().st_mtime)
    return touched
