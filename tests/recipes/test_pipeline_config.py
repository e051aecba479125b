"""Configs of TensorFlow's Object Detection API become recipes, and nothing in them is lost without a word."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.detection.blocks import GridAnchorGenerator, SsdAnchorGenerator, WeightedSigmoidFocal
from lockstep.detection.tf_configs import (
    FasterRcnn,
    L2Regularizer,
    MaskRcnnBoxPredictor,
    RfcnBoxPredictor,
    Ssd,
    VarianceScalingInitializer,
)
from lockstep.errors import DataError, InputError, InputErrors
from lockstep.inline_toml import kind_name
from lockstep.metrics.detection_sets import DETECTION_METRICS
from lockstep.optim import SGD, Cosine, Exponential, MovingAverage, PiecewiseConstant, RMSProp, ScaleGradients
from lockstep.recipes.data import DetectionData
from lockstep.recipes.messages import Row, no_effect, to
from lockstep.recipes.parts import DetectionEvaluation, DetectionMetrics, Pictures, Quantization
from lockstep.recipes.pipeline_config import Imported, import_pipeline
from lockstep.recipes.recipe import recipe_changes
from lockstep.recipes.toml import from_toml, to_toml
from lockstep.records.text_format import Field, parse_text_format
from lockstep.types import Epochs, Interval, Steps

FIXTURES = Path(__file__).parents[1] / "fixtures" / "odapi_configs"
"""The 25 configs that the API has published for data sets of its time."""

MODEL = """
  num_classes: 3
  image_resizer { fixed_shape_resizer { } }
  feature_extractor { type: "ssd_mobilenet_v1" }
  box_coder { faster_rcnn_box_coder { } }
  matcher { argmax_matcher { } }
  similarity_calculator { iou_similarity { } }
  box_predictor { convolutional_box_predictor { } }
  anchor_generator { ssd_anchor_generator { } }
  loss { classification_loss { weighted_sigmoid { } } localization_loss { weighted_smooth_l1 { } } }
