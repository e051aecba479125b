"""The training of a pipeline.config as fields of a recipe: optimizer, schedule, average, gradients, first weights.

Patterns of the Object Detection API's variables become patterns of a detector's parameters. The API names a variable
after the part that it is in, its layer, and what it is: "FeatureExtractor/MobilenetV1/Conv2d_0/BatchNorm/beta". Parts
and kinds of variables have their counterparts in any detector, layers have other names: a pattern that asks for them
matches nothing, and the report of the import says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep import optim
from lockstep.checkpoints.retention import Retention
from lockstep.errors import InputError
from lockstep.listing import shorten
from lockstep.optim.rules import Optimizer
from lockstep.optim.schedules import Schedule
from lockstep.optim.transforms import GradientTransform
from lockstep.recipes import pipeline_messages as messages
from lockstep.recipes.parts import Checkpoints, InitialWeights
from lockstep.towers.towers import Towers
from lockstep.types import Steps

if TYPE_CHECKING:
    from torch import nn

    from lockstep.weights.warm_start import Takes

OF_FIRST_WEIGHTS = ("from_detection_checkpoint", "load_all_detection_checkpoint_vars", "fine_tune_checkpoint_type")
"""The fields that say what `fine_tune_checkpoint` is, and what is taken of it."""
CHECKPOINT_TYPES: Mapping[str, Takes] = {
    "classification": "classifier",
    "detection": "features",
    "fine_tune": "features",
    "full": "detector",
}
"""What is taken of a checkpoint by its `fine_tune_checkpoint_type`; "fine_tune" and "full" are of TensorFlow 2."""
BY_NAME = ("freeze_variables", "update_trainable_variables", "bias_grad_multiplier")
"""The fields that choose parameters by the names of their variables."""
_BIASES = ".*/biases"
"""The variables whose gradients `bias_grad_multiplier` is for: those of layers, and not the beta of batch norm."""


def recipe_fields(train: messages.TrainConfig) -> dict[str, Any]:
    """Make the fields of a recipe that `train_config` says, but for those that choose parameters by their names.

    The replicas of a synchronous training are towers: each computes its share of the batch, if all shares are alike.
    """
    fields = {"end": Steps(train.num_steps)} if train.num_steps else {}
    given = train.optimizer
    # The decay is constant: the reference gives its average no number of updates.
    average = optim.MovingAverage(given.moving_average_decay, dynamic=False) if given.use_moving_average else None
    return fields | {
        "optimizer": _optimizer(given),
        "average": average,
        "warm_start": _first_weights(train),
        "batch_size": train.batch_size,
        "num_towers": train.replicas_to_aggregate if train.sync_replicas and has_even_shares(train) else 1,
        "towers": Towers(precision="bf16" if train.use_bfloat16 else "fp32"),
        "checkpoints": Checkpoints(retention=Retention(every_hours=train.keep_checkpoint_every_n_hours)),
    }


def has_even_shares(train: messages.TrainConfig) -> bool:
    """Tell whether the batch can be split evenly over the replicas."""
    return train.batch_size % train.replicas_to_aggregate == 0


def _optimizer(given: messages.OptimizerConfig) -> Optimizer:
    kinds = ("rms_prop_optimizer", "momentum_optimizer", "adam_optimizer")
    said = [name for name in kinds if getattr(given, name) is not None]
    if len(said) != 1:
        raise InputError(
            "A training has one optimizer.",
            given=", ".join(said) or "none",
            expected=f"one of {', '.join(kinds)}",
            hint="name one",
        )
    if momentum := given.momentum_optimizer:
        return optim.SGD(_rate(momentum.learning_rate), momentum=momentum.momentum_optimizer_value)
    if adam := given.adam_optimizer:
        return optim.Adam(_rate(adam.learning_rate), eps=adam.epsilon, epsilon_hat=True)
    rms = given.rms_prop_optimizer
    assert rms is not None, "it is the last one"
    rate = _rate(rms.learning_rate)
    return optim.RMSProp(rate, alpha=rms.decay, eps=rms.epsilon, momentum=rms.momentum_optimizer_value)


def _rate(given: messages.LearningRate) -> float | Schedule:
    match given:
        case messages.ConstantLearningRate():
            return given.learning_rate
        case messages.ExponentialDecayLearningRate():
            return optim.Exponential(
                given.initial_learning_rate,
                given.decay_steps,
                given.decay_factor,
                staircase=given.staircase,
                burn_in_steps=given.burnin_steps,
                burn_in=given.burnin_learning_rate or None,
                final=given.min_learning_rate,
            )
        case messages.ManualStepLearningRate():
            return _manual_steps(given)
        case messages.CosineDecayLearningRate():
            return optim.Cosine(
                given.learning_rate_base,
                given.total_steps,
                warmup_steps=given.warmup_steps,
                warmup_initial=given.warmup_learning_rate if given.warmup_steps else 0.0,
                hold_steps=given.hold_base_rate_steps,
            )


def _manual_steps(given: messages.ManualStepLearningRate) -> Schedule:
    """Make the schedule; a first boundary at step 0, as files of 2017 have it, takes the place of the initial rate."""
    if not given.schedule:
        raise InputError(
            "The learning rate's schedule is empty.",
            given="manual_step_learning_rate without a schedule",
            expected="a step and a rate",
            hint="add schedule { step: ... learning_rate: ... }, or take constant_learning_rate",
        )
    steps = [each.step for each in given.schedule]
    rates = [given.initial_learning_rate, *(each.learning_rate for each in given.schedule)]
    from_zero = steps[0] == 0 and not given.warmup
    return optim.PiecewiseConstant(tuple(steps[from_zero:]), tuple(rates[from_zero:]), warmup=given.warmup)


def fields_by_name(train: messages.TrainConfig, variables: Mapping[str, str]) -> dict[str, Any]:
    """Make the fields about gradients, and about some of the parameters, whose names in the API are `variables`.

    Raises:
        InputError: all variables that are to be trained are none of the detector's.
    """
    names = [*variables]
    frozen = _matched(train.freeze_variables, variables)
    train_only = _matched(train.update_trainable_variables, variables)
    if any(train.update_trainable_variables) and not train_only:
        raise InputError(
            "The detector has none of the parameters that are to be trained.",
            given=f"update_trainable_variables: {list(train.update_trainable_variables)}",
            expected=f"patterns of variables such as {shorten([*dict.fromkeys(variables.values())], 4)}",
            hint='leave the field out of the config, and set train_only=["^head"] in the recipe',
        )
    biases = _matched((_BIASES,), variables).intersection(train_only or names) - frozen
    transforms = list[GradientTransform]()
    if train.bias_grad_multiplier and biases:  # the order is that of the reference
        transforms.append(optim.ScaleGradients(dict.fromkeys(as_patterns(biases, names), train.bias_grad_multiplier)))
    if train.gradient_clipping_by_norm:
        transforms.append(optim.ClipNorm(train.gradient_clipping_by_norm))
    return {
        "frozen": as_patterns(frozen, names),
        "train_only": as_patterns(train_only, names),
        "gradient_transforms": tuple(transforms),
    }


def unmatched(train: messages.TrainConfig, variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each pattern that matches no variable, after its field."""
    given = [
        (name, pattern)
        for name in ("freeze_variables", "update_trainable_variables")
        for pattern in getattr(train, name)
    ]
    return [(name, pattern) for name, pattern in given if not _matched((pattern,), variables)]


