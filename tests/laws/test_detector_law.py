"""The laws for a detector: its update depends on no dealing of its images over towers and workers, nor on a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_refused_attempt import learned
from test_towers import Array, digest
from test_towers import learned as arrays
from tiny_detector import Objects, TinyDetector, make_loader, make_task
from torch import Tensor, nn

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.detection.blocks import L1LocalizationLoss, PenaltyReducedLogisticFocalLoss
from lockstep.detection.rt_detr import RtDetrNet
from lockstep.detection.rt_detr_layers import RtDetrSizes
from lockstep.detection.tf_center_net import TfCenterNet
from lockstep.detection.tf_center_net_configs import (
    CenterNet,
    CenterNetFeatureExtractor,
    KeypointEstimation,
    KeypointLoss,
    ObjectCenterParams,
    ObjectDetection,
)
from lockstep.detection.values import RtDetr, SqueezeSsd
from lockstep.recipes.tasks import Detection
from lockstep.weights.warm_start import WarmStart

ONE_SIZE, OWN_SIZES = make_task(), make_task(KeepAspectRatioResizer(24, 36))
LARGER = make_task(FixedShapeResizer(32, 40))
POINTED = make_task(FixedShapeResizer(32, 32), num_keypoints=3)
SIDES = ((24, 30), (30, 24), (24, 24))


class Sampling(TinyDetector):
    """Chooses at random, in its losses, half of the cells that they are computed on; so it cannot count them."""

    def counts(self, assigned: Any) -> Mapping[str, Tensor]:
        return {}

    def losses(self, predictions: Mapping[str, Any], assigned: Any) -> Mapping[str, Tensor]:
        is_chosen = torch.rand(predictions["logits"].shape[:2]) < 0.5
        sampled = {**predictions, "offsets": predictions["offsets"] * is_chosen[..., None]}
        return super().losses(sampled, assigned)


class Pointed(Objects):
    """Objects of the first class have three keypoints, of which the last is not labelled, and others have none."""

    def read_batch(self, indices: Any) -> dict[str, Any]:
        batch = super().read_batch(indices)
        points = []
        for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True):
            corners = torch.where((labels == 1)[:, None, None], boxes.view(-1, 2, 2), torch.nan)
            points.append(torch.cat([corners, torch.full((len(boxes), 1, 2), torch.nan)], 1))
        return {**batch, "keypoints": points}


class Quarter(nn.Conv2d):
    """A backbone of a CenterNet, of one layer."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(3, 24, 4, 4)

    def forward(self, images: Tensor) -> Any:
        return [super().forward(images / 255).relu()]


def small_center_net() -> nn.Module:
    heat, places = PenaltyReducedLogisticFocalLoss(2.0, 4.0), L1LocalizationLoss()
    task = KeypointEstimation(KeypointLoss(places, heat), keypoint_labels=("a", "b", "c"), offset_peak_radius=1)
    boxes, features = ObjectDetection(places), CenterNetFeatureExtractor("mobilenet_v2_fpn")
    model = CenterNet(2, features, boxes, ObjectCenterParams(heat), (task,)).build(seed=0)
    assert isinstance(model, TfCenterNet)
    model.backbone = Quarter()  # type: ignore[assignment]
    return model


def make_state(model: nn.Module | None = None, **more: Any) -> ls.TrainState:
    return ls.TrainState(
        model or TinyDetector(coupled=True),
        ls.optim.SGD(ls.optim.Cosine(0.02, 40), momentum=0.9),
        gradient_transforms=[ls.optim.ClipGlobalNorm(5.0)],
        average=ls.optim.MovingAverage(0.9),
        **more,
    )


def sides_for(task: Detection) -> tuple[tuple[int, int], ...]:
    return SIDES if isinstance(task.data.resizer, KeepAspectRatioResizer) else ((24, 24),)


def train_some(
    num_towers: int,
    exchange: Any,
    task: Detection = ONE_SIZE,
    model: Callable[[], nn.Module] | None = None,
    steps: int = 6,
    **towers: Any,
) -> tuple[str, dict[str, Array]]:
    torch.set_num_threads(1)
    state = make_state(model() if model else None)
    objects = Pointed if task.data.num_keypoints else Objects
    loader = make_loader(task, objects(sides=sides_for(task)))
    reports = list(
        ls.train_steps(
            state,
            task.losses,
            loader,
            ls.Towers(num_towers, **towers),
            exchange,
            counts=task.counts(state.model),
            until=ls.Steps(steps),
        )
    )
    assert all(np.isfinite(report.total) for report in reports)
    return digest(state, [each.total for each in reports] + [each.gradient_norm for each in reports]), arrays(state)


