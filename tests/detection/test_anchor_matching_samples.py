"""Samples are balanced, or hard, as in the systems that they come from."""

from __future__ import annotations

import torch
from device_calls import accelerator, counted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.detection.anchor_matching import BACKGROUND, IGNORED, balanced_sample, hard_examples
from lockstep.detection.blocks import HardExampleMiner
from lockstep.detection.nms import batched_nms


def matches_of(kinds: Tensor) -> Tensor:
    """Matches of anchors that learn an object, 1, that are background, 0, or are ignored, -1."""
    return torch.where(kinds == 1, 7, torch.where(kinds == 0, BACKGROUND, IGNORED))


@settings(deadline=None, max_examples=30)
@given(num_positives=st.integers(0, 30), num_negatives=st.integers(0, 30), count=st.integers(0, 30))
def test_a_sample_has_its_share_of_positives_and_is_filled_with_negatives(
    num_positives: int, num_negatives: int, count: int
) -> None:
    kinds = torch.tensor([1] * num_positives + [0] * num_negatives + [-1] * 5)[
        torch.randperm(num_positives + num_negatives + 5)
    ]
    sample = balanced_sample(matches_of(kinds[None]), count, 0.25)
    taken = min(num_positives, int(count * 0.25))
    assert sample.num_positives == [taken] == [(kinds[sample.places] == 1).sum()]
    assert (kinds[sample.places] == 0).sum() == min(num_negatives, count - taken)
    assert sample.lengths == [len(sample.places)] == [len(sample.places.unique())]
    assert not (kinds[sample.places] == -1).any()


def test_draws_are_those_of_torchvision() -> None:
    """Its sampler permutes the positives and the negatives of one image after the other."""
    kinds = torch.randint(-1, 2, (2, 50), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    expected = []
    for image in kinds:
        positives, negatives = (torch.where(image == kind)[0] for kind in (1, 0))
        drawn = positives[torch.randperm(len(positives))[:4]], negatives[torch.randperm(len(negatives))[:12]]
        expected.append(sorted(torch.cat(drawn).tolist()))
    torch.manual_seed(3)
    places, lengths, _ = balanced_sample(matches_of(kinds), 16, 0.25)
    first, second = places.split(lengths)
    assert [first.tolist(), (second - 50).tolist()] == expected
    assert not torch.equal(balanced_sample(matches_of(kinds[:1]), 16, 0.25).places, first)


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return batched_nms(boxes, scores, torch.zeros_like(scores, dtype=torch.int64), threshold)


def mined(config: HardExampleMiner, losses: Tensor, boxes: Tensor, positive: Tensor, negative: Tensor) -> list[int]:
    """The reference's steps for one image."""
    selected = nms(boxes, losses, config.iou_threshold).tolist()[: config.num_hard_examples or None]
    if not config.max_negatives_per_positive:
        return sorted(selected)
    num_positives = sum(bool(positive[place]) for place in selected)
    most = max(config.min_negatives_per_image, config.max_negatives_per_positive * num_positives)
    kept, seen = [], 0
    for place in selected:
        seen += bool(negative[place])
        if positive[place] or seen <= most:
            kept.append(place)
    return sorted(kept)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    number=st.sampled_from([0, 5, 40]),
    negatives=st.sampled_from([0, 1, 3]),
    least=st.sampled_from([0, 4]),
)
def test_hard_examples_are_the_reference_ones(seed: int, number: int, negatives: int, least: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(2, 60, 2, generator=generator) * 30
    boxes = torch.cat([corners, corners + torch.rand(2, 60, 2, generator=generator) * 20], -1)
    losses = torch.randint(20, (2, 60), generator=generator).float()
    kinds = torch.randint(-3, 2, (2, 60), generator=generator)
    config = HardExampleMiner(number, 0.5, "both", negatives, least)
    chosen = hard_examples(config, losses, boxes, kinds == 1, (kinds == 0) | (kinds < -1))
    for image in range(2):
        expected = mined(
            config, losses[image], boxes[image], kinds[image] == 1, (kinds[image] == 0) | (kinds[image] < -1)
        )
        assert chosen[image].nonzero()[:, 0].tolist() == expected


def test_mining_waits_once_for_all_images() -> None:
    """With the threshold of the API's SSDs, which leaves out only what is nearly the same."""
    generator = torch.Generator().manual_seed(1)
    corners = torch.rand(3, 700, 2, generator=generator) * 30
    boxes, losses = torch.cat([corners, corners + 9], -1), torch.rand(3, 700, generator=generator)
    boxes[:, ::5] = boxes[:, 1::5]
    given = HardExampleMiner(num_hard_examples=300, iou_threshold=0.99), losses, boxes, losses > 0.7, losses < 0.3
    with accelerator(), counted() as calls:
        chosen = hard_examples(*given)
    assert len(calls.waits) == 1
    assert torch.equal(chosen, hard_examples(*given))
