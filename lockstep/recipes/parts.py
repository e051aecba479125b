"""The parts of a recipe that only runs have: data loading, stages, checkpoints, monitoring, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.checkpoints.retention import Retention
from lockstep.checks import (
    Checked,
    Fraction,
    Hint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    check_type,
)
from lockstep.data.bad_examples import Policy
from lockstep.data.order import BlockShuffled, Repeated
from lockstep.data.prefetch import LoaderPool
from lockstep.errors import InputError
from lockstep.evaluation.scores import Weights
from lockstep.optim.rules import Optimizer
from lockstep.reporting.profiling import Profile
from lockstep.towers.towers import Precision
from lockstep.types import Epochs, Interval, StepRange, Steps
from lockstep.weights.warm_start import Takes, WarmStart

_TEN_STEPS, _TWO_MINUTES, _TEN_MINUTES = Interval(10, "steps"), Interval(120, "seconds"), Interval(600, "seconds")
_EACH_EPOCH, _NEVER = Interval(1, "epochs"), Interval(0, "steps")


PositiveInt64 = Annotated[int, Range(ge=1, lt=2**63)]
NonNegativeInt64 = Annotated[int, Range(ge=0, lt=2**63)]
QuantizedBits = Annotated[int, Range(ge=2, le=8), Hint("8 bits are usual; TensorFlow's rewriter takes 2 to 8")]


@dataclass(frozen=True)
class DataLoading(Checked):
    """How workers load the training examples; the number of loaders does not change what they read."""

    order: Literal["shuffled", "sequential"] | BlockShuffled | Repeated = "shuffled"
    """A new permutation each epoch; or in blocks, for storage with slow random access; or in the order of the files; or
    each example several times in a row, with other augmentations (repeated augmentation)."""
    num_processes: int | None = None
    """Loader processes of each worker; None: its share of the free cores. They read what has to be decoded; the worker
    itself reads what is in memory."""
    num_threads: int = 0
    """Loader threads, in place of processes."""
    prefetch: int = 2
    """Batches that each of them loads ahead."""
    bad_examples: Policy = "raise"
    """An example that cannot be read ends the run, or is replaced by the next one of its epoch."""
    bad_budget: NonNegativeInt64 = 100
    """Examples that may be replaced before the run ends after all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        LoaderPool(self.num_processes, self.num_threads, self.prefetch)


@dataclass(frozen=True)
class InitialWeights:
    """Weights that a run starts from if its workdir has no checkpoint yet."""

    path: str | None = None
    """A file, checkpoint or run that `lockstep inspect` understands; `RUN@STEP` for one checkpoint of a run."""
    mapping: WarmStart = field(default_factory=WarmStart)
    """How tensors are matched to parameters of the model."""
    takes: Takes | None = None
    """What a detector takes of the weights: a classifier as its backbone, the backbone of another detector, or all of
    one; what they lack, or have in another shape, stays fresh. None: what `mapping` says, as for classifiers."""


@dataclass(frozen=True)
class CrossEntropy(Checked):
    """The loss of a classifier: softmax cross entropy, with that of an auxiliary head if there is one."""

    label_smoothing: Fraction = 0.0
    """Share of the target that is spread evenly over all classes."""
    auxiliary_weight: NonNegativeFloat = 0.4
    """Factor of the loss of an auxiliary head."""


def _check_end(name: str, value: object) -> None:
    check_type(name, value, (Steps, Epochs), expected="steps or epochs", hint="write ls.Steps(1000)")


