"""Running the towers of one worker: losses, gradients and new statistics of each, added up in the order of the tree.

More towers than workers is gradient accumulation, in bits that do not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.exchange.bucketed import BUCKET_BYTES, FIRST_BUCKET_BYTES
from lockstep.exchange.tree import GradientHook, PartialSum, TreeSum, assign_towers
from lockstep.optim.gradients import Gradients
from lockstep.optim.transforms import BoundTransforms
from lockstep.randomness import key_of, mix
from lockstep.spans import span
from lockstep.tensors import reading_waits
from lockstep.towers.activation_checkpointing import ActivationCheckpointing
from lockstep.towers.backends import backends_of_steps
from lockstep.towers.backward import (
    gradients,
    hooked_gradients,
    is_reentrant,
    own_gradients,
    reentrant_gradients,
    watched_gradients,
)
from lockstep.towers.batch_norm import around_towers
from lockstep.towers.diagnosis import Finding, first_nonfinite
from lockstep.towers.statistics import Statistics
from lockstep.towers.tower_outputs import TowerOutputs, objective
from lockstep.towers.towers import CompileMode, Precision, Towers
from lockstep.types import Batch
from lockstep.workers.random_streams import RandomStreams
from lockstep.workers.rank import Worker
from lockstep.workers.signals import interruptible

if TYPE_CHECKING:
    from lockstep.exchange.exchange import OverlappedConnection
    from lockstep.types import LossFunction

OWNING_PAYS_FROM_ELEMENTS = 2**16
_ALIGNMENT_BYTES = 64
"""A line of a processor's cache, and its widest vector."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return the context in which losses and scores are computed; it can be entered again once it is left."""
    dtype = _AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def compiled(model: nn.Module, mode: CompileMode, *, in_buckets: bool = False) -> nn.Module:
    """Compile a model, which keeps its names; `in_buckets`, in parts that end where a bucket of gradients is full.

    The backward pass of what is compiled as one gives all its gradients at its end, when nothing is left to send them
    beside. Torch cuts the nets of its DistributedDataParallel in this way.
    """
    whole: Any = (
        torch.compile(model, backend=_compiler_in_buckets(mode)) if in_buckets else torch.compile(model, mode=mode)
    )
    return cast("nn.Module", whole)


@cache  # torch compiles anew for another backend
def _compiler_in_buckets(mode: CompileMode) -> Callable[..., Any]:
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._inductor import list_mode_options

    inductor: Callable[..., Any] = lookup_backend("inductor")
    part = partial(inductor, config_patches=list_mode_options(mode))
    return DDPOptimizer(BUCKET_BYTES, part, FIRST_BUCKET_BYTES).compile_fn


class StepInputs(NamedTuple):
    """Inputs of one step that are the same for all its towers."""

    step: int = 0
    """Completed updates."""
    counts: Mapping[str, float | Tensor] = {}
    """For losses that are sums: the number of things summed, over all towers."""
    loss_scale: float | None = None
    """The losses are multiplied by it before the backward pass; None: they are not scaled."""
    extras: Sequence[float] | Tensor = ()
    """Numbers that the worker adds to the sum once; a tensor where the host would wait for the sum."""


class TowerBatch(NamedTuple):
    """The slice of a batch that one tower runs, or all of them together where they are joined."""

    leaf: int
    """Index of its operand in the tree."""
    tower: int
    """The first one."""
    batch: Batch


