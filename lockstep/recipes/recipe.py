"""The recipe: the complete description of a run, as one frozen value.

Its parts are the values that the library itself works with, so a recipe says what a script of one's own would say.
A field that may be None is None by default: in TOML it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from lockstep.checkpoints.retention import Retention
from lockstep.data.bad_examples import Policy
from lockstep.data.block_order import BlockShuffled
from lockstep.data.crew import Crew
from lockstep.errors import InputError
from lockstep.evaluation.evaluate import Weights
from lockstep.images.augment import RandomShift
from lockstep.losses.regularization import L1, L2
from lockstep.models.mnist import Mnist
from lockstep.optim import (
    FTRL,
    LAMB,
    LARS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AdaptiveClip,
    ByName,
    ClipGlobalNorm,
    ClipNorm,
    ClipValue,
    Constant,
    Cosine,
    Exponential,
    MovingAverage,
    OneCycle,
    PiecewiseConstant,
    Polynomial,
    RMSProp,
    ScaledByBatch,
    ScaleGradients,
    Warmup,
)
from lockstep.optim.optimizers import Optimizer
from lockstep.optim.schedules import Schedule
from lockstep.optim.transforms import GradientTransform
from lockstep.parallel.exchange import AllReduce, Alone
from lockstep.parallel.towers import Towers
from lockstep.progress import End, Interval
from lockstep.training.smoothing import LossAverage
from lockstep.training.state import Nonfinite
from lockstep.weights.warm_start import WarmStart

CLASSES_OF: Mapping[Any, tuple[type, ...]] = {
    Schedule: (Constant, Cosine, Exponential, Polynomial, PiecewiseConstant, OneCycle, Warmup, ScaledByBatch),
    Optimizer: (SGD, RMSProp, Adam, AdamW, Adagrad, Adadelta, FTRL, LARS, LAMB, ByName),
    GradientTransform: (ScaleGradients, ClipNorm, ClipGlobalNorm, ClipValue, AdaptiveClip),
}
"""What a recipe may say where the library takes anything that fits a protocol."""

SAID_ELSEWHERE: Mapping[tuple[type, str], str] = {(Towers, "count"): "num_towers"}
"""Fields of parts that the recipe says in a field of its own."""

HARMLESS = (
    "name",
    "num_workers",
    "device",
    "end",
    "checkpoints",
    "watch",
    "evaluate.every",
    "feed.num_processes",
    "feed.num_threads",
    "feed.prefetch",
    "feed.bad_budget",
)
"""Fields, or parts as a whole, that change nothing in what is trained: a resumed run may have others."""

_TEN_STEPS, _TWO_MINUTES, _TEN_MINUTES = Interval(10, "steps"), Interval(120, "seconds"), Interval(600, "seconds")
_EACH_EPOCH, _NEVER = Interval(1, "epochs"), Interval(0, "steps")


@dataclass(frozen=True)
class MnistData:
    """The 55,000 examples of MNIST to train on, 5,000 to validate and 10,000 to test."""

    folder: str | None = None
    """Where the four files are; None: the ones that come with the project."""
    augment: tuple[RandomShift, ...] = ()
    """What happens to the images of a training batch, in this order."""
    split: Literal["train", "validation", "test"] = "train"
    """The examples to train on."""


@dataclass(frozen=True)
class Feed:
    """How the examples to train on reach a worker; who reads ahead changes nothing in what is read."""

    order: Literal["shuffled", "sequential"] | BlockShuffled = "shuffled"
    """A new permutation each epoch; or in blocks, for storage that is slow at random; or as they lie there."""
    num_processes: int | None = None
    """Loader processes of each worker; None: its share of the cores that are left over. They read what has to be
    decoded; what lies in memory is read by the worker itself."""
    num_threads: int = 0
    """Loader threads, in place of processes."""
    prefetch: int = 2
    """Batches that each of them is ahead."""
    bad_examples: Policy = "raise"
    """An example that cannot be read ends the run, or is replaced by the next one of its epoch."""
    bad_budget: int = 100
    """More examples than this must not be replaced."""

    def __post_init__(self) -> None:
        Crew(self.num_processes, self.num_threads, self.prefetch)
        _check_counts(0, bad_budget=self.bad_budget)


@dataclass(frozen=True)
class InitialWeights:
    """What a run starts from instead of fresh weights, where its workdir has no checkpoint yet."""

    path: str
    """A file, checkpoint or run: what `lockstep inspect` understands; `RUN@STEP` for one checkpoint of a run."""
    mapping: WarmStart = field(default_factory=WarmStart)
    """How its tensors find their places in the model."""


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written (besides start and end, and where one is among the best), and which are kept."""

    every: Interval = _TEN_MINUTES
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True)
class Watch:
    """How often a run tells what it does."""

    console: Interval = _TEN_STEPS
    """A line on the screen; a live bar follows every step."""
    summaries: Interval = _TWO_MINUTES
    """Scalars for TensorBoard."""
    metrics: Interval = _TEN_STEPS
    """A line in `metrics.jsonl`."""
    gradients: Interval = _NEVER
    """Histograms and norms of the gradients, after the transforms, for TensorBoard."""
    variables: Interval = _NEVER
    """Histograms and norms of parameters and buffers."""
    activations: Interval = _NEVER
    """Histograms and sparsity of the outputs of the model's modules."""
    images: int = 0
    """Input images of the first batch to show in TensorBoard."""

    def __post_init__(self) -> None:
        _check_counts(0, images=self.images)