@dataclass(frozen=True)
class Stage(Checked):
    """A stage of a run with settings of its own: None takes that of the recipe.

    From one stage to the next, parameters, statistics and averages continue, and so does the stream of examples. The
    optimizer starts anew, even if it is that of the recipe: slots are fresh, and schedules count from the first step
    of the stage. A parameter that was not trained before starts its average at its present value; one that is no
    longer trained has none.
    """

    length: Annotated[Steps | Epochs, _check_end]
    """Number of updates; an epoch has as many as it has whole batches."""
    optimizer: Optimizer | None = None
    """Optimizer of the trained parameters."""
    frozen: tuple[str, ...] | None = None
    """Patterns of parameters that are not trained."""
    train_only: tuple[str, ...] | None = None
    """Patterns of the only parameters that are trained."""
    freeze_statistics: bool | None = None
    """Batch norm with frozen parameters keeps its statistics, and normalises with them."""
    image_size: PositiveInt | None = None
    """Height and width of the images, in pixels."""


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written (besides those at start and end, and the best ones), and which are kept."""

    every: Interval = _TEN_MINUTES
    """How often a checkpoint is written."""
    retention: Retention = field(default_factory=Retention)
    """The checkpoints that are kept."""


@dataclass(frozen=True)
class Monitoring(Checked):
    """How often a run reports, and compares its workers; how long it may stand still; whether it probes its memory."""

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
    """Number of input images of the first batch to show in TensorBoard."""
    hang_seconds: NonNegativeFloat = 600.0
    """A worker that stays longer at one place of a step is ended: to compute or exchange, or in a loop body; six times
    as long in a first step, a save, an evaluation, a start and an end, and one and a half times for data. A loader
    process that reads longer at one example is ended, too; 0: never."""
    restarts: NonNegativeInt64 = 3
    """How often in a row all start again, from the last checkpoint, when some are lost: killed, stopped or silent,
    or their host gone. A step beyond the furthest so far begins a new row. An error ends the run."""
    on_failure: Literal["restart", "continue"] = "restart"
    """What follows when workers are lost: all start again; or those that are left go on from what they have in memory,
    and others take the place of the lost where their hosts live (`lockstep train` and its own launcher alone)."""
    min_workers: PositiveInt64 = 1
    """With fewer workers than this left, the run does not go on without the lost, but starts again."""
    compare_steps: NonNegativeInt64 = 100
    """Updates between two comparisons of the model and the optimizer's slots on all workers, by a checksum that travels
    with the gradients: a run whose workers come to differ ends, and names the first tensor; 0: never."""
    probe_memory: bool = True
    """Compute the largest batch of a detector's run before its first step, so that it ends there if memory is lacking:
    images as large as they can be, each with the most objects. The images of classifiers have one size."""
    memory_snapshot: bool = False
    """Where a GPU lacks memory, leave torch's snapshot of it in the run's folder, `memory/worker-0.pickle`: what was
    allocated, and by which lines. To know it costs some microseconds an allocation."""
    trace: Annotated[StepRange | None, Hint('write "100:110" for ten steps')] = None
    """Record what all workers do in these steps, as a timeline: those that begin when so many updates are complete.
    None: no steps."""
    profile: Annotated[Profile | None, Hint("give watch.profile.every, or watch.profile.steps")] = None
    """Record the operators of some steps by torch.profiler; None: of none."""
    on_end: str = ""
    """A command that the shell runs when `lockstep train` ends, however that is: `notify-send "$LOCKSTEP_RUN is over"`.
    Its environment has LOCKSTEP_RUN, the run's folder, and LOCKSTEP_EXIT_CODE. One of a run's folder in which others
    may have written it is left out, unless `--allow-code` is given."""


@dataclass(frozen=True)
class Verification(Checked):
    """What a run writes down beside its results, so that they can be verified afterwards."""

    every: NonNegativeInt64 = 0
    """Updates between two digests of the model and the optimizer's slots in `chain.jsonl`, besides those at each
    checkpoint; 0: at checkpoints alone."""
    replay: NonNegativeInt64 = 0
    """Updates between two before which one tower is computed on all workers, too, as a device that errs gives others
    bits: at every 100th update, about a hundredth of the time of a tower. The run ends where it finds one; 0: never."""


@dataclass(frozen=True)
class Quantization(Checked):
    """Training with the weights and activations that whole numbers can stand for, as TensorFlow's rewriter has it."""

    delay: NonNegativeInt64 = 0
    """Quantizing begins with the update of this number, counted from 1; ranges are taken from the first one on."""
    weight_bits: QuantizedBits = 8
    """Bits of the whole numbers that stand for weights."""
    activation_bits: QuantizedBits = 8
    """Bits of those that stand for activations."""


DetectionMetrics = Literal[
    "pascal_voc_metrics",
    "pascal_voc_detection_metrics",
    "weighted_pascal_voc_detection_metrics",
    "pascal_voc_instance_segmentation_metrics",
    "weighted_pascal_voc_instance_segmentation_metrics",
    "open_images_metrics",
    "open_images_V2_detection_metrics",
    "oid_V2_detection_metrics",
    "oid_challenge_object_detection_metrics",
    "oid_challenge_detection_metrics",
    "coco_detection_metrics",
    "coco_mask_metrics",
    "coco_keypoint_metrics",
]
"""The names in `lockstep.metrics.detection_sets`, here because that takes numpy to import."""
_PASCAL, _COCO = "Precision/mAP@0.5IOU", "Precision/mAP"
MAIN_SCORES: Mapping[DetectionMetrics, str] = {
    "pascal_voc_metrics": f"PascalBoxes_{_PASCAL}",
    "pascal_voc_detection_metrics": f"PascalBoxes_{_PASCAL}",
    "weighted_pascal_voc_detection_metrics": f"WeightedPascalBoxes_{_PASCAL}",
    "pascal_voc_instance_segmentation_metrics": f"PascalMasks_{_PASCAL}",
    "weighted_pascal_voc_instance_segmentation_metrics": f"WeightedPascalMasks_{_PASCAL}",
    "open_images_metrics": f"OpenImagesV2_{_PASCAL}",
    "open_images_V2_detection_metrics": f"OpenImagesV2_{_PASCAL}",
    "oid_V2_detection_metrics": f"OpenImagesV2_{_PASCAL}",
    "oid_challenge_object_detection_metrics": f"OpenImagesChallenge2018_{_PASCAL}",
    "oid_challenge_detection_metrics": f"OpenImagesChallenge2018_{_PASCAL}",
    "coco_detection_metrics": f"DetectionBoxes_{_COCO}",
    "coco_mask_metrics": f"DetectionMasks_{_COCO}",
    "coco_keypoint_metrics": f"Keypoints_{_COCO}",
}
"""The score of each metric that says which checkpoint is the best."""


