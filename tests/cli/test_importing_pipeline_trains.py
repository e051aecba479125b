"""The published configs of the Object Detection API train as they are: only paths and the size of images are set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.augmentations import RandomSquareCropByScale
from lockstep.cli.main import main
from lockstep.recipes.data import DetectionData
from lockstep.recipes.toml import load, with_settings
from lockstep.runs.run import run
from lockstep.runs.workdir import Result
from lockstep.workers.rank import leave

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "odapi_configs"
RACCOONS = ROOT / "data" / "raccoon"
REFUSED = ("context_rcnn", "rfcn", "quantized")
TRAINED = [path for path in sorted(FIXTURES.glob("*.config")) if not any(word in path.stem for word in REFUSED)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other beside other tests take many times as long."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.fixture(scope="module")
def raccoons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded records of raccoons, as the API's tutorials have them."""
    folder = tmp_path_factory.mktemp("raccoons")
    options = ["--set", "all", "--shards", "2", "--processes", "1"]
    assert main(["convert", "voc", "--data-dir", str(RACCOONS), "--to", str(folder), *options]) == 0
    return folder / "all-?????-of-00002"


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Annotations of eight images in COCO's format, on each of which a rectangle has a mask."""
    folder = tmp_path_factory.mktemp("rectangles")
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(1, 9):
        pixels = np.random.default_rng(number).integers(0, 90, (120, 100, 3), np.uint8)
        left, top, right, bottom = 10 + number, 20, 60, 80 + number
        pixels[top:bottom, left:right] = (250, 20, 20)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "height": 120, "width": 100})
        outline = [left, top, right, top, right, bottom, left, bottom]
        box = [left, top, right - left, bottom - top]
        of_image = {"id": number, "image_id": number, "category_id": 1, "iscrowd": 0, "bbox": box}
        annotations.append({**of_image, "area": box[2] * box[3], "segmentation": [outline]})
    path = folder / "instances.json"
    categories = [{"id": 1, "name": "rectangle"}]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def train(config: Path, target: Path, *settings: str) -> Result:
    """Import a config, and train three steps by its recipe; losses that are not finite would end it."""
    assert main(["import", "pipeline", str(config), "--to", str(target), "--substitute-model"]) == 0
    fresh = [
        "feed.num_processes=0",
        "data.validation=none",
        "data.label_map=none",
        "warm_start=none",
        "end.kind=steps",
        "end.count=3",
    ]
    leave()
    return run(with_settings(load(target), [*fresh, *settings]), None)


@pytest.mark.slow
@pytest.mark.parametrize("config", TRAINED, ids=lambda path: path.stem)
def test_a_published_config_trains_three_steps(config: Path, raccoons: Path, rectangles: Path, tmp_path: Path) -> None:
    has_masks = config.stem.startswith("mask_rcnn")
    fixed = "fixed_shape_resizer" in config.read_text()
    sides = ("height", "width") if fixed else ("min_dimension", "max_dimension")
    size = [f"data.resizer.{side}={96 if fixed else 128}" for side in sides]
    # Without trained weights, frozen batch norm is refused.
    learning = ["model.feature_extractor.batch_norm_trainable=true"] * ("rcnn" in config.stem)
    given = f"data.train={rectangles if has_masks else raccoons}"
    assert train(config, tmp_path / "a.toml", given, *size, *learning).step == 3


PYRAMID = "ssd_mobilenet_v2_mnasfpn_shared_box_predictor_320x320_coco_sync"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "extractor", "changes"),
    [
        ("ssd_mobilenet_v2_coco", "ssd_mobilenet_v2_keras", {}),
        ("faster_rcnn_resnet50_coco", "faster_rcnn_resnet50_keras", {}),
        (PYRAMID, "ssd_mobilenet_v2_fpn_keras", {}),
        (PYRAMID, "ssd_resnet50_v1_fpn", {"use_depthwise: true": ""}),
        (PYRAMID, "ssd_resnet50_v1_fpn_keras", {"use_depthwise: true": ""}),
        (
            PYRAMID,
            "ssd_efficientnet-b0_bifpn_keras",
            {
                "fpn {": "bifpn { num_iterations: 2 num_filters: 48 ",
                "use_depthwise: true": "",
                "override_base_feature_extractor_hyperparams: true": "",
                "activation:": "force_use_bias: true activation:",
            },
        ),
    ],
)
def test_a_net_of_tensorflow_2_trains_three_steps(
    name: str, extractor: str, changes: dict[str, str], raccoons: Path, tmp_path: Path
) -> None:
    text = re.sub(
        r"type: '\w+'|type: \"\w+\"", f'type: "{extractor}"', (FIXTURES / f"{name}.config").read_text(), count=1
    )
    for old, new in changes.items():
        text = text.replace(old, new)
    step = "data_augmentation_options { random_square_crop_by_scale { } }"
    text = text.replace("train_config: {", f"train_config: {{ {step}").replace(
        "train_config {", f"train_config {{ {step}"
    )
    config = tmp_path / "tf2.config"
    config.write_text(text)
    sides = ("height", "width") if "fixed_shape_resizer" in text else ("min_dimension", "max_dimension")
    size = [*(f"data.resizer.{side}=136" for side in sides), "batch_size=2", "num_towers=1"]
    result = train(config, tmp_path / "a.toml", f"data.train={raccoons}", *size)
    assert result.step == 3
    recipe = load(tmp_path / "a.toml")
    assert isinstance(recipe.data, DetectionData)
    assert RandomSquareCropByScale() in recipe.data.augment


@pytest.mark.parametrize("name", ["ssd_mobilenet_v1_focal_loss_pets", "ssdlite_mobiledet_gpu_320x320_coco_sync_4x4"])
def test_small_batches_of_small_images_train(name: str, rectangles: Path, tmp_path: Path) -> None:
    config = FIXTURES / f"{name}.config"
    small = ["data.resizer.height=64", "data.resizer.width=64", "batch_size=2", "num_towers=1", "end.count=1"]
    assert train(config, tmp_path / "a.toml", f"data.train={rectangles}", "data.masks=false", *small).step == 1


def test_all_configs_that_are_not_refused_are_here() -> None:
    assert len(TRAINED) == 20
