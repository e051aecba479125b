from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.augmentations.augment import Deferred
from lockstep.augmentations.colours import ColourDraws, GreyDraws, JitterDraws
from lockstep.errors import InputError
from lockstep.images.colour import JITTER_OPERATIONS, JITTER_ORDERS, Order, grey, in_orders
from lockstep.images.normalisation import as_floats
from lockstep.randomness import Draws

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "policies_golden.npz")
FACTORS = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.6, 1.4), "hue": (-0.1, 0.3)}
PARTS = [(name, factor) for name, factors in FACTORS.items() for factor in factors]


def draws(count: int, start: int = 0) -> Draws:
    return Draws(3, np.arange(start, start + count))


def golden_images(count: int = 1) -> Tensor:
    return torch.from_numpy(GOLDEN["image"]).expand(count, -1, -1, -1)


def jittered(images: Tensor, numbers: Tensor, orders: tuple[Order, ...] = JITTER_ORDERS) -> Tensor:
    return JitterDraws().apply({"image": images, "image.jitter": numbers}, orders)


def greyed(images: Tensor, chosen: Tensor) -> Tensor:
    return GreyDraws().apply({"image": images, "image.grey": chosen})


@pytest.mark.parametrize(("name", "factor"), PARTS)
def test_each_part_gives_the_numbers_of_torchvision(name: str, factor: float) -> None:
    numbers = torch.zeros(1, 5)
    numbers[0, [*FACTORS].index(name)] = factor
    found = jittered(golden_images(), numbers, ((name,),))
    torch.testing.assert_close(found[0], torch.from_numpy(GOLDEN[f"{name} {factor}"]), rtol=0, atol=1e-5)


def test_all_parts_in_the_order_of_the_numbers_of_torchvision() -> None:
    order = JITTER_ORDERS.index(("hue", "contrast", "brightness", "saturation"))
    numbers = torch.tensor([[1.4, 1.4, 1.4, 0.3, (order + 0.5) / 24]])
    found = jittered(golden_images(), numbers)
    torch.testing.assert_close(found[0], torch.from_numpy(GOLDEN["jitter"]), rtol=0, atol=1e-5)
    fixed = jittered(golden_images(), numbers, (JITTER_ORDERS[order],))
    assert torch.equal(fixed, found)


def test_a_device_that_looks_no_order_up_gives_the_same() -> None:
    images = golden_images(24) / 255
    numbers = JitterDraws(0.4, 0.4, 0.4, 0.1)({}, draws(24))["image.jitter"]
    numbers[:, 4] = torch.arange(24) / 24
    without_look_up = in_orders(images, numbers, torch.arange(24), JITTER_ORDERS, JITTER_OPERATIONS)
    torch.testing.assert_close(without_look_up, jittered(images, numbers), rtol=0, atol=1e-6)


def test_an_image_depends_on_its_own_numbers_alone() -> None:
    images = torch.randint(0, 256, (8, 3, 5, 6), dtype=torch.uint8)
    given = images.clone()
    augment = JitterDraws(0.8, 0.8, 0.8, 0.5)
    whole = jittered(images, augment({}, draws(8))["image.jitter"])
    assert whole.min() >= 0
    assert whole.max() <= 1
    for row in range(8):
        numbers = augment({}, draws(1, start=row))["image.jitter"]
        assert torch.equal(jittered(images[row : row + 1], numbers)[0], whole[row])
    assert torch.equal(images, given)