def _matched(patterns: Sequence[str], variables: Mapping[str, str]) -> set[str]:
    """Return the parameters whose variables match from the start, as in the reference; empty patterns match nothing."""
    try:
        return {
            name
            for name, variable in variables.items()
            if any(pattern and re.match(pattern, variable) for pattern in patterns)
        }
    except re.error as error:
        raise InputError(
            f"A pattern of variables is no regular expression: {error}.",
            given=", ".join(map(repr, patterns)),
            expected="regular expressions",
            hint="correct them in freeze_variables and update_trainable_variables",
        ) from error


def _first_weights(train: messages.TrainConfig) -> InitialWeights | None:
    """Say whose weights the checkpoint has; as in the reference, a variable that it lacks stays as it is."""
    if not train.fine_tune_checkpoint:
        return None
    kind = train.fine_tune_checkpoint_type or ("detection" if train.from_detection_checkpoint else "classification")
    if kind == "detection" and train.load_all_detection_checkpoint_vars:
        kind = "full"
    return InitialWeights(train.fine_tune_checkpoint, takes=CHECKPOINT_TYPES.get(kind, "classifier"))


_NETS = {
    r"ssd_mobilenet_v(\d)": r"MobilenetV\1",
    r"(?:ssd|faster_rcnn)_inception_v(\d)": r"InceptionV\1",
    r"faster_rcnn_inception_resnet_v(\d)": r"InceptionResnetV\1",
    r"(?:ssd|faster_rcnn)_resnet(\d+)": r"resnet_v1_\1",
}
"""The API's name of a backbone, by a pattern of how its feature extractor's begins."""
_SSD = {
    r"backbone\.": "FeatureExtractor/{net}",
    r"head\.box_predictor\.(\d+)\.": r"BoxPredictor_\1/BoxEncodingPredictor",
    r"head\.class_predictor\.(\d+)\.": r"BoxPredictor_\1/ClassPredictor",
    r"head\.layers\.(\d+)\.": r"BoxPredictor_\1",
    r"head\.": "WeightSharedConvolutionalBoxPredictor",
}
_FASTER_RCNN = {
    r"backbone\.": "FirstStageFeatureExtractor/{net}",
    r"second_stage\.": "SecondStageFeatureExtractor/{net}",
    r"rpn\.conv\.": "Conv",
    r"rpn\.box_predictor\.": "FirstStageBoxPredictor/BoxEncodingPredictor",
    r"rpn\.class_predictor\.": "FirstStageBoxPredictor/ClassPredictor",
    r"box_head\.box_predictor\.": "SecondStageBoxPredictor/BoxEncodingPredictor",
    r"box_head\.class_predictor\.": "SecondStageBoxPredictor/ClassPredictor",
    r"(?:box|mask)_head\.": "SecondStageBoxPredictor",
}
"""The API's name of a part of a detector, by a pattern of how the names of its parameters begin."""
_LAYER = "*"
"""Stands for the layer in the name of a variable; no pattern that spells a layer out matches it."""


