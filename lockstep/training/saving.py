"""Checkpoints of a run: written at once or while it goes on, and resumed, exactly: the next batch is the one due."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from lockstep.checkpoints.background import BackgroundWriter, wait_for_writers
from lockstep.checkpoints.encoding import FROZEN
from lockstep.checkpoints.fetching import fetch_run, local_folder
from lockstep.checkpoints.mirror import MirroredStore, mirror_of, store_in
from lockstep.checkpoints.store import BeforeCommit, Checkpoint, Store
from lockstep.checks import Count, FiniteFloat, PositiveFloat, check_all, check_type, check_value
from lockstep.data.loader import Loader, check_stream
from lockstep.errors import CheckpointError, InputError, NotFoundError
from lockstep.screen import log
from lockstep.storage.remote_path import is_url
from lockstep.training.handing_over import hand_over, only_chief_has
from lockstep.training.preflight import check_data, compare_trained_with
from lockstep.training.saved_state import (
    EXTRA,
    STATEFUL,
    ExtraState,
    check_extra_state,
    extra_state,
    set_extra_state,
    set_stateful,
    state_of,
)
from lockstep.training.state import TrainState, before_change
from lockstep.version import __version__
from lockstep.workers.rank import join
from lockstep.workers.signals import uninterrupted

States = TrainState | Mapping[str, TrainState]


def save(
    states: States, loader: Loader, workdir: str | Path | Store, *, scores: Mapping[str, float] | None = None
) -> None:
    """Write a checkpoint of the run as it is now; only the chief writes, and the others go on.

    Returns once it is on the disk, or on the bucket. A `Saver` writes while the run goes on.

    Args:
        states: one state, or several by name.
        loader: its position is saved, not what it has read ahead.
        workdir: the run's folder (checkpoints go to its `checkpoints/`), also one on a bucket ("s3://bucket/runs/mine"),
            all of which is uploaded then; or a store with other rules of retention.
        scores: of the weights as they are now, by name ("validation/top1"), for a retention that keeps the best.

    Raises:
        CheckpointError: it cannot be written, or the state is not finite: trained parameters, averages and slots have
            to be, and nothing may hold NaN, whatever `nonfinite` says. Older checkpoints are as they were. An
            UploadError where it is on the disk of this machine, and not on the bucket.
        WorkdirError: another process has taken the run on the bucket further; or the bucket cannot be reached for the
            first time in this process, by this call or by `resume`.
    """
    worker = join()
    if worker.is_chief:
        wait_for_writers()
        step, tensors, values = snapshot(states, loader)
        with worker.pulse.during(step, "save"):
            store = store_of(workdir)
            store.write(step, tensors, values, scores)
            if is_url(workdir) and isinstance(store, MirroredStore):
                store.mirror.settle()


class Saver:
    """Writes the checkpoints of a run while it goes on; only the chief does, and on the others nothing happens.

    `save` returns once the state is copied, and a thread writes the copy: whatever the loop body changes afterwards, by
    whatever means, is not in it. On an accelerator the copy is a clone there, for which nobody waits, as long as its
    memory has room for one. Where a checkpoint cannot be written, a later step or `save` raises the error. At most one
    is in flight: the next `save` waits for it. After `wait`, or at the end of a `with` statement, the last one is on
    the disk; of a folder on a bucket, to which another thread uploads it, there. An upload that fails in between is
    told, and the next checkpoint is another try.

    Args:
        workdir: the run's folder (checkpoints go to its `checkpoints/`), also one on a bucket; or a store with other
            rules of retention.
    """

    def __init__(self, workdir: str | Path | Store) -> None:
        store = store_of(workdir)
        self._writer = BackgroundWriter(store, before_change)
        self._mirror = store.mirror if is_url(workdir) and isinstance(store, MirroredStore) else None

    def save(
        self,
        states: States,
        loader: Loader,
        *,
        scores: Mapping[str, float] | None = None,
        before_commit: BeforeCommit | None = None,
    ) -> None:
        """Begin to write a checkpoint of the run as it is now; the arguments are those of `lockstep.save`.

        The thread calls `before_commit` once the files are on the disk, with the digests of the tensors and the SHA-256
        of `values.json`, before the checkpoint has its name.

        Raises:
            CheckpointError: the one before could not be written, or a tensor cannot be saved. That the state is not
                finite, a later call says.
        """
        if not join().is_chief:
            return
        step, tensors, values = snapshot(states, loader)
        self._writer.begin(step, tensors, values, scores, before_commit=before_commit)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk, or on the bucket."""
        self._writer.wait()
        if self._mirror and join().is_chief:
            self._mirror.settle()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as unwritten:
            if error is None:
                raise
            error.add_note(f"Besides: {unwritten}")


