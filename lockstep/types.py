"""The values that travel between the parts: progress and ends of a run, a batch, loss functions, reports of steps.

Whether an interval has passed is a pure function of two moments of the run. All workers see the same moments (the clock
is the chief's, sent along with the gradients), so all decide alike without asking each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from lockstep.errors import InputError, LockstepError, MissingFieldError, WorkerError
from lockstep.listing import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

    Scalars = Mapping[str, Tensor]
    LossFunction = Callable[[nn.Module, "Batch"], Scalars | tuple[Scalars, Scalars]]
    """`losses(model, batch)` returns named scalars whose sum is the objective; or (losses, metrics)."""
    CountFunction = Callable[["Batch"], Mapping[str, float | Tensor]]
    """`counts(batch)` returns how many things some of the losses, by name, are sums over in this part of the batch."""
    ScoreFunction = Callable[[nn.Module, "Batch"], Mapping[str, Tensor | tuple[Any, ...]]]
    """`score(model, batch)` returns named tensors of shape (batch,), one number an example; or what a metric takes."""

ProgressFunction = Callable[[int, int], object]
"""`progress(done, total)` is called with how many items are done so far, and how many there are."""


class Progress(NamedTuple):
    """One moment of a run."""

    step: int
    """Completed updates."""
    position: int
    """Place in the stream of the first example that has not been used."""
    epoch_size: int
    """Examples in an epoch; 0 where the stream has none."""
    elapsed_seconds: float = 0.0
    """Time since this start of the run, on the chief's clock."""

    @property
    def epochs(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self.position / self.epoch_size if self.epoch_size else 0.0


@dataclass(frozen=True)
class _Count:
    """Base of the ends of a run: so many of the unit that the class is called by."""

    count: float
    """How many steps, epochs or hours, above 0."""

    def __post_init__(self) -> None:
        if not self.count > 0:
            unit = type(self).__name__.lower()
            raise InputError(
                f"A run of {self.count} {unit} has no step to do.",
                given=f"{self.count} {unit}",
                expected="a number above 0",
                hint=f"give a positive number of {unit}, or none at all to train until stopped",
            )

    def __str__(self) -> str:
        return f"{self.count:g} {type(self).__name__.lower()}"


@dataclass(frozen=True)
class Steps(_Count):
    """The run ends when `count` updates are complete."""

    count: int
    """Number of updates."""

    def reached(self, progress: Progress, batch_size: int) -> bool:
        """Whether no further step is due."""
        return progress.step >= self.count

    def fraction(self, progress: Progress) -> float:
        """Share of the run that is done, 0 to 1."""
        return min(1.0, progress.step / self.count)


@dataclass(frozen=True)
class Epochs(_Count):
    """The run ends at the end of epoch `count`; every batch is full.

    The rest that does not fill a batch is left out, as by the reference trainers. With `keep_last` the last batch takes
    it, and is filled from the next epoch.
    """

    keep_last: bool = False
    """Train on the last batch of an epoch though it is not full."""

    def steps(self, epoch_size: int, batch_size: int) -> int:
        """Number of batches in that many epochs, rounded down, or up with `keep_last`."""
        batches = epoch_size * self.count / batch_size
        return math.ceil(batches) if self.keep_last else int(batches)

    def reached(self, progress: Progress, batch_size: int) -> bool:
        """Whether no further batch fits: no full one, or with `keep_last` not one example."""
        needed = 1 if self.keep_last else batch_size
        return progress.position + needed > self.count * progress.epoch_size

    def fraction(self, progress: Progress) -> float:
        """Share of the run that is done, 0 to 1."""
        return min(1.0, progress.epochs / self.count)


@dataclass(frozen=True)
class Hours(_Count):
    """This start of the run ends after `count` hours of the chief's clock."""

    def reached(self, progress: Progress, batch_size: int) -> bool:
        """Whether the time is up."""
        return progress.elapsed_seconds >= self.count * 3600

    def fraction(self, progress: Progress) -> float:
        """Share of the run that is done, 0 to 1."""
        return min(1.0, progress.elapsed_seconds / (self.count * 3600))


End = Steps | Epochs | Hours

_STEP_RANGE = re.compile(r"(\d{0,18}):(\d{1,18})")
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|s|seconds?|epochs?)")