"""
RATE = "learning_rate { constant_learning_rate { } }"
OPTIMIZER = f"optimizer {{ momentum_optimizer {{ {RATE} }} }}"


def imported(*, model: str = "", train: str = OPTIMIZER, rest: str = "") -> Imported:
    """Import a small config with these things in it."""
    text = f"model {{ ssd {{ {MODEL}\n{model} }} }}\ntrain_config {{ {train} }}\n{rest}"
    return import_pipeline(text, "a.config", "a")


def refused(**parts: str) -> InputError:
    with pytest.raises(InputError) as caught:
        imported(**parts)
    return caught.value


def config(name: str) -> Imported:
    (path,) = FIXTURES.glob(f"{name}*.config")
    return import_pipeline(path.read_text(), path.name, path.stem)


def row_of(made: Imported, field: str) -> Row:
    (row,) = [row for row in made.rows if row.field == field]
    return row


def number_of_leaves(fields: list[Field]) -> int:
    return sum(number_of_leaves(f.value) if isinstance(f.value, list) and f.value else 1 for f in fields)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.config")), ids=lambda path: path.stem)
def test_every_field_of_a_config_is_in_the_report_and_the_recipe_is_read_back(path: Path) -> None:
    text = path.read_text()
    recipe, rows, *_ = import_pipeline(text, path.name, path.stem)
    assert len(rows) == number_of_leaves(parse_text_format(text, path.name))
    assert not any("no such field" in row.outcome.text for row in rows)
    lines = text.splitlines()
    assert all(re.search(rf"\b{row.name}\b", lines[row.place.line - 1]) for row in rows)
    assert [row.place for row in rows] == sorted(row.place for row in rows)
    assert from_toml(to_toml(recipe), path.name) == recipe
    assert not recipe_changes(recipe, from_toml(to_toml(recipe), path.name))


def test_what_the_published_configs_have_is_counted() -> None:
    recipes = [import_pipeline(path.read_text(), path.name, path.stem).recipe for path in FIXTURES.glob("*.config")]
    assert len(recipes) == 25
    models = [recipe.model for recipe in recipes]
    two_stages = [model for model in models if isinstance(model, FasterRcnn)]
    heads = [model.second_stage_box_predictor for model in two_stages]
    assert (sum(isinstance(model, Ssd) for model in models), len(two_stages)) == (14, 11)
    assert sum(isinstance(head, MaskRcnnBoxPredictor) and head.predict_instance_masks for head in heads) == 3
    assert sum(isinstance(head, RfcnBoxPredictor) for head in heads) == 1
    untrained = Counter(
        part for model in models if isinstance(model, Ssd | FasterRcnn) for part in model.untrained_parts
    )
    assert untrained == {"context_config": 1}
    assert sorted(recipe.quantization.delay for recipe in recipes if recipe.quantization) == [1800, 48000, 500000]
    optimizers: list[Any] = [recipe.optimizer for recipe in recipes]
    assert Counter(map(type, optimizers)) == {SGD: 16, RMSProp: 9}
    rates = Counter(type(optimizer.lr) for optimizer in optimizers)
    assert rates == {PiecewiseConstant: 11, Exponential: 9, Cosine: 5}
    steps = Counter(kind_name(type(step)) for recipe in recipes for step in getattr(recipe.data, "augment", ()))
    assert steps == {
        "horizontal_flip": 25,
        "ssd_random_crop": 12,
        "ssd_random_crop_fixed_aspect_ratio": 1,
        "random_crop_image": 1,
    }


def test_a_mask_rcnn_is_imported_with_all_that_it_says() -> None:
    recipe = config("mask_rcnn_resnet101").recipe
    model = recipe.model
    assert isinstance(model, FasterRcnn)
    assert (model.num_classes, model.number_of_stages, model.feature_extractor.type) == (37, 3, "faster_rcnn_resnet101")
    anchors = GridAnchorGenerator(scales=(0.25, 0.5, 1.0, 2.0), aspect_ratios=(0.5, 1.0, 2.0))
    assert model.first_stage_anchor_generator == anchors
    head = model.second_stage_box_predictor
    assert isinstance(head, MaskRcnnBoxPredictor)
    assert head.fc_hyperparams
    assert head.fc_hyperparams.initializer == VarianceScalingInitializer(1.0, uniform=True, mode="fan_avg")
    assert head.fc_hyperparams.regularizer == L2Regularizer(0.0)
    nms = model.second_stage_post_processing.batch_non_max_suppression
    assert (nms.iou_threshold, nms.max_total_detections) == (0.6, 300)
    data = recipe.data
    assert isinstance(data, DetectionData)
    assert data.resizer == KeepAspectRatioResizer(600, 1024)
    assert data.train == "PATH_TO_BE_CONFIGURED/pet_fullbody_with_masks_train.record-?????-of-00010"
    assert data.validation == "PATH_TO_BE_CONFIGURED/pet_fullbody_with_masks_val.record-?????-of-00010"
    assert (data.label_map, data.masks) == ("PATH_TO_BE_CONFIGURED/pet_label_map.pbtxt", True)
    assert recipe.optimizer == SGD(PiecewiseConstant((15000, 30000), (0.0007, 0.00007, 0.000007)), momentum=0.9)
    assert (recipe.batch_size, recipe.num_towers, recipe.end, recipe.average) == (1, 1, Steps(200000), None)
    assert recipe.evaluate.detection == DetectionEvaluation(("coco_mask_metrics",))
    assert (recipe.evaluate.examples, recipe.evaluate.every) == (1101, Interval(300, "seconds"))


def test_an_ssd_is_imported_with_all_that_it_says() -> None:
    made = config("ssdlite_mobilenet_v3")
    model = made.recipe.model
    assert isinstance(model, Ssd)
    assert isinstance(made.recipe.data, DetectionData)
    ratios = (1.0, 2.0, 0.5, 3.0, 0.3333)
    assert model.anchor_generator == SsdAnchorGenerator(6, 0.2, 0.95, aspect_ratios=ratios)
    assert model.loss.classification_loss == WeightedSigmoidFocal(gamma=2.0, alpha=0.75)
    assert (model.encode_background_as_zeros, model.normalize_loc_loss_by_codesize) == (True, True)
    assert made.recipe.data.resizer == FixedShapeResizer(320, 320)
    rate = Cosine(0.4, 800000, warmup_steps=2000, warmup_initial=0.13333)
    assert made.recipe.optimizer == SGD(rate, momentum=0.9)
    assert (made.recipe.batch_size, made.recipe.num_towers) == (512, 32)
    assert row_of(made, "model.ssd.inplace_batchnorm_update").outcome.fate == "no effect"


def test_quantization_is_imported() -> None:
    made = config("facessd")
    recipe = made.recipe
    assert recipe.quantization == Quantization(500000, 8, 8)
    assert not made.refusal
    assert row_of(made, "graph_rewriter.quantization.delay").outcome == to("quantization.delay")
    symmetric = imported(rest="graph_rewriter { quantization { symmetric: true } }")
    assert symmetric.recipe.quantization == Quantization(500000)
    assert row_of(symmetric, "graph_rewriter.quantization.symmetric").outcome.fate == "not mapped"
    assert "from 2 to 8" in str(refused(rest="graph_rewriter { quantization { weight_bits: 16 } }"))
    assert recipe.average == MovingAverage(0.9999, dynamic=False)
    assert recipe.evaluate.weights == "average"
    assert recipe.warm_start is None


def test_what_is_not_set_is_as_by_default_in_the_reference() -> None:
    recipe = imported().recipe
    assert (recipe.batch_size, recipe.end, recipe.checkpoints.retention.every_hours) == (32, None, 1000)
    assert recipe.optimizer == SGD(0.002, momentum=0.9)
    assert recipe.average == MovingAverage(0.9999, dynamic=False)
    assert recipe.evaluate.detection == DetectionEvaluation(("pascal_voc_detection_metrics",), pictures=Pictures(10))
    assert (recipe.evaluate.weights, recipe.evaluate.examples) == ("raw", None)
    assert recipe.gradient_transforms == ()


def test_both_forms_of_lists_are_one() -> None:
    anchors = "anchor_generator { ssd_anchor_generator { %s } }"
    base = MODEL.replace("anchor_generator { ssd_anchor_generator { } }", "")
    made = [
        import_pipeline(f"model {{ ssd {{ {base} {anchors % ratios} }} }} train_config {{ {OPTIMIZER} }}", "a", "a")
        for ratios in (
            "aspect_ratios: 1 aspect_ratios: .5",
            "aspect_ratios: [1, 0.5]",
            "aspect_ratios: [1] aspect_ratios: 5e-1",
        )
    ]
    for each in made:
        assert isinstance(each.recipe.model, Ssd)
        assert each.recipe.model.anchor_generator == SsdAnchorGenerator(aspect_ratios=(1.0, 0.5))
        fields = [row.outcome.text for row in each.rows if row.name == "aspect_ratios"]
        assert fields == ["model.anchor_generator.aspect_ratios.0", "model.anchor_generator.aspect_ratios.1"]


def test_first_stage_only_of_2017_is_a_number_of_stages() -> None:
    model = """model { faster_rcnn { first_stage_only: true num_classes: 1
      image_resizer { keep_aspect_ratio_resizer { } }
      feature_extractor { type: 'faster_rcnn_resnet50' }
      first_stage_anchor_generator { grid_anchor_generator { } } } }"""
    made = import_pipeline(f"{model} train_config {{ {OPTIMIZER} }}", "a.config", "a")
    assert isinstance(made.recipe.model, FasterRcnn)
    assert made.recipe.model.number_of_stages == 1
    assert row_of(made, "model.faster_rcnn.first_stage_only").outcome.text == "model.number_of_stages"


def test_unknown_fields_are_reported_with_all_that_is_in_them() -> None:
    made = imported(model="focus { power: 3 inner { deep: 'x' } }", train=f"{OPTIMIZER} batch_sizee: 4", rest="more: 1")
    told = {row.field: row.outcome for row in made.rows if row.outcome.fate == "not mapped"}
    assert told.keys() == {"model.ssd.focus.power", "model.ssd.focus.inner.deep", "train_config.batch_sizee", "more"}
    assert told["train_config.batch_sizee"].text == 'there is no such field. did you mean "batch_size"?'
    assert made.recipe.batch_size == 32


def test_unknown_fields_may_be_nested_deeply() -> None:
    made = imported(rest="a {" * 5_000 + "}" * 5_000)
    (row,) = [row for row in made.rows if row.outcome.fate == "not mapped"]
    assert (row.field, row.value) == (".".join("a" * 501), "{ ... }")


def test_of_two_messages_where_there_is_one_none_is_guessed() -> None:
    rates = "learning_rate { constant_learning_rate { } cosine_decay_learning_rate { } }"
    error = refused(train=f"optimizer {{ momentum_optimizer {{ {rates} }} }}")
    assert (error.given, error.hint) == ("constant_learning_rate, cosine_decay_learning_rate", "name one of these")


def test_resizers_nested_deeply_are_refused() -> None:
    resizer = "image_resizer {" + "a {" * 5_000 + "}" * 5_001
    assert isinstance(refused(model=2 * resizer), InputErrors)


def test_all_wrong_values_are_told_together_with_line_and_column() -> None:
    model = "\nfreeze_batchnorm: maybe\npost_processing { score_converter: SIGMOIDD }"
    error = refused(model=model, train=f"{OPTIMIZER}\n batch_size: 0\n batch_size: 2 num_steps: 1e3")
    assert isinstance(error, InputErrors)
    found = {each.what: (each.given, each.expected, each.hint) for each in error.errors}
    assert found.keys() == {
        "a.config, line 17, column 2: train_config.batch_size cannot be used.",
        "a.config, line 17, column 27: train_config.num_steps cannot be used.",
        "a.config, line 13, column 19: model.ssd.freeze_batchnorm cannot be used.",
        "a.config, line 14, column 36: model.ssd.post_processing.score_converter cannot be used.",
    }
    wrong_name = found["a.config, line 14, column 36: model.ssd.post_processing.score_converter cannot be used."]
    assert wrong_name == ("SIGMOIDD", "one of IDENTITY, SIGMOID, SOFTMAX", 'did you mean "SIGMOID"?')


@pytest.mark.parametrize(
    ("parts", "what", "given"),
    [
        (
            {"train": f"{OPTIMIZER} num_steps: 4294967296"},
            "line 13, column 109: train_config.num_steps cannot",
            "4294967296",
        ),
        ({"train": f"{OPTIMIZER} num_steps: {'9' * 5000}"}, "train_config.num_steps cannot", "9" * 100),
        ({"train": f"{OPTIMIZER} num_steps: 010"}, "train_config.num_steps cannot", "010"),
        ({"train": f"{OPTIMIZER} num_steps: \uff19"}, "train_config.num_steps cannot", "\uff19"),
        (
            {"train": f"{OPTIMIZER} replicas_to_aggregate: 0"},
            "line 13, column 121, in train_config: replicas_to_aggregate is out of range",
            "replicas_to_aggregate=0",
        ),
        (
            {"train": f"{OPTIMIZER} batch_size: 0"},
            "line 13, column 110, in train_config: batch_size is out of range",
            "batch_size=0",
        ),
        ({"train": ""}, "line 13, column 14: train_config cannot", "no field optimizer"),
        ({"train": "optimizer { }"}, "training: A training has one optimizer", "none"),
        ({"rest": "model { ssd {} }"}, "line 1, column 9: model", "ssd, ssd"),
        ({"rest": "graph_rewriter: 3"}, "line 14, column 17: graph_rewriter cannot", "3"),
        ({"train": f"{OPTIMIZER} data_augmentation_options: 1"}, "train_config.data_augmentation_options cannot", "1"),
        ({"rest": "eval_config { min_score_threshold: 2 }"}, "evaluation: min_score is out of range", "min_score=2.0"),
    ],
)
def test_impossible_values_of_a_config_are_refused(parts: dict[str, str], what: str, given: str) -> None:
    error = refused(**parts)
    assert what in error.what
    assert error.what.startswith("a.config")
    assert str(error.given) == given


def test_a_number_of_classes_that_would_fill_the_memory_is_refused() -> None:
    text = f"model {{ ssd {{ {MODEL} }} }} train_config {{ {OPTIMIZER} }}".replace("classes: 3", "classes: 4000000000")
    with pytest.raises(InputError, match=r"line 2, column 16, in model\.ssd: num_classes is out of range"):
        import_pipeline(text, "a.config", "a")


def test_another_model_is_refused_by_name() -> None:
    with pytest.raises(InputError) as caught:
        import_pipeline(f"model {{ experimental_model {{ }} }} train_config {{ {OPTIMIZER} }}", "a.config", "a")
    assert caught.value.what == "a.config, line 1, column 9: model cannot be used."
    assert (caught.value.given, caught.value.expected) == ("experimental_model", "ssd or faster_rcnn or center_net")


def test_another_format_is_refused() -> None:
    with pytest.raises(DataError, match="line 1, column 1 cannot be read"):
        import_pipeline('{"model": 1}', "a.config", "a")


def test_the_options_of_the_api_are_those_that_there_are() -> None:
    made = imported(
        train=f"{OPTIMIZER} data_augmentation_options {{ random_horizontal_flip {{ }} }} "
        "data_augmentation_options { random_horizontal_flip2 { strength: 3 } }"
    )
    assert isinstance(made.recipe.data, DetectionData)
    assert made.recipe.data.augment == (HorizontalFlip(),)
    path = "train_config.data_augmentation_options"
    assert row_of(made, f"{path}.random_horizontal_flip").outcome.text == "data.augment.0"
    told = row_of(made, f"{path}.random_horizontal_flip2.strength").outcome
    assert told.text == 'there is no such augmentation here. did you mean "random_horizontal_flip"?'


def test_readers_say_paths_masks_keypoints_and_the_order() -> None:
    made = imported(
        rest="""
        train_input_reader { shuffle: false load_instance_masks: true num_keypoints: 4 num_epochs: 7
          label_map_path: "map" tf_record_input_reader { input_path: ["a", "b"] } max_number_of_boxes: 9 }
        eval_input_reader { label_map_path: "other" tf_record_input_reader { input_path: "c" }
          input_type: TF_SEQUENCE_EXAMPLE }
        eval_input_reader { name: "second" }
        """
    )
    recipe = made.recipe
    assert isinstance(recipe.data, DetectionData)
    assert (recipe.data.train, recipe.data.validation, recipe.data.label_map) == ("a", "c", "map")
    assert (recipe.data.masks, recipe.data.num_keypoints, recipe.data.max_number_of_boxes) == (True, 4, 9)
    assert (recipe.feed.order, recipe.end) == ("sequential", Epochs(7))
    left = {(row.field, row.value) for row in made.rows if row.outcome.fate == "not mapped"}
    assert left == {
        ("train_input_reader.tf_record_input_reader.input_path", '"b"'),
        ("eval_input_reader.label_map_path", '"other"'),
        ("eval_input_reader.input_type", "TF_SEQUENCE_EXAMPLE"),
        ("eval_input_reader.name", '"second"'),
    }


def test_a_path_that_is_given_twice_is_read() -> None:
    made = imported(rest='train_input_reader { tf_record_input_reader { input_path: ["a", "a", "b"] } }')
    field = "train_input_reader.tf_record_input_reader.input_path"
    assert [row.outcome.fate for row in made.rows if row.field == field] == ["mapped", "mapped", "not mapped"]


def test_what_other_fields_overrule_is_not_said_to_be_mapped() -> None:
    made = imported(
        train=f"{OPTIMIZER.removesuffix('}')} use_moving_average: false moving_average_decay: 0.9 }}"
        " batch_size: 24 sync_replicas: true replicas_to_aggregate: 5 max_number_of_boxes: 7"
        ' fine_tune_checkpoint: "a" fine_tune_checkpoint_type: "fine_tune"',
        rest="train_input_reader { max_number_of_boxes: 9 num_keypoints: 4 } eval_input_reader { num_keypoints: 5 }",
    )
    assert isinstance(made.recipe.data, DetectionData)
    assert (made.recipe.num_towers, made.recipe.data.max_number_of_boxes, made.recipe.data.num_keypoints) == (1, 9, 4)
    assert {row.field for row in made.rows if row.outcome.fate != "mapped"} == {
        "train_config.optimizer.moving_average_decay",
        "train_config.replicas_to_aggregate",
        "train_config.max_number_of_boxes",
        "train_config.fine_tune_checkpoint_type",
        "eval_input_reader.num_keypoints",
    }
    made = imported(train=f"{OPTIMIZER} replicas_to_aggregate: 8 from_detection_checkpoint: true")
    assert (made.recipe.num_towers, made.recipe.warm_start) == (1, None)
    assert {row.name for row in made.rows if row.outcome.fate == "no effect"} == {
        "replicas_to_aggregate",
        "from_detection_checkpoint",
    }


def test_what_training_says_of_targets_is_said_by_the_data() -> None:
    data = imported(train=f"{OPTIMIZER} merge_multiple_label_boxes: true max_number_of_boxes: 8").recipe.data
    assert isinstance(data, DetectionData)
    assert (data.merge_multiple_label_boxes, data.use_multiclass_scores, data.max_number_of_boxes) == (True, False, 8)
    scores = imported(train=f"{OPTIMIZER} use_multiclass_scores: true").recipe.data
    assert isinstance(scores, DetectionData)
    assert scores.use_multiclass_scores
    error = refused(train=f"{OPTIMIZER} merge_multiple_label_boxes: true use_multiclass_scores: true")
    assert error.what.startswith("a.config, data: ")


def test_a_recipe_names_all_the_metrics_that_there_are() -> None:
    assert {*get_args(DetectionMetrics)} == DETECTION_METRICS.keys()


def test_metrics_that_there_are_not_are_reported() -> None:
    made = imported(rest='eval_config { metrics_set: ["pascal_voc_metrics", "coco_detection_metrics", "cocoo"] }')
    assert made.recipe.evaluate.detection
    assert made.recipe.evaluate.detection.metrics == ("pascal_voc_metrics", "coco_detection_metrics")
    fates = {row.value: row.outcome.fate for row in made.rows if row.name == "metrics_set"}
    assert fates['"cocoo"'] == "not mapped"


def test_evaluation_is_part_of_the_run() -> None:
    made = imported(
        rest="""eval_config { eval_interval_secs: 60 max_evals: 5 num_visualizations: 3 batch_size: 2 num_examples: 50
        ignore_groundtruth: true export_path: 'out.json' skip_scores: true use_moving_averages: true
        visualization_export_dir: 'seen' include_metrics_per_category: true }"""
    )
    recipe = made.recipe
    assert (recipe.evaluate.every, recipe.evaluate.micro_batch) == (Interval(60, "seconds"), 2)
    assert (recipe.evaluate.examples, recipe.evaluate.weights) == (50, "average")
    pictures = Pictures(3, folder="seen", scores=False)
    assert recipe.evaluate.detection == DetectionEvaluation(
        per_category=True, ignore_ground_truth=True, export_path="out.json", pictures=pictures
    )
    assert row_of(made, "eval_config.max_evals").outcome == no_effect(
        "it ends the reference's evaluation job; a run is scored until its end"
    )


def test_averages_that_are_not_kept_are_not_scored() -> None:
    without = OPTIMIZER.removesuffix("}") + " use_moving_average: false }"
    made = imported(train=without, rest="eval_config { use_moving_averages: true }")
    assert made.recipe.evaluate.weights == "raw"
    assert row_of(made, "eval_config.use_moving_averages").outcome.fate == "not mapped"


def test_a_resizer_that_there_is_not_is_reported() -> None:
    text = MODEL.replace("fixed_shape_resizer { }", "conditional_shape_resizer { size_threshold: 5 }")
    made = import_pipeline(f"model {{ ssd {{ {text} }} }} train_config {{ {OPTIMIZER} }}", "a", "a")
    assert isinstance(made.recipe.data, DetectionData)
    assert made.recipe.data.resizer == FixedShapeResizer()
    assert [row.name for row in made.rows if row.outcome.fate == "not mapped"] == ["size_threshold"]


@pytest.mark.parametrize(
    ("part", "message", "text"),
    [
        ("random_example_sampler", "  loss {", "random_example_sampler { }"),
        ("equalization_loss", "  loss {", "equalization_loss { weight: 2 }"),
    ],
)
def test_a_part_of_an_ssd_that_nothing_trains_is_refused_by_name(part: str, message: str, text: str) -> None:
    model = MODEL.replace(message, f"{message} {text}")
    made = import_pipeline(f"model {{ ssd {{ {model} }} }} train_config {{ {OPTIMIZER} }}", "a", "a")
    assert made.refusal
    assert part in str(made.refusal.given)
    assert any(part in row.field and row.outcome.fate == "not mapped" for row in made.rows)
    assert from_toml(to_toml(made.recipe), "a") == made.recipe


def test_a_feature_extractor_that_is_not_there_stays_in_the_recipe_unless_another_may_take_its_place() -> None:
    path = FIXTURES / "faster_rcnn_inception_v2_coco.config"
    text = path.read_text().replace("inception_v2", "nas")
    as_it_is, substituted = (
        import_pipeline(text, path.name, path.stem, substitute_model=allowed) for allowed in (False, True)
    )
    assert isinstance(as_it_is.recipe.model, FasterRcnn)
    assert as_it_is.recipe.model.feature_extractor.type == "faster_rcnn_nas"
    assert as_it_is.recipe.warm_start is not None
    assert not as_it_is.substitutes
    assert as_it_is.refusal
    assert "There is no feature extractor faster_rcnn_nas here" in as_it_is.refusal.what
    assert isinstance(substituted.recipe.model, FasterRcnn)
    assert substituted.recipe.model.feature_extractor.type == "faster_rcnn_inception_resnet_v2"
    assert substituted.recipe.warm_start is None
    assert substituted.substitutes == {"model.feature_extractor.type": "faster_rcnn_inception_resnet_v2"}
    left = {row.name for row in substituted.rows if row.outcome.fate == "not mapped"}
    assert left == {"type", "fine_tune_checkpoint", "from_detection_checkpoint"}
    again = import_pipeline(path.read_text(), "a", "a", substitute_model=True)
    assert not again.substitutes
    assert again.recipe.warm_start is not None


def test_patterns_of_variables_become_patterns_of_the_detectors_parameters() -> None:
    patterns = "freeze_variables: ['FeatureExtractor/MobilenetV1/.*', 'FeatureExtractor/MobilenetV1/Conv2d_0/.*']"
    predictor = "convolutional_box_predictor { } "
    regular = "conv_hyperparams { regularizer { l2_regularizer { } } initializer { random_normal_initializer { } } }"
    text = f"model {{ ssd {{ {MODEL} }} }} train_config {{ {OPTIMIZER} bias_grad_multiplier: 2 {patterns} }}"
    made = import_pipeline(text.replace(predictor, f"convolutional_box_predictor {{ {regular} }} "), "a.config", "a")
    assert made.refusal is None
    assert made.recipe.frozen == (r"^backbone\.",)
    (scaled,) = made.recipe.gradient_transforms
    assert isinstance(scaled, ScaleGradients)
    assert len(scaled.multipliers) == 12
    assert all(re.fullmatch(r"head\.(box|class)_predictor\.\d\.predictor\.bias", name) for name in scaled.multipliers)
    fates = {row.value: row.outcome.fate for row in made.rows if row.name == "freeze_variables"}
    assert [*fates.values()] == ["mapped", "not mapped"]


def test_patterns_of_a_detector_that_is_not_trained_are_left_out_and_named() -> None:
    made = imported(
        model="explicit_background_class: true",
        train=f"{OPTIMIZER} bias_grad_multiplier: 2 update_trainable_variables: 'a'",
    )
    assert made.refusal
    assert (made.recipe.train_only, made.recipe.gradient_transforms) == ((), ())
    left = {row.name for row in made.rows if row.outcome.fate == "not mapped"}
    assert left == {"bias_grad_multiplier", "update_trainable_variables"}