def assert_close(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def without_dropout() -> nn.Module:
    model = TinyDetector(coupled=True)
    model.between[1] = nn.Identity()  # type: ignore[index]
    return model


def small_ssd() -> nn.Module:
    return SqueezeSsd(2, layers=(3,), anchor_sizes=((12.0, 24.0),)).build(seed=0)


def small_detr(num_denoising: int = 6) -> nn.Module:
    sizes = RtDetrSizes((1, 1, 1, 1), False, 2, 0.5, 16, 16, stem=8, queries=16, decoder_feed_forward=16, heads=2)
    settings = RtDetr(2, num_queries=4, num_denoising=num_denoising)
    return RtDetrNet(settings, sizes, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("task", "model", "batch_norm"),
    [
        (ONE_SIZE, TinyDetector, "mean"),
        (ONE_SIZE, without_dropout, "frozen"),
        (LARGER, small_ssd, "mean"),
        (LARGER, partial(small_detr, 0), "frozen"),
        (POINTED, small_center_net, "frozen"),
    ],
)
def test_one_two_and_four_towers_make_one_update(
    task: Detection, model: Callable[[], nn.Module], batch_norm: str
) -> None:
    """Losses are divided by their counts over all towers, of which some have no objects.

    It is so where images have one size: those of a tower are padded to the largest of them, and what a detector makes
    of the padding depends on how they are dealt.
    """
    _, joined = train_some(1, ls.Alone(), task, model, 3, batch_norm=batch_norm)
    for num_towers in (2, 4, 8):
        _, split = train_some(num_towers, ls.Alone(), task, model, 3, batch_norm=batch_norm)
        assert_close(split, joined)


def test_what_is_assigned_before_the_towers_are_seeded_draws_nothing() -> None:
    task, model = OWN_SIZES, small_ssd()
    batch = next(iter(ls.batches(make_loader(task, Objects(sides=SIDES)))))
    before = torch.get_rng_state()
    task.counts(model)(batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_synchronised_batch_norm_makes_the_update_of_one_batch() -> None:
    _, joined = train_some(1, ls.Alone(), model=without_dropout)
    _, split = train_some(4, ls.Alone(), model=without_dropout, batch_norm="sync")
    assert_close(split, joined)


@pytest.mark.process
@pytest.mark.parametrize(
    ("task", "model"),
    [
        pytest.param(ONE_SIZE, None, marks=pytest.mark.slow),
        pytest.param(OWN_SIZES, None, marks=pytest.mark.slow),
        (ONE_SIZE, Sampling),
        pytest.param(LARGER, small_ssd, marks=pytest.mark.slow),
        pytest.param(LARGER, small_detr, marks=pytest.mark.slow),
        pytest.param(POINTED, small_center_net, marks=pytest.mark.slow),
    ],
    ids=["one size", "own", "sampling", "ssd", "detr", "keypoints"],
)
def test_every_number_of_workers_makes_the_same_bits(
    run_workers: Callable[..., list[Any]], task: Detection, model: Any
) -> None:
    """Also where losses sample: what they draw depends on the position and the tower."""
    alone, _ = train_some(4, ls.Alone(), task, model, 3)
    found = run_workers(train_some, 2, 4, ls.AllReduce(exact=True), task, model, 3)
    assert {each[0] for each in found} == {alone}


@pytest.mark.parametrize("num_towers", [1, 2])
def test_batches_without_objects_are_trained_on(num_towers: int) -> None:
    """Nothing divides the sums: the detector learns that there are no objects."""
    state, task = make_state(), make_task()
    before = state.step
    loader = make_loader(task, Empty())
    counts = task.counts(state.model)
    reports = [*ls.train_steps(state, task.losses, loader, ls.Towers(num_towers), counts=counts, until=ls.Steps(2))]
    assert 0 < reports[1].losses["classification"] < reports[0].losses["classification"]
    assert [report.losses["localization"] for report in reports] == [0.0, 0.0]
    assert state.step == before + 2
    assert all(np.isfinite(values).all() for values in arrays(state).values())


class Empty(Objects):
    """Images without objects."""

    def read_batch(self, indices: Any) -> dict[str, Any]:
        batch = super().read_batch(indices)
        return {**batch, "boxes": [each[:0] for each in batch["boxes"]], "labels": [e[:0] for e in batch["labels"]]}


# Resume, and steps that are refused -----------------------------------------------------------------------------------


def trained(
    workdir: Path | None, until: int, task: Detection = OWN_SIZES, model: Callable[[], nn.Module] | None = None
) -> tuple[str, list[float]]:
    """Train to a step from where the folder stands; returns what was learned, and the losses of these steps."""
    objects = Pointed if task.data.num_keypoints else Objects
    state, loader = make_state(model() if model else None), make_loader(task, objects(sides=sides_for(task)))
    if workdir:
        ls.resume(state, loader, workdir)
    counts, towers = task.counts(state.model), ls.Towers(2)
    totals = [
        report.total
        for report in ls.train_steps(state, task.losses, loader, towers, counts=counts, until=ls.Steps(until))
    ]
    if workdir:
        ls.save(state, loader, workdir)
    return digest(state, []), totals


@pytest.mark.parametrize(
    ("stops", "task", "model"),
    [((1, 2, 5), OWN_SIZES, None), ((4,), OWN_SIZES, None), ((3,), POINTED, small_center_net)],
    ids=["thrice", "once", "keypoints"],
)
def test_a_run_that_is_resumed_ends_as_one_that_never_stopped(
    tmp_path: Path, stops: tuple[int, ...], task: Detection, model: Any
) -> None:
    whole, totals = trained(None, 6, task, model)
    found = [trained(tmp_path, until, task, model) for until in (*stops, 6)]
    assert found[-1][0] == whole
    assert [total for _, some in found for total in some] == totals


class Marked(Objects):
    """The image of one example is white."""

    BAD = 10

    def read_batch(self, indices: Any) -> dict[str, Any]:
        batch = super().read_batch(indices)
        images = [
            torch.full_like(image, 255) if index == self.BAD else image
            for index, image in zip(indices.tolist(), batch["image"], strict=True)
        ]
        return {**batch, "image": images}


class Dazzled(TinyDetector):
    """A white image makes it blind."""

    def preprocess(self, images: Tensor) -> Tensor:
        is_white = (images == 255).flatten(1).all(1)
        return super().preprocess(images).masked_fill(is_white[:, None, None, None], torch.nan)


@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize("task", [ONE_SIZE, OWN_SIZES], ids=["one size", "own sizes"])
def test_a_refused_step_names_its_example(task: Detection, num_towers: int) -> None:
    """The losses are computed again for it, from the batch as the loader gave it or as it was counted."""
    state = make_state(Dazzled(), nonfinite="skip")
    loader = make_loader(task, Marked(sides=sides_for(task)))
    counts, towers = task.counts(state.model), ls.Towers(num_towers)
    reports = [*ls.train_steps(state, task.losses, loader, towers, counts=counts, until=ls.Steps(2))]
    refused = [report.nonfinite for report in reports if report.nonfinite]
    assert len(reports) == 3
    (report,) = refused
    (culprit,) = report.culprits
    assert "the output of module 'features' (Conv2d) is not finite; examples objects-10" in culprit
    assert report.batch is not None


def test_a_refused_step_leaves_the_state_as_if_it_had_been_skipped() -> None:
    def attempts(*, told: bool) -> list[Any]:
        state, loader = make_state(Dazzled(coupled=True), nonfinite="skip"), make_loader(ONE_SIZE, Marked())
        position = next(b.position for b in ls.batches(make_loader(ONE_SIZE, Marked())) if white(b))
        if told:
            loader.skip(position)
        counts = ONE_SIZE.counts(state.model)
        [*ls.train_steps(state, ONE_SIZE.losses, loader, ls.Towers(2), counts=counts, until=ls.Steps(4))]
        return learned(state)

    assert attempts(told=False) == attempts(told=True)


def white(batch: ls.Batch) -> bool:
    return bool((batch["image"] == 255).flatten(1).all(1).any())


def test_a_detector_starts_from_the_weights_of_another(tmp_path: Path) -> None:
    """A head of other classes begins fresh, which is said, where it is told that it may; else the start is refused."""
    state = make_state()
    ls.save(state, make_loader(ONE_SIZE), tmp_path)
    fresh = make_state(TinyDetector(num_classes=3, seed=1, coupled=True))
    with pytest.raises(ls.CheckpointError, match=r"'head\.weight' does not fit .* \(6, 8, 1, 1\) in the file, \(7, 8"):
        ls.warm_start(fresh, tmp_path)
    report = ls.warm_start(fresh, tmp_path, WarmStart(mismatch="skip"))
    assert torch.equal(fresh.parameters["features.weight"], state.parameters["features.weight"])
    assert "head.weight" in str(report)
