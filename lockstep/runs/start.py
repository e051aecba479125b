"""How a run starts: from a checkpoint of its own or of another run, from weights in a file, or from fresh ones.

A dry run ends there, and prints the topology: which worker computes which towers, where, and where the state lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.checkpoints.store import Checkpoint
from lockstep.checks import check_one_of
from lockstep.errors import InputError, NotFoundError
from lockstep.exchange.exchange import AllReduce, is_exact
from lockstep.exchange.tree import assign_towers
from lockstep.inline_toml import inline_toml
from lockstep.listing import shorten
from lockstep.models.layers import FrozenBatchNorm2d
from lockstep.readers.object_survey import ObjectSurvey
from lockstep.readers.reader import NO_DECODER
from lockstep.recipes.python_parts import PythonModel
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts
from lockstep.runs.inputs import unused_classes
from lockstep.runs.objects import probe_largest_batch
from lockstep.runs.segment import Files, RunEvent
from lockstep.runs.stages import Stages
from lockstep.runs.validation import SPLIT, score_split
from lockstep.runs.workdir import KnownData, Workdir, class_names
from lockstep.screen import log
from lockstep.served.exchanges import Asynchronous, Backups, is_served, num_computing, towers_of
from lockstep.terminal import in_columns
from lockstep.towers.batch_norm import keeps_batch_statistics
from lockstep.training import choices
from lockstep.training.choices import Choices
from lockstep.training.loop import bind_loop
from lockstep.training.preflight import check_data
from lockstep.training.run_weights import open_weights, run_at_step
from lockstep.training.saving import read_checkpoint, save, store_of
from lockstep.training.warm_start import warm_start
from lockstep.weights.warm_start import WarmStartReport
from lockstep.workers.devices import describe_accelerator
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.exchange.exchange import Exchange
    from lockstep.training.state import TrainState


class Origin(NamedTuple):
    """The source of the weights and the position that a run starts with."""

    is_resumed: bool = False
    """Whether it is the run's own checkpoint, which goes before all others."""
    is_forked: bool = False
    """Whether it is a checkpoint of another run."""
    data_changed: Sequence[str] = ()
    """Changes in the data since the checkpoint was saved, a line each."""
    report: WarmStartReport | None = None
    """The tensors that were loaded, where the run starts from weights in a file."""


