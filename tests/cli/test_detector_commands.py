"""The commands that take the run of a detector: evaluate, predict."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from saved_runs import saved
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_detector import build_tiny, tiny_recipe, write_coco

import lockstep as ls
from lockstep.cli import scoring
from lockstep.cli.main import main
from lockstep.detection.configs import FasterRcnn
from lockstep.readers.coco_results import read_coco_results
from lockstep.runs.known_data import KnownData
from lockstep.runs.workdir import Workdir
from lockstep.workers.rank import leave

MAP = "PascalBoxes_Precision/mAP@0.5IOU"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: the run of a tiny detector with a checkpoint of step 7, and its data in images/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FasterRcnn, "build", build_tiny)
    Path("images").mkdir()
    recipe = tiny_recipe(write_coco(Path("images"), 5), per_category=True)
    saved(Path("run"), recipe)
    KnownData(tmp_path, {1: "red", 2: "green"}).write(Workdir(Path("run")))
    return tmp_path


def pixels_of(path: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def evaluate(*words: str) -> int:
    leave()
    return scoring.score_in_worker(["evaluate", "run", *words])


def test_evaluate_writes_scores_by_their_reference_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    words = ["--set", "evaluate.detection.export_path=new/found.json", "--set", "evaluate.detection.pictures.count=2"]
    assert evaluate("--json", "scores.json", *words) == 0
    scores = json.loads(Path("scores.json").read_text())["scores"]
    by_category = "PascalBoxes_PerformanceByCategory/AP@0.5IOU"
    assert [*scores] == [MAP, f"{by_category}/red", f"{by_category}/green"]
    assert json.loads(Path("run/evaluations.jsonl").read_text())["scores"] == scores
    assert any(message.startswith(f"validation {MAP} ") for message in caplog.messages)
    events = EventAccumulator("run/summaries-evaluation/validation-raw").Reload()
    assert {MAP, f"evaluation/validation/{MAP}"} < set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["image-0", "image-1"]
    assert len(read_coco_results("new/found.json")) > 5


def test_what_evaluate_exports_is_shown_beside_the_objects(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("--set", "evaluate.detection.export_path=found.json")
    words = ["--detections", "found.json", "--min-score", "0.5", "--to", "page.html"]
    assert main(["show", "images/annotations.json:images", *words]) == 0
    assert "objects missed" in capsys.readouterr().out


def test_detections_that_cannot_be_written_are_an_error() -> None:
    Path("file").touch()
    with pytest.raises(ls.InputError, match=r"file/found\.json cannot be written"):
        evaluate("--set", "evaluate.detection.export_path=file/found.json")


def test_following_ends_after_as_many_evaluations_as_the_run_allows() -> None:
    assert evaluate("--follow", "--timeout", "60", "--set", "evaluate.detection.max_evaluations=1") == 0
    assert len(Path("run/evaluations.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("flag", ["--confusion=a.csv", "--mistakes=a.png"])
def test_details_of_classifiers_are_refused(flag: str) -> None:
    with pytest.raises(ls.InputError, match="the run of a classifier"):
        evaluate(flag)


def test_predict_writes_objects_in_pixels_of_the_files(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lockstep")
    Path("images/deep").mkdir()
    Path("images/1.png").rename("images/deep/1.png")
    Path("images/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert main(["predict", "run", "images", "--to", "out", "--show", "4", "--min-score", "0.1"]) == 0
    assert capsys.readouterr().out == "out: 5 images, 1 skipped, by the raw weights of step 7\n"
    assert [message.split(" cannot")[0] for message in caplog.messages if "skipped" in message] == [
        "skipped: images/broken.png"
    ]
    facts = json.loads(Path("out/predictions.json").read_text())
    assert (facts["step"], facts["weights"], facts["folder"]) == (7, "raw", "images")
    assert [each["file"] for each in facts["predictions"]] == ["2.png", "3.png", "4.png", "5.png", "deep/1.png"]
    assert facts["skipped"][0]["file"] == "broken.png"
    for each in facts["predictions"]:
        height, width = pixels_of(f"images/{each['file']}").shape[:2]
        assert each["objects"]
        for found in each["objects"]:
            x, y, box_width, box_height = found["bbox"]
            assert min(x, y, box_width, box_height) >= 0
            assert x + box_width <= width + 1e-3
            assert y + box_height <= height + 1e-3
            assert found["class"] == {1: "red", 2: "green"}[found["label"]]
        scores = [found["score"] for found in each["objects"]]
        assert scores == sorted(scores, reverse=True)
    drawn = sorted(path.relative_to("out/pictures").as_posix() for path in Path("out/pictures").rglob("*.png"))
    assert drawn == ["2.png.png", "3.png.png", "4.png.png", "5.png.png"]
    before, after = map(pixels_of, ("images/2.png", "out/pictures/2.png.png"))
    assert before.shape == after.shape
    assert (before != after).any()


def test_predict_finds_what_evaluate_scores() -> None:
    evaluate("--set", "evaluate.detection.export_path=found.json")
    assert main(["predict", "run", "images", "--to", "out", "--show", "0"]) == 0
    results = read_coco_results("found.json")
    predicted = json.loads(Path("out/predictions.json").read_text())["predictions"]
    for number, each in enumerate(predicted, 1):
        found = results.on(str(7 * number))
        np.testing.assert_allclose([o["bbox"] for o in each["objects"]], found.boxes, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose([o["score"] for o in each["objects"]], found.scores, rtol=1e-5)
    assert not Path("out/pictures").exists()


def test_predict_overwrites_nothing_unasked_and_says_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").touch()
    assert main(["predict", "run", "images", "--to", "out"]) == 2
    assert main(["predict", "run", "images", "--to", "new", "--top", "3"]) == 2
    assert "--top 3" in capsys.readouterr().err
    assert not Path("new").exists()
    with pytest.raises(ls.InputError, match=r"ls\.detect"):
        ls.predict("run", "images")


def test_a_script_gets_the_objects() -> None:
    found = ls.detect("run", ["images/1.png"], weights="average")
    assert (found.files, len(found), found.weights) == (["1.png"], 1, "average")
    best = found.objects(0)[0]
    assert best.name in ("red", "green")
    assert best.mask is None
    assert best.score == max(each.score for each in found.objects(0))


def test_boxes_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(Path("images/annotations.json"))
    state = saved(Path("broken"), replace(recipe, average=None), 3)
    del state

    def build(model: FasterRcnn, seed: int) -> object:
        net = build_tiny(model, seed)
        monkeypatch.setattr(net, "anchors", lambda shape: type(net).anchors(net, shape) * float("nan"), raising=False)
        return net

    monkeypatch.setattr(FasterRcnn, "build", build)
    with pytest.raises(ls.NonFiniteError, match=r"1\.png"):
        ls.detect("broken", "images/1.png")