def test_the_number_of_threads_changes_nothing() -> None:
    images = torch.rand(8, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([[1.0, 1.4, 1.0, 0.0, 0.0]]).expand(8, -1)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(jittered(images, numbers, (("contrast",),)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_jitter_of_zero_changes_nothing() -> None:
    numbers = JitterDraws()({}, draws(4))["image.jitter"]
    assert torch.equal(numbers[:, :4], torch.tensor([[1.0, 1.0, 1.0, 0.0]]).expand(4, -1))
    torch.testing.assert_close(jittered(golden_images(4), numbers), golden_images(4) / 255, rtol=0, atol=1e-6)


def test_the_numbers_are_uniform_within_their_bounds() -> None:
    batch = JitterDraws(0.4, 1.5, 0.0, 0.1)({"image": None, "label": 3}, draws(4000))
    assert [*batch] == ["image", "label", "image.jitter"]
    numbers = batch["image.jitter"]
    assert numbers.dtype == torch.float32
    low, high = torch.tensor([[0.6, 0.0, 1.0, -0.1, 0.0], [1.4, 2.5, 1.0, 0.1, 1.0]])
    assert (numbers >= low).all()
    assert (numbers <= high).all()
    assert ((numbers.mean(0) - (low + high) / 2).abs() <= 0.03 * (high - low)).all()
    assert ((numbers.std(0) - (high - low) / 12**0.5).abs() <= 0.02 * (high - low)).all()


@pytest.mark.parametrize("augment", [ColourDraws(), JitterDraws(0.4), GreyDraws(1.0)], ids=repr)
def test_a_batch_without_numbers_keeps_its_colours(augment: Deferred) -> None:
    assert torch.equal(augment.apply({"image": golden_images()}), as_floats(golden_images()))


def test_grey_is_that_of_torchvision() -> None:
    found = grey(golden_images() / 255)
    torch.testing.assert_close(found[0], torch.from_numpy(GOLDEN["grey"]), rtol=0, atol=1e-6)


def test_some_images_become_grey() -> None:
    chosen = GreyDraws(0.3)({}, draws(2000))["image.grey"]
    assert 530 < chosen.sum() < 670
    assert torch.equal(GreyDraws(0.3)({}, draws(5, start=7))["image.grey"], chosen[7:12])
    images = golden_images(2) / 255
    found = greyed(images, torch.tensor([True, False]))
    assert torch.equal(found[0], grey(images[:1])[0].expand(3, -1, -1))
    assert torch.equal(found[1], images[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8], ids=str)
def test_images_of_any_type_become_grey_in_32_bits(dtype: torch.dtype) -> None:
    images = golden_images(2) if dtype == torch.uint8 else golden_images(2).to(dtype) / 255
    found = greyed(images, torch.tensor([True, False]))
    assert found.dtype == torch.float32
    expected = greyed(golden_images(2) / 255, torch.tensor([True, False]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("images", "chosen", "given"),
    [
        (torch.zeros(2, 1, 4, 4), torch.ones(2, dtype=torch.bool), r"shape \(2, 1, 4, 4\)"),
        (torch.zeros(3, 4, 4), torch.ones(3, dtype=torch.bool), r"shape \(3, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4).long(), torch.ones(2, dtype=torch.bool), "torch.int64"),
        (torch.zeros(2, 3, 4, 4), torch.ones(1, dtype=torch.bool), r"a choice of torch.bool and shape \(1,\)"),
        (torch.zeros(2, 3, 4, 4), torch.ones(2), "a choice of torch.float32"),
    ],
)
def test_images_and_choices_that_do_not_fit_are_not_greyed(images: Tensor, chosen: Tensor, given: str) -> None:
    with pytest.raises(InputError, match=f"cannot become grey(.|\n)*{given}(.|\n)*add GreyDraws"):
        greyed(images, chosen)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"brightness": -0.1}, "brightness is out of range"),
        ({"contrast": float("nan")}, "contrast is out of range"),
        ({"saturation": -1}, "saturation is out of range"),
        ({"hue": 0.6}, "hue is out of range"),
    ],
)
def test_bounds_that_cannot_be_drawn_from_are_refused(numbers: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        JitterDraws(**numbers)  # type: ignore[arg-type]


def test_no_probability_is_refused() -> None:
    with pytest.raises(InputError, match="p is out of range"):
        GreyDraws(1.5)


def test_numbers_that_do_not_fit_name_who_draws_them() -> None:
    with pytest.raises(InputError, match=r"numbers of shape \(1, 4\)(.|\n)*add JitterDraws"):
        jittered(golden_images(), torch.zeros(1, 4))
