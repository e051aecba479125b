"""The parts of a recipe that are no values of the library itself: when and how often, and in which stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.checkpoints.retention import Retention
from lockstep.checks import Checked, Fraction, Hint, NonNegativeFloat, PositiveInt, Range, check_type
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


PositiveInt64 = Annotated[int, Range(ge=1, lt=2**63)]
NonNegativeInt64 = Annotated[int, Range(ge=0, lt=2**63)]


@dataclass(frozen=True)
class DataLoading(Checked):
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
    bad_budget: NonNegativeInt64 = 100
    """More examples than this must not be replaced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        LoaderPool(self.num_processes, self.num_threads, self.prefetch)


@dataclass(frozen=True)
class InitialWeights:
    """What a run starts from instead of fresh weights, where its workdir has no checkpoint yet."""

    path: str | None = None
    """A file, checkpoint or run: what `lockstep inspect` understands; `RUN@STEP` for one checkpoint of a run."""
    mapping: WarmStart = field(default_factory=WarmStart)
    """How its tensors find their places in the model."""


@dataclass(frozen=True)
class CrossEntropy(Checked):
    """The loss of a classifier: softmax cross entropy, and that of an auxiliary head beside it."""

    label_smoothing: Fraction = 0.0
    """The share of the right class that all classes get instead, in equal parts."""
    auxiliary_weight: NonNegativeFloat = 0.4
    """What the loss of an auxiliary head counts, where the model has one."""


def _check_end(name: str, value: object) -> None:
    check_type(name, value, (Steps, Epochs), expected="steps or epochs", hint="write ls.Steps(1000)")


@dataclass(frozen=True)
class Stage(Checked):
    """A stretch of a run with settings of its own: where one is None it is that of the recipe.

    Where one stage ends and the next begins, parameters, statistics and averages go on, and so does the stream of
    examples. Each stage begins its optimizer anew, also where it is that of the recipe: slots are fresh, and schedules
    count from the first step of the stage. A parameter that was not trained before begins its average at its present
    value; one that is not trained any more has none.

    Raises:
        InputError: the length is neither steps nor epochs, or the image size is no number of pixels.
    """

    length: Annotated[Steps | Epochs, _check_end]
    """How many updates it makes; in epochs, as many as there are batches in them."""
    optimizer: Optimizer | None = None
    """What updates the parameters that are trained."""
    frozen: tuple[str, ...] | None = None
    """Patterns of parameters that are not trained."""
    train_only: tuple[str, ...] | None = None
    """Patterns of those that are."""
    freeze_statistics: bool | None = None
    """Batch norm with frozen parameters keeps its statistics, and normalises with them."""
    image_size: PositiveInt | None = None
    """Height and width of the images, in pixels."""


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written (besides start and end, and where one is among the best), and which are kept."""

    every: Interval = _TEN_MINUTES
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True)
class Monitoring(Checked):
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
    images: NonNegativeInt64 = 0
    """Input images of the first batch to show in TensorBoard."""
    hang_seconds: NonNegativeFloat = 600.0
    """A worker that stays at one step and phase for longer is ended, six times as long in phases that take long; a
    loader process that reads one example for longer, too. 0 for never."""


@dataclass(frozen=True)
class Evaluate(Checked):
    """When the run is scored on the validation examples, and how; after its end the test examples follow."""

    every: Interval = _EACH_EPOCH
    micro_batch: PositiveInt64 | None = None
    """Examples a forward pass; None: as many as the batch."""
    weights: Weights = "raw"
    """The parameters as they are, or their moving averages."""
    examples: PositiveInt64 | None = None
    """The first so many of a split are scored; None: all of them."""
    drop_last: bool = False
    """What does not fill a micro-batch at the end is left out; else it is filled up, and only what was there counts."""
    top: Annotated[tuple[PositiveInt, ...], Hint("write top = [1, 5]")] = (1,)
    """The scores: the share of examples whose class is among so many with the highest scores, as "top1" and "top5"."""
    flip: bool = False
    """Each image is scored together with its mirror image, by the mean of their logits: a little better, and twice the
    work."""
    patience: PositiveInt64 | None = None
    """The run ends after so many evaluations in a row without a checkpoint among the best; None: it does not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.top:
            raise InputError("There is nothing to score.", given="top=[]", expected="a number", hint="write top = [1]")
