"""Each data augmentation option of the Object Detection API becomes its class, with the fields that the file sets."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.augmentations.lists import AUGMENTATIONS
from lockstep.augmentations.random_crops import (
    SsdRandomCropFixedAspectRatioOperation,
    SsdRandomCropOperation,
    SsdRandomCropPadOperation,
)
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.errors import InputError
from lockstep.inline_toml import kind_name
from lockstep.recipes.data import DetectionData
from lockstep.recipes.pipeline_config import OPTIONS, Imported, import_pipeline
from lockstep.recipes.toml import from_toml, to_toml

CLASSES = {kind_name(cls): cls for cls in AUGMENTATIONS}
SAMPLE = """
model { faster_rcnn { num_classes: 1 image_resizer { fixed_shape_resizer { } }
  feature_extractor { type: "faster_rcnn_resnet50" } first_stage_anchor_generator { grid_anchor_generator { } } } }
train_config { optimizer { adam_optimizer { learning_rate { constant_learning_rate { } } } } %s }
"""
LIMITS = "min_object_covered: 0.5 min_aspect_ratio: 0.9 max_aspect_ratio: 1.2 min_area: 0.2 max_area: 0.8"
LIMITS_READ = {
    "min_object_covered": 0.5,
    "min_aspect_ratio": 0.9,
    "max_aspect_ratio": 1.2,
    "min_area": 0.2,
    "max_area": 0.8,
}
AREAS = "min_object_covered: 0.5 min_area: 0.2 max_area: 0.8"
AREAS_READ = {"min_object_covered": 0.5, "min_area": 0.2, "max_area": 0.8}


def imported(options: str) -> Imported:
    return import_pipeline(SAMPLE % f"data_augmentation_options {{ {options} }}", "a.config", "a")


def made(options: str) -> Any:
    recipe, rows, *_ = imported(options)
    assert not [row for row in rows if row.outcome.fate == "not mapped"]
    assert isinstance(recipe.data, DetectionData)
    assert from_toml(to_toml(recipe), "a") == recipe
    (augmentation,) = recipe.data.augment
    return augmentation


@pytest.mark.parametrize(
    ("option", "text", "values"),
    [
        (
            "normalize_image",
            "original_minval: 0 original_maxval: 255 target_minval: -1 target_maxval: 1",
            {"original_minval": 0.0, "original_maxval": 255.0, "target_minval": -1.0, "target_maxval": 1.0},
        ),
        ("random_vertical_flip", "keypoint_flip_permutation: [1, 0]", {"keypoint_flip_permutation": (1, 0)}),
        ("random_rotation90", "", {}),
        ("random_pixel_value_scale", "minval: 0.8 maxval: 1.2", {"minval": 0.8, "maxval": 1.2}),
        (
            "random_image_scale",
            "min_scale_ratio: .8 max_scale_ratio: 2",
            {"min_scale_ratio": 0.8, "max_scale_ratio": 2.0},
        ),
        ("random_rgb_to_gray", "probability: 0.8", {"probability": 0.8}),
        ("random_adjust_brightness", "max_delta: 0.2", {"max_delta": 0.2}),
        ("random_adjust_contrast", "min_delta: 0.7 max_delta: 1.1", {"min_delta": 0.7, "max_delta": 1.1}),
        ("random_adjust_hue", "max_delta: 0.01", {"max_delta": 0.01}),
        ("random_adjust_saturation", "min_delta: 0.75 max_delta: 1.15", {"min_delta": 0.75, "max_delta": 1.15}),
        ("random_distort_color", "color_ordering: 1", {"color_ordering": 1}),
        ("random_jitter_boxes", "ratio: 0.1", {"ratio": 0.1}),
        (
            "random_crop_image",
            f"{LIMITS} overlap_thresh: 0.9 random_coef: .1",
            {**LIMITS_READ, "overlap_thresh": 0.9, "random_coef": 0.1},
        ),
        ("random_pad_image", "", {}),
        (
            "random_pad_image",
            "min_image_height: 400.0 min_image_width: 300 pad_color: [1, 2, 3]",
            {"min_image_height": 400, "min_image_width": 300, "pad_color": (1.0, 2.0, 3.0)},
        ),
        (
            "random_absolute_pad_image",
            "max_height_padding: 200 max_width_padding: 100 pad_color: [0, 0, 0]",
            {"max_height_padding": 200, "max_width_padding": 100, "pad_color": (0.0, 0.0, 0.0)},
        ),
        ("random_crop_pad_image", LIMITS, LIMITS_READ),
        (
            "random_crop_pad_image",
            f"{LIMITS} min_padded_size_ratio: [1, 1.5] max_padded_size_ratio: [2, 3] pad_color: [7, 8, 9]",
            {
                **LIMITS_READ,
                "min_padded_size_ratio": (1.0, 1.5),
                "max_padded_size_ratio": (2.0, 3.0),
                "pad_color": (7.0, 8.0, 9.0),
            },
        ),
        (
            "random_crop_to_aspect_ratio",
            "aspect_ratio: 0.85 overlap_thresh: 0.35",
            {"aspect_ratio": 0.85, "overlap_thresh": 0.35},
        ),
        (
            "random_black_patches",
            "max_black_patches: 20 probability: 0.95 size_to_image_ratio: 0.12",
            {"max_black_patches": 20, "probability": 0.95, "size_to_image_ratio": 0.12},
        ),
        ("random_resize_method", "target_height: 75 target_width: 100", {"target_height": 75, "target_width": 100}),
        (
            "random_square_crop_by_scale",
            "max_border: 64 scale_min: 0.5 scale_max: 1.5 num_scales: 4",
            {"max_border": 64, "scale_min": 0.5, "scale_max": 1.5, "num_scales": 4},
        ),
        (
            "random_scale_crop_and_pad_to_square",
            "output_size: 768 scale_min: 0.2 scale_max: 1.9",
            {"output_size": 768, "scale_min": 0.2, "scale_max": 1.9},
        ),
        ("scale_boxes_to_pixel_coordinates", "", {}),
        (
            "resize_image",
            "new_height: 75 new_width: 100 method: BICUBIC",
            {"new_height": 75, "new_width": 100, "method": "bicubic"},
        ),
        ("resize_image", "method: NEAREST_NEIGHBOR", {"method": "nearest"}),
        ("subtract_channel_mean", "means: [116.779, 103.939, 123.68]", {"means": (116.779, 103.939, 123.68)}),
        ("ssd_random_crop", "", {}),
        (
            "ssd_random_crop",
            f"operations {{ {LIMITS} overlap_thresh: 0 }} operations {{ random_coef: 0.5 }}",
            {"operations": (SsdRandomCropOperation(**LIMITS_READ), SsdRandomCropOperation(random_coef=0.5))},
        ),
        (
            "ssd_random_crop_pad",
            f"operations {{ {LIMITS} min_padded_size_ratio: [1, 1] max_padded_size_ratio: [2, 2] pad_color_r: 0.5 }}",
            {"operations": (SsdRandomCropPadOperation(**LIMITS_READ, pad_color_r=0.5),)},
        ),
        (
            "ssd_random_crop_fixed_aspect_ratio",
            f"aspect_ratio: 0.875 operations {{ {AREAS} }}",
            {"aspect_ratio": 0.875, "operations": (SsdRandomCropFixedAspectRatioOperation(**AREAS_READ),)},
        ),
        (
            "ssd_random_crop_pad_fixed_aspect_ratio",
            f"aspect_ratio: 0.875 min_padded_size_ratio: [1, 1] operations: [{{ {LIMITS} }}]",
            {"aspect_ratio": 0.875, "operations": (SsdRandomCropOperation(**LIMITS_READ),)},
        ),
        ("rgb_to_gray", "", {}),
        ("convert_class_logits_to_softmax", "temperature: 2", {"temperature": 2.0}),
    ],
)
def test_each_option_is_its_class_with_the_fields_that_are_set(option: str, text: str, values: dict[str, Any]) -> None:
    assert made(f"{option} {{ {text} }}") == CLASSES[option](**values)


def test_a_flip_has_its_keypoints_permuted() -> None:
    flip = made("random_horizontal_flip { keypoint_flip_permutation: 1 keypoint_flip_permutation: 0 }")
    assert flip == HorizontalFlip(keypoint_flip_permutation=(1, 0))
    assert made("random_horizontal_flip { }") == HorizontalFlip()


def test_options_stay_in_their_order_and_may_come_twice() -> None:
    options = "} data_augmentation_options {".join(["ssd_random_crop { }", "rgb_to_gray { }", "ssd_random_crop { }"])
    recipe, rows, *_ = imported(options)
    assert isinstance(recipe.data, DetectionData)
    assert [kind_name(type(step)) for step in recipe.data.augment] == [
        "ssd_random_crop",
        "rgb_to_gray",
        "ssd_random_crop",
    ]
    targets = [row.outcome.text for row in rows if row.within.endswith("options")]
    assert targets == ["data.augment.0", "data.augment.1", "data.augment.2"]


MISSING = ["random_self_concat_image"]


@pytest.mark.parametrize("option", MISSING)
def test_an_option_of_2018_is_reported(option: str) -> None:
    recipe, rows, *_ = imported(f"{option} {{ }}")
    assert [row.outcome.text for row in rows if row.name == option] == ["there is no such augmentation here."]
    assert [name for name, cls in OPTIONS.items() if cls is None] == MISSING
    assert isinstance(recipe.data, DetectionData)
    assert recipe.data.augment == ()


def test_boxes_are_always_clipped() -> None:
    _, rows, *_ = imported("random_crop_image { clip_boxes: true }")
    assert [row.outcome.fate for row in rows if row.name == "clip_boxes"] == ["no effect"]
    _, rows, *_ = imported("ssd_random_crop { operations { clip_boxes: false } }")
    assert [row.outcome.fate for row in rows if row.name == "clip_boxes"] == ["not mapped"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("random_pad_image { min_image_height: 5 }", "min_image"),
        ("random_pad_image { pad_color: [1, 2] }", "pad_color"),
        ("random_crop_pad_image { min_padded_size_ratio: 1 }", "min_padded_size_ratio"),
        ("normalize_image { original_minval: 0 }", "original_maxval"),
        ("random_distort_color { color_ordering: 2 }", "color_ordering"),
        ("resize_image { method: LANCZOS }", "method"),
        ("subtract_channel_mean { }", "means"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_its_place(options: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        imported(options)
    assert caught.value.what.startswith("a.config, line 4, column")
    assert what in str(caught.value)
