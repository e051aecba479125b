"""What both sides of the recorded checkpoints of TensorFlow 2 begin with: configurations, images and weights."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import center_net_keypoints_inputs
import detectors_inputs
import keras_detectors_inputs
import numpy as np
import numpy.typing as npt
import retinanet_inputs

PATH = Path(__file__).parent / "zoo_checkpoints_golden.json.gz"
SAMPLES = 32
_SSD = f"""ssd {{
  num_classes: 3 {retinanet_inputs.TARGETS}
  anchor_generator {{ ssd_anchor_generator {{ num_layers: 6 min_scale: 0.2 max_scale: 0.95 }} }}
  image_resizer {{ fixed_shape_resizer {{ height: 96 width: 128 }} }}
  box_predictor {{ convolutional_box_predictor {{ kernel_size: 1 use_dropout: false {retinanet_inputs.LAYERS} }} }}
  feature_extractor {{ type: "%s" override_base_feature_extractor_hyperparams: true {retinanet_inputs.LAYERS} }}
  {retinanet_inputs.LOSS_AND_SCORES}
}}"""
_FPN = retinanet_inputs.CONFIGS["fpnlite keras"]
_TWO_STAGES = detectors_inputs.CONFIGS["faster_rcnn_inception_v2"]
CONFIGS: dict[str, str] = {
    "ssd mobilenet v1": _SSD % "ssd_mobilenet_v1_keras",
    "ssd mobilenet v2": _SSD % "ssd_mobilenet_v2_keras",
    "fpn mobilenet v1": _FPN.replace("mobilenet_v2", "mobilenet_v1").replace("share_prediction_tower: true", ""),
    "fpnlite mobilenet v2": _FPN,
    "retinanet": retinanet_inputs.CONFIGS["retinanet keras"],
    "efficientdet": keras_detectors_inputs.CONFIGS["efficientdet b0"],
    "mask rcnn resnet": _TWO_STAGES.replace("faster_rcnn_inception_v2", "faster_rcnn_resnet50_keras").replace(
        "num_classes: 3", "num_classes: 3 number_of_stages: 3", 1
    ),
    **{f"centernet {name}": text for name, text in keras_detectors_inputs.CONFIGS.items() if "center_net" in text},
    "centernet keypoints": re.sub(
        center_net_keypoints_inputs.SPREAD, "", center_net_keypoints_inputs.CONFIGS["two classes"]
    ).replace("LABEL_MAP", str(center_net_keypoints_inputs.LABEL_MAP)),
}
"""Messages of the model."""

Array = npt.NDArray[np.float32]


def sides(name: str) -> tuple[int, int]:
    """Height and width of the images of a configuration."""
    found = re.search(r"fixed_shape_resizer {\s*height: (\d+) width: (\d+)", CONFIGS[name])
    assert found is not None
    return int(found[1]), int(found[2])


def images(name: str) -> Array:
    """An image from 0 to 255, (1, height, width, 3)."""
    return np.random.default_rng(0).uniform(0, 255, (1, *sides(name), 3)).astype(np.float32)


def weights(key: str, shape: Sequence[int]) -> Array:
    """The value of a variable, by its key in a checkpoint; activations about keep their size from layer to layer."""
    drawn = np.random.default_rng(zlib.crc32(key.encode())).random(shape, dtype=np.float32)
    kind = key.split("/")[-3]
    if len(shape) > 1:
        inputs = np.prod(shape[:2] if kind == "depthwise_kernel" else shape[:-1])
        return (drawn - np.float32(0.5)) * np.float32(np.sqrt(9 / inputs))
    if kind in ("beta", "bias", "moving_mean"):
        return (drawn - np.float32(0.5)) / np.float32(5)
    return drawn + np.float32(0.5)


def sample(values: npt.ArrayLike) -> list[float]:
    """A few values, spread over all, with six digits."""
    flat = np.asarray(values, np.float32).reshape(-1)
    places = np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64)
    return [float(f"{each:.6g}") for each in flat[places]]


def write(recorded: Mapping[str, Any]) -> None:
    """Write what was recorded, the same bytes for the same values."""
    text = json.dumps(recorded, separators=(",", ":"))
    PATH.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read() -> dict[str, Any]:
    """Read what was recorded: by the name of a configuration the shapes of variables by their keys, and predictions."""
    found: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return found
