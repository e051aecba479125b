"""Recipes of photos through the real commands: trained, resumed, scored, shown, measured; and what is no data."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_images import image_folder, image_shards
from worker_processes import HANG_SECONDS

from lockstep.cli import evaluate, train
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml, with_settings
from lockstep.workers.rank import leave

FIXTURES = Path(__file__).parent.parent / "fixtures"
ROOT = FIXTURES.parent.parent
SMALL = [
    "data.image_size=75", "model.depth_multiplier=0.05", "model.num_classes=4", "evaluate.top=[1, 2]", "num_towers=1",
    "batch_size=4", "exchange.exact=true", "towers.precision=fp32",
    "evaluate.every=0", "checkpoints.retention.best=none", "watch.summaries=0",
    "watch.metrics=0", "feed.num_processes=0",
]  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return image_shards(tmp_path / "shards", "train", [1, 2, 3, 1, 2, 3], boxes=True)


def small(*settings: str) -> Recipe:
    return with_settings(find("inception_v3"), [*SMALL, *settings])


def words(path: Path, *settings: str) -> list[str]:
    """The command line that trains a small recipe two steps, on this machine's first worker."""
    file = path / "recipe.toml"
    file.write_text(to_toml(small(*settings)))
    return ["train", str(file), "--workdir", str(path / "run"), "--steps", "2", "--workers", "1", "--device", "cpu"]


def test_a_recipe_of_photos_is_trained_resumed_scored_shown_and_measured(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    photos = image_folder(tmp_path / "photos")
    told = [f"data.train={shards}", f"data.validation={photos}", f"data.test={photos}"]
    argv = words(tmp_path, *told)
    caplog.set_level(logging.INFO, "lockstep")
    assert train.plan_train(argv)["workers"] == 1
    assert train.train_as_worker(argv) == 0
    leave()
    caplog.clear()
    assert train.train_as_worker([*argv, "--steps", "3"]) == 0
    assert any(message.startswith("resumed at step 2, position 8, from") for message in caplog.messages)
    leave()
    result, table = tmp_path / "scores.json", tmp_path / "table.csv"
    scored = ["evaluate", str(tmp_path / "run"), "--average", "--to", str(result), "--confusion", str(table)]
    assert evaluate.evaluate_as_worker(scored) == 0
    leave()
    found = json.loads(result.read_text())
    assert (found["step"], found["weights"], found["num_examples"]) == (3, "average", 6)
    assert {*found["scores"]} == {"top1", "top2"}
    assert table.read_text().splitlines()[0].split(",")[1:4] == ["blue", "green", "red"]
    written = str(tmp_path / "recipe.toml")
    assert main(["show", written, "--positions", "0:2", "--to", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert text.count("<figcaption>DistortedCrop, 75 x 75") == 2
    assert text.count("<figcaption>inputs, 75 x 75") == 2, "with the colours that the network sees"
    capsys.readouterr()
    assert main(["benchmark", "input", written, "--seconds", "0.1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "6 examples, batches of 4, DistortedCrop, HorizontalFlip, ColourDraws" in said
    assert "the training step alone" in said


# What cannot be trained on --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.process
def test_the_command_says_which_record_has_a_label_past_the_classes(tmp_path: Path) -> None:
    """Found by a worker at its first batch: wrong input all the same, in words and not as a traceback."""
    argv = words(tmp_path, f"data.train={image_shards(tmp_path / 'shards', 'train', [1, 1, 1, 1000])}")
    command = [sys.executable, "-m", "lockstep", *argv]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert ended.returncode == 2
    assert ended.stderr.endswith(
        "error: The label of train-00001-of-00002:1 is none of the model's classes.\n"
        "  given:    label 1000\n"
        "  expected: 0 to 3, for a model with 4 classes\n"
        "  hint:     set model.num_classes to 1001 or more; or data.labels_offset to 1, if the labels begin there\n"
    )
    assert "Traceback" not in ended.stderr


def refused(run: Callable[[list[str]], object], argv: list[str]) -> str:
    try:
        with pytest.raises(InputError) as caught:
            run(argv)
    finally:
        leave()
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "This recipe has not been told where its train images are."),
        (["data.train={0}/phtos"], "There is no data at {0}/phtos."),
        (["data.train={0}/shards/test-*"], "No file is named like {0}/shards/test-*"),
        (["data.train={0}/shards/train-*", "data.validation={0}/valid"], "There is no data at {0}/valid."),
        (["data.train={0}/shards/train-*", "data.test={0}/empty"], "{0}/empty is no data that is known."),
        (["data.train={0}/shards/train-*", "data.function=mine:reader"], "There is no module mine."),
    ],
    ids=["untold", "misspelled", "no_match", "no_validation", "empty", "function"],
)  # fmt: skip
def test_a_path_that_is_none_is_refused_before_workers_start(
    shards: str, tmp_path: Path, settings: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    given = [setting.format(tmp_path) for setting in settings]
    assert said.format(tmp_path) in refused(train.plan_train, words(tmp_path, *given))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.train={1}/voc/bccd"], "This data has not one class for each image."),
        (["data.train={1}/coco/instances.json:{1}/coco/images"], "This data has not one class for each image."),
        (["data.train={0}/unlabelled/train-*"], "train-00000-of-00002:0 has no label."),
        (["data.train={0}/shards/train-*", "data.decoding.exif=true"], "exif"),
    ],
    ids=["voc", "coco", "unlabelled", "turned"],
)
def test_data_that_will_not_do_is_refused_by_a_worker_at_its_start(
    shards: str, tmp_path: Path, settings: list[str], said: str
) -> None:
    image_shards(tmp_path / "unlabelled", "train", [None] * 4)
    given = [setting.format(tmp_path, FIXTURES) for setting in settings]
    argv = words(tmp_path, *given, "feed.order=sequential")
    train.plan_train(argv)
    assert said.format(tmp_path) in refused(train.train_as_worker, argv)


def test_unlabelled_records_may_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lockstep")
    path = image_shards(tmp_path / "shards", "train", [1, 2, 3, 1, None, 2, 3, 1])
    assert train.train_as_worker(words(tmp_path, f"data.train={path}", "feed.bad_examples=skip")) == 0
    quarantined = (tmp_path / "run/quarantine.jsonl").read_text()
    assert "train-00000-of-00002:2 has no label." in quarantined


def test_a_resumed_run_with_another_stage_says_what_differs(shards: str, tmp_path: Path) -> None:
    stage = ["stages.0.length.kind=steps", "stages.0.length.count=2"]
    (tmp_path / "run").mkdir()
    file = tmp_path / "run/recipe.toml"
    file.write_text(to_toml(small(f"data.train={shards}", *stage, "end.count=2")))
    shutil.copy(file, tmp_path / "saved.toml")
    said = refused(train.plan_train, words(tmp_path, f"data.train={shards}", *stage, "stages.0.image_size=80"))
    assert said.startswith(f"The run in {tmp_path}/run has another recipe.\n")
    assert "given:    stages.0.image_size: saved None, given 80\n" in said
    assert file.read_text() == (tmp_path / "saved.toml").read_text()
