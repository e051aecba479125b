"""Options that move images, with the fields of their messages, as values."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import augmentations as options
from lockstep.augmentations import ssd_crops
from lockstep.images.augment import Augment
from lockstep.recipes.detection import DetectionData
from lockstep.recipes.pipeline_config import import_pipeline

CONFIG = (
    Path(__file__).parents[1] / "fixtures/odapi_configs/ssdlite_mobilenet_v3_small_320x320_coco.config"
).read_text()
LIMITS = (
    "min_object_covered: 0.1 min_aspect_ratio: 0.4 max_aspect_ratio: 2.5 min_area: 0.2 max_area: 0.9 "
    "overlap_thresh: 0.5"
)
FOUND = (0.1, 0.4, 2.5, 0.2, 0.9, 0.5)
CASES: dict[str, Augment] = {
    "random_vertical_flip { keypoint_flip_permutation: [1, 0] }": options.RandomVerticalFlip(0.5, (1, 0)),
    "random_rotation90 { }": options.RandomRotation90(),
    "random_image_scale { min_scale_ratio: 0.7 }": options.RandomImageScale(0.7),
    "random_jitter_boxes { ratio: 0.1 }": options.RandomJitterBoxes(0.1),
    f"random_crop_image {{ {LIMITS} random_coef: 0.2 }}": options.RandomCropImage(*FOUND, 0.2),
    "random_pad_image { max_image_height: 9 max_image_width: 8 pad_color: 1 pad_color: 2.5 pad_color: 3 }": (
        options.RandomPadImage(None, None, 9, 8, (1.0, 2.5, 3.0))
    ),
    f"random_crop_pad_image {{ {LIMITS} max_padded_size_ratio: [1.5, 3] }}": (
        options.RandomCropPadImage(*FOUND, max_padded_size_ratio=(1.5, 3.0))
    ),
    "random_crop_to_aspect_ratio { aspect_ratio: 2 }": options.RandomCropToAspectRatio(2.0),
    "random_resize_method { target_height: 75 target_width: 150 }": options.RandomResizeMethod(75, 150),
    "scale_boxes_to_pixel_coordinates { }": options.ScaleBoxesToPixelCoordinates(),
    "resize_image { new_height: 75 method: NEAREST_NEIGHBOR }": options.ResizeImage(75, method="nearest_neighbor"),
    "ssd_random_crop { }": options.SsdRandomCrop(),
    f"ssd_random_crop {{ operations {{ {LIMITS} }} operations {{ }} }}": (
        options.SsdRandomCrop((ssd_crops.SsdRandomCropOperation(*FOUND), ssd_crops.SsdRandomCropOperation()))
    ),
    f"ssd_random_crop_pad {{ operations {{ {LIMITS} pad_color_g: 7 min_padded_size_ratio: [1, 2] }} }}": (
        options.SsdRandomCropPad(
            (ssd_crops.SsdRandomCropPadOperation(*FOUND, min_padded_size_ratio=(1.0, 2.0), pad_color_g=7.0),)
        )
    ),
    "ssd_random_crop_fixed_aspect_ratio { aspect_ratio: 0.75 operations { min_area: 0.3 } }": (
        options.SsdRandomCropFixedAspectRatio((ssd_crops.SsdRandomCropFixedAspectRatioOperation(min_area=0.3),), 0.75)
    ),
    "ssd_random_crop_pad_fixed_aspect_ratio { aspect_ratio: 2 max_padded_size_ratio: [1, 1] }": (
        options.SsdRandomCropPadFixedAspectRatio((), 2.0, max_padded_size_ratio=(1.0, 1.0))
    ),
}


@pytest.mark.parametrize("text", CASES)
def test_an_option_has_the_fields_of_its_message(text: str) -> None:
    option = "data_augmentation_options"
    found = import_pipeline(CONFIG.replace(option, f"{option} {{ {text} }}\n  {option}", 1), "pipeline.config", "run")
    assert isinstance(found.recipe.data, DetectionData)
    assert found.recipe.data.augment[0] == CASES[text]
    assert {row.outcome.fate for row in found.rows if option in row.field} == {"mapped"}
