from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.augmentations.mixing import MixDraws, symmetric_beta
from lockstep.errors import InputError
from lockstep.losses.weighted import softmax_cross_entropy
from lockstep.randomness import Draws

SHAPE = (3, 8, 10)


def draws(count: int, start: int = 0) -> Draws:
    return Draws(3, np.arange(start, start + count))


def numbers_of(augment: MixDraws, count: int, start: int = 0) -> torch.Tensor:
    images = torch.zeros(1, *SHAPE).expand(count, -1, -1, -1)
    numbers = augment({"image": images}, draws(count, start))["image.mix"]
    assert isinstance(numbers, torch.Tensor)
    return numbers


def mixed(images: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor, num_classes: int) -> Any:
    batch = {"image": images, "label": labels, "image.mix": numbers}
    return MixDraws().apply(batch), MixDraws().apply_to_labels(batch, num_classes)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 8.0])
def test_shares_are_of_the_beta_distribution(alpha: float) -> None:
    count = 40_000
    found = symmetric_beta(draws(count).uniform("u"), draws(count).uniform("v"), alpha)
    assert ((found >= 0) & (found <= 1)).all()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(found.mean() - 0.5) < 5 * (variance / count) ** 0.5
    for power in (2, 3, 4, 6):
        moment = math.prod((alpha + k) / (2 * alpha + k) for k in range(power))
        assert abs((found**power).mean() - moment) < 5 * (found**power).std() / count**0.5
    # The share of numbers below a quarter, by the trapezoid rule after x = t ** (1 / alpha) took the pole away.
    grid = np.linspace(0, 0.25**alpha, 20_001)
    density = (1 - grid ** (1 / alpha)) ** (alpha - 1) / alpha * math.gamma(2 * alpha) / math.gamma(alpha) ** 2
    below = (density[1:] + density[:-1]).sum() / 2 * grid[1]
    assert abs((found < 0.25).mean() - below) < 5 * (0.25 / count) ** 0.5


@settings(max_examples=50)
@given(
    st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), st.floats(1e-3, 1e3), st.sampled_from([0, 1])
)
def test_every_share_lies_between_0_and_1(uniform: float, angle: float, alpha: float, edge: int) -> None:
    numbers = np.array([uniform, 0.0, math.nextafter(1, 0)]), np.array([angle, edge / 4, edge * 0.75])
    found = symmetric_beta(*numbers, alpha)
    assert ((found >= 0) & (found <= 1)).all()


def test_mixup_draws_a_share_and_no_part() -> None:
    numbers = numbers_of(MixDraws(mixup=1.0), 4000)
    assert numbers.dtype == torch.float32
    assert abs(numbers[:, 0].mean() - 0.5) < 0.02
    assert abs(numbers[:, 0].std() - 12**-0.5) < 0.01
    assert torch.equal(numbers[:, 1], numbers[:, 3])
    assert torch.equal(numbers[:, 2], numbers[:, 4])


def test_cutmix_draws_a_part_within_the_image() -> None:
    augment = MixDraws(mixup=0, cutmix=1.0)
    images = torch.zeros(1, 1, 200, 300).expand(4000, -1, -1, -1)
    share, top, left, bottom, right = augment({"image": images}, draws(4000))["image.mix"].T
    assert (share == 1).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (bottom <= 200).all()
    assert (right <= 300).all()
    whole = (top > 0) & (left > 0) & (bottom < 200) & (right < 300)
    height, width = bottom - top, right - left
    assert ((height * 1.5 - width).abs()[whole] <= 3).all()  # parts have the aspect of the image
    assert abs((top + bottom)[whole].mean() / 2 - 100) < 3
    # About any pixel, clipped: E[r - r ** 2 / 4] of the height, where r ** 2 is uniform.
    assert abs(height.mean() / 200 - (2 / 3 - 1 / 8)) < 0.01


def test_half_are_mixed_in_either_way_and_some_not_at_all() -> None:
    share, top, _, bottom, _ = numbers_of(MixDraws(mixup=1.0, cutmix=0.5, p=0.6), 4000).T
    is_mixed, is_cut = share < 1, bottom > top
    assert not (is_mixed & is_cut).any()
    assert abs(is_mixed.float().mean() - 0.3) < 0.03
    assert 0.2 < is_cut.float().mean() < 0.32  # small parts may be none
    assert abs((~is_mixed & ~is_cut).float().mean() - 0.42) < 0.06


@pytest.mark.parametrize("augment", [MixDraws(), MixDraws(0, 1.0), MixDraws(0.4, 1.0, p=0.7)], ids=repr)
def test_the_numbers_of_an_example_depend_on_its_position_alone(augment: MixDraws) -> None:
    whole = numbers_of(augment, 12)
    for row in range(12):
        assert torch.equal(numbers_of(augment, 1, start=row)[0], whole[row])


