"""`lockstep predict` by the run of a detector."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
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


def pixels_of(path: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def evaluate(*words: str) -> int:
    leave()
    return cli_evaluate.evaluate_as_worker(["evaluate", "run", *words])


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