@dataclass(frozen=True)
class Interval:
    """How often something happens: every `amount` steps, seconds or epochs; an amount of 0 is never."""

    amount: float
    unit: Literal["steps", "seconds", "epochs"] = "steps"

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Parse `"20 steps"`, `"600 s"`, `"1 epochs"` or `"0"`; other texts are an InputError."""
        if text.strip() == "0":
            return cls(0)
        match = _INTERVAL.fullmatch(text.strip())
        if match is None:
            raise InputError(
                f"{text!r} is not an interval.",
                given=repr(text),
                expected='a number and a unit: "20 steps", "600 s" or "1 epochs"; "0" switches it off',
                hint="write the number, a space and steps, s or epochs",
            )
        unit: Literal["steps", "seconds", "epochs"] = (
            "steps" if match[2].startswith("step") else "epochs" if match[2].startswith("epoch") else "seconds"
        )
        return cls(float(match[1]), unit)

    def __post_init__(self) -> None:
        if not 0 <= self.amount < math.inf:
            raise InputError(
                "An interval is a finite number, 0 or more.",
                given=f"{self.amount} {self.unit}",
                expected="0 (never) or more",
                hint="give a positive amount, or 0 to switch it off",
            )

    def __str__(self) -> str:
        amount = Decimal(str(self.amount)).normalize()
        return f"{amount:f} {'s' if self.unit == 'seconds' else self.unit}"

    def passed(self, before: Progress, now: Progress) -> bool:
        """Whether a whole multiple of the interval lies in (before, now]."""
        if not self.amount:
            return False
        return self._count(now) > self._count(before)

    def _count(self, progress: Progress) -> int:
        if self.unit == "steps":
            return int(progress.step / self.amount)
        return int((progress.elapsed_seconds if self.unit == "seconds" else progress.epochs) / self.amount)


@dataclass(frozen=True)
class StepRange:
    """Steps by number, as Python counts: those that begin when `start` to `stop` - 1 updates are complete."""

    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """Parse `"100:110"`, ten steps, or `":3"`, the first three; other texts are an InputError."""
        match = _STEP_RANGE.fullmatch(text.strip())
        if match is None:
            raise InputError(
                f"{text!r} is no range of steps.",
                given=repr(text),
                expected='its start and its end, as Python has them: "100:110" is ten steps',
                hint="write two whole numbers of 0 or more, and a colon between them",
            )
        return cls(int(match[1] or 0), int(match[2]))

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InputError(
                "There is no step in this range.",
                given=f"{self.start}:{self.stop}",
                expected="a start of 0 or more, and an end that is higher",
                hint=f"write {max(0, self.start)}:{max(0, self.start) + 10} for ten steps",
            )

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


class BatchSource(Protocol):
    """The loader of a batch, as a step sees it: it names examples, and takes the report on the batch."""

    def example_ids(self, position: int, count: int, bad: Sequence[BadExample] = ()) -> list[str]:
        """Names of `count` examples from `position` of the stream on; for bad ones, of what was read instead."""

    def add_bad(self, bad: Sequence[BadExample]) -> None:
        """Count bad examples of all workers against the budget, before an update is made from their batch."""

    def commit(self, batch: Batch, report: StepReport | None) -> None:
        """Move the stream's position past a batch whose attempt is over."""


@dataclass(frozen=True, eq=False, repr=False)
class Batch(dict[str, Any]):
    """Examples of one attempt, by field: tensors with the batch first, lists of that length, or `Ragged`s.

    A worker's batch holds the examples of its own towers alone, in the order of the stream. The fields are those of a
    dict; everything else about the batch is fixed when it is made.
    """

    fields: InitVar[Mapping[str, Any]]
    _: KW_ONLY
    position: int
    """Place in the stream of the first example of the attempt (of tower 0)."""
    batch_size: int
    """Examples of the attempt over all towers."""
    towers: range
    """The towers whose examples are in here."""
    seed: int = 0
    """Seed of the stream; the towers' own random streams are keyed by it."""
    epoch_size: int = 0
    """Examples in an epoch of the stream; 0 where it has none."""
    bad: Sequence[BadExample] = ()
    """The examples of this worker's part that could not be read, and what stands in for them."""
    wait_seconds: float = 0.0
    """How long the training loop waited for this batch."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time of this worker's part went, by stage: read, decode, augment, collate, copy."""
    queue_fill: float | None = None
    """Share of the prefetched batches that were ready when this one was asked for; None without prefetching."""
    loader: BatchSource | None = None
    """The loader that the batch comes from, to which a step commits it; None for a batch made by hand."""

    def __post_init__(self, fields: Mapping[str, Any]) -> None:
        self.update(fields)

    def __missing__(self, name: object) -> Any:
        # Called by dict for a name that is not there, and for no other: it costs no batch anything.
        raise MissingFieldError(
            f"The batch has no field {name!r}.",
            given=repr(name),
            expected=f"one of {', '.join(map(repr, self))}" if self else "nothing: the batch has no fields",
            hint=did_you_mean(name, map(str, self)) or "use one of these, or have the reader give such a field",
        )

    def rows(self, rows: slice, towers: range) -> Batch:
        """The part of the batch that belongs to some of its towers."""
        return Batch(
            {name: value[rows] for name, value in self.items()},
            position=self.position,
            batch_size=self.batch_size,
            towers=towers,
            seed=self.seed,
            epoch_size=self.epoch_size,
            bad=self.bad,
            loader=self.loader,
        )


class BadExample(NamedTuple):
    """An example that could not be read, where that may be."""

    position: int
    """Its place in the stream; in an evaluation, its index."""
    example_id: str
    reason: str
    replaced_by: str = ""
    """The example that was read in its place; none in an evaluation."""
    partner_of: str = ""
    """For one that an augmentation puts together with another: that other one."""