@dataclass(frozen=True)
class Evaluate:
    """When the run is scored on the validation examples, and how; after its end the test examples follow."""

    every: Interval = _EACH_EPOCH
    micro_batch: int | None = None
    """Examples a forward pass; None: as many as the batch."""
    weights: Weights = "raw"
    """The parameters as they are, or their moving averages."""
    examples: int | None = None
    """The first so many of a split are scored; None: all of them."""
    drop_last: bool = False
    """What does not fill a micro-batch at the end is left out; else it is filled up, and only what was there counts."""

    def __post_init__(self) -> None:
        _check_counts(1, micro_batch=self.micro_batch, examples=self.examples)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run does.

    Raises:
        InputError: a field is out of range, or two of them contradict each other.
    """

    name: str
    """What the run is called; names its folder where none is given."""
    model: Mnist
    data: MnistData
    optimizer: Optimizer
    warm_start: InitialWeights | None = None
    """Where the first weights come from; None: the model's own."""
    batch_size: int = 128
    """Examples an update, over all towers."""
    seed: int = 0
    """Of the initial weights, the order of the examples, the augmentation and the towers' random streams."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained."""
    train_only: tuple[str, ...] = ()
    """Patterns of those that are; none: all."""
    freeze_statistics: bool = False
    """Batch norm with frozen parameters keeps its statistics, and normalises with them."""
    regularization: tuple[L1 | L2, ...] = ()
    """Losses of the parameters themselves, part of the objective."""
    tower_gradient_transforms: tuple[GradientTransform, ...] = ()
    """What happens to the gradients of each tower before they are added up, in this order."""
    gradient_transforms: tuple[GradientTransform, ...] = ()
    """What happens to the averaged gradients before the update, in this order."""
    average: MovingAverage | None = None
    """Moving average of the parameters, kept beside them."""
    feed: Feed = field(default_factory=Feed)
    """How the examples reach the workers."""
    loss_average: LossAverage = field(default_factory=LossAverage)
    """How the losses that are reported beside the raw ones are smoothed."""
    nonfinite: Nonfinite = "stop"
    """What a loss or gradient that is not finite does: end the run, have this one attempt change nothing, go back to
    the last checkpoint and leave its examples out, or nothing."""
    nonfinite_budget: int = 10
    """So many attempts may be skipped, or rolled back from, before the run ends after all."""
    num_towers: int | None = None
    """Slices of the batch; None: as many as the workers of the first start, and from then on that number."""
    towers: Towers = field(default_factory=Towers)
    """How each tower computes; how many there are is said in `num_towers` alone."""
    num_workers: int | None = None
    """Processes, one device each; None: one for each accelerator, on a CPU as many as towers and cores allow."""
    device: str | None = None
    """"cpu", or None for accelerators where there are any."""
    exchange: AllReduce | Alone = field(default_factory=AllReduce)
    """How the gradients of the towers become one update."""
    end: End | None = None
    """When the run ends; None: when it is stopped."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    watch: Watch = field(default_factory=Watch)
    evaluate: Evaluate = field(default_factory=Evaluate)

    def __post_init__(self) -> None:
        self._check_name()
        _check_counts(0, seed=self.seed, nonfinite_budget=self.nonfinite_budget)
        _check_counts(1, batch_size=self.batch_size, num_towers=self.num_towers, num_workers=self.num_workers)
        self._check_towers()
        self._check_best()
        if self.evaluate.weights == "average" and self.average is None:
            raise InputError(
                "The averaged weights cannot be scored: this run keeps no average.",
                given='evaluate.weights="average", and no average',
                expected="an average, or the raw weights",
                mend='set average.decay (0.9999 is usual), or evaluate.weights="raw"',
            )

    def _check_best(self) -> None:
        best = self.checkpoints.retention.best
        if best is not None and not (best.startswith("validation/") and self.evaluate.every.amount):
            raise InputError(
                "By this score no checkpoint can be kept.",
                given=f"checkpoints.retention.best={best!r}, evaluate.every={self.evaluate.every}",
                expected='a score of the validation examples, such as "validation/top1", and evaluations',
                mend="name such a score and set evaluate.every, or leave checkpoints.retention.best out",
            )

    def towers_for(self, num_workers: int) -> Towers:
        """The towers with their number: that of the recipe, or one for each worker."""
        return replace(self.towers, count=self.num_towers or num_workers)

    def _check_name(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise InputError(
                "This name cannot be that of a folder.",
                given=f"name={self.name!r}",
                expected="letters, digits and _, after the first one also . + -",
                mend="give the run a name such as mnist_2",
            )

    def _check_towers(self) -> None:
        if self.towers.count != 1:
            raise InputError(
                "How many towers there are is said in num_towers alone.",
                given=f"towers.count={self.towers.count}",
                expected="towers that leave their count out",
                mend=f"set num_towers={self.towers.count}, and leave the count out of towers",
            )
        if self.num_towers is not None:
            self.towers_for(self.num_towers).check(self.batch_size, self.num_workers or 1)


@dataclass(frozen=True)
class Difference:
    """A field in which two recipes differ, or a part, where the two are of different classes."""

    path: str
    saved: Any
    given: Any
    harmless: bool
    """A resumed run may differ in it without more ado."""

    def __str__(self) -> str:
        return f"{self.path}: saved {self.saved}, given {self.given}"


def differences(saved: Recipe, given: Recipe) -> list[Difference]:
    """Where the recipe of a run and the one given to go on with it differ, in the order of the fields.

    Towers that are not counted in `given` are those of `saved`: the first start has settled their number.
    """
    if given.num_towers is None:
        saved = replace(saved, num_towers=None)
    return list(_differences("", saved, given))


def _differences(path: str, saved: Any, given: Any) -> Iterator[Difference]:
    if saved == given:
        return
    if is_dataclass(saved) and type(saved) is type(given) and not isinstance(saved, Interval):
        for name in [each.name for each in fields(saved)]:
            inner = f"{path}.{name}" if path else name
            yield from _differences(inner, getattr(saved, name), getattr(given, name))
    else:
        yield Difference(path, saved, given, harmless=f"{path}.".startswith(tuple(f"{outer}." for outer in HARMLESS)))


def _check_counts(least: int, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and not least <= count < 2**63:
            raise InputError(
                f"{name} is out of range.",
                given=f"{name}={count}",
                expected=f"{least} or more" if count < least else "a whole number below 2**63",
                mend=f"give another {name}, or leave it out",
            )
