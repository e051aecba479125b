"""Pixels of JPEGs beside those of TensorFlow."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from lockstep.images.decode import Decoding
from lockstep.images.jpeg import LIBRARIES

HERE = Path(__file__).parent
IMAGES = HERE.parent / "fixtures" / "images"
TENSORFLOW = json.loads((HERE / "jpeg_golden.json").read_text())
USABLE = [name for name, load in LIBRARIES.items() if not load().problem]


@pytest.mark.parametrize("library", [*USABLE, "pillow"])
@pytest.mark.parametrize("name", TENSORFLOW)
def test_pixels_are_those_of_the_accurate_transform(name: str, library: str) -> None:
    pixels = Decoding(library).decode((IMAGES / name).read_bytes(), name)
    digest = hashlib.sha256(pixels.permute(1, 2, 0).contiguous().numpy()).hexdigest()
    assert digest == TENSORFLOW[name]["accurate"]
    assert digest != TENSORFLOW[name]["default"]
