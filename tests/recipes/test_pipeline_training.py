"""The training of a pipeline.config: what its optimizer, schedule and first weights become."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

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
from lockstep.parallel.towers import Towers
from lockstep.progress import Steps
from lockstep.recipes.messages import At, MessageReader, to
from lockstep.recipes.parts import InitialWeights
from lockstep.recipes.pipeline_config import import_pipeline
from lockstep.recipes.pipeline_messages import TrainConfig
from lockstep.recipes.pipeline_training import recipe_fields
from lockstep.text_format import Place, parse_text_format

FIXTURES = Path(__file__).parents[1] / "fixtures" / "odapi_configs"
RATE = "learning_rate { constant_learning_rate { learning_rate: 0.1 } }"
MOMENTUM = f"optimizer {{ momentum_optimizer {{ {RATE} }} use_moving_average: false }}"


def fields_of(text: str) -> dict[str, Any]:
    reader = MessageReader("a.config", {})
    message = parse_text_format(text, "a.config")
    return recipe_fields(reader.read(TrainConfig, message, At("train_config", Place(1, 1), to(""))))


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


def test_gradients_of_biases_are_multiplied_before_each_is_clipped() -> None:
    fields = fields_of(f"{MOMENTUM} gradient_clipping_by_norm: 10 bias_grad_multiplier: 2")
    (scaled, clipped) = fields["gradient_transforms"]
    assert isinstance(scaled, ScaleGradients)
    assert [*scaled.multipliers.values()] == [2.0]
    assert clipped == ClipNorm(10.0)
    assert fields_of(MOMENTUM)["gradient_transforms"] == ()


@pytest.mark.parametrize(
    "config",
    [
        "ssd_inception_v3_pets",
        "ssd_mobilenet_v1_coco",
        "ssd_mobilenet_v2_mnasfpn_shared_box_predictor_320x320_coco_sync",
        "ssdlite_mobilenet_v3_small_320x320_coco",
    ],
)
def test_biases_are_those_of_layers_and_not_of_norms(config: str) -> None:
    path = FIXTURES / f"{config}.config"
    model = import_pipeline(path.read_text(), path.name, "x", substitute_model=True).recipe.model
    thin = replace(model, num_classes=2, feature_extractor=replace(model.feature_extractor, depth_multiplier=0.1))
    net = thin.build(0)
    layers = (nn.Conv2d, nn.Linear)
    expected = {
        f"{name}.bias" for name, each in net.named_modules() if isinstance(each, layers) and each.bias is not None
    }
    (scaled,) = fields_of(f"{MOMENTUM} bias_grad_multiplier: 2")["gradient_transforms"]
    (pattern,) = scaled.multipliers
    assert {name for name, _ in net.named_parameters() if re.search(pattern, name)} == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("FeatureExtractor", "^backbone\\."),
        ("^FeatureExtractor/MobilenetV1/.*", "^backbone\\."),
        ("BoxPredictor_0/", "^head\\."),
        ("WeightSharedConvolutionalBoxPredictor", "^head\\."),
        ("FeatureExtractor/MobilenetV1/Conv2d_0", "^(?:FeatureExtractor/MobilenetV1/Conv2d_0)"),
    ],
)
def test_scopes_of_frozen_variables_become_modules(pattern: str, expected: str) -> None:
    assert fields_of(f'{MOMENTUM} freeze_variables: "{pattern}"')["frozen"] == (expected,)


def test_all_biases_can_be_frozen() -> None:
    (frozen,) = fields_of(f'{MOMENTUM} freeze_variables: ".*/biases"')["frozen"]
    assert re.search(frozen, "head.box_predictor.0.predictor.bias")
    assert not re.search(frozen, "backbone.features.Conv2d_0.1.bias")


def test_patterns_of_frozen_variables_match_from_the_start() -> None:
    fields = fields_of(f'{MOMENTUM} freeze_variables: ["Feature|Box", ""] update_trainable_variables: "a"')
    assert (fields["frozen"], fields["train_only"]) == (("^(?:Feature|Box)",), ("^(?:a)",))


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
        ('fine_tune_checkpoint_type: "classification" from_detection_checkpoint: true', "classifier"),
    ],
)
def test_first_weights_are_those_of_a_classifier_or_of_a_detector(text: str, takes: Any) -> None:
    fields = fields_of(f'{MOMENTUM} fine_tune_checkpoint: "model.ckpt" {text}')
    assert fields["warm_start"] == InitialWeights("model.ckpt", takes=takes)


def test_without_a_checkpoint_weights_are_fresh() -> None:
    assert fields_of(f'{MOMENTUM} from_detection_checkpoint: true fine_tune_checkpoint: ""')["warm_start"] is None
