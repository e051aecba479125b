"""The values that travel between the parts: a batch, what a loss function is, the report of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    Scalars = Mapping[str, Tensor]
    LossFunction = Callable[[nn.Module, "Batch"], Scalars | tuple[Scalars, Scalars]]
    """`losses(model, batch)` returns named scalars whose sum is the objective; or (losses, metrics)."""
    CountFunction = Callable[["Batch"], Mapping[str, float | Tensor]]
    """`counts(batch)` returns how many things some of the losses, by name, are sums over in this part of the batch."""
    ScoreFunction = Callable[[nn.Module, "Batch"], Mapping[str, Tensor | tuple[Tensor, ...]]]
    """`score(model, batch)` returns named tensors of shape (batch,), one number an example; or what a metric takes."""


class Batch(dict[str, Any]):
    """Examples of one attempt, by field: tensors with the batch first, or lists of that length.

    A worker's batch holds the examples of its own towers alone, in the order of the stream.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        position: int,
        batch_size: int,
        towers: range,
        seed: int = 0,
        epoch_size: int = 0,
    ) -> None:
        super().__init__(fields)
        self.seed = seed
        """Of the stream; the towers' own random streams are keyed by it."""
        self.position = position
        """Place in the stream of the first example of the attempt (of tower 0)."""
        self.batch_size = batch_size
        """Examples of the attempt over all towers."""
        self.towers = towers
        """The towers whose examples are in here."""
        self.epoch_size = epoch_size
        """Examples in an epoch of the stream; 0 where it has none."""
        self.wait_seconds = 0.0
        """How long the training loop waited for this batch."""
        self.stage_seconds: Mapping[str, float] = {}
        """Where the time of this worker's part went, by stage: read, decode, augment, collate, copy."""
        self.queue_fill: float | None = None
        """Share of what may be read ahead that was there when this was asked for; None where nothing is."""
        self.bad: Sequence[BadExample] = ()
        """The examples of this worker's part that could not be read, and what stands in for them."""
        self.quarantine: Callable[[Sequence[BadExample]], None] = lambda found: None
        """Told of the bad examples of all workers, before anything is made of the batch."""
        self.example_ids: Callable[[int, int], list[str]] = lambda position, count: []
        """Names of so many examples from a position of the stream on."""
        self.attempted: Callable[[], None] = lambda: None
        """Called once the attempt is over: the stream's position moves past it."""
        self.report: StepReport | None = None
        """What the last attempt made of this batch did."""

    def rows(self, rows: slice, towers: range) -> Batch:
        """The part of the batch that belongs to some of its towers."""
        fields = {name: value[rows] for name, value in self.items()}
        part = Batch(
            fields,
            position=self.position,
            batch_size=self.batch_size,
            towers=towers,
            seed=self.seed,
            epoch_size=self.epoch_size,
        )
        part.example_ids = self.example_ids
        return part


class BadExample(NamedTuple):
    """An example that could not be read, where that may be."""

    position: int
    """Its place in the stream; in an evaluation, its index."""
    example_id: str
    reason: str
    replaced_by: str = ""
    """The example that was read in its place; none in an evaluation."""


class NonFiniteReport(NamedTuple):
    """Why an attempt changed nothing."""

    position: int
    """Place in the stream of the first example of its batch."""
    reasons: tuple[str, ...]
    """What is not finite, in words."""
    culprits: tuple[str, ...] = ()
    """Where it came from: towers with their workers, the first thing in each that is not finite, and the examples."""
    batch: Batch | None = None
    """The part of the batch that this worker's guilty towers had; None where it has none."""


class StepReport(NamedTuple):
    """What one attempt did. Losses and metrics are means over all towers."""

    progress: Progress
    losses: Mapping[str, float]
    smoothed: Mapping[str, float]
    """Moving averages of the losses and of `total`, as the state's `loss_average` says."""
    metrics: Mapping[str, float]
    learning_rate: float
    """The rate this update used; that of the first optimizer, where there are several."""
    gradient_norm: float
    """Global norm of the averaged gradients, before any transform."""
    num_examples: int
    step_seconds: float
    """Wall time of this attempt on this worker, waiting for data included."""
    wait_seconds: float
    """The part of it that was spent waiting for data."""
    skipped: bool = False
    """The attempt was not finite and changed nothing."""
    learning_rates: Mapping[str, float] = MappingProxyType({})
    """The rates by pattern, where there are several optimizers; else that one under ""."""
    nonfinite: NonFiniteReport | None = None
    """Why it was refused."""
    stage_seconds: Mapping[str, float] = MappingProxyType({})
    """Where the time of this worker's part of the batch went, by stage; most of it while earlier steps were made."""
    queue_fill: float | None = None
    """Share of what may be read ahead that was there when the batch was asked for; None where nothing is."""
    bad: tuple[BadExample, ...] = ()
    """Examples of all workers that could not be read, and what was read in their place."""
    stop_requested: bool = False
    """Some worker was asked to stop: all of them see it at the same step."""

    @property
    def step(self) -> int:
        """Updates completed so far, this one included."""
        return self.progress.step

    @property
    def total(self) -> float:
        """The objective: the sum of the losses."""
        return sum(self.losses.values())

    @property
    def examples_per_second(self) -> float:
        """Rate of this one attempt, over all towers."""
        return self.num_examples / self.step_seconds if self.step_seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the attempt spent waiting for data, 0 to 1."""
        return self.wait_seconds / self.step_seconds if self.step_seconds else 0.0
