from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_calls import accelerator, counted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.images import batch_resizing
from lockstep.images.batch_resizing import Resizes, resized_batch
from lockstep.images.resizing import METHODS, resized

SIDES = st.integers(1, 40)


def image(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8))


def buffer(images: list[Tensor]) -> Tensor:
    return torch.cat([each.movedim(0, -1).flatten() for each in images])


def batch(images: list[Tensor], parts: list[tuple[int, int, int, int, str]], size: int) -> Tensor:
    rows = [[*each.shape[1:], *part[:4], METHODS.index(part[4])] for each, part in zip(images, parts, strict=True)]
    resizes = Resizes(*torch.tensor(rows).unbind(1))
    return resized_batch(buffer(images), resizes, resizes, size)


def alone(pixels: Tensor, part: tuple[int, int, int, int, str], size: int) -> Tensor:
    height, width, top, left, method = part
    return resized(pixels, height, width, method, slice(top, top + size), slice(left, left + size))


@st.composite
def parts(draw: st.DrawFn, size: int) -> tuple[int, int, int, int, str]:
    height, width = (size + draw(st.integers(0, 9)) for _ in range(2))
    top, left = draw(st.integers(0, height - size)), draw(st.integers(0, width - size))
    return height, width, top, left, draw(st.sampled_from(METHODS))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_batch_has_the_pixels_of_its_images_resized_one_by_one(data: Any) -> None:
    size, count = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    images = [image(data.draw(SIDES), data.draw(SIDES), seed) for seed in range(count)]
    chosen = [data.draw(parts(size)) for _ in images]
    expected = torch.stack([alone(each, part, size) for each, part in zip(images, chosen, strict=True)])
    found = batch(images, chosen, size)
    assert found.dtype == torch.uint8
    # A weight that lies in the middle between two whole numbers may be rounded otherwise by another processor.
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("method", METHODS)
def test_of_photos_all_pixels_are_the_same(method: str) -> None:
    sides = [(187, 250), (96, 96), (64, 301), (400, 333), (50, 40)]
    images = [image(*each, seed) for seed, each in enumerate(sides)]
    chosen = [(96, 96, 0, 0, method), (96, 96, 0, 0, method), (110, 130, 7, 20, method)]
    chosen += [(96, 96, 0, 0, method), (120, 96, 24, 0, method)]
    expected = torch.stack([alone(each, part, 96) for each, part in zip(images, chosen, strict=True)])
    different = (batch(images, chosen, 96).int() - expected.int()).abs()
    assert different.max() <= 1
    assert (different > 0).double().mean() < 1e-4


def test_an_image_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    images = [image(*rng.integers(1, 90, 2).tolist(), seed) for seed in range(20)]
    chosen = [(17 + n % 3, 17, n % 2, 0, METHODS[n % len(METHODS)]) for n in range(20)]
    found = batch(images, chosen, 16)
    for row, (each, part) in enumerate(zip(images, chosen, strict=True)):
        assert torch.equal(batch([each], [part], 16)[0], found[row])
    assert torch.equal(batch(images[::-1], chosen[::-1], 16).flip(0), found)
    monkeypatch.setattr(batch_resizing, "_MOST_VALUES", 2000)
    assert torch.equal(batch(images, chosen, 16), found)
    monkeypatch.setattr(batch_resizing, "_MOST_IMAGES", 2)
    assert torch.equal(batch(images, chosen, 16), found)


def test_threads_change_nothing() -> None:
    images = [image(150, 140, seed) for seed in range(4)]
    chosen = [(64, 64, 0, 0, method) for method in METHODS[:4]]
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(batch(images, chosen, 64))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_batch_of_no_images() -> None:
    none = Resizes(*torch.empty(len(Resizes._fields), 0, dtype=torch.int64))
    assert resized_batch(torch.empty(0, dtype=torch.uint8), none, none, 5).shape == (0, 3, 5, 5)


def test_the_host_never_waits_and_launches_do_not_grow_with_the_batch() -> None:
    def launches(count: int) -> int:
        images = [image(20, 30, seed) for seed in range(count)]
        rows = torch.tensor([[20, 30, 8, 8, 0, 0, number % 2] for number in range(count)])
        pixels, on_device, here = buffer(images), Resizes(*rows.clone().unbind(1)), rows.numpy()
        with accelerator(), counted(refuse_waits=True) as calls:
            resized_batch(pixels, on_device, Resizes(*torch.from_numpy(here).unbind(1)), 8)
        return calls.num_launches

    assert launches(4) == launches(40)
