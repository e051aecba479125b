"""Record the names and shapes of timm's MobileNets and EfficientNets. Run by hand, never in the tests.

    pip install timm==1.0.31
    python tests/golden/make_timm_names.py

It writes `timm_names.json.gz` beside itself: of each net, the shape of each tensor by its name.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from timm.models import create_model

NETS = ("mobilenetv2_100", "mobilenetv3_large_100", "mobilenetv3_small_100", "efficientnet_b0")


def main() -> None:
    recorded = {}
    with torch.device("meta"):
        for name in NETS:
            recorded[name] = {key: list(tensor.shape) for key, tensor in create_model(name).state_dict().items()}
    packed = gzip.compress(json.dumps(recorded, separators=(",", ":")).encode(), 9, mtime=0)
    (Path(__file__).parent / "timm_names.json.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
