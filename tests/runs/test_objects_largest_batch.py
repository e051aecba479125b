"""The largest batch of a detector's run: how large its images and how many its objects are, and what it is told of."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_detector import Objects, make_loader, make_task, tiny_recipe, write_coco
from torch import Tensor

import lockstep as ls
from lockstep.augmentations.colours import RandomDistortColor
from lockstep.augmentations.mixing import Mosaic
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.augmentations.zoom import RandomZoomOut
from lockstep.readers.detection import DetectionReader
from lockstep.readers.object_survey import ObjectSurvey, survey_objects
from lockstep.recipes.code import Function
from lockstep.recipes.data import DetectionData
from lockstep.recipes.parts import Monitoring, Stage
from lockstep.recipes.recipe import Recipe
from lockstep.runs.objects import Largest, largest, largest_batch, probe_largest_batch
from lockstep.runs.run import Run
from lockstep.workers.rank import leave

KEEP = KeepAspectRatioResizer(60, 100)


def known(sizes: list[tuple[int, int]], *, is_complete: bool = True) -> ObjectSurvey:
    found = survey_objects(DetectionReader(Objects(4), 2))
    return replace(found, sizes=np.array(sizes), most_objects=7, is_complete=is_complete)


def data(resizer: Any, *augment: Any, **more: Any) -> DetectionData:
    return DetectionData(function=Function("", "f"), resizer=resizer, augment=augment, **more)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (data(FixedShapeResizer(30, 50), RandomZoomOut()), Largest(30, 50, 7)),
        (data(replace(KEEP, pad_to_max_dimension=True)), Largest(100, 100, 7)),
        (data(KEEP), Largest(60, 90, 7)),
        (data(KEEP, HorizontalFlip(), RandomDistortColor()), Largest(60, 90, 7)),
        (data(KEEP, RandomZoomOut()), Largest(100, 100, 7)),
        (data(KEEP, Mosaic(24)), Largest(100, 100, 28)),
        (data(FixedShapeResizer(9, 9), max_number_of_boxes=90), Largest(9, 9, 7)),
    ],
)
def test_images_and_objects_are_as_many_as_can_come_together(given: DetectionData, expected: Largest) -> None:
    assert largest(given, known([(20, 30), (30, 40), (40, 40)])) == expected


def test_a_wide_and_a_tall_image_need_room_for_both() -> None:
    assert largest(data(KEEP), known([(20, 30), (30, 20)])) == Largest(90, 90, 7)


def test_what_is_not_known_is_bounded() -> None:
    some = known([(20, 30)], is_complete=False)
    assert largest(data(KEEP), some) == Largest(100, 100, 7)
    assert largest(data(KEEP, max_number_of_boxes=90), some) == Largest(100, 100, 90)


def test_the_largest_batch_has_the_fields_of_a_training_batch() -> None:
    task = make_task(masks=False)
    made = largest_batch(task.data, Largest(24, 24, 5), 4, 2)
    (real,) = [next(iter(ls.batches(make_loader(task, batch_size=4))))]
    assert made.keys() == real.keys() - {"source_id", "objects_left_out"}
    for name, value in made.items():
        for mine, theirs in zip(tensors(value), tensors(real[name]), strict=True):
            assert (mine.dtype, mine.shape[1:]) == (theirs.dtype, theirs.shape[1:]), name
    boxes = made["boxes"].values
    assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_masks_and_keypoints_take_their_part() -> None:
    made = largest_batch(data(KEEP, masks=True, num_keypoints=3), Largest(8, 12, 5), 2, 2)
    assert [masks.shape for masks in made["masks"]] == [(5, 8, 12)] * 2
    assert made["keypoints"].values.shape == (10, 3, 2)


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [value.values, value.lengths]


# In a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    given = tiny_recipe(write_coco(tmp_path, 6))
    return replace(given, end=ls.Steps(2), evaluate=replace(given.evaluate, every=ls.Interval(0, "steps")))


def start(recipe: Recipe, workdir: Path) -> Any:
    leave()
    return Run(recipe, workdir, ls.join("cpu")).run(conclude=False)


def test_a_run_says_that_it_fits_and_learns_the_same(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    start(recipe, tmp_path / "probed")
    said = "the largest batch fits into memory: 4 examples over 2 towers, image 3 x 32 x 48, up to 3 boxes each; "
    assert said in caplog.text
    caplog.clear()
    start(replace(recipe, watch=Monitoring(probe_memory=False)), tmp_path / "not")
    assert "the largest batch" not in caplog.text
    learned = [sorted((tmp_path / name / "checkpoints").glob("*2/*.safetensors")) for name in ("probed", "not")]
    assert [path.name for path in learned[0]] == [path.name for path in learned[1]] != []
    for one, other in zip(*learned, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_run_that_does_not_fit_ends_before_its_first_step(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks_memory(self: Any, inputs: Tensor, assigned: Any = None) -> Any:
        return inputs.new_empty(2**50)

    monkeypatch.setattr("tiny_detector.TinyDetector.forward", lacks_memory)
    with pytest.raises(ls.InputError) as caught:
        start(recipe, tmp_path / "run")
    error = caught.value
    assert "4 examples over 2 towers, image 3 x 32 x 48, up to 3 boxes each (" in str(error.given)
    for mend in ("batch_size", "num_towers", "data.resizer", "data.max_number_of_boxes", "watch.probe_memory=false"):
        assert mend in error.hint
    assert not (tmp_path / "run/recipe.toml").exists()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_the_largest_batch_of_stages_has_the_largest_images(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    stages = (Stage(ls.Steps(1), image_size=40), Stage(ls.Steps(1), image_size=56))
    start(replace(recipe, stages=stages), tmp_path / "run")
    assert "image 3 x 56 x 56" in caplog.text
    assert caplog.text.count("the largest batch") == 1


@pytest.mark.process
def test_workers_compute_their_parts_of_it_together(
    run_workers: Callable[..., list[Any]], tmp_path: Path, recipe: Recipe
) -> None:
    given = replace(recipe, num_workers=None, exchange=ls.AllReduce(exact=True))
    found = run_workers(losses_on_workers, 2, given)
    assert found == [losses_on_workers(replace(given, watch=Monitoring(probe_memory=False)))] * 2


def losses_on_workers(recipe: Recipe) -> dict[str, float]:
    torch.set_num_threads(1)
    run = Run(recipe, None, ls.join("cpu"))
    run.run(conclude=False)
    return dict(run._stages.parts.state.smoothed.now())


def test_it_is_computed_beside_the_other_batches_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(state: Any, losses: Any, batch: ls.Batch, *_: Any, **__: Any) -> int:
        shape = batch["image"].shape
        tensors = [each for each in gc.get_objects() if type(each) is Tensor and each.shape == shape]
        found.append([each.device.type for each in tensors if each.dtype == torch.uint8])
        return 0

    found: list[list[str]] = []
    monkeypatch.setattr("lockstep.runs.objects.probe_memory", count)
    recipe: Any = SimpleNamespace(
        data=data(FixedShapeResizer(31, 53)),
        watch=Monitoring(),
        batch_size=4,
        num_classes=2,
        exchange=None,
    )
    parts: Any = SimpleNamespace(towers=ls.Towers(2), state=SimpleNamespace(model=None), task=SimpleNamespace())
    parts.task.losses, parts.task.counts = None, lambda model: None
    group = SimpleNamespace(broadcast=lambda value: value)
    worker: Any = SimpleNamespace(device=torch.device("meta"), group=group, num_workers=1, rank=0, is_chief=False)
    probe_largest_batch(recipe, parts, known([(20, 30)]), worker)
    assert sorted(found[0]) == ["cpu", "meta", "meta", "meta"]
