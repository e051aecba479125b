"""`lockstep evaluate` of the run of a detector."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_detector import save_detector_run

import lockstep as ls
from lockstep.cli import evaluate as cli_evaluate
from lockstep.cli.main import main
from lockstep.readers.coco_results import read_coco_results
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


@pytest.mark.parametrize("flag", ["--confusion=a.csv", "--mistakes=a.png"])
def test_details_of_classifiers_are_refused(flag: str) -> None:
    with pytest.raises(ls.InputError, match="the run of a classifier"):
        evaluate(flag)


def test_averaged_weights_find_something_else() -> None:
    for weights in ("raw", "average"):
        evaluate(f"--{weights}", "--set", f"evaluate.detection.export_path={weights}.json")
    assert Path("raw.json").read_text() != Path("average.json").read_text()