@dataclass(frozen=True)
class Start:
    """All that comes before the first segment of a run: the state is loaded, recipe and choices are written down."""

    recipe: Recipe
    """Recipe of the whole run, with all its stages."""
    stages: Stages
    files: Files | None
    changed: Sequence[str]
    """Changes of the recipe since the last start, a line each."""
    _: KW_ONLY
    objects: ObjectSurvey | None
    """What the chief knows of the objects of a detector's images."""
    is_data_elsewhere: bool
    """The data is read in the folder where an earlier start has read it, which is not this one."""
    accept_data_change: bool
    fork_from: str | None

    def load(self, worker: Worker) -> tuple[ResolvedChoices, Origin]:
        """Load the state to start from; returns the choices, too."""
        stages, files = self.stages, self.files
        choices = resolve_choices(self.recipe, stages.parts, worker, files.workdir if files else None)
        if worker.is_chief:
            self._log_changes(choices.changed)
            if files and not files.store.steps():
                files.workdir.check_unstarted()
        origin = self._load_origin(worker)
        parts = stages.parts
        _check_activations(self.recipe, worker)
        for hook in self.recipe.hooks:
            hook.get()  # which refuses what could not be called with a report
        # It refuses what does not fit.
        bind_loop(parts.state, parts.towers, self.recipe.exchange)
        if not (origin.is_resumed or origin.is_forked):
            _check_fresh_norms(stages.now.recipe, parts, worker)
        return choices, origin

    def _load_origin(self, worker: Worker) -> Origin:
        """Load the state to start from, the same on all workers.

        A checkpoint of the run's own goes before one of another run, and that before the weights that the recipe names.
        """
        stages, fork_from, given = self.stages, self.fork_from, self.recipe.warm_start
        check_data(stages.parts.loader, worker)
        own = read_checkpoint(self.files.store) if self.files else None
        checkpoint = own or (_of_another_run(fork_from) if fork_from else None)
        source = given.path if given else None
        if checkpoint is None:
            if given and source:
                return Origin(report=warm_start(stages.parts.state, source, given.mapping, given.takes))
            return Origin()
        changed = stages.load(checkpoint, accept_data_change=self.accept_data_change)
        if worker.is_chief:
            step, how = checkpoint.step, "resumed" if own else "taken up"
            log.info("%s at step %d, position %d, from %s", how, step, stages.parts.loader.position, checkpoint.path)
            if own and fork_from:
                log.info("not forked again: the run goes on from its own checkpoint of step %d", step)
            if source:
                log.info("%s is not loaded: the run goes on from its own checkpoint of step %d", source, step)
        return Origin(is_resumed=own is not None, is_forked=own is None, data_changed=changed)

    def begin(self, worker: Worker) -> RunEvent:
        """Load the state, and write recipe and choices down; returns the event that the first segment begins with."""
        choices, origin = self.load(worker)
        stages, files = self.stages, self.files
        facts: dict[str, Any] = {"changed": [*self.changed, *choices.changed]}
        largest = max((span.recipe for span in stages.spans), key=lambda each: each.data.image_size)
        probe_largest_batch(largest, stages.parts, self.objects, worker)
        if not origin.is_resumed and (self.recipe.task or isinstance(self.recipe.model, PythonModel)):
            try_task(self.recipe, stages.parts, worker)
        if origin.data_changed:
            facts["data_changed"] = origin.data_changed
        if files and worker.is_chief:
            files.workdir.write_start(self.recipe, choices.first, origin.report)
            self._write_known_data(files.workdir)
        if files and origin.is_forked:
            # Saved before the history names its step: a fork that is killed begins again, or goes on from here.
            save(stages.parts.state, stages.parts.loader, files.store)
            facts["forked_from"] = self.fork_from
        return RunEvent("resume" if origin.is_resumed else "start", facts, choices.now)

    def dry_run(self, worker: Worker) -> list[str]:
        """Load the state, and describe in lines how the run would go on."""
        self.load(worker)
        return describe_topology(self.stages.parts, self.recipe.exchange, worker)

    def _write_known_data(self, workdir: Workdir) -> None:
        before = KnownData.of(workdir)
        folder = before.folder if self.is_data_elsewhere else Path.cwd()
        names = class_names(self.stages.parts.loader.reader) or before.class_names
        KnownData(folder, names).write(workdir)

    def _log_changes(self, choices: list[str]) -> None:
        if self.files is None:
            log.info("without a workdir nothing is written: no checkpoints, metrics or summaries")
            if self.recipe.loggers:
                log.warning("without a workdir nothing is logged: %s", inline_toml(self.recipe.loggers))
        if unused := unused_classes(self.recipe, self.stages.parts.examples.trained_classes):
            log.warning("%s", unused)
        for line in self.stages.mismatches():
            log.warning("%s", line)
        for line in self.changed:
            log.info("changed since the last start: %s", line)
        for line in choices:
            log.warning("changed since the first start, so the bits may differ: %s", line)


def try_task(recipe: Recipe, parts: Parts, worker: Worker) -> None:
    """Compute the losses and the scores of some examples, and forget them; all workers call it together.

    What a network or task of the user's own lacks thus ends a run before anything is written, and not at its first
    evaluation.
    """
    exchange, count = recipe.exchange, parts.towers.num_towers
    if not (is_served(exchange) and worker.num_workers > 1 and worker.is_chief):
        mine = towers_of(exchange, worker.rank, worker.num_workers, count)
        counts = parts.task.counts(parts.state.model)
        step = bind_loop(parts.state, parts.towers, exchange)
        with closing(parts.loader.batches(mine, count, worker.device)) as batches:
            step.rehearse(parts.task.losses, next(batches), counts)
    if parts.scores(SPLIT):
        micro_batch = recipe.evaluate.micro_batch or recipe.batch_size
        scored = score_split(recipe, parts, SPLIT, most=micro_batch * worker.num_workers)
        if scored and (best := recipe.checkpoints.retention.best):
            check_one_of("checkpoints.retention.best", best, [f"{SPLIT}/{name}" for name in scored.scores])


def check_sources(recipe: Recipe, path: Path | None, fork_from: str | None) -> None:
    """Check that what a run without a checkpoint of its own begins with can be opened: another run, or weights."""
    if path and path.is_dir() and store_of(path).steps():
        return
    if fork_from:
        _check_has_checkpoint(fork_from)
    elif recipe.warm_start and recipe.warm_start.path:
        open_weights(recipe.warm_start.path)


