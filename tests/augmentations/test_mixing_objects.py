"""Two images mixed, with the objects of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from painted_scenes import batch_of, check_in_step, labels_of, pixels_of, scene

from lockstep.augmentations.mixing import MixUp
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

Numbers = st.integers(0, 10_000)


def draws(seed: int, count: int) -> Draws:
    return Draws(seed, np.arange(count))


@settings(max_examples=25)
@given(Numbers, Numbers, st.sampled_from([0.0, 0.6, 1.0]))
def test_both_images_lie_at_the_corner_and_all_objects_stay(first: int, seed: int, p: float) -> None:
    augment = MixUp(p=p)
    batch = batch_of([scene(first + row) for row in range(3)])
    rows = np.flatnonzero(augment.needs_partners(draws(seed, 3))).tolist()
    partner = batch_of([scene(first + 10 + row) for row in rows]) if rows else None
    found = augment(batch, draws(seed, 3), [partner] if partner else ())
    check_in_step(found, painted=False)
    own, theirs = pixels_of(batch), dict(zip(rows, pixels_of(partner) if partner else [], strict=True))
    for row in range(3):
        labels = labels_of(batch)[row]
        if row not in rows:
            assert labels_of(found)[row] == labels
            assert found["image"][row] is batch["image"][row]
            continue
        assert partner is not None
        assert labels_of(found)[row] == [*labels, *labels_of(partner)[rows.index(row)]]
        height, width = (max(own[row].shape[axis], theirs[row].shape[axis]) for axis in (1, 2))
        assert found["image"][row].shape == (3, height, width)
        share = _share(found, row, len(labels))
        if share is not None:
            layers = torch.zeros(2, 3, height, width)
            for layer, pixels in zip(layers, (own[row], theirs[row]), strict=True):
                layer[:, : pixels.shape[1], : pixels.shape[2]] = pixels
            mixed = share * layers[0] + (1 - share) * layers[1]
            assert (found["image"][row].float() - mixed).abs().max() <= 0.501


def _share(found: dict[str, Any], row: int, count: int) -> float | None:
    """The share of the first image: the weight of its objects, and the rest of that of the others."""
    weights = found["weights"][row].tolist()
    shares = np.array([*weights[:count], *(1 - weight for weight in weights[count:])])
    assert np.allclose(shares, shares[:1])
    return float(shares[0]) if weights else None


def test_weights_are_multiplied_or_made() -> None:
    batch, partner = (batch_of([scene(number, count=3)]) for number in (1, 2))
    plain = MixUp()(batch, draws(4, 1), [partner])["weights"].values
    for each in (batch, partner):
        each["weights"] = Ragged(each["weights"].values * 0.5, each["weights"].lengths)
    assert torch.allclose(MixUp()(batch, draws(4, 1), [partner])["weights"].values, plain / 2)
    for each in (batch, partner):
        del each["weights"]
    assert torch.equal(MixUp()(batch, draws(4, 1), [partner])["weights"].values, plain)
    assert torch.equal(MixUp(p=0.0)(batch, draws(4, 1))["weights"].values, torch.ones(len(batch["labels"].values)))


def test_shares_have_the_beta_distribution() -> None:
    one = batch_of([scene(1, sides=(12, 12), count=1)] * 2000)
    weights = MixUp(alpha=1.5)(one, draws(1, 2000), [one])["weights"].values[::2]
    assert abs(float(weights.mean()) - 0.5) < 0.02
    assert abs(float(weights.var()) - 1 / 16) < 0.005
