"""Objects cut out of one image, on another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from painted_scenes import batch_of, check_in_step, labels_of, pixels_of, scene

from lockstep.augmentations.copy_paste import CopyPaste
from lockstep.errors import InputError
from lockstep.randomness import Draws

Numbers = st.integers(0, 10_000)


def draws(seed: int, count: int) -> Draws:
    return Draws(seed, np.arange(count))


def decoded_masks(batch: dict[str, Any]) -> list[torch.Tensor]:
    return [each if isinstance(each, torch.Tensor) else each.decode() for each in batch["masks"]]


@settings(max_examples=40)
@given(Numbers, Numbers, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_pixels_masks_boxes_and_keypoints_agree(first: int, seed: int, files: bool, same: bool, least: float) -> None:
    sides: Any = {"sides": (24, 20)} if same else {}
    augment = CopyPaste(p=0.7, min_visible=least)
    batch = batch_of([scene(first + row, **sides) for row in range(4)], files=files)
    rows = np.flatnonzero(augment.needs_partners(draws(seed, 4))).tolist()
    partner = batch_of([scene(first + 10 + row, **sides) for row in rows], files=files) if rows else None
    found = augment(batch, draws(seed, 4), [partner] if partner else ())
    check_in_step(found)
    before, after = labels_of(batch), labels_of(found)
    for row in range(4):
        theirs = labels_of(partner)[rows.index(row)] if partner and row in rows else []
        assert [label for label in [*before[row], *theirs] if label in after[row]] == after[row]
        _check_below(batch, found, row, least)


def _check_below(batch: dict[str, Any], found: dict[str, Any], row: int, least: float) -> None:
    """Of the objects below the pasted ones, masks, areas and boxes are those of what is left to see."""
    own, left = decoded_masks(batch)[row], decoded_masks(found)[row]
    labels = labels_of(found)[row]
    pasted = (
        left[[place for place, label in enumerate(labels) if label not in labels_of(batch)[row]]].amax(0, keepdim=True)
        if set(labels) - set(labels_of(batch)[row])
        else torch.zeros(1, *own.shape[1:], dtype=torch.uint8)
    )
    height, width = own.shape[1:]
    for place, label in enumerate(labels_of(batch)[row]):
        seen = own[place] * (1 - pasted[0])
        share = float(seen.sum() / own[place].sum())
        if label not in labels:
            assert share == 0 or share < least
            continue
        now = labels.index(label)
        assert share >= least
        assert share > 0
        assert torch.equal(left[now], seen)
        assert abs(float(found["area"][row][now]) - float(seen.sum())) < 1e-3
        rows, columns = seen.any(1).nonzero()[:, 0], seen.any(0).nonzero()[:, 0]
        tight = torch.tensor([rows[0] / height, columns[0] / width, (rows[-1] + 1) / height, (columns[-1] + 1) / width])
        assert (found["boxes"][row][now] - tight).abs().max() < 1e-6


def test_all_is_pasted_or_nothing() -> None:
    batch, partner = (batch_of([scene(number, sides=(24, 24), count=4)]) for number in (1, 2))
    whole = CopyPaste(share=1.0)(batch, draws(0, 1), [partner])
    is_pasted = decoded_masks(partner)[0].amax(0).bool()
    (pixels,), (own,), (theirs,) = (pixels_of(each) for each in (whole, batch, partner))
    assert torch.equal(pixels[:, is_pasted], theirs[:, is_pasted])
    assert torch.equal(pixels[:, ~is_pasted], own[:, ~is_pasted])
    assert labels_of(whole)[0][-len(labels_of(partner)[0]) :] == labels_of(partner)[0]
    none = CopyPaste(share=0.0)(batch, draws(0, 1), [partner])
    assert labels_of(none) == labels_of(batch)
    assert torch.equal(pixels_of(none)[0], own)


def test_crowds_are_not_pasted() -> None:
    batch, partner = (batch_of([scene(number, sides=(24, 24), count=4)]) for number in (1, 2))
    partner["is_crowd"].values[0] = True
    found = CopyPaste(share=1.0)(batch, draws(0, 1), [partner])
    assert labels_of(partner)[0][0] not in labels_of(found)[0]
    assert labels_of(partner)[0][1] in labels_of(found)[0]


def test_objects_are_chosen_one_by_one() -> None:
    batch = batch_of([scene(1, sides=(24, 24), count=0)] * 200)
    partner = batch_of([scene(2, sides=(24, 24), count=3)] * 200)
    found = CopyPaste(share=0.5)(batch, draws(0, 200), [partner])
    labels = labels_of(partner)[0]
    chosen = np.array([[label in each for label in labels] for each in labels_of(found)])
    assert ((chosen.mean(0) > 0.4) & (chosen.mean(0) < 0.6)).all()
    assert len(np.unique(chosen, axis=0)) == 2 ** len(labels)


def test_covered_keypoints_are_not_visible_any_more() -> None:
    batch, partner = (batch_of([scene(number, sides=(24, 24), count=4)]) for number in (1, 2))
    found = CopyPaste(share=1.0, min_visible=0.0)(batch, draws(0, 1), [partner])
    is_pasted = decoded_masks(partner)[0].amax(0).bool()
    for place, label in enumerate(labels_of(batch)[0]):
        if label in labels_of(found)[0]:
            row, column = (batch["keypoints"][0][place, 0] * 24).long().tolist()
            now = found["keypoint_visibility"][0][labels_of(found)[0].index(label)].tolist()
            assert now == [1 if is_pasted[row, column] else 2, 0]
    assert batch["keypoint_visibility"].values[:, 0].tolist() == [2] * len(labels_of(batch)[0])


def test_masks_that_nothing_covers_stay_as_they_are() -> None:
    batch, partner = (batch_of([scene(number, count=3)]) for number in (1, 2))
    assert CopyPaste(share=0.0)(batch, draws(0, 1), [partner])["masks"][0] is batch["masks"][0]


def test_without_masks_it_is_refused() -> None:
    batch = batch_of([scene(1)])
    del batch["masks"]
    with pytest.raises(InputError, match="CopyPaste finds no masks"):
        CopyPaste()(batch, draws(0, 1), [batch])