def _check_has_checkpoint(run: str) -> None:
    folder, step = run_at_step(run)
    store = store_of(folder)
    steps = store.steps()
    if not steps or step not in (None, *steps):
        raise NotFoundError(
            f"There is no checkpoint{'' if step is None else f' of step {step}'} in {store.folder}.",
            given=f"--fork-from {run}",
            expected=f"one of the steps there are: {', '.join(map(str, steps))}"
            if steps
            else "a run that has saved one",
            hint="name one of these steps, or none for the newest" if steps else "check the path",
        )


def _of_another_run(fork_from: str) -> Checkpoint:
    _check_has_checkpoint(fork_from)
    checkpoint = read_checkpoint(*run_at_step(fork_from))
    assert checkpoint is not None, "there is one, and where all are damaged the chief has raised"
    return checkpoint


class ResolvedChoices(NamedTuple):
    """With what a start computes."""

    first: Choices
    """The choices of the first start."""
    now: Choices
    changed: list[str]
    """A line for each that differs now."""


def resolve_choices(recipe: Recipe, parts: Parts, worker: Worker, workdir: Workdir | None) -> ResolvedChoices:
    """Determine threads, kernels and versions, those of the first start where they were saved, and log them.

    An exact run refuses choices that differ from those of its first start.
    """
    exact = is_exact(recipe.exchange)
    saved = worker.group.broadcast(workdir.saved_choices() if workdir and worker.is_chief else None)
    before = Choices(**saved) if saved else None
    now = choices.resolve(
        parts.state, parts.towers, parts.loader, worker, exact=exact, saved=before, num_threads=recipe.num_threads
    )
    choices.compare(now, worker, exact=exact)
    torch.set_num_threads(now.threads)
    worker.pulse.shared_threads = 1 if exact else now.threads  # for the next run of a script, if it has several
    changed = choices.differences(before, now) if before else []
    if exact:
        choices.refuse_changed(changed)
    if worker.is_chief:
        log.debug("chosen: %s", now)
        if now.decoder != NO_DECODER:
            log.info("images are decoded by %s", now.decoder)
        if parts.loader.reader.cost == "decode":
            log.info("%s", parts.loader.pool.describe(worker.num_local_workers))
    return ResolvedChoices(before or now, now, changed)


def _check_fresh_norms(recipe: Recipe, parts: Parts, worker: Worker) -> None:
    """Refuse batch norm that is frozen by the recipe over a fresh model, and so normalises nothing; of a part, warn.

    Raises:
        InputError: no norm that is frozen has the statistics of trained weights, and settings of the recipe free them.
    """
    model, is_frozen = parts.state.model, parts.towers.batch_norm == "frozen"
    norms = {name: module for name, module in model.named_modules() if keeps_batch_statistics(module)}
    kept = {
        name: module
        for name, module in norms.items()
        if is_frozen
        or not module.training
        or isinstance(module, FrozenBatchNorm2d)
        or any(module is still for still in parts.state.frozen.norms)
    }
    if not kept:
        return
    statistics: Any = [(module.running_mean, module.running_var) for module in kept.values()]
    are_fresh = torch.stack([~mean.any() & (variance == 1).all() for mean, variance in statistics]).tolist()
    fresh = [name for name, each in zip(kept, are_fresh, strict=True) if each]
    thawing = " ".join(f"--set {setting}" for setting in _thawing(recipe))
    given = f"{len(fresh)} of {len(norms)} batch norms keep their statistics, and have those of a fresh model"
    why = "with mean 0 and variance 1 nothing is normalised, and losses may be in the millions"
    mend = "start from trained weights (--set warm_start.path=FILE), or let "
    mend += f"them learn: {thawing}" if thawing else "the model train them"
    if fresh and len(fresh) == len(kept) and thawing:
        raise InputError(
            "Batch norm is frozen over weights that are not trained.",
            given=f"{given}: {shorten(fresh)}",
            expected=f"statistics of trained weights: {why} else",
            hint=mend,
        )
    if fresh and worker.is_chief:
        log.warning("%s: %s: %s; %s", given, why, shorten(fresh), mend)


