"""The weights of our own runs as a source like any other, and the one door to weights from anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.checkpoints.fetching import fetch_run
from lockstep.checkpoints.manifest import MANIFEST, SUFFIX, FileEntry, Manifest
from lockstep.checkpoints.store import Store
from lockstep.errors import CheckpointError, NotFoundError
from lockstep.records.index_cache import local_copies
from lockstep.records.shards import check_local
from lockstep.run_files import CHECKPOINTS, named_step
from lockstep.storage.remote_path import DataPath, RemotePath, is_url
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.open import open_weights_file, unknown, weights_in_store
from lockstep.weights.safetensors_file import SafetensorsFile
from lockstep.weights.source import TensorInfo, WeightSource, entry_of

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = ("parameters", "buffers", "average")
_SLOTS = "slots"
_RUN_AT_STEP = re.compile(r"(.+)@(\d+)", re.DOTALL)


class _Section(NamedTuple):
    """One file of tensors of a checkpoint."""

    entry: FileEntry
    file: SafetensorsFile
    prefix: str
    """What stands before the names of its tensors: the name of the state, where a run has several."""
    ending: str


class RunWeights:
    """One checkpoint of a run. Parameters and buffers have the model's names; moving averages end as TensorFlow's do.

    Where a run has several states, the name of the state stands before the names of its tensors: "generator.conv.bias".
    Opening it reads the manifest and compares the sizes of the files; the hash of a file is verified when the first of
    its tensors is read.

    Args:
        slots: list those of the optimizer too, such as "momentum/conv.bias".

    Raises:
        CheckpointError: it is damaged (DamagedError), or of another version of the format; or two of its tensors would
            have one name.
    """

    kind = "Lockstep checkpoint"

    def __init__(self, folder: Path, *, slots: bool = False) -> None:
        self.path = folder
        manifest = Manifest.read(folder)
        self.step = manifest.step
        self._verified: set[str] = set()
        self._places: dict[str, tuple[_Section, str]] = {}
        for section in _sections(folder, manifest, (*_WEIGHTS, _SLOTS) if slots else _WEIGHTS):
            for inside in section.file.tensors:
                name = section.prefix + inside + section.ending
                other, _ = self._places.setdefault(name, (section, inside))
                if other is not section:
                    raise CheckpointError(
                        f"Two tensors of {self.path} have the name {name!r}.",
                        given=f"one in {other.entry.name}, one in {section.entry.name}",
                        expected="names of states that stay apart with the names of their tensors",
                        hint="save the run with other names of its states",
                    )
        self.tensors: Mapping[str, TensorInfo] = {
            name: section.file.tensors[inside] for name, (section, inside) in self._places.items()
        }

    def read(self, name: str) -> Tensor:
        """A tensor, whole and contiguous, the hash of its file verified."""
        section, inside = entry_of(name, self._places, self.path)
        self._verify(section)
        return section.file.read(inside)

    def verify(self) -> None:
        """Verify the hashes of all files with tensors that are listed."""
        for section, _ in self._places.values():
            self._verify(section)

    def _verify(self, section: _Section) -> None:
        if section.entry.name not in self._verified:
            section.entry.check(self.path)
            self._verified.add(section.entry.name)


def _sections(folder: Path, manifest: Manifest, wanted: tuple[str, ...]) -> Iterator[_Section]:
    for kind in wanted:
        for entry in manifest.files:
            state, _, section = entry.name.removesuffix(SUFFIX).rpartition(".")
            if section == kind:
                file = _opened(folder, entry)
                yield _Section(entry, file, f"{state}." if state else "", AVERAGE if kind == "average" else "")


def _opened(folder: Path, entry: FileEntry) -> SafetensorsFile:
    entry.check_size(folder)
    try:
        return SafetensorsFile(folder / entry.name)
    except CheckpointError:
        entry.check(folder)  # says that it is not what was written
        raise


def open_weights(path: str | Path, *, slots: bool = False, newest: int | None = None) -> WeightSource:
    """The weights at a path, whatever wrote them.

    It is a checkpoint of a run; a run's workdir, for its newest checkpoint that is intact, or `WORKDIR@STEP`; or what
    `lockstep.weights.open.open_weights_file` opens. With `slots` those of our own optimizers are listed too. `newest`
    is the step of a workdir's newest, where that has been found out already.

    Raises:
        CheckpointError: there are no weights that are known, or they are damaged.
    """
    path = Path(_brought_here(str(path)))
    if (path / MANIFEST).is_file():
        return RunWeights(path, slots=slots)
    if store := store_of_run(path):
        found = _newest(store, slots) if newest is None else RunWeights(_at(store, newest), slots=slots)
        if found:
            return found
    folder, step = run_at_step(str(path))
    if step is not None and (store := store_of_run(folder)):
        return RunWeights(_at(store, step), slots=slots)
    if (path / CHECKPOINTS).is_dir():
        raise unknown(path, "a run without a checkpoint")
    return open_weights_file(path)


def _brought_here(path: str) -> str:
    """Bring weights of an object store to this machine, a run with all its checkpoints; other paths stay."""
    if not is_url(path):
        check_local(path)
        return path
    url, step = run_of_url(path)
    if (DataPath(url) / CHECKPOINTS).is_dir():
        return f"{fetch_run(url)}" + (f"@{step}" if step is not None else "")
    place = DataPath(path)
    if (place / MANIFEST).is_file():  # a checkpoint that lies alone
        return str(local_copies([each for each in place.iterdir() if each.is_file()])[0].parent)
    return str(weights_in_store(place))


def without_step(text: str) -> tuple[str, int | None]:
    """Split "RUN@STEP"; the step is None where there is none."""
    at = _RUN_AT_STEP.fullmatch(text)
    return (at[1], int(at[2])) if at else (text, None)


def run_of_url(text: str) -> tuple[str, int | None]:
    """The URL of a run on a bucket, and a step of it where one is named, as `run_at_step` splits local paths."""
    url, step = without_step(text)
    place = RemotePath(url)
    if step is None and place.parent.name == CHECKPOINTS and (named := named_step(place.name)) is not None:
        return str(place.parent.parent), named
    is_within = place.name == CHECKPOINTS and not (place / CHECKPOINTS).is_dir()
    return str(place.parent if is_within else place), step


def run_at_step(text: str) -> tuple[Path, int | None]:
    """A run's workdir and a step of it, from "WORKDIR@STEP"; without a step, or where a folder is called so, None.

    The workdir may be given by the folder "checkpoints" in it, and with the step by the folder of a checkpoint. One on
    a bucket is brought to this machine.
    """
    if is_url(text):
        url, step = run_of_url(text)
        return fetch_run(url), step
    named, step = (text, None) if Path(text).exists() else without_step(text)
    folder = Path(named)
    place = folder.absolute()
    if step is None and place.parent.name == CHECKPOINTS:
        store = Store(place.parent)
        step = next((each for each in store.steps() if store.path(each) == place), None)
        if step is not None:
            return place.parent.parent, step
    found = store_of_run(folder)
    is_within = found and found.folder == folder and place.name == CHECKPOINTS
    return (place.parent if is_within else folder), step


def store_of_run(folder: Path) -> Store | None:
    """The checkpoints of a workdir, or of the folder in it that they are in; None where there are none."""
    stores = (Store(folder / CHECKPOINTS), Store(folder))
    return next((store for store in stores if store.folder.is_dir() and store.steps()), None)


def _newest(store: Store, slots: bool) -> RunWeights | None:
    def verified(step: int) -> RunWeights:
        weights = RunWeights(store.path(step), slots=slots)
        weights.verify()
        return weights

    return store.newest_intact(verified, otherwise="name another run")


def _at(store: Store, step: int) -> Path:
    if step not in store.steps():
        raise NotFoundError(
            f"{store.folder} has no checkpoint of step {step}.",
            given=f"step {step}",
            expected=f"one of the steps there are: {', '.join(map(str, store.steps()))}",
            hint="name one of these, or the workdir alone for the newest that is intact",
        )
    return store.path(step)