@dataclass(frozen=True)
class Pictures(Checked):
    """Pictures of detections, for TensorBoard and as files."""

    count: NonNegativeInt = 10
    """How many of the first examples of each evaluation are drawn."""
    folder: str | None = None
    """Where files of them are written; None: TensorBoard alone shows them."""
    min_score: Probability = 0.5
    """Least score of the detections that are drawn, and that `lockstep evaluate` counts in its table by class."""
    max_boxes: NonNegativeInt = 20
    """At most so many an image, those with the highest scores."""
    scores: bool = True
    """Write the score at each box."""
    labels: bool = True
    """Write the class at each box."""
    ground_truth: bool = False
    """Draw the objects of the data, too."""


@dataclass(frozen=True)
class DetectionEvaluation(Checked):
    """How detections are scored and shown."""

    metrics: tuple[DetectionMetrics, ...] = ("pascal_voc_detection_metrics",)
    """The sets of metrics that are computed; the first one says which checkpoint is the best."""
    per_category: bool = False
    """Score each category by itself, too."""
    keypoint_sigmas: tuple[PositiveFloat, ...] = ()
    """For `coco_keypoint_metrics`: of each keypoint, how far apart people mark it, in parts of the object's size; none:
    those of the 17 keypoints of COCO's persons."""
    ignore_ground_truth: bool = False
    """Score nothing, once: detections are written to `export_path` alone."""
    export_path: str | None = None
    """The file of detections, in COCO's format, of the last evaluation; None: they are not kept."""
    max_evaluations: NonNegativeInt = 0
    """The most evaluations of a run, and of `lockstep evaluate --follow`; 0: no limit. With a limit no later checkpoint
    of the run can be its best."""
    pictures: Pictures = field(default_factory=Pictures)
    """Pictures of detections."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ignore_ground_truth and self.export_path is None:
            raise InputError(
                "Without ground truth and without a file, nothing would come of an evaluation.",
                given="evaluate.detection.ignore_ground_truth=true, and no evaluate.detection.export_path",
                expected="a file for the detections",
                hint="set evaluate.detection.export_path=detections.json",
            )
        if not self.metrics and not self.ignore_ground_truth:
            raise InputError(
                "There is nothing to score.",
                given="evaluate.detection.metrics=[]",
                expected="a metric, such as coco_detection_metrics",
                hint="name one; or set evaluate.detection.ignore_ground_truth=true and export_path to keep detections",
            )

    @property
    def most_evaluations(self) -> int | None:
        """The most evaluations; None: no limit."""
        return 1 if self.ignore_ground_truth else self.max_evaluations or None


@dataclass(frozen=True)
class Evaluate(Checked):
    """When and how the run is scored on the validation examples, and after its end on the test examples."""

    every: Interval = _EACH_EPOCH
    """How often the validation examples are scored; 0: never during the run."""
    micro_batch: PositiveInt64 | None = None
    """Examples of a forward pass; None: the batch size."""
    weights: Weights = "raw"
    """The parameters as they are, or their moving averages."""
    precision: Precision | None = None
    """Precision of evaluation; None: that of the towers."""
    examples: PositiveInt64 | None = None
    """Number of examples of a split that are scored, from the first on, or as many as there are; None: all."""
    drop_last: bool = False
    """Leave out examples at the end that do not fill a micro-batch; else it is padded, and the padding not counted."""
    top: Annotated[tuple[PositiveInt, ...], Hint("write top = [1, 5]")] = (1,)
    """The k of the top-k accuracies that are computed: (1, 5) gives "top1" and "top5"."""
    flip: bool = False
    """Score the mean of the logits of each image and its mirror image: a little better, at twice the cost."""
    patience: PositiveInt64 | None = None
    """Early stopping: the run ends after this many evaluations in a row without a better checkpoint; None: never. Which
    is better is said by `checkpoints.retention`, and where its `best` is left out, by the first accuracy of `top`."""
    detection: DetectionEvaluation | None = None
    """Settings of the evaluation of detectors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.top:
            raise InputError("There is nothing to score.", given="top=[]", expected="a number", hint="write top = [1]")
        if self.patience is not None and self.detection is not None and self.detection.ignore_ground_truth:
            raise InputError(
                "Without scores no checkpoint is better than another.",
                given=f"evaluate.patience={self.patience}, and evaluate.detection.ignore_ground_truth=true",
                expected="one of them",
                hint="leave evaluate.patience out, or score the detections",
            )

    @property
    def most_evaluations(self) -> int | None:
        """The most evaluations; None: no limit."""
        return self.detection.most_evaluations if self.detection else None

    @property
    def limit(self) -> str:
        """The setting that limits the evaluations: `evaluate.detection.max_evaluations=10`; "" where none does."""
        if self.detection is None or self.most_evaluations is None:
            return ""
        is_once = self.detection.ignore_ground_truth
        setting = "ignore_ground_truth=true" if is_once else f"max_evaluations={self.detection.max_evaluations}"
        return f"evaluate.detection.{setting}"
