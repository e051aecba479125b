from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.augmentations.colours import ColourDraws
from lockstep.errors import InputError
from lockstep.images.colour import FAST_ORDERS, INCEPTION_ORDERS, OPERATIONS, SLIM_ORDERS, Order, in_orders
from lockstep.images.normalisation import as_floats, centred
from lockstep.randomness import Draws

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "preprocessing_golden.npz")
ORDERS = {"inception": INCEPTION_ORDERS, "slim": SLIM_ORDERS, "fast": FAST_ORDERS}
PLACES = [(name, place) for name, orders in ORDERS.items() for place in range(len(orders))]


def golden_images() -> Tensor:
    return torch.from_numpy(GOLDEN["images"]).permute(0, 3, 1, 2)


def golden_numbers(place: float = 0.0) -> Tensor:
    numbers = torch.from_numpy(GOLDEN["numbers"])
    return torch.cat([numbers, torch.full((len(numbers), 1), place)], dim=1)


def distort(images: Tensor, numbers: Tensor, orders: tuple[Order, ...] = INCEPTION_ORDERS) -> Tensor:
    return ColourDraws().apply({"image": images, "image.colour": numbers}, orders)


def draws(count: int, start: int = 0) -> Draws:
    return Draws(3, np.arange(start, start + count))


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_every_order_gives_the_numbers_of_tensorflow(name: str, place: int) -> None:
    orders = ORDERS[name]
    coloured = distort(golden_images(), golden_numbers((place + 0.5) / len(orders)), orders)
    expected = torch.from_numpy(GOLDEN[f"{name} {place}"]).permute(0, 3, 1, 2)
    torch.testing.assert_close(coloured, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("orders", [INCEPTION_ORDERS, SLIM_ORDERS], ids=["inception", "slim"])
def test_images_of_one_batch_take_orders_of_their_own(orders: tuple[Order, ...]) -> None:
    images = golden_images()
    numbers = golden_numbers()
    numbers[:, 4] = (torch.arange(len(images)) % len(orders) + 0.5) / len(orders)
    together = distort(images, numbers, orders)
    for row in range(len(images)):
        order = orders[row % len(orders)]
        torch.testing.assert_close(together[row], distort(images[row : row + 1], numbers[row : row + 1], (order,))[0])


def test_a_device_that_looks_no_order_up_gives_the_same() -> None:
    images, numbers = golden_images(), golden_numbers()
    chosen = torch.arange(len(images)) % 4
    numbers[:, 4] = chosen / 4
    without_look_up = in_orders(as_floats(images), numbers, chosen, SLIM_ORDERS, OPERATIONS).clamp(0, 1)
    torch.testing.assert_close(without_look_up, distort(images, numbers, SLIM_ORDERS), rtol=0, atol=1e-6)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3))
def test_numbers_that_change_nothing_change_nothing(colour: list[float]) -> None:
    image = torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    numbers = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.9]])
    torch.testing.assert_close(distort(image, numbers), image, rtol=0, atol=1e-6)


def test_the_ends_of_the_choice_are_the_first_order_and_the_last() -> None:
    images = golden_images()
    for end, order in ((0.0, SLIM_ORDERS[0]), (1.0, SLIM_ORDERS[-1])):
        alone = distort(images, golden_numbers(), (order,))
        assert torch.equal(distort(images, golden_numbers(end), SLIM_ORDERS), alone)


def test_black_white_and_grey_stay_finite() -> None:
    image = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 3, 2, 2)
    coloured = distort(image, golden_numbers()[:3])
    assert coloured.isfinite().all()
    torch.testing.assert_close(coloured, coloured.mean(dim=1, keepdim=True).expand_as(coloured))


def test_the_numbers_are_uniform_within_their_bounds() -> None:
    numbers = ColourDraws()({"image": None}, draws(4000))["image.colour"]
    assert numbers.shape == (4000, 5)
    assert numbers.dtype == torch.float32
    low = torch.tensor([-32 / 255, 0.5, 0.5, -0.2, 0])
    high = torch.tensor([32 / 255, 1.5, 1.5, 0.2, 1])
    assert (numbers >= low).all()
    assert (numbers <= high).all()
    assert ((numbers.mean(0) - (low + high) / 2).abs() < 0.03 * (high - low)).all()
    assert ((numbers.std(0) / (high - low) - 12**-0.5).abs() < 0.01).all()
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.06


def test_the_numbers_depend_on_the_position_alone() -> None:
    whole = ColourDraws()({"image": None}, draws(8))["image.colour"]
    part = ColourDraws()({"image": None}, draws(3, start=4))["image.colour"]
    assert torch.equal(part, whole[4:7])
    other = ColourDraws(field="second")({}, draws(8))["second.colour"]
    assert not torch.equal(other, whole)


def test_scales() -> None:
    values = as_floats(torch.tensor([0, 51, 255], dtype=torch.uint8))
    torch.testing.assert_close(values, torch.tensor([0.0, 0.2, 1.0]))
    torch.testing.assert_close(centred(values), torch.tensor([-1.0, -0.6, 1.0]))


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"brightness": -0.1}, "brightness is out of range"),
        ({"hue": -0.1}, "hue is out of range"),
        ({"hue": 0.6}, "hue is out of range"),
        ({"contrast": 0.5}, "contrast is of the wrong type"),
        ({"saturation": (1.0,)}, "saturation is of the wrong length"),
        ({"saturation": (1.0, "2")}, r"saturation\[1\] is of the wrong type"),
        ({"contrast": (-1, 1)}, r"contrast\[0\] is out of range"),
        ({"saturation": (1.5, 0.5)}, "saturation is out of range"),
    ],
)
def test_bounds_that_cannot_be_drawn_from_are_refused(numbers: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ColourDraws(**numbers)  # type: ignore[arg-type]


def test_an_operation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="an operation cannot be 'gamma'"):
        distort(golden_images(), golden_numbers(), (("gamma",),))


@pytest.mark.parametrize("orders", [(), (("hue",), ("hue", "contrast"))])
def test_orders_of_different_lengths_are_refused(orders: tuple[Order, ...]) -> None:
    with pytest.raises(InputError, match="orders cannot be chosen from"):
        distort(golden_images(), golden_numbers(), orders)


def test_whole_numbers_of_no_known_range_are_refused() -> None:
    with pytest.raises(InputError, match=r"images of torch\.int64"):
        distort(golden_images().long(), golden_numbers())


@pytest.mark.parametrize(("images", "numbers"), [((2, 3, 4), (2, 5)), ((2, 1, 4, 4), (2, 5)), ((2, 3, 4, 4), (1, 5))])
def test_shapes_that_do_not_fit_are_refused(images: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"cannot be coloured") as raised:
        distort(torch.zeros(images), torch.zeros(numbers))
    assert str(images) in str(raised.value)
