from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.augmentations import auto_augment
from lockstep.augmentations.augment import Augment
from lockstep.augmentations.auto_augment import RANDAUGMENT, TRIVIALAUGMENT, Operation, RandAugment, TrivialAugmentWide
from lockstep.errors import InputError
from lockstep.randomness import Draws

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "policies_golden.npz")
TABLES = {"RandAugment": RANDAUGMENT, "TrivialAugmentWide": TRIVIALAUGMENT}
SIGNED = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness"}
POLICIES: list[Augment] = [RandAugment(), RandAugment(3, 30), TrivialAugmentWide()]


def draws(count: int, start: int = 0) -> Draws:
    return Draws(3, np.arange(start, start + count))


def noise(count: int, height: int = 9, width: int = 12) -> torch.Tensor:
    pixels = np.random.default_rng(count).integers(0, 256, (count, 3, height, width))
    return torch.from_numpy(pixels.astype(np.uint8))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", RANDAUGMENT)
def test_amounts_are_those_of_torchvision(table: str, name: str) -> None:
    """Torchvision computes them in 32 bits, and thresholds as shares of 255."""
    operation = TABLES[table][name]
    expected = GOLDEN[f"{table} {name}"] * (255 if name == "Solarize" else 1)
    found = [operation.amount(place / 30, 15, 18) for place in range(31)]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert operation.signed == (name in SIGNED)


def test_operations_are_in_the_order_of_torchvision() -> None:
    expected = [name.split()[1] for name in GOLDEN if name.startswith("RandAugment")]
    assert [*RANDAUGMENT] == [*TRIVIALAUGMENT] == expected


@pytest.mark.parametrize("name", RANDAUGMENT)
def test_every_operation_gives_the_pixels_of_torchvision(name: str) -> None:
    image = torch.from_numpy(GOLDEN["image"])
    for amount, expected in zip(GOLDEN[f"{name} amounts"].tolist(), GOLDEN[name], strict=True):
        found = RANDAUGMENT[name].apply(image, 255 * amount if name == "Solarize" else amount)
        assert torch.equal(found, torch.from_numpy(expected)), amount
    assert torch.equal(image, torch.from_numpy(GOLDEN["image"]))


@pytest.mark.parametrize("table", TABLES)
def test_values_from_the_threshold_on_are_solarized_at_every_strength(table: str) -> None:
    """A threshold that is whole must not be missed by the error of a double: so do torchvision's first transforms."""
    ramp = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    solarize = TABLES[table]["Solarize"]
    for place in range(31):
        changed = solarize.apply(ramp, solarize.amount(place / 30, 1, 256)) != ramp
        first = -(-255 * (30 - place) // 30)
        assert torch.equal(changed[0, 0], torch.arange(256) >= first), place


@pytest.mark.parametrize("name", [name for name in RANDAUGMENT if name not in ("AutoContrast", "Equalize")])
@pytest.mark.parametrize("table", TABLES)
def test_no_strength_changes_nothing(table: str, name: str) -> None:
    operation = TABLES[table][name]
    image = noise(1)[0].clamp(max=254)
    assert torch.equal(operation.apply(image, operation.amount(0.0, 9, 12)), image)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([*RANDAUGMENT]), st.floats(0, 1), st.booleans(), st.integers(1, 9), st.integers(1, 9))
def test_images_of_every_size_keep_it(name: str, strength: float, turn: bool, height: int, width: int) -> None:
    image = noise(1, height, width)[0]
    for table in TABLES.values():
        operation = table[name]
        amount = operation.amount(strength, height, width)
        found = operation.apply(image, -amount if turn and operation.signed else amount)
        assert found.shape == image.shape
        assert found.dtype == torch.uint8


@pytest.mark.parametrize("value", [0, 77, 255])
@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "Contrast", "Color", "Sharpness"])
def test_an_image_of_one_grey_stays(name: str, value: int) -> None:
    image = torch.full((3, 5, 6), value, dtype=torch.uint8)
    found = RANDAUGMENT[name].apply(image, 0.5)
    # Weights of 32 bits that add up to 0.9999 may take the grey to the next whole number below.
    assert (found.int() - value).abs().max() <= (name in ("Contrast", "Color"))