def snapshot(states: States, loader: Loader) -> tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Step, tensors and values of a checkpoint; the tensors are the run's own, not copies, the values JSON."""
    named = named_states(states)
    sections: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Any] = {}
    frozen: dict[str, list[str]] = {}
    for name, state in named.items():
        sections |= {dotted(name, section): tensors for section, tensors in state.sections().items()}
        saved[name] = state.values()
        if untrained := state.untrained():
            frozen[dotted(name, "parameters")] = untrained
    for name, state in named.items():
        extra = extra_state(state.model)
        if extra.values:
            sections[dotted(name, EXTRA)] = dict(extra.tensors)
            saved[name][EXTRA] = extra.values
        if state.stateful is not None:
            kept = state_of(state.stateful)
            sections[dotted(name, STATEFUL)], saved[name][STATEFUL] = dict(kept.tensors), kept.values
    values: dict[str, Any] = {
        "lockstep": __version__,
        "states": saved,
        "loader": loader.state(),
        "trained_with": {
            "states": {name: state.trained_with for name, state in named.items()},
            "loader": loader.made_with,
        },
    }
    if frozen:
        values[FROZEN] = frozen
    return max(state.step for state in named.values()), sections, values


def named_states(states: States) -> dict[str, TrainState]:
    """The states by name; a single one has the name ""."""
    return {"": states} if isinstance(states, TrainState) else dict(states)


def dotted(name: str, part: str) -> str:
    """The part of a state: `generator.parameters`; of a single state, which has no name, the part alone."""
    return f"{name}.{part}" if name else part


def store_of(workdir: str | Path | Store, *, anew: bool = False) -> Store:
    """The store itself, or that of a run's folder.

    One on a bucket is brought to this machine first, once in a process: in the midst of a run another's state is not
    put under its hands. With `anew` it is brought up to date.
    """
    if isinstance(workdir, Store):
        return workdir
    if not is_url(workdir):
        return store_in(Path(workdir))
    mirror = mirror_of(local_folder(str(workdir)))
    if anew or mirror is None or not mirror.is_fetched:
        mirror = mirror_of(fetch_run(str(workdir)))
        if mirror and mirror.check == mirror.check_latest:  # and no run of this process works there
            mirror.is_fetched = True
            mirror.forget()
    return store_in(local_folder(str(workdir)))


def resume(
    states: States,
    loader: Loader,
    workdir: str | Path | Store,
    *,
    changed: Sequence[str] = (),
    accept_data_change: bool = False,
) -> int | None:
    """Load the newest intact checkpoint of a workdir, if it has one, on all workers alike.

    What the run was trained with is compared: optimizers and all else that `TrainState` is given for the update, batch
    size, order and augmentations of the loader, and its data; with the first step the towers and the exchange.
    Functions and objects of your own are compared by name. Ends, intervals, workers and loader processes may differ,
    and so may the number of threads, which the log then tells; but for an exact exchange, whose bits depend on it.

    Args:
        states: one state, or several by name, as they were saved.
        loader: is set to the position of the checkpoint.
        workdir: the run's folder, or its store.
        changed: paths of what differs on purpose: `("optimizer.lr", "loader.batch_size")`. A path stands for all below
            it: "optimizer". Of several states it begins with the name of one.
        accept_data_change: go on although the examples are other ones, if they are as many; the log names them.

    Returns:
        The step it was saved at, or None where there is none and the run starts afresh.

    Raises:
        CheckpointError: there are checkpoints and none is intact, or it does not fit the states.
        NotFoundError: a worker does not see the checkpoint that the chief reads.
        InputError: the loader reads other data, or with another seed; or something else differs from what the run was
            trained with. Towers and exchange are refused by the first step.
        WorkerError: the workers' loaders read different data.
    """
    check_all("changed", changed, str, hint='write changed=("optimizer.lr",), a tuple of paths')
    if join().num_workers > 1:
        check_data(loader, join())
    checkpoint = read_checkpoint(workdir)
    if checkpoint is None:
        return None
    named = named_states(states)
    lines = compare_trained_with(checkpoint, named, loader, changed)
    load_run(checkpoint, named, loader, accept_data_change=accept_data_change)
    if join().is_chief:
        for line in lines:
            log.info("changed since the checkpoint: %s", line)
        log.info("resumed at step %d, position %d, from %s", checkpoint.step, loader.position, checkpoint.path)
    return checkpoint.step


