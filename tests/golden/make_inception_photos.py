"""Cut the photos of the Inception recordings out of those of NVIDIA's DALI_extra. Run by hand, never in the tests.

    git clone https://github.com/NVIDIA/DALI_extra /tmp/DALI_extra
    python tests/golden/make_inception_photos.py /tmp/DALI_extra/db/single/jpeg

It writes `tests/fixtures/inception/photos.webp`: the squares at the centres of the photos, 139 pixels wide, side by
side and compressed without loss, so that no decoder shows in what is compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from inception_inputs import FIXTURES
from PIL import Image, ImageOps

SIZE = 139
PHOTOS = [
    "100/swan-3584559_640.jpg",
    "113/snail-4291306_1280.jpg",
    "134/baukran-3703469_1280.jpg",
    "312/grasshopper-4357903_1280.jpg",
    "425/winter-barn-556696_1280.jpg",
    "510/ship-1083562_640.jpg",
    "704/parking-meter-3556171_960_720.jpg",
    "84/peacock-90051_640.jpg",
]


def main(folder: Path) -> None:
    squares = [ImageOps.fit(Image.open(folder / name).convert("RGB"), (SIZE, SIZE)) for name in PHOTOS]
    FIXTURES.mkdir(parents=True, exist_ok=True)
    row = Image.fromarray(np.concatenate([np.asarray(square) for square in squares], axis=1))
    row.save(FIXTURES / "photos.webp", lossless=True, quality=100, method=6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