@pytest.mark.parametrize("augment", POLICIES, ids=repr)
def test_an_example_depends_on_its_own_draws_alone(augment: Augment) -> None:
    images = noise(40)
    before = images.clone()
    whole = augment({"image": images, "label": 3}, draws(40))
    assert torch.equal(images, before)
    assert whole["label"] == 3
    assert (whole["image"] != images).flatten(1).any(1).sum() > 25
    for row in range(40):
        alone = augment({"image": images[row : row + 1]}, draws(1, start=row))["image"]
        assert torch.equal(alone[0], whole["image"][row])


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[str, float]]:
    """The operations that a policy applies from now on, and their amounts."""
    found: list[tuple[str, float]] = []

    def recording(called: str, operation: Operation) -> Operation:
        def apply(image: torch.Tensor, amount: float) -> torch.Tensor:
            found.append((called, amount))
            return image

        return operation._replace(apply=apply)

    table = {called: recording(called, operation) for called, operation in getattr(auto_augment, name).items()}
    monkeypatch.setattr(auto_augment, name, table)
    return found


def test_operations_and_signs_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, "RANDAUGMENT")
    RandAugment(num_ops=2, magnitude=9)({"image": noise(1, 1, 1).expand(3500, -1, -1, -1)}, draws(3500))
    counts = Counter(name for name, _ in found)
    assert {*counts} == {*RANDAUGMENT}
    assert all(430 < count < 570 for count in counts.values())
    assert {abs(amount) for name, amount in found if name == "Rotate"} == {9.0}
    assert 0.46 < np.mean([amount < 0 for name, amount in found if name in SIGNED]) < 0.54
    assert not any(amount < 0 for name, amount in found if name not in SIGNED)
    first, second = found[:3500], found[3500:]
    assert 0.04 < np.mean([one[0] == two[0] for one, two in zip(first, second, strict=True)]) < 0.1


def test_one_operation_of_any_strength_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, "TRIVIALAUGMENT")
    TrivialAugmentWide()({"image": noise(1, 1, 1).expand(3500, -1, -1, -1)}, draws(3500))
    assert len(found) == 3500
    assert {*(name for name, _ in found)} == {*TRIVIALAUGMENT}
    turns = [amount for name, amount in found if name == "Rotate"]
    assert {round(abs(turn), 6) for turn in turns} <= {4.5 * place for place in range(31)}
    assert abs(np.mean(np.abs(turns)) - 67.5) < 10
    assert {amount for name, amount in found if name == "Posterize"} == {2, 3, 4, 5, 6, 7, 8}


def test_operations_follow_one_another() -> None:
    """What two operations give is one of the second on what the first gave."""
    images = noise(30)
    once, twice = (RandAugment(count, 15)({"image": images}, draws(30))["image"] for count in (1, 2))
    tried = [
        operation.apply(once[row], sign * operation.amount(0.5, 9, 12))
        for row in range(30)
        for operation in RANDAUGMENT.values()
        for sign in (1, -1)[: 1 + operation.signed]
    ]
    each = torch.stack(tried).view(30, -1, 3, 9, 12)
    assert (each == twice[:, None]).flatten(2).all(2).any(1).all()


@pytest.mark.parametrize("augment", [RandAugment(), TrivialAugmentWide()], ids=repr)
@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"label": 0}, "missing; the fields are label"),
        ({"image": torch.zeros(2, 3, 4, 4)}, r"a tensor of shape \(2, 3, 4, 4\), torch.float32"),
        ({"image": torch.zeros(2, 1, 4, 4, dtype=torch.uint8)}, r"\(2, 1, 4, 4\), torch.uint8"),
        ({"image": [b"", ""]}, "a list of bytes, str"),
    ],
)
def test_policies_refuse_fields_without_decoded_images(augment: Augment, batch: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=f"{type(augment).__name__} finds no decoded images(.|\n)*{found}"):
        augment(batch, draws(2))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandAugment(0), "num_ops is out of range"),
        (lambda: RandAugment(magnitude=-1), "magnitude is out of range"),
        (lambda: RandAugment(magnitude=31), r"magnitude=31, num_bins=31(.|\n)*from 0 to 30"),
        (lambda: RandAugment(magnitude=2.5), "magnitude is of the wrong type"),  # type: ignore[arg-type]
        (lambda: RandAugment(num_bins=1), "num_bins is out of range"),
        (lambda: TrivialAugmentWide(1), "num_bins is out of range"),
    ],
)
def test_parameters_of_policies_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()