def read_checkpoint(
    workdir: str | Path | Store, step: int | None = None, *, before: int | None = None
) -> Checkpoint | None:
    """The same checkpoint on all workers, as `Store.read` finds it; None where there is none."""
    wait_for_writers()
    worker, found, is_handed_over = join(), None, False
    if worker.is_chief:
        store = store_of(workdir, anew=True)
        found, is_handed_over = store.read(step, check_values, before=before), only_chief_has(store, worker)
    if worker.num_workers == 1:
        return found
    newest, is_handed_over = worker.group.broadcast([found.step if found else None, is_handed_over])
    if newest is not None and is_handed_over:
        return hand_over(found, worker)
    if found or newest is None:
        return found
    store = store_of(workdir)
    if not store.path(int(newest)).exists():
        raise NotFoundError(
            f"{worker.name} does not see the checkpoint that worker 0 goes on from.",
            given=f"no {store.path(int(newest))}",
            expected="a workdir that all workers see, under the path that each of them is given",
            hint="put it on a file system that all hosts mount; only worker 0 writes, but all read when they resume",
        )
    return store.read(int(newest), check_values)


def check_values(checkpoint: Checkpoint) -> None:
    """Refuse values of a checkpoint that no run has saved at its step; raises InputError."""
    states = _object(checkpoint.values, "states")
    for name in states:
        which = f"state {name!r}" if name else "the state"
        state = _object(states, name, which)
        for count in ("step", "num_refused"):
            check_value(f"{count} of {which}", state.get(count), Count)
        scale, smoothed = _object(state, "loss_scale"), _object(state, "smoothed")
        check_value("value of loss_scale", scale.get("value"), PositiveFloat)
        check_value("good_steps of loss_scale", scale.get("good_steps"), Count)
        check_value("weight of smoothed", smoothed.get("weight"), FiniteFloat)
        for loss, average in _object(smoothed, "averages").items():
            check_value(f"average of {loss!r}", average, FiniteFloat)
        _object(state, "optimizer")
        if EXTRA in state:
            _object(state, EXTRA)
    steps = [state["step"] for state in states.values()]
    if max(steps, default=None) != checkpoint.step:
        raise InputError(
            "The values are those of another step.",
            given=f"states at step {', '.join(map(str, steps)) or 'none'}",
            expected=f"step {checkpoint.step}, as the folder's name and the manifest say",
            hint="resume from another checkpoint",
        )
    check_stream(_object(checkpoint.values, "loader"))
    if "trained_with" in checkpoint.values:  # older versions did not say it
        trained_with = _object(checkpoint.values, "trained_with")
        _object(trained_with, "loader")
        for name in (made_with := _object(trained_with, "states")):
            _object(made_with, name, f"what state {name!r} was trained with" if name else "what it was trained with")


def _object(values: Mapping[str, Any], name: str, called: str = "") -> Mapping[str, Any]:
    """The object of that name in an object of JSON."""
    found = values.get(name)
    check_type(called or name, found, dict, expected="an object with values by name", hint="take another checkpoint")
    return dict(found or {})


def load_run(
    checkpoint: Checkpoint,
    states: Mapping[str, TrainState],
    loader: Loader,
    *,
    accept_data_change: bool = False,
    keeps_stateful: bool = False,
) -> list[str]:
    """Set states, by name, and a loader to where a checkpoint was saved; returns a line for each change of the data.

    With `keeps_stateful` the `stateful` of the states stays as it is.
    """
    with uninterrupted():
        load_states(checkpoint, states, keeps_stateful=keeps_stateful)
        changed = loader.load_state(checkpoint.values["loader"], accept_data_change=accept_data_change)
    if join().is_chief:
        for line in changed:
            log.warning("changed in the training data since step %d: %s", checkpoint.step, line)
    return changed


def load_states(checkpoint: Checkpoint, states: Mapping[str, TrainState], *, keeps_stateful: bool = False) -> None:
    """Set states, by name, to those of a checkpoint; its place in the stream is left out."""
    saved = checkpoint.values["states"]
    if saved.keys() != states.keys():
        raise CheckpointError(
            f"{checkpoint.path} holds other states.",
            given=_list_states(saved),
            expected=_list_states(states),
            hint="resume with the same dict of states, or one state alone, as it was saved",
        )
    sections: dict[str, dict[str, Mapping[str, Tensor]]] = defaultdict(dict)
    for path, tensors in checkpoint.tensors.items():
        name, _, section = path.rpartition(".")
        sections[name][section] = tensors
    for name, state in states.items():
        extra = ExtraState(sections[name].pop(EXTRA, {}), saved[name].get(EXTRA, {}))
        check_extra_state(state.model, extra)
        kept = ExtraState(sections[name].pop(STATEFUL, {}), saved[name].get(STATEFUL, {}))
        state.load(sections[name], saved[name])
        set_extra_state(state.model, extra)
        if state.stateful is not None and not keeps_stateful:
            set_stateful(state.stateful, kept)


def _list_states(states: Iterable[str]) -> str:
    return "one state without a name" if set(states) == {""} else f"states named {', '.join(sorted(states))}"
