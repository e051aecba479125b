"""`lockstep evaluate` of the run of a detector."""

from __future__ import annotations

import csv
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from annotation_formats import labelimg, pascal
from PIL import Image
from saved_runs import saved
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_detector import save_detector_run, tiny_recipe

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.cli import evaluate as cli_evaluate
from lockstep.cli.main import main
from lockstep.metrics.detection_errors import KINDS
from lockstep.readers.boxed_images import BoxedImage, BoxedObject
from lockstep.readers.coco_results import read_coco_results
from lockstep.recipes.data import DetectionData
from lockstep.runs.workdir import KnownData, Workdir
from lockstep.workers.rank import leave

MAP = "PascalBoxes_Precision/mAP@0.5IOU"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_detector_run(tmp_path, monkeypatch)


def evaluate(*words: str) -> int:
    leave()
    return cli_evaluate.evaluate_as_worker(["evaluate", "run", *words])


def test_evaluate_writes_scores_by_their_reference_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    words = ["--set", "evaluate.detection.export_path=new/found.json", "--set", "evaluate.detection.pictures.count=2"]
    assert evaluate("--to", "scores.json", *words) == 0
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


def test_following_ends_after_as_many_evaluations_as_the_run_allows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    assert evaluate("--follow", "--timeout", "60", "--set", "evaluate.detection.max_evaluations=1") == 0
    assert len(Path("run/evaluations.jsonl").read_text().splitlines()) == 1
    assert "no checkpoint is waited for any more, by evaluate.detection.max_evaluations=1" in caplog.text


def test_what_is_right_false_and_missed_by_class(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    files = [
        f"--{name}=run/{name}.{kind}" for name, kind in (("confusion", "csv"), ("curves", "csv"), ("mistakes", "png"))
    ]
    assert evaluate("--json", *files, "--set=evaluate.detection.pictures.min_score=0.45") == 0
    told = json.loads(capsys.readouterr().out)
    table = told["by_class"]
    assert (table["min_score"], table["iou"]) == (0.45, 0.5)
    header, *rows = csv.reader(Path("run/confusion.csv").read_text().splitlines())
    assert header == ["is / detected from a score of 0.45", "red", "green", "background"]
    assert [[int(count) for count in row[1:]] for row in rows] == told["confusion"]
    for place, row in enumerate(table["classes"]):
        cells = np.array(told["confusion"])
        assert (row["name"], row["objects"]) == (header[1 + place], cells[place].sum())
        assert (row["right"], row["missed"]) == (cells[place, place], cells[place].sum() - cells[place, place])
        assert row["false"] == cells[:, place].sum() - cells[place, place]
    right = table["all"]["right"]
    assert 0 < right < table["all"]["objects"] == 11
    assert json.loads(Path("run/evaluations.jsonl").read_text())["by_class"] == table
    errors = table["errors"]
    counts = " +".join(str(errors[kind]["mistakes"]) for kind in KINDS)
    assert sum(error["cost"] for error in errors.values()) > 0.1
    said = rf"\nall classes +11 +{right} (.|\n)*\n +class +location (.|\n)*\nmistakes +{counts}\nmAP +0\.[0-9]{{3}} "
    assert any(re.search(said, message) for message in caplog.messages)
    with Image.open("run/mistakes.png") as sheet:
        assert sheet.width > 600
    assert Path("run/curves.csv").read_text().startswith("class,recall,precision,score\ngreen,0.0,")
    assert main(["report", "run", "--to", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "validation, raw weights of step 7; detections of a score of 0.45 or more" in page
    assert page.count('<figure class="precision">') == 1
    assert ">is / detected" not in page
    assert "background" in page
    assert "the images with the most false and missed objects" in page


def test_where_nothing_is_known_to_be_right_nothing_is_told() -> None:
    words = ["--set=evaluate.detection.ignore_ground_truth=true", "--set=evaluate.detection.export_path=found.json"]
    assert evaluate("--to=scores.json", *words) == 0
    assert "by_class" not in json.loads(Path("scores.json").read_text())
    with pytest.raises(ls.InputError, match="none is known to be right"):
        evaluate("--confusion=a.csv", *words)
    with pytest.raises(ls.InputError, match="are two tables, and one would overwrite the other"):
        evaluate("--confusion=a.csv", "--curves=run/../a.csv")


def test_averaged_weights_find_something_else() -> None:
    for weights in ("raw", "average"):
        evaluate(f"--{weights}", "--set", f"evaluate.detection.export_path={weights}.json")
    assert Path("raw.json").read_text() != Path("average.json").read_text()


def test_a_set_that_lacks_a_class_is_scored_where_the_training_data_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """XML says classes by name, and that which is missing would come first: the run knows its numbers."""
    recipe = replace(tiny_recipe(Path("gone")), data=DetectionData(train="gone", resizer=FixedShapeResizer(32, 48)))
    saved(Path("other"), recipe)
    KnownData(tmp_path, {1: "blue", 2: "green"}).write(Workdir(Path("other")))
    shutil.copytree("images", "copies")
    image = BoxedImage("1.png", 51, 44, (BoxedObject("green", (2.0, 2.0, 12.0, 12.0)),))
    labelimg([image], Path("copies"), Path("set"))
    leave()
    assert cli_evaluate.evaluate_as_worker(["evaluate", "other", "--data", "set", "--split=validation", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["by_class"]["classes"]
    assert [(row["name"], row["objects"]) for row in rows] == [("blue", 0), ("green", 1)]
    pascal([image._replace(objects=(BoxedObject("pink", (2.0, 2.0, 12.0, 12.0)),))], Path("copies"), Path("third"))
    leave()
    with pytest.raises(ls.DataError, match=r"(?s)a class that the run does not know.*pink.*blue, green"):
        cli_evaluate.evaluate_as_worker(["evaluate", "other", "--data", "third", "--split=validation"])
