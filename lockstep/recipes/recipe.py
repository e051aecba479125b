"""The recipe: the complete description of a run, as one frozen value.

Its parts are the values that the library itself works with, as a script would write them.
A field that may be None is None by default: in TOML it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

from lockstep import optim
from lockstep.augmentations.augment import Augment
from lockstep.augmentations.lists import AUGMENTATIONS
from lockstep.checks import Checked, check_type
from lockstep.cores import NumThreads
from lockstep.description import Change, changes, described
from lockstep.detection.tf_center_net_configs import CenterNet
from lockstep.detection.tf_configs import FasterRcnn, Ssd
from lockstep.detection.values import (
    FasterRcnnFpn,
    Fcos,
    KeypointRcnnFpn,
    MaskRcnnFpn,
    RtDetr,
    SqueezeSsd,
    Ssd300,
    Ssdlite,
    TorchvisionDetector,
)
from lockstep.errors import InputError
from lockstep.exchange.exchange import AllReduce, Alone
from lockstep.loggers.kinds import Csv, Mlflow, Trackio, Wandb
from lockstep.losses.regularization import L1, L2
from lockstep.models import InceptionV3, LeNet, Mnist, SqueezeNet, Timm, Torchvision
from lockstep.optim.from_torch import FromTorch, TorchOptimizerByName
from lockstep.optim.optimizers import FTRL, Adadelta
from lockstep.optim.rules import Optimizer
from lockstep.optim.schedules import Constant, Schedule
from lockstep.optim.transforms import GradientTransform
from lockstep.recipes import parts, python_parts
from lockstep.recipes.data import DetectionData, ImageData, MnistData
from lockstep.recipes.tasks import Classification, Detection
from lockstep.served.exchanges import Asynchronous, Backups, is_served, num_computing
from lockstep.towers.towers import Precision, Towers
from lockstep.training.attempt import LossAverage, Nonfinite
from lockstep.types import End

CLASSES_OF: Mapping[Any, tuple[type, ...]] = {
    Schedule: (
        Constant,
        optim.Cosine,
        optim.Exponential,
        optim.Polynomial,
        optim.PiecewiseConstant,
        optim.OneCycle,
        optim.Warmup,
        optim.ScaledByBatch,
    ),
    Optimizer: (
        optim.SGD,
        optim.RMSProp,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        Adadelta,
        FTRL,
        optim.LARS,
        optim.LAMB,
        TorchOptimizerByName,
        optim.ByName,
        optim.LayerDecay,
        python_parts.PythonOptimizer,
    ),
    GradientTransform: (
        optim.ScaleGradients,
        optim.ClipNorm,
        optim.ClipGlobalNorm,
        optim.ClipValue,
        optim.AdaptiveClip,
    ),
    Augment: AUGMENTATIONS,
}
"""The classes a recipe may name where the library takes anything that fits a protocol."""

SAID_ELSEWHERE: Mapping[tuple[type, str], str] = {(Towers, "count"): "num_towers"}
"""Fields of parts that are fields of the recipe itself instead."""


class NewName(NamedTuple):
    """The name that a field has now, and what its values of old are by that name."""

    name: str
    convert: Callable[[Any], Any] | None = None
    """Makes the value that means the same now from a plain value of TOML, or one item of it; None: they are equal."""
    note: str = ""
    """What a reader must know who writes the new name, for the log."""


def _inverse(value: Any) -> Any:
    if isinstance(value, list):
        return [_inverse(each) for each in value]
    return 1 / value if type(value) in (int, float) and value > 0 else value  # others are refused later


_OF_TWO_STAGES = {
    "aspect_ratios": NewName("anchor_ratios"),
    "rpn_nms_thresh": NewName("rpn_iou_threshold"),
    "box_score_thresh": NewName("score_threshold"),
    "box_nms_thresh": NewName("iou_threshold"),
    "box_detections_per_img": NewName("max_detections"),
}
_QUANTIZATION = NewName("untrained_parts", lambda given: [] if given is None else ["quantization"])
_CONTEXT = NewName("untrained_parts", lambda given: [] if given is None else ["context_config"])
NEW_NAMES: Mapping[type, Mapping[str, NewName]] = {
    Ssd: {"quantization": _QUANTIZATION},
    FasterRcnn: {"quantization": _QUANTIZATION, "context_config": _CONTEXT},
    SqueezeSsd: {"aspect_ratios": NewName("anchor_ratios", _inverse, "height over width, not width over height")},
    FasterRcnnFpn: _OF_TWO_STAGES,
    MaskRcnnFpn: _OF_TWO_STAGES,
    parts.Monitoring: {"on_loss": NewName("on_failure")},
}
"""Fields by the names that they once had, which saved recipes and command lines still hold: they are read, and the log
says the new name."""

Model = (
    Mnist
    | LeNet
    | InceptionV3
    | SqueezeNet
    | Torchvision
    | Timm
    | Ssd
    | FasterRcnn
    | CenterNet
    | SqueezeSsd
    | FasterRcnnFpn
    | MaskRcnnFpn
    | KeypointRcnnFpn
    | Ssd300
    | Ssdlite
    | Fcos
    | RtDetr
    | TorchvisionDetector
    | python_parts.PythonModel
)


@dataclass(frozen=True)
class Recipe(Checked):
    """Everything that decides what a run does."""

    name: str
    """Name of the run, and of its folder where none is given."""
    model: Model
    """The network that is trained."""
    data: MnistData | ImageData | DetectionData | python_parts.PythonData
    """The examples, and how they become inputs of the network."""
    optimizer: Optimizer
    """How gradients change the parameters."""
    task: python_parts.PythonTask | None = None
    """What the model learns; None: the classes of images, or where objects are on them, by the kind of `data`."""
    loss: parts.CrossEntropy = field(default_factory=parts.CrossEntropy)
    """The loss that is minimized, together with the regularization."""
    warm_start: parts.InitialWeights | None = None
    """Where the first weights come from; None: the model initializes them."""
    batch_size: parts.PositiveInt64 = 128
    """Examples an update, over all towers."""
    seed: parts.NonNegativeInt64 = 0
    """Seed of the initial weights, the order of the examples, the augmentation and the towers' random streams."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained."""
    train_only: tuple[str, ...] = ()
    """Patterns of the only parameters that are trained; none: all."""
    freeze_statistics: bool = False
    """Batch norm with frozen parameters keeps its statistics, and normalises with them."""
    regularization: tuple[L1 | L2, ...] = ()
    """Losses of the parameters themselves, part of the objective."""
    tower_gradient_transforms: tuple[GradientTransform, ...] = ()
    """Transforms of the gradients of each tower before they are summed, in this order."""
    gradient_transforms: tuple[GradientTransform, ...] = ()
    """Transforms of the averaged gradients before the update, in this order."""
    average: optim.MovingAverage | None = None
    """Moving average of the parameters, kept beside them."""
    feed: parts.DataLoading = field(default_factory=parts.DataLoading)
    """How the examples reach the workers."""
    loss_average: LossAverage = field(default_factory=LossAverage)
    """How the losses that are reported beside the raw ones are smoothed."""
    nonfinite: Nonfinite = "stop"
    """Policy for losses or gradients that are not finite: end the run, skip the attempt, roll back to the last
    checkpoint and leave its examples out, or ignore it."""
    nonfinite_budget: parts.NonNegativeInt64 = 10
    """Attempts that may be skipped, or rolled back from, before the run ends after all."""
    num_towers: parts.PositiveInt64 | None = None
    """Slices of the batch; None: as many as the workers of the first start, and from then on that number. All shipped
    recipes name it, so that they are the same experiment on any machine."""
    towers: Towers = field(default_factory=Towers)
    """How each tower computes; `num_towers` alone says how many there are."""
    num_workers: parts.PositiveInt64 | None = None
    """Processes, one device each; None: one for each accelerator, on a CPU as many as towers and cores allow."""
    workers_per_device: parts.PositiveInt64 | None = None
    """Workers that may share an accelerator, and then exchange over gloo; None: each has one of its own."""
    num_threads: NumThreads | None = None
    """Torch's threads in each worker; None: its share of the host's cores, but one where the exchange is exact on a
    CPU, as bits depend on it. A run that goes on keeps the number of its first start."""
    device: str | None = None
    """"cpu", or None for accelerators where there are any."""
    exchange: AllReduce | Alone | Backups | Asynchronous = field(default_factory=AllReduce)
    """How the gradients of the towers become one update."""
    end: End | None = None
    """When the run ends; None: when it is stopped, or with its last stage."""
    stages: tuple[parts.Stage, ...] = ()
    """Stages of the run, one after another; none: the run has no stages."""
    checkpoints: parts.Checkpoints = field(default_factory=parts.Checkpoints)
    """When checkpoints are written, and which are kept."""
    watch: parts.Monitoring = field(default_factory=parts.Monitoring)
    """What is reported and watched, how often, and what follows when workers are lost."""
    verify: parts.Verification = field(default_factory=parts.Verification)
    """What is written down so that the run can be verified later."""
    loggers: tuple[Wandb | Mlflow | Trackio | Csv, ...] = ()
    """Live loggers: they get what `metrics.jsonl` gets, as often as `watch.metrics` says, and all scores."""
    evaluate: parts.Evaluate = field(default_factory=parts.Evaluate)
    """When and how the run is scored."""
    hooks: tuple[python_parts.PythonHook, ...] = ()
    """Functions of the user's own that are called after each attempt, in this order."""
    quantization: parts.Quantization | None = None
    """Quantization-aware training: the network learns with the weights and activations that it will have as one of
    whole numbers; None: with floating point alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_classes()
        self._name_best()
        self._check_name()
        self._check_towers()
        self._check_best()
        self._check_quantization()
        self.check_image_sizes(self.model.smallest_image, getattr(self.model, "only_image", None))
        if self.model.num_classes is not None:
            self.chosen_task.check(self.model.num_classes)
        if self.evaluate.weights == "average" and self.average is None:
            raise InputError(
                "The averaged weights cannot be scored: this run keeps no average.",
                given='evaluate.weights="average", and no average',
                expected="an average, or the raw weights",
                hint='set average.decay (0.9999 is usual), or evaluate.weights="raw"',
            )

    def _check_classes(self) -> None:
        """Refuse a network of the user's own of which a task of Lockstep would not know the number of classes."""
        check_type("model", self.model, get_args(Model), expected="a model of a recipe", hint=_HOW_TO_GIVE)
        if self.task is None and self.model.num_classes is None:
            raise InputError(
                "How many classes the network has is not said, and there is no task of your own.",
                given=f"model.function={self.model.function.full_name!r}, and neither model.num_classes nor a task",
                expected="the number of classes for a classifier or detector, or the losses of another task",
                hint='set model.num_classes=10; or task.losses="my_net:losses"',
            )

    def _name_best(self) -> None:
        """Keep the best checkpoint where early stopping has to know which it is: by the first of the scores."""
        if self.evaluate.patience is not None and self.checkpoints.retention.best is None:
            score, retention = self.chosen_task.main_score, self.checkpoints.retention
            better = self.task.better if self.task else retention.better
            if not score or not better:
                raise InputError(
                    "Early stopping has to know which checkpoint is the best.",
                    given=f"evaluate.patience={self.evaluate.patience}, main_score={score!r}, better={better!r}",
                    expected="the name of a score, and whether higher or lower is better",
                    hint='set checkpoints.retention.best="validation/NAME" and checkpoints.retention.better="lower"',
                )
            retention = replace(retention, best=f"validation/{score}", better=better)
            object.__setattr__(self, "checkpoints", replace(self.checkpoints, retention=retention))

    def _check_best(self) -> None:
        best = self.checkpoints.retention.best
        if best is not None and not (best.startswith("validation/") and self.evaluate.every.amount):
            raise InputError(
                "By this score no checkpoint can be kept.",
                given=f"checkpoints.retention.best={best!r}, evaluate.every={self.evaluate.every}",
                expected='a score of the validation examples, such as "validation/top1", and evaluations',
                hint="name such a score and set evaluate.every, or leave checkpoints.retention.best out",
            )

    def _check_quantization(self) -> None:
        """Refuse what would compute past the quantized weights and activations, or keep no ranges of them."""
        towers = self.towers
        at_fault = {
            f'towers.precision="{towers.precision}"': towers.precision != "fp32",
            f'evaluate.precision="{self.evaluate.precision}"': self.evaluate.precision not in (None, "fp32"),
            f'towers.batch_norm="{towers.batch_norm}"': towers.batch_norm in ("none", "frozen", "sync"),
            "towers.compile=true": towers.compile,
            "towers.activation_checkpointing": bool(towers.activation_checkpointing),
        }
        if self.quantization is not None and any(at_fault.values()):
            raise InputError(
                "Quantization-aware training is not done with this.",
                given=", ".join(name for name, is_given in at_fault.items() if is_given),
                expected='float32; batch norm "mean", "first" or "last", with whose statistics ranges are kept; a '
                "network that is neither compiled nor computed again",
                hint='set towers.precision="fp32" and the like, or leave quantization out',
            )

    def check_image_sizes(self, least: int, only: int | None = None) -> None:
        """Refuse images, of a stage too, with sides below `least`, or not of the `only` size, if there is one."""
        if isinstance(self.data, python_parts.PythonData):
            return
        of_stages = {f"stages[{number}].image_size": stage.image_size for number, stage in enumerate(self.stages)}
        given = {name: size for name, size in of_stages.items() if size is not None}
        for name, size in given.items():
            self.data.resized(size, name)  # which may be refused
        for name, size in {self.data.size_field: self.data.image_size, **given}.items():
            if only is not None and size != only:
                raise InputError(
                    f"This {type(self.model).__name__} takes images of one size.",
                    given=f"{name}={size}",
                    expected=f"{only} pixels",
                    hint=f"set {name} to {only}, or make the model for other images, by an option of it",
                )
            if size < least:
                raise InputError(
                    f"The images are too small for {type(self.model).__name__}.",
                    given=f"{name}={size}",
                    expected=f"{least} pixels or more",
                    hint=f"set {name} to {least} or more ({self.model.image_size} is usual)",
                )

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        reader: Callable[..., Any] | python_parts.PythonData,
        losses: Callable[..., Any] | None = None,
        *,
        task: Any = None,
        score: Callable[..., Any] | None = None,
        num_classes: int | None = None,
        optimizer: Optimizer | FromTorch | None = None,
        hooks: Sequence[Callable[..., Any]] = (),
        name: str = "mine",
        **more: Any,
    ) -> Recipe:
        """Make a recipe of functions of a script's own; see `ls.run` for what each of them is.

        Args:
            model: the class of the network, or a function that makes it.
            reader: gives the examples of a split; `PythonData` says besides how they are augmented.
            losses: of the network and a batch; None for a task, and for a classifier.
            task: an object with losses and what else it has, in place of functions.
            score: of the network and a batch; None: nothing is evaluated.
            num_classes: of a classifier without losses of its own, whose examples have the fields "image" and "label".
            optimizer: None: AdamW with a learning rate of 0.001.
            hooks: called with the report of each attempt.
            name: of the run.
            more: other fields of the recipe: batch_size=64, end=ls.Epochs(10), ...
        """
        optimizer = python_parts.as_optimizer(optimizer or optim.AdamW(1e-3))
        made = python_parts.as_task(task, losses, score)
        network, data = python_parts.as_model(model, num_classes), python_parts.as_data(reader, None, has_task=True)
        return cls(name, network, data, optimizer, made, hooks=tuple(map(python_parts.as_hook, hooks)), **more)

    def with_parts(
        self,
        *,
        model: Any = None,
        task: Any = None,
        losses: Callable[..., Any] | None = None,
        score: Callable[..., Any] | None = None,
        reader: Callable[..., Any] | None = None,
        optimizer: Optimizer | FromTorch | None = None,
        hooks: Sequence[Callable[..., Any]] = (),
    ) -> Recipe:
        """Return the recipe with parts of a script's own; see `ls.run` for what each of them is."""
        given: dict[str, Any] = {"hooks": (*self.hooks, *map(python_parts.as_hook, hooks))}
        if (own := python_parts.as_task(task, losses, score)) is not None:
            given["task"] = own
        if model is not None:
            given["model"] = python_parts.as_model(model, self.model.num_classes)
        if optimizer is not None:
            given["optimizer"] = python_parts.as_optimizer(optimizer)
        if reader is not None:
            given["data"] = python_parts.as_data(reader, self.data, has_task=(own or self.task) is not None)
        return replace(self, **given)

    @property
    def chosen_task(self) -> Classification | Detection | python_parts.PythonTask:
        """What the model learns: its losses, scores and metrics."""
        if self.task is not None:
            return self.task
        if isinstance(self.data, DetectionData):
            return Detection(self.data, self.num_classes, self.evaluate.detection or parts.DetectionEvaluation())
        return Classification(
            self.data.inputs, self.loss, self.evaluate.top, self.evaluate.flip, mixing=self.data.mixing
        )

    @property
    def num_classes(self) -> int:
        """Number of classes of the model; beyond any label where a task of the user's own does not need to know it."""
        return self.model.num_classes or _BEYOND_LABELS

    @property
    def evaluation_precision(self) -> Precision:
        """Precision of evaluation."""
        return self.evaluate.precision or self.towers.precision

    def towers_for(self, num_workers: int) -> Towers:
        """Return the towers with their count: that of the recipe, else one for each worker that computes."""
        return replace(self.towers, count=self.num_towers or num_computing(self.exchange, num_workers))

    def check_towers(self, num_workers: int) -> None:
        """Refuse a batch that cannot be split evenly over the towers, and workers that would have none of their own.

        And batch norm with which the chief cannot serve them.
        """
        if isinstance(self.exchange, Backups | Asynchronous) and num_workers > 1:
            self.exchange.check_batch_norm(self.towers.batch_norm)
        self.towers_for(num_workers).check(self.batch_size, 1 if is_served(self.exchange) else num_workers)

    def _check_name(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise InputError(
                "This name cannot be that of a folder.",
                given=f"name={self.name!r}",
                expected="letters, digits and _, after the first one also . + -",
                hint="give the run a name such as mnist_2",
            )

    def _check_towers(self) -> None:
        if self.towers.count is not None:
            raise InputError(
                "How many towers there are is said in num_towers alone.",
                given=f"towers.count={self.towers.count}",
                expected="towers that leave their count out",
                hint=f"set num_towers={self.towers.count}, and leave the count out of towers",
            )
        if self.num_towers is not None:
            self.check_towers(self.num_workers or 1)
            self._check_auxiliary_head()

    def _check_auxiliary_head(self) -> None:
        """Refuse one image a tower: the head's batch norm sees one value a channel of it, which has no variance."""
        has_head = isinstance(self.model, InceptionV3) and self.model.auxiliary
        if has_head and self.batch_size == self.num_towers and self.towers.batch_norm not in ("sync", "frozen"):
            raise InputError(
                "With one image a tower the batch norm of the auxiliary head has nothing to normalise with.",
                given=f"batch_size={self.batch_size} over {self.num_towers} towers",
                expected="two images or more a tower",
                hint='lower num_towers, raise batch_size, or set towers.batch_norm="sync" or model.auxiliary=false',
            )


_BEYOND_LABELS = 2**31 - 1
_HOW_TO_GIVE = "of a network of your own give the class: ls.run(recipe, workdir, model=Net)"
_HARMLESS = (
    "name",
    "num_workers",
    "workers_per_device",
    "num_threads",
    "device",
    "end",
    "checkpoints",
    "data.folder",
    "data.cache",
    "data.cache_gb",
    "watch",
    "verify",
    "hooks",
    "loggers",
    "evaluate.every",
    "evaluate.patience",
    "feed.num_processes",
    "feed.num_threads",
    "feed.prefetch",
    "feed.bad_budget",
)
"""Fields, or parts as a whole, that change nothing in what is trained: a resumed run may have others."""
_DATA_PATHS = ("data.train", "data.validation", "data.test")
"""One path for another may be the same data, moved. A resume compares the training data itself by its fingerprint."""


def recipe_changes(saved: Recipe, given: Recipe) -> list[Change]:
    """Compare the recipe of a run with the one given to go on with it, field by field.

    If `given` leaves the number of towers open, it is that of `saved`, which the first start has determined.
    """
    if given.num_towers is None:
        saved = replace(saved, num_towers=None)
    return list(changes("", described(saved), described(given)))


def is_harmless(change: Change) -> bool:
    """Whether a resumed run may differ in this field without being told to accept it."""
    is_moved = change.path in _DATA_PATHS and None not in (change.saved, change.given)
    return is_moved or change.is_allowed(_HARMLESS)