def variables_of(model: nn.Module, extractor: str) -> dict[str, str]:
    """Return the API's name of each parameter of a detector, with a "*" in the place of its layer."""
    net = next((found.expand(name) for start, name in _NETS.items() if (found := re.match(start, extractor))), _LAYER)
    parts = _FASTER_RCNN if extractor.startswith("faster_rcnn") else _SSD
    return {
        name: f"{_part_of(name, parts, net)}/{_LAYER}/{_kind_of(model, name)}" for name, _ in model.named_parameters()
    }


def _part_of(name: str, parts: Mapping[str, str], net: str) -> str:
    for start, part in parts.items():
        if found := re.match(start, name):
            return found.expand(part).format(net=net)
    return _LAYER


def _kind_of(model: nn.Module, name: str) -> str:
    from torch import nn

    path, _, kind = name.rpartition(".")
    layer = model.get_submodule(path)
    if not isinstance(layer, nn.Conv2d | nn.Linear):
        return {"weight": "BatchNorm/gamma", "bias": "BatchNorm/beta"}.get(kind, kind)
    if kind == "bias":
        return "biases"
    return "depthwise_weights" if isinstance(layer, nn.Conv2d) and layer.groups > 1 else "weights"


def as_patterns(chosen: Collection[str], names: Sequence[str]) -> tuple[str, ...]:
    r"""Return patterns of the chosen ones of all names, and of no others: "^head\." where all below it are chosen."""
    return tuple(_patterns_below("", {*chosen}, names))


def _patterns_below(prefix: str, chosen: set[str], names: Sequence[str]) -> list[str]:
    inside = [name for name in names if name.startswith(prefix)]
    if prefix and len(inside) > 1 and chosen.issuperset(inside):
        return [f"^{re.escape(prefix)}"]
    if chosen.isdisjoint(inside):
        return []
    patterns = list[str]()
    for part in dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in inside):
        name = prefix + part
        if name in chosen:
            patterns.append(name)
        elif name not in names:
            patterns += _patterns_below(f"{name}.", chosen, names)
    return patterns
