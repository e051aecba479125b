"""The training of a pipeline.config: what its optimizer, schedule and first weights become."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.checkpoints.retention import Retention
from lockstep.errors import InputError
from lockstep.optim import (
    SGD,
    Adam,
    ClipNorm,
    Cosine,
    Exponential,
    MovingAverage,
    PiecewiseConstant,
    RMSProp,
    ScaleGradients,
)
from lockstep.recipes.messages import At, MessageReader, to
from lockstep.recipes.parts import InitialWeights
from lockstep.recipes.pipeline_messages import TrainConfig
from lockstep.recipes.pipeline_training import fields_by_name, recipe_fields, unmatched
from lockstep.records.text_format import Place, parse_text_format
from lockstep.towers.towers import Towers
from lockstep.types import Steps

RATE = "learning_rate { constant_learning_rate { learning_rate: 0.1 } }"
MOMENTUM = f"optimizer {{ momentum_optimizer {{ {RATE} }} use_moving_average: false }}"


def train_config(text: str) -> TrainConfig:
    reader = MessageReader("a.config", {})
    message = parse_text_format(text, "a.config")
    return reader.read(TrainConfig, message, At("train_config", Place(1, 1), to("")))


def fields_of(text: str) -> dict[str, Any]:
    return recipe_fields(train_config(text))


def optimizer_of(text: str) -> Any:
    return fields_of(f"optimizer {{ {text} }}")["optimizer"]


def rate_of(text: str) -> Any:
    return optimizer_of(f"momentum_optimizer {{ learning_rate {{ {text} }} }}").lr


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        (f"momentum_optimizer {{ {RATE} }}", SGD(0.1, momentum=0.9)),
        (f"momentum_optimizer {{ {RATE} momentum_optimizer_value: 0.5 }}", SGD(0.1, momentum=0.5)),
        (f"rms_prop_optimizer {{ {RATE} }}", RMSProp(0.1, alpha=0.9, momentum=0.9, eps=1.0)),
        (
            f"rms_prop_optimizer {{ {RATE} decay: 0.8 epsilon: 0.01 momentum_optimizer_value: 0 }}",
            RMSProp(0.1, alpha=0.8, momentum=0.0, eps=0.01),
        ),
        (f"adam_optimizer {{ {RATE} }}", Adam(0.1, eps=1e-8, epsilon_hat=True)),
        (f"adam_optimizer {{ {RATE} epsilon: 1e-4 }}", Adam(0.1, eps=1e-4, epsilon_hat=True)),
    ],
)
def test_each_optimizer_has_the_references_defaults(text: str, optimizer: object) -> None:
    assert optimizer_of(text) == optimizer


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("constant_learning_rate { }", 0.002),
        ("exponential_decay_learning_rate { }", Exponential(0.002, 4_000_000, 0.95, staircase=True)),
        (
            "exponential_decay_learning_rate { initial_learning_rate: 1 decay_steps: 9 decay_factor: .5 staircase: f }",
            Exponential(1.0, 9, 0.5, staircase=False),
        ),
        (
            "exponential_decay_learning_rate { burnin_learning_rate: 0.01 burnin_steps: 5 min_learning_rate: 1e-4 }",
            Exponential(0.002, 4_000_000, 0.95, burn_in_steps=5, burn_in=0.01, final=1e-4),
        ),
        (
            "manual_step_learning_rate { schedule { step: 5 learning_rate: 1 } schedule: { step: 9 } }",
            PiecewiseConstant((5, 9), (0.002, 1.0, 0.002)),
        ),
        (
            "manual_step_learning_rate { initial_learning_rate: 0 schedule: [{ step: 5 learning_rate: 1 }] warmup: t }",
            PiecewiseConstant((5,), (0.0, 1.0), warmup=True),
        ),
        ("cosine_decay_learning_rate { }", Cosine(0.002, 4_000_000, warmup_steps=10_000, warmup_initial=0.0002)),
        (
            "cosine_decay_learning_rate { learning_rate_base: .4 "
            "total_steps: 9 warmup_steps: 2, hold_base_rate_steps: 3 }",
            Cosine(0.4, 9, warmup_steps=2, warmup_initial=0.0002, hold_steps=3),
        ),
        (
            "cosine_decay_learning_rate { learning_rate_base: .1 warmup_learning_rate: .2 warmup_steps: 0 }",
            Cosine(0.1, 4_000_000),
        ),
    ],
)
def test_each_schedule_has_the_references_defaults(text: str, rate: object) -> None:
    assert rate_of(text) == rate


def test_a_schedule_of_2017_may_begin_at_step_0() -> None:
    rate = rate_of(
        "manual_step_learning_rate { initial_learning_rate: 9 "
        "schedule { step: 0 learning_rate: 1 } schedule { step: 7 } }"
    )
    assert rate == PiecewiseConstant((7,), (1.0, 0.002))
    assert [rate(step) for step in (0, 6, 7)] == [1.0, 1.0, 0.002]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("manual_step_learning_rate { }", "The learning rate's schedule is empty."),
        ("manual_step_learning_rate { schedule { step: 5 } schedule { step: 5 } }", "The boundaries do not rise."),
        ("exponential_decay_learning_rate { decay_steps: 0 }", "decay_steps is out of range."),
        ("cosine_decay_learning_rate { total_steps: 5 }", "The warm-up is longer than the whole schedule."),
        (
            "cosine_decay_learning_rate { warmup_learning_rate: 1 }",
            "The warm-up would fall instead of rise.",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        rate_of(text)
    assert caught.value.what == what


def test_two_optimizers_are_refused() -> None:
    with pytest.raises(InputError, match="A training has one optimizer") as caught:
        optimizer_of(f"momentum_optimizer {{ {RATE} }} adam_optimizer {{ {RATE} }}")
    assert caught.value.given == "momentum_optimizer, adam_optimizer"


@pytest.mark.parametrize(
    ("text", "average"),
    [
        ("", MovingAverage(0.9999, dynamic=False)),
        ("use_moving_average: true moving_average_decay: 0.2", MovingAverage(0.2, dynamic=False)),
        ("use_moving_average: false", None),
    ],
)
def test_the_average_is_kept_unless_it_is_switched_off(text: str, average: object) -> None:
    assert fields_of(f"optimizer {{ momentum_optimizer {{ {RATE} }} {text} }}")["average"] == average


VARIABLES = {
    "backbone.conv.weight": "FeatureExtractor/MobilenetV1/*/weights",
    "backbone.norm.bias": "FeatureExtractor/MobilenetV1/*/BatchNorm/beta",
    "backbone.extra.bias": "FeatureExtractor/MobilenetV1/*/biases",
    "head.classes.weight": "BoxPredictor_0/ClassPredictor/*/weights",
    "head.classes.bias": "BoxPredictor_0/ClassPredictor/*/biases",
}


def by_name(text: str) -> dict[str, Any]:
    return fields_by_name(train_config(f"{MOMENTUM} {text}"), VARIABLES)


def test_gradients_of_biases_and_not_of_norms_are_multiplied_before_each_is_clipped() -> None:
    fields = by_name("gradient_clipping_by_norm: 10 bias_grad_multiplier: 2")
    biases = {"backbone.extra.bias": 2.0, "head.classes.bias": 2.0}
    assert fields["gradient_transforms"] == (ScaleGradients(biases), ClipNorm(10.0))
    assert by_name("")["gradient_transforms"] == ()


def test_what_is_frozen_is_not_multiplied() -> None:
    scaled = {
        "freeze_variables: 'FeatureExtractor'": "head.classes.bias",
        "update_trainable_variables: 'F'": "backbone.extra.bias",
    }
    for text, name in scaled.items():
        (transform,) = by_name(f"bias_grad_multiplier: 2 {text}")["gradient_transforms"]
        assert transform == ScaleGradients({name: 2.0})
    assert by_name("bias_grad_multiplier: 2 freeze_variables: '.*/biases'")["gradient_transforms"] == ()


def test_patterns_of_variables_match_from_the_start_and_become_those_of_parameters() -> None:
    fields = by_name('freeze_variables: ["Feature|Box.*/biases", ""] update_trainable_variables: ".*/weights"')
    assert fields["frozen"] == (r"^backbone\.", "head.classes.bias")
    assert fields["train_only"] == ("backbone.conv.weight", "head.classes.weight")
    assert by_name("freeze_variables: 'MobilenetV1'")["frozen"] == ()


def test_a_pattern_of_single_layers_matches_nothing_and_is_named() -> None:
    train = train_config(f"{MOMENTUM} freeze_variables: ['FeatureExtractor/MobilenetV1/Conv2d_0', '.*/biases']")
    assert unmatched(train, VARIABLES) == [("freeze_variables", "FeatureExtractor/MobilenetV1/Conv2d_0")]


@pytest.mark.parametrize(
    ("text", "what"), [("'nothing'", "has none of the parameters"), ("'('", "no regular expression")]
)
def test_to_train_nothing_is_refused(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        by_name(f"update_trainable_variables: {text}")


def test_defaults_are_those_of_the_reference() -> None:
    train = train_config(MOMENTUM)
    assert (train.batch_size, train.sync_replicas, train.replicas_to_aggregate) == (32, False, 1)
    assert (train.keep_checkpoint_every_n_hours, train.gradient_clipping_by_norm, train.num_steps) == (1000, 0.0, 0)
    assert (train.bias_grad_multiplier, train.freeze_variables, train.update_trainable_variables) == (0.0, (), ())
    assert (train.fine_tune_checkpoint, train.fine_tune_checkpoint_type) == ("", "")
    assert (train.from_detection_checkpoint, train.load_all_detection_checkpoint_vars) == (False, False)
    assert (train.add_regularization_loss, train.merge_multiple_label_boxes, train.use_multiclass_scores) == (
        True,
        False,
        False,
    )
    assert (train.use_bfloat16, train.unpad_groundtruth_tensors) == (False, True)
    assert fields_of(MOMENTUM)["checkpoints"].retention == Retention(newest=5, every_hours=1000)


@pytest.mark.parametrize(
    ("text", "towers"),
    [
        ("", 1),
        ("replicas_to_aggregate: 8", 1),
        ("sync_replicas: true replicas_to_aggregate: 8 startup_delay_steps: 0", 8),
    ],
)
def test_replicas_of_a_synchronous_training_are_towers(text: str, towers: int) -> None:
    assert fields_of(f"{MOMENTUM} {text}")["num_towers"] == towers


def test_steps_checkpoints_and_precision() -> None:
    fields = fields_of(f"{MOMENTUM} num_steps: 7 keep_checkpoint_every_n_hours: 3 use_bfloat16: true batch_size: 0x10")
    assert (fields["end"], fields["batch_size"], fields["towers"]) == (Steps(7), 16, Towers(precision="bf16"))
    assert fields["checkpoints"].retention.every_hours == 3
    assert "end" not in fields_of(f"{MOMENTUM} num_steps: 0")


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("", "classifier"),
        ("load_all_detection_checkpoint_vars: true", "classifier"),
        ("from_detection_checkpoint: true", "features"),
        ("from_detection_checkpoint: true load_all_detection_checkpoint_vars: true", "detector"),
        ('fine_tune_checkpoint_type: "detection" load_all_detection_checkpoint_vars: true', "detector"),
        ('fine_tune_checkpoint_version: V2 fine_tune_checkpoint_type: "full"', "detector"),
        ('fine_tune_checkpoint_version: V2 fine_tune_checkpoint_type: "fine_tune"', "features"),
        ('fine_tune_checkpoint_type: "classification" from_detection_checkpoint: true', "classifier"),
    ],
)
def test_first_weights_are_those_of_a_classifier_or_of_a_detector(text: str, takes: Any) -> None:
    fields = fields_of(f'{MOMENTUM} fine_tune_checkpoint: "model.ckpt" {text}')
    assert fields["warm_start"] == InitialWeights("model.ckpt", takes=takes)


def test_without_a_checkpoint_weights_are_fresh() -> None:
    assert fields_of(f'{MOMENTUM} from_detection_checkpoint: true fine_tune_checkpoint: ""')["warm_start"] is None