class TowerHost:
    """Runs a worker's towers in turn through one module.

    Args:
        parameters: those that are trained, by name.
        name: of the state; a key of the towers' random streams.
        transforms: of each tower's own gradients.
        still: batch norm that keeps its statistics.
        exact: with deterministic algorithms.
        any_order: a tower's place in the sum is unknown while it runs (backup workers); see `Statistics`.
        sends_early: gradients of the last tower are sent while its backward pass goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        towers: Towers,
        worker: Worker,
        name: str,
        transforms: BoundTransforms | None = None,
        still: Sequence[nn.Module] = (),
        *,
        exact: bool = False,
        any_order: bool = False,
        sends_early: bool = False,
    ) -> None:
        self.outputs = TowerOutputs(model, parameters, is_alone=worker.num_workers == 1)
        self.statistics = Statistics(model, towers.batch_norm, towers.num_towers, any_order=any_order)
        self.absent: dict[int, int] = {}
        """Number of the towers just run without a gradient for a parameter, by its index, where any had none."""
        self.values: dict[int, list[float] | Tensor] = {}
        """The losses and metrics of each tower just run, by its index."""
        self.leaves: dict[int, int] = {}
        """The leaf of the tree that each tower just run is, by its index."""
        self.tap: tuple[int, Callable[[PartialSum], None]] | None = None
        """A tower, by its index, and what is called with its operand before it is added to others."""
        self._plain_model = model
        self._model = model
        if towers.compile:
            self._model = compiled(model, towers.compile_mode, in_buckets=sends_early and transforms is None)
        patterns = towers.activation_checkpointing
        self._activations = ActivationCheckpointing(model, patterns) if patterns else nullcontext()
        self._names, self._parameters = list(parameters), tuple(parameters.values())
        self._towers, self._transforms = towers, transforms
        self._is_joined = towers.joined
        self._stream_key = key_of(name)
        device = self._parameters[0].device
        self._streams = RandomStreams(device)
        self._replays_graphs = towers.compile_mode != "default" and reading_waits(device)
        backends = backends_of_steps(towers, device, exact=exact)
        self._backends: AbstractContextManager[None] = backends if backends.flags else nullcontext()
        self._precision = autocast(device, towers.precision)
        self._batch_norm = around_towers(model, towers, worker, still)
        hosted = len(assign_towers(towers.num_towers, worker.num_workers)[worker.rank]) if self._is_joined else 1
        self._share = hosted / towers.num_towers
        # With nothing to add to it, the update gets what the backward pass made, and may use it up once what is held
        # elsewhere is copied: to look for that costs more than it saves where there is little to use up.
        num_elements = sum(p.numel() for p in self._parameters)
        self._owns = hosted == towers.num_towers and num_elements >= OWNING_PAYS_FROM_ELEMENTS
        self._rank = worker.rank
        # Else the others have what joined towers have sent.
        self._can_run_again = not self._is_joined or worker.num_workers == 1
        self._is_reentrant: bool | None = None
        """Whether the backward pass runs others inside it, as reentrant checkpointing does. Found in the first tower,
        and again where a gradient is missing or cannot be had: that tower runs again, since its graph is used up."""
        self._seed_gradients: dict[tuple[torch.dtype, float], Tensor] = {}

    def run(
        self,
        losses: LossFunction,
        parts: Sequence[TowerBatch],
        inputs: StepInputs,
        overlapped: OverlappedConnection | None = None,
    ) -> TreeSum:
        """The sum over this worker's towers of their shares of the mean; see `tower_outputs` for its contents.

        The gradients of the last tower go to the overlapped connection, if there is one, as they come: not with
        transforms, which need them all first, nor where the towers are joined, since workers whose gradients come in
        other orders would then sum gradients where others sum statistics of the batch norm.

        The caller's random streams and the model's buffers are as before.
        """
        sums, last = TreeSum(len(self._parameters)), parts[-1].leaf
        if self._transforms is not None or self._is_joined or self._is_reentrant:
            overlapped = None
        self.absent.clear()
        self.values.clear()
        self.leaves.clear()
        factors = {name: _factor(count, self._share) for name, count in inputs.counts.items()}
        if self._replays_graphs:  # they may take the memory of the gradients before, but not of another tower's
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self._restored():
            for leaf, tower, part in parts:
                hooks = overlapped.start(sums, leaf) if overlapped is not None and leaf == last else {}
                if sums.nodes:
                    self.statistics.restore()
                    inputs = inputs._replace(extras=_zeros_like(inputs.extras))  # the first tower has added them
                self._seed(part, tower)
                try:
                    operand = self._tower(losses, part, leaf, tower, inputs, factors, hooks)
                except _NowReentrant:
                    self._expect_reentrant(is_waited_for=bool(hooks))
                    self.statistics.restore()
                    self._seed(part, tower)
                    operand = self._tower(losses, part, leaf, tower, inputs, factors)
                if self.tap is not None and self.tap[0] == tower:
                    self.tap[1](operand)
                if hooks:
                    sums.put(leaf, operand)
                else:
                    sums.add(leaf, operand)
        self.statistics.check()
        return sums

    def explain(self, losses: LossFunction, batch: Batch, tower: int, sums: TreeSum) -> Finding:
        """Run a tower's forward pass again, and find what was not finite first; `sums` is what `run` has returned."""
        part = next(part for _, first, part in self.parts(batch) if first == tower)
        leaf = self.leaves[tower]
        operand = next(operand for node, operand in sums.nodes if node.start <= leaf < node.start + node.span)
        found = dict(zip(self._names, operand.tensors, strict=False))

        def run_again() -> None:
            self._seed(part, tower)
            with self._batch_norm, self._precision:
                losses(self._plain_model, part)

        with self._restored():
            # Joined towers sum over the workers as they run, and the others do not run again.
            run = None if self._is_joined else run_again
            words, rows = first_nonfinite(self._plain_model, part, run, found)
        size = batch.batch_size // self._towers.num_towers
        first = batch.position + tower * size
        return Finding(words, tower, range(first, first + size * len(part.towers)), rows)

    def parts(self, batch: Batch) -> list[TowerBatch]:
        """The slices that run one after the other."""
        if self._towers.channels_last:
            _to_channels_last(batch)
        towers = batch.towers
        if self._is_joined:
            return [TowerBatch(self._rank, towers.start, batch)]
        if len(towers) == 1:
            return [TowerBatch(towers.start, towers.start, batch)]
        size = batch.batch_size // self._towers.num_towers
        return [
            TowerBatch(
                tower, tower, _aligned(batch.rows(slice(index * size, (index + 1) * size), range(tower, tower + 1)))
            )
            for index, tower in enumerate(towers)
        ]

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """The caller's random streams and the model's buffers are at the end what they were at the start."""
        self.statistics.save()
        self._streams.set_aside()
        try:
            with self._backends:
                yield
        finally:
            self._streams.put_back()
            self.statistics.restore()

    def _seed(self, batch: Batch, tower: int) -> None:
        self._streams.seed(mix(batch.seed, self._stream_key, batch.position, tower))

    def _tower(
        self,
        losses: LossFunction,
        batch: Batch,
        leaf: int,
        tower: int,
        inputs: StepInputs,
        factors: Mapping[str, float | Tensor],
        hooks: Mapping[int, GradientHook] = MappingProxyType({}),
    ) -> PartialSum:
        """Run one tower: the operand that it adds to the sum. The hooks get its gradients, by index, as they come."""
        with self._batch_norm:  # around the backward pass too: checkpointing runs parts of the model again in it
            with self._precision, self._activations, interruptible(), span("forward", tower, on_device=True):
                returned = losses(self._model, batch)
            named, metrics = self.outputs.checked(returned, factors)
            total = objective(named)
            with span("backward", tower, on_device=True):
                found, owned = self._backward(total, inputs.loss_scale or 1.0, hooks)
        tensors, numbers, values, absent = self.outputs.packed(named, metrics, found, self._share, inputs.extras)
        if absent and not self._is_reentrant and is_reentrant(total):
            raise _NowReentrant
        for index in absent:
            self.absent[index] = self.absent.get(index, 0) + 1
        if self._transforms is not None:
            tensors, owned = self._transformed(self._transforms, tensors, inputs), False
        self.leaves[tower], self.values[tower] = leaf, values
        return PartialSum(tensors + self.statistics.shares(leaf, self._share), numbers, owned=owned)

    def _backward(
        self, total: Tensor, loss_scale: float, hooks: Mapping[int, GradientHook]
    ) -> tuple[Sequence[Tensor | None], bool]:
        """This tower's share of the mean's gradients, times the loss scale; with transforms, its own gradients.

        And whether nobody else holds them.
        """
        start = loss_scale if self._transforms is not None else loss_scale * self._share
        seed = self._seed_gradients.get((total.dtype, start))
        if seed is None:
            seed = torch.full_like(total, start, requires_grad=False)
            self._seed_gradients[total.dtype, start] = seed
        is_first = self._is_reentrant is None
        if is_first:
            self._is_reentrant = is_reentrant(total)
        if self._is_reentrant:
            return reentrant_gradients(total, self._parameters, seed), False
        try:
            if hooks:
                return hooked_gradients(total, self._parameters, seed, hooks), False
            if self._owns:
                return own_gradients(total, self._parameters, seed)
            if is_first and self._can_run_again:
                found, has_run_others = watched_gradients(total, self._parameters, seed)
                if has_run_others:
                    raise _NowReentrant
                return found, False
            return gradients(total, self._parameters, seed), False
        except RuntimeError:  # torch refuses what is reentrant and lies on the way to a parameter
            if is_reentrant(total):
                raise _NowReentrant from None
            raise

    def _expect_reentrant(self, *, is_waited_for: bool) -> None:
        """Compute gradients from now on as reentrant checkpointing, which began after the first tower, needs it."""
        if is_waited_for or not self._can_run_again:
            raise InputError(
                "Reentrant checkpointing begins after the first step.",
                given="torch.utils.checkpoint.checkpoint(..., use_reentrant=True)",
                expected="the same in each step, from the first one on",
                hint="write use_reentrant=False, as torch recommends",
            )
        self._is_reentrant = True

    def _transformed(self, transforms: BoundTransforms, tensors: list[Tensor], inputs: StepInputs) -> list[Tensor]:
        """A tower's share of the mean, after the transforms of its own gradients; not transformed if not finite."""
        scale = inputs.loss_scale or 1.0
        own = Gradients(self._names, tensors[: len(self._names)], divisor=scale)
        to_share: float | Tensor = 1.0 / (self._share * scale)
        if own.reading_waits and not transforms.readers:
            norm, _ = own.unread_norms()
            # Not finite, they are NaN in the end: a transform might hide what is wrong.
            to_share = torch.where(norm.isfinite(), to_share, math.nan)
            is_finite = True
        else:
            is_finite = own.norm < math.inf
        if is_finite:
            transforms(own, inputs.step)
        own.divide(to_share)
        return [g for g in own.tensors if g is not None] + tensors[len(self._names) :]


def _factor(count: float | Tensor, share: float) -> float | Tensor:
    """1 / (count * share); with a count of 1 where there is nothing: a detector learns that there are no objects."""
    if isinstance(count, Tensor):
        return 1.0 / (torch.where(count == 0, 1.0, count) * share)
    return 1.0 / ((count or 1.0) * share)


def _zeros_like(numbers: Sequence[float] | Tensor) -> Sequence[float] | Tensor:
    return torch.zeros_like(numbers) if isinstance(numbers, Tensor) else [0.0] * len(numbers)


class _NowReentrant(Exception):  # noqa: N818 (no error)
    """A tower uses reentrant checkpointing, and those before it did not."""


def _aligned(part: Batch) -> Batch:
    """Have each tensor begin where one of its own would: kernels may compute other bits from other addresses."""
    for name, value in part.items():
        if isinstance(value, Tensor) and value.data_ptr() % _ALIGNMENT_BYTES:
            part[name] = value.clone()
    return part


def _to_channels_last(batch: Batch) -> None:
    """Lay image tensors (batch, channels, height, width) out in channels_last, once for all towers."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim == 4:
            batch[name] = value.to(memory_format=torch.channels_last)
