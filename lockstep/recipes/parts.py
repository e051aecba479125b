"""The parts of a recipe that are no values of the library itself: when and how often, and in which stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockstep.checkpoints.retention import Retention
from lockstep.checks import check_all, check_range, check_type, check_whole
from lockstep.data.bad_examples import Policy
from lockstep.data.order import BlockShuffled
from lockstep.data.prefetch import LoaderPool
from lockstep.errors import InputError
from lockstep.evaluation.evaluate import Weights
from lockstep.optim.optimizers import Optimizer
from lockstep.progress import Epochs, Interval, Steps
from lockstep.weights.warm_start import WarmStart

_TEN_STEPS, _TWO_MINUTES, _TEN_MINUTES = Interval(10, "steps"), Interval(120, "seconds"), Interval(600, "seconds")
_EACH_EPOCH, _NEVER = Interval(1, "epochs"), Interval(0, "steps")


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
        LoaderPool(self.num_processes, self.num_threads, self.prefetch)
        check_counts(0, bad_budget=self.bad_budget)


@dataclass(frozen=True)
class InitialWeights:
    """What a run starts from instead of fresh weights, where its workdir has no checkpoint yet."""

    path: str | None = None
    """A file, checkpoint or run: what `lockstep inspect` understands; `RUN@STEP` for one checkpoint of a run."""
    mapping: WarmStart = field(default_factory=WarmStart)
    """How its tensors find their places in the model."""


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of a classifier: softmax cross entropy, and that of an auxiliary head beside it.

    Raises:
        InputError: a field is out of range.
    """

    label_smoothing: float = 0.0
    """The share of the right class that all classes get instead, in equal parts."""
    auxiliary_weight: float = 0.4
    """What the loss of an auxiliary head counts, where the model has one."""

    def __post_init__(self) -> None:
        check_range("label_smoothing", self.label_smoothing, 0.0, 1.0)
        check_range("auxiliary_weight", self.auxiliary_weight, 0.0)


@dataclass(frozen=True)
class Stage:
    """A stretch of a run with settings of its own: where one is None it is that of the recipe.

    Where one stage ends and the next begins, parameters, statistics and averages go on, and so does the stream of
    examples. Each stage begins its optimizer anew, also where it is that of the recipe: slots are fresh, and schedules
    count from the first step of the stage. A parameter that was not trained before begins its average at its present
    value; one that is not trained any more has none.

    Raises:
        InputError: the length is neither steps nor epochs, or the image size is no number of pixels.
    """

    length: Steps | Epochs
    """How many updates it makes; in epochs, as many as there are batches in them."""
    optimizer: Optimizer | None = None
    """What updates the parameters that are trained."""
    frozen: tuple[str, ...] | None = None
    """Patterns of parameters that are not trained."""
    train_only: tuple[str, ...] | None = None
    """Patterns of those that are."""
    freeze_statistics: bool | None = None
    """Batch norm with frozen parameters keeps its statistics, and normalises with them."""
    image_size: int | None = None
    """Height and width of the images, in pixels."""

    def __post_init__(self) -> None:
        check_type("length", self.length, (Steps, Epochs), expected="steps or epochs", hint="write ls.Steps(1000)")
        if self.image_size is not None:
            check_whole("image_size", self.image_size, least=1)


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written (besides start and end, and where one is among the best), and which are kept."""

    every: Interval = _TEN_MINUTES
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True)
class Watch:
    """How often a run tells what it does, and how long it may stand still."""

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
    hang_seconds: float = 600.0
    """A worker that stays at one step and phase for longer is ended, six times as long in phases that take long; a
    loader process that reads one example for longer, too. 0 for never."""

    def __post_init__(self) -> None:
        check_counts(0, images=self.images)
        check_range("hang_seconds", self.hang_seconds, 0.0)


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
    top: tuple[int, ...] = (1,)
    """The scores: the share of examples whose class is among so many with the highest scores, as "top1" and "top5"."""
    flip: bool = False
    """Each image is scored together with its mirror image, by the mean of their logits: a little better, and twice the
    work."""
    patience: int | None = None
    """The run ends after so many evaluations in a row without a checkpoint among the best; None: it does not."""

    def __post_init__(self) -> None:
        check_all("top", self.top, int, hint="write top = [1, 5]")
        if not self.top:
            raise InputError("There is nothing to score.", given="top=[]", expected="a number", hint="write top = [1]")
        for each in self.top:
            check_whole("top", each, least=1)
        check_counts(1, patience=self.patience)
        check_counts(1, micro_batch=self.micro_batch, examples=self.examples)


def check_counts(least: int, **counts: int | None) -> None:
    """Refuse numbers below the least, and those that no file can hold; None is none.

    Raises:
        InputError: naming the field.
    """
    for name, count in counts.items():
        if count is not None and not least <= count < 2**63:
            raise InputError(
                f"{name} is out of range.",
                given=f"{name}={count}",
                expected=f"{least} or more" if count < least else "a whole number below 2**63",
                hint=f"give another {name}, or leave it out",
            )