def _thawing(recipe: Recipe) -> list[str]:
    """Return the settings by which batch norm that is frozen would learn its statistics."""
    model: Any = recipe.model
    extractor = getattr(model, "feature_extractor", None)
    frozen_by = {
        "model.freeze_batchnorm=false": getattr(model, "freeze_batchnorm", False),
        "model.feature_extractor.batch_norm_trainable=true": not getattr(extractor, "batch_norm_trainable", True),
        "towers.batch_norm=mean": recipe.towers.batch_norm == "frozen",
        "freeze_statistics=false": recipe.freeze_statistics,
    }
    return [setting for setting, is_frozen in frozen_by.items() if is_frozen]


def _check_activations(recipe: Recipe, worker: Worker) -> None:
    """Refuse to show the outputs of modules on a chief that runs none."""
    every, exchange = recipe.watch.activations, recipe.exchange
    if every.amount and num_computing(exchange, worker.num_workers) < worker.num_workers:
        raise InputError(
            "The chief of this exchange computes no towers, so it sees no activations.",
            given=f"watch.activations={str(every)!r}, {exchange}, {worker.num_workers} workers",
            expected="no activations, another exchange, or one worker",
            hint="leave out watch.activations (--set watch.activations=0)",
        )


def describe_topology(parts: Parts, exchange: Exchange, worker: Worker) -> list[str]:
    """Describe how a run would go on from where its parts stand, in lines; all workers call it, and get the same."""
    state, loader, count = parts.state, parts.loader, parts.towers.num_towers
    size = loader.batch_size // count
    towers, positions = _part_of(worker, parts, exchange)
    here = {
        "host": worker.host,
        "worker": str(worker.rank),
        "device": " ".join([str(worker.device), describe_accelerator(worker.device).get("gpu", "")]).rstrip(),
        "threads": str(torch.get_num_threads()),
        "towers": towers,
        "first positions": positions,
    }
    workers: list[dict[str, str]] = worker.group.gather(here)
    return [
        f"{count} x {size} examples an update, from step {state.step}, position {loader.position}",
        f"exchange: {_transport(exchange, worker)}",
        "",
        *in_columns([[*here], *([*each.values()] for each in workers)]),
        "",
        *_describe_state(state),
    ]


def _part_of(worker: Worker, parts: Parts, exchange: Exchange) -> tuple[str, str]:
    """Name the towers of a worker, and the positions of the first examples that it reads."""
    loader, count = parts.loader, parts.towers.num_towers
    if isinstance(exchange, Backups | Asynchronous) and worker.num_workers > 1:
        if worker.is_chief:
            return "serves", "none"
        num_slices = exchange.num_slices(count)
        size = loader.batch_size // num_slices
        return "one at a time" if num_slices > 1 else "all in turn", _range(
            loader.position + (worker.rank - 1) * size, size
        )
    mine = assign_towers(count, worker.num_workers)[worker.rank]
    size = loader.batch_size // count
    return _range(mine.start, len(mine)), _range(loader.position + mine.start * size, len(mine) * size)


def _transport(exchange: Exchange, worker: Worker) -> str:
    if worker.num_workers == 1:
        return f"{exchange}, of one worker: nothing is sent"
    if is_served(exchange):
        return f"{exchange}, served by worker 0"
    name = exchange.resolve(worker) if isinstance(exchange, AllReduce) else "what it connects by itself"
    return f"{exchange} over {name.replace('_', ' ')}"


def _describe_state(state: TrainState) -> list[str]:
    sections = state.sections()
    num_bytes = sum(t.numel() * t.itemsize for tensors in sections.values() for t in tensors.values())
    rows: list[Sequence[str]] = [("parameter", "shape", "dtype", "kept beside it")]
    for name, tensor in sections["parameters"].items():
        slots = [key.removesuffix(f"/{name}") for key in sections["slots"] if key.endswith(f"/{name}")]
        beside = slots + (["average"] if name in sections["average"] else [])
        rows.append((*_facts(name, tensor), ", ".join(beside) if name in state.parameters else "not trained"))
    if sections["buffers"]:
        rows.append(("buffer", "shape", "dtype", ""))
        rows += [(*_facts(name, tensor), "") for name, tensor in sections["buffers"].items()]
    return [
        f"state: all of it on the device of each worker, {num_bytes / 1e6:.1f} MB; the chief saves it",
        "",
        *in_columns(rows),
    ]


def _facts(name: str, tensor: Any) -> tuple[str, str, str]:
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return name, shape, str(tensor.dtype).removeprefix("torch.")


def _range(start: int, length: int) -> str:
    return f"{start} to {start + length - 1}" if length > 1 else str(start)
