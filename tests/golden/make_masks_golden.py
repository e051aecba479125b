"""Have pycocotools draw masks. Run by hand, never in the tests.

    python3.11 -m venv /tmp/coco
    /tmp/coco/bin/pip install "pycocotools==2.0.11" "numpy==2.4.6"
    /tmp/coco/bin/python tests/golden/make_masks_golden.py COCO-MINI

COCO-MINI is a checkout of https://github.com/Obmutescence/COCO-MINI, of which `tests/fixtures/coco` is a part.

It writes `masks_golden.json.gz` beside itself: segmentations of every kind, each with the mask that it stands for,
packed to bits row by row; and, for each annotation of instances in the fixture and in COCO-MINI, the first eight digits
of the SHA-256 of its mask.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco

HERE = Path(__file__).parent
FIXTURE = HERE.parent / "fixtures" / "coco" / "instances.json"


def main() -> None:
    rng = np.random.default_rng(0)
    cases = [case(segmentation, *size) for segmentation, size in [*drawn_by_hand(), *polygons(rng), *runs(rng)]]
    files = [FIXTURE, *sorted(Path(sys.argv[1], "annotations").glob("instances_*.json"))]
    golden = {"cases": cases, "files": {path.name: digests(path) for path in files}}
    text = json.dumps(golden, separators=(",", ":")) + "\n"
    (HERE / "masks_golden.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def drawn_by_hand() -> list[tuple[Any, tuple[int, int]]]:
    """Corners on the edges and middles of pixels, lines, points, rings, and what lies outside."""
    square = [2, 2, 7, 2, 7, 7, 2, 7]
    return [
        ([square], (10, 9)),
        ([[value + 0.5 for value in square]], (10, 9)),
        ([[value + 0.1 for value in square], [value / 3 for value in square]], (10, 9)),
        ([square, [3, 3, 5, 3, 5, 5, 3, 5]], (10, 9)),  # within the other
        ([[2, 2, 7, 7, 7, 2, 2, 7]], (10, 9)),  # a bow
        ([[1, 1, 8, 1, 8, 1]], (10, 9)),  # a line
        ([[4, 4, 4, 4, 4, 4]], (10, 9)),  # a point
        ([[0, 0, 9, 0, 9, 10, 0, 10]], (10, 9)),  # the whole image
        ([[-5, -7, 20, -7, 20, 30, -5, 30]], (10, 9)),
        ([[-5.3, 4.2, 4.7, -6.1, 14.9, 5.5, 3.3, 17.2]], (10, 9)),
        ([[20, 20, 30, 20, 30, 30]], (10, 9)),  # outside
        ([[-9, -9, -2, -9, -2, -2]], (10, 9)),
        ([[0.7, 0.3, 0.7, 0.9, 3.3, 4.1]], (1, 1)),
        ({"size": [10, 9], "counts": [90]}, (10, 9)),
        ({"size": [10, 9], "counts": [0, 90]}, (10, 9)),
        ({"size": [10, 9], "counts": [3, 0, 4, 5, 0, 0, 70, 8]}, (10, 9)),
    ]


def polygons(rng: np.random.Generator) -> list[tuple[Any, tuple[int, int]]]:
    cases = []
    for number in range(120):
        height, width = (int(side) for side in rng.integers(1, 34, 2))
        parts = []
        for _ in range(rng.integers(1, 4)):
            corners = rng.uniform(-0.3, 1.3, (rng.integers(3, 12), 2)) * (width, height)
            parts.append(np.round(corners, number % 4).ravel().tolist())
        cases.append((parts, (height, width)))
    return cases


def runs(rng: np.random.Generator) -> list[tuple[Any, tuple[int, int]]]:
    cases: list[tuple[Any, tuple[int, int]]] = []
    for number in range(40):
        size = tuple(int(side) for side in rng.integers(1, 40, 2))
        pixels = np.asfortranarray(rng.random(size) < rng.random() ** 3, dtype=np.uint8)
        if number % 3:
            pixels[: size[0] // 2] = 0
        encoded = coco.encode(pixels)
        cases.append(({"size": list(size), "counts": encoded["counts"].decode()}, (size[0], size[1])))
    # Lengths of every number of characters; their sum is the product of the sides.
    large = coco.frPyObjects(
        {"size": [2048, 2049], "counts": [1_000_000, 1, 2_000_000, 40, 1_100_000, 96311]}, 2048, 2049
    )
    cases.append(({"size": [2048, 2049], "counts": large["counts"].decode()}, (2048, 2049)))
    return cases


def case(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    pixels = drawn(segmentation, height, width)
    large = pixels.size > 1 << 16
    key, value = ("sha256", digest(pixels)) if large else ("bits", np.packbits(pixels).tobytes().hex())
    return {"segmentation": segmentation, "size": [height, width], key: value}


def drawn(segmentation: Any, height: int, width: int) -> np.ndarray:
    """As `COCO.annToMask` does."""
    if isinstance(segmentation, list):
        encoded = coco.merge(coco.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        encoded = coco.frPyObjects(segmentation, height, width)
    else:
        encoded = segmentation
    return np.ascontiguousarray(coco.decode(encoded))


def digests(path: Path) -> str:
    """Those of all annotations, in the order of their ids."""
    document = json.loads(path.read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in document["images"]}
    found = sorted(document["annotations"], key=lambda each: each["id"])
    return "".join(digest(drawn(each["segmentation"], *sizes[each["image_id"]]))[:8] for each in found)


def digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


if __name__ == "__main__":
    main()