Cause = Literal["data", "device", "weights", "nondeterministic", "unclear"]
"""What is to blame: the data or the code; a device; a worker's copy of the model; an operator that does not give the
same bits each time; "unclear": such an operator or a device."""


class ReplayVerdict(NamedTuple):
    """What has come of making an attempt again, on this worker and on the others."""

    cause: Cause
    said: str
    """A sentence about it, for a person."""
    suspects: tuple[str, ...] = ()
    """The names of the workers whose device or copy may be bad."""
    step: int = 0
    """Completed updates before the attempt."""
    position: int = 0
    """Place in the stream of the first example of its batch."""

    @classmethod
    def from_json(cls, facts: Sequence[Any] | None) -> ReplayVerdict | None:
        """Make the verdict of its JSON, a list; None of None."""
        if facts is None:
            return None
        cause, said, suspects, *place = facts
        return cls(cause, said, tuple(suspects), *place)


class FaultError(WorkerError):
    """A worker that does not compute what the others do, or holds another copy of the model."""

    def __init__(self, what: str, *, given: object, expected: object, hint: str, verdict: ReplayVerdict) -> None:
        super().__init__(what, given=given, expected=expected, hint=hint)
        self.verdict = verdict

    def __reduce__(self) -> tuple[object, ...]:
        return _fault_error, (self.what, self.given, self.expected, self.hint, self.verdict)


def _fault_error(what: str, given: object, expected: object, hint: str, verdict: ReplayVerdict) -> FaultError:
    return FaultError(what, given=given, expected=expected, hint=hint, verdict=verdict)


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
    verdict: ReplayVerdict | None = None
    """What has come of making the attempt again; None where it was not."""


class NonFiniteError(LockstepError):
    """A loss or a gradient that is not finite; nothing was updated."""

    nonfinite: NonFiniteReport | None = None

    def about(self, nonfinite: NonFiniteReport) -> NonFiniteError:
        """The same error, with what is known of the attempt."""
        self.nonfinite = nonfinite
        return self


class Arrivals(NamedTuple):
    """The gradients that have come to the chief of a served exchange since the loop began, by the rank of the worker.

    With `Backups` a staleness of 0 alone is used; with `Asynchronous` it is about the number of workers that compute,
    less one, where they are equally fast.
    """

    used: Mapping[int, int]
    """How many are part of an update."""
    dropped: Mapping[int, int]
    """How many came too late; their examples were handed out again."""
    staleness: Mapping[int, int]
    """How many of the used ones were so many updates old."""

    def __str__(self) -> str:
        workers = sorted({*self.used, *self.dropped})
        each = [f"worker {rank} {self.used.get(rank, 0)} ({self.dropped.get(rank, 0)} dropped)" for rank in workers]
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(self.staleness.items()))
        return f"gradients used: {', '.join(each) or 'none'}; updates old: {ages or 'none'}"


class StepReport(NamedTuple):
    """What one attempt did. Losses and metrics are means over all towers."""

    progress: Progress
    losses: Mapping[str, float]
    smoothed: Mapping[str, float]
    """Moving averages of the losses and of `total`, as the state's `loss_average` says."""
    metrics: Mapping[str, float]
    learning_rate: float
    """The rate this update used; of several optimizers that of the first pattern, and all are in `learning_rates`."""
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
    """Share of the prefetched batches that were ready when this one was asked for; None without prefetching."""
    bad: tuple[BadExample, ...] = ()
    """Examples of all workers that could not be read, and what was read in their place."""
    stop_requested: bool = False
    """Some worker was asked to stop: all of them see it at the same step."""
    arrivals: Arrivals | None = None
    """For a served exchange (`Backups`, `Asynchronous`) with several workers: what became of the gradients so far."""
    regroup_requested: bool = False
    """Other workers are to join in the place of lost ones: a run by a recipe takes them in after this step."""
    verdict: ReplayVerdict | None = None
    """What has come of making an attempt again that was finite (`state.replay_steps`), where not all was the same."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON, without the batch of an attempt that was refused."""
        facts = {name: dict(value) if isinstance(value, Mapping) else value for name, value in self._asdict().items()}
        return facts | {"nonfinite": self.nonfinite and self.nonfinite._replace(batch=None)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> StepReport:
        """Make the report of what `as_json` gave, as it is after having been text."""
        nonfinite = facts["nonfinite"]
        if nonfinite is not None:
            position, reasons, culprits, _, verdict = nonfinite
            found = ReplayVerdict.from_json(verdict)
            nonfinite = NonFiniteReport(position, tuple(reasons), tuple(culprits), verdict=found)
        bad, arrivals = tuple(BadExample(*each) for each in facts["bad"]), facts["arrivals"]
        if arrivals is not None:
            arrivals = Arrivals(*({int(key): count for key, count in counts.items()} for counts in arrivals))
        progress = Progress(*facts["progress"])
        given = {"progress": progress, "nonfinite": nonfinite, "bad": bad, "arrivals": arrivals}
        return cls(**{**facts, **given, "verdict": ReplayVerdict.from_json(facts["verdict"])})

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
