"""The laws of the runs hold for Inception-v3 on photos: crops by boxes, colours, dropout, batch norm and an average;
and with what fine-tuning asks for today: a list of augmentations, mixed images, rates by layer, any of torch's rules.

Any number of workers gives the same bytes, and so does a run that was stopped and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_images import image_folder, image_shards

import lockstep as ls
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.workers.rank import leave

STEPS = 4
TODAY = [
    'data.preprocessing={kind = "resized_crop", horizontal_flip = 0.2, augment = [{kind = "random_vertical_flip"}, '
    '{kind = "rand_augment", magnitude = 5}, {kind = "grey_draws"}, {kind = "mix_draws", mixup = 0.8, cutmix = 1.0}]}',
    'optimizer={kind = "layer_decay", decay = 0.9, optimizer = {kind = "adamw", lr = 1e-3}}',
]
BY_TORCH = [TODAY[0], 'optimizer={kind = "from_torch", name = "NAdam", lr = 1e-3}']


def train(workdir: Path, photos: Path, steps: int = STEPS, *settings: str) -> Result:
    """A start of a run on this worker: two towers, scored by its average every two steps."""
    usual = [
        f"data.train={photos}/shards/train-*", f"data.validation={photos}/validation", "data.labels_offset=0",
        "data.image_size=75", "model.depth_multiplier=0.05", "model.num_classes=4", "evaluate.top=[1, 2]",
        "num_towers=2", "batch_size=4", "exchange.exact=true", "towers.precision=fp32",
        "evaluate.every=2 steps", "evaluate.micro_batch=3",
        "watch.metrics=1 steps", "watch.summaries=0", "feed.num_processes=0", f"end.count={steps}", *settings,
    ]  # fmt: skip
    return Run(with_settings(find("inception_v3"), usual), workdir, ls.join("cpu")).run()


def contents(workdir: Path) -> dict[str, bytes]:
    """All that was learned and said; the manifest alone holds the time of saving."""
    newest = workdir / f"checkpoints/step-{STEPS:08d}"
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven photos to train on, in records with boxes, and three to validate, in folders."""
    folder = tmp_path_factory.mktemp("photos")
    image_shards(folder / "shards", "train", [1, 2, 3, 1, 2, 3, 1], boxes=True)
    image_folder(folder / "validation", count=1)
    return folder


@pytest.fixture(
    scope="module",
    params=[[], TODAY, pytest.param(BY_TORCH, marks=pytest.mark.slow)],
    ids=["inception", "today", "by_torch"],
)
def changed(request: pytest.FixtureRequest) -> list[str]:
    """Settings that differ from those of Inception's trainer."""
    settings: list[str] = request.param
    return settings


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, photos: Path, changed: list[str]) -> dict[str, bytes]:
    leave()
    workdir = tmp_path_factory.mktemp("undisturbed")
    result = train(workdir, photos, STEPS, *changed)
    leave()
    assert (result.step, result.reason, result.split) == (STEPS, "end", "validation")
    assert result.evaluation is not None
    assert (result.evaluation.weights, result.evaluation.num_examples) == ("average", 3)
    assert {*result.evaluation.means} == {"top1", "top2"}
    return contents(workdir)


def test_metrics_jsonl_has_every_loss_and_score(undisturbed: dict[str, bytes]) -> None:
    lines = [json.loads(line) for line in undisturbed["metrics.jsonl"].splitlines()]
    assert "auxiliary_cross_entropy" in str(lines[0])
    assert "l2" in str(lines[0])
    assert [line["step"] for line in lines if "top2" in str(line)] == [2, 4]


on_one_kind = pytest.mark.parametrize(
    "changed",
    [TODAY, *(pytest.param(settings, marks=pytest.mark.slow) for settings in ([], BY_TORCH))],
    indirect=True,
    ids=["today", "inception", "by_torch"],
)


@pytest.mark.process
@on_one_kind
def test_two_workers_learn_the_same_bytes(
    undisturbed: dict[str, bytes],
    photos: Path,
    changed: list[str],
    tmp_path: Path,
    run_workers: Callable[..., list[Any]],
) -> None:
    first, second = run_workers(train, 2, tmp_path, photos, STEPS, *changed)
    assert contents(tmp_path) == undisturbed
    assert first.evaluation.means == second.evaluation.means


@on_one_kind
def test_a_resumed_run_learns_the_same_bytes(
    undisturbed: dict[str, bytes], photos: Path, changed: list[str], tmp_path: Path
) -> None:
    assert train(tmp_path, photos, 1, *changed).step == 1
    leave()
    assert train(tmp_path, photos, STEPS, *changed).step == STEPS
    assert contents(tmp_path) == undisturbed


@pytest.mark.parametrize("changed", [[]], indirect=True, ids=["inception"])
def test_boxes_matter(undisturbed: dict[str, bytes], photos: Path, tmp_path: Path) -> None:
    train(tmp_path, photos, STEPS, "data.preprocessing.crop_by_boxes=false")
    assert contents(tmp_path) != undisturbed


@pytest.mark.parametrize("changed", [TODAY], indirect=True, ids=["today"])
def test_mixed_images_matter(undisturbed: dict[str, bytes], photos: Path, tmp_path: Path) -> None:
    train(tmp_path, photos, STEPS, *TODAY, "data.preprocessing.augment=[]")
    assert contents(tmp_path) != undisturbed