def test_images_and_labels_are_mixed_with_the_mirrored_ones() -> None:
    images = torch.rand(4, *SHAPE)
    labels = torch.tensor([0, 1, 2, 2])
    numbers = torch.tensor([[0.75, 0, 0, 0, 0], [1, 2, 3, 6, 8], [1, 0, 0, 0, 0], [1, 0, 0, 8, 10]])
    found, probabilities = mixed(images, labels, numbers, 3)
    torch.testing.assert_close(found[0], 0.75 * images[0] + 0.25 * images[3])
    expected = images[1].clone()
    expected[:, 2:6, 3:8] = images[2][:, 2:6, 3:8]
    assert torch.equal(found[1], expected)
    assert torch.equal(found[2], images[2])
    assert torch.equal(found[3], images[0])
    expected = torch.tensor([[0.75, 0, 0.25], [0, 0.75, 0.25], [0, 0, 1], [1, 0, 0]])
    torch.testing.assert_close(probabilities, expected)


def test_a_batch_without_numbers_is_not_mixed() -> None:
    images, labels = torch.rand(2, *SHAPE), torch.tensor([2, 0])
    assert torch.equal(MixDraws().apply({"image": images}), images)
    found = MixDraws().apply_to_labels({"image": images, "class": labels}, 3, labels="class")
    assert torch.equal(found, torch.tensor([[0.0, 0, 1], [1, 0, 0]]))


def test_cross_entropy_takes_the_labels() -> None:
    """It is the mean of that of both labels, each by its share."""
    labels, share = torch.tensor([0, 3, 1]), torch.tensor([0.9, 0.5, 0.2])
    numbers = torch.cat([share[:, None], torch.zeros(3, 4)], dim=1)
    logits = torch.randn(3, 5)
    _, probabilities = mixed(torch.zeros(3, *SHAPE), labels, numbers, 5)
    one, other = (softmax_cross_entropy(logits, each, reduction="none") for each in (labels, labels.flip(0)))
    expected = share * one + (1 - share) * other
    torch.testing.assert_close(softmax_cross_entropy(logits, probabilities, reduction="none"), expected)


def test_bytes_are_taken_as_shares_of_the_range() -> None:
    images = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    given = images.clone()
    numbers, labels = numbers_of(MixDraws(0.4, 1.0), 3), torch.tensor([0, 1, 2])
    of_bytes, of_floats = mixed(images, labels, numbers, 3), mixed(images / 255, labels, numbers, 3)
    torch.testing.assert_close(of_bytes, of_floats)
    assert torch.equal(images, given)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 1000))
def test_labels_add_up_to_one_and_the_middle_of_an_odd_slice_stays(count: int, start: int) -> None:
    images, labels = torch.rand(count, *SHAPE), torch.arange(count) % 4
    found, probabilities = mixed(images, labels, numbers_of(MixDraws(0.4, 1.0), count, start), 4)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(count))
    assert (probabilities >= 0).all()
    if count % 2:
        torch.testing.assert_close(found[count // 2], images[count // 2])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MixDraws(-0.1), "mixup is out of range"),
        (lambda: MixDraws(0.2, float("inf")), "cutmix is out of range"),
        (lambda: MixDraws(0.2, p=1.1), "p is out of range"),
        (lambda: MixDraws(0, 0), "Nothing is mixed"),
    ],
)
def test_parameters_of_mix_draws_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize("image", [None, [b""], torch.zeros(2, 3)])
def test_mix_draws_refuse_fields_without_decoded_images(image: object) -> None:
    with pytest.raises(InputError, match=r"MixDraws finds no decoded images(.|\n)*crop or resize encoded images first"):
        MixDraws()({"image": image}, draws(2))


@pytest.mark.parametrize(
    ("images", "labels", "numbers"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2).long(), torch.zeros(2, 5)),
        (torch.zeros(2, 3, 4, 4).long(), torch.zeros(2).long(), torch.zeros(2, 5)),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2), torch.zeros(2, 5)),
        (torch.zeros(2, 3, 4, 4), torch.zeros(3).long(), torch.zeros(2, 5)),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), torch.zeros(2, 4)),
    ],
    ids=["dimensions", "dtype", "probabilities", "labels", "numbers"],
)
def test_images_labels_and_numbers_that_do_not_fit_are_not_mixed(
    images: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor
) -> None:
    with pytest.raises(InputError, match=r"cannot be mixed"):
        mixed(images, labels, numbers, 3)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    with pytest.raises(InputError, match="A label is not the number of a class") as raised:
        mixed(torch.zeros(2, *SHAPE), torch.tensor([1, label]), torch.zeros(2, 5), 3)
    assert str(label) in str(raised.value)
