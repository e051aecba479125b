"""The worst mistakes as one image."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.cli import scoring
from lockstep.cli.cards import Card
from lockstep.cli.scoring import ScoreFiles, log_scores, mistakes_sheet, write_result
from lockstep.errors import InputError
from lockstep.evaluation.evaluate import Evaluation
from lockstep.metrics.worst_mistakes import Mistake
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.reader import Arrays, Reader
from lockstep.run_files import EVALUATIONS

COLOURS = {"daisy/1": (250, 0, 0), "daisy/2": (0, 250, 0), "rose/1": (0, 0, 250), "rose/2": (0, 0, 0)}
SIDE = 300


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """Four images, each of one colour; the last one is damaged."""
    for name, colour in COLOURS.items():
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (10, 6), colour).save(path)
    path.write_bytes(b"no image")
    return ImageFolder(tmp_path)


def colours(sheet: Image.Image) -> set[tuple[int, ...]]:
    pixels = np.array(sheet).reshape(-1, 3)
    return {tuple(map(int, colour)) for colour in np.unique(pixels, axis=0)}


def test_the_images_stand_there_the_worst_first(reader: Reader) -> None:
    sheet = mistakes_sheet([Mistake(2, 9.5, 0, 1), Mistake(1, 3.0, 1, 0)], reader, ["daisy", "rose"])
    assert {COLOURS["rose/1"], COLOURS["daisy/2"]} < colours(sheet)
    assert COLOURS["daisy/1"] not in colours(sheet)
    middle = sheet.height // 2
    assert [sheet.getpixel((x, middle)) for x in (SIDE // 2, SIDE + SIDE // 2)] == [(0, 0, 250), (0, 250, 0)]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """What is drawn on sheets."""
    drawn: list[Any] = []

    def keep(title: str, cards: list[Card], side_pixels: int) -> Image.Image:
        drawn.extend([title, *cards])
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(scoring, "contact_sheet", keep)
    return drawn


def test_cards_of_mistakes_name_example_classes_and_loss(reader: Reader, cards: list[Any]) -> None:
    mistakes_sheet([Mistake(2, 9.51236, 0, 1), Mistake(1, math.inf, 7, 0)], reader, {0: "daisy", 1: "rose"})
    title, first, second = cards
    assert title == "the 2 worst mistakes"
    assert (first.position, first.example_id, first.details) == (2, "rose/1.png", "loss 9.512")
    assert [tile.caption for tile in first.tiles] == ["predicted daisy, is rose"]
    assert second.details == "loss inf"
    assert [tile.caption for tile in second.tiles] == ["predicted 7, is daisy"]


def test_what_cannot_be_read_any_more_says_so_and_what_it_is(reader: Reader, cards: list[Any]) -> None:
    mistakes_sheet([Mistake(3, 2.0, 0, 1)], reader)
    title, card = cards
    assert title == "the worst mistake"
    assert card.details == "loss 2, predicted 0, is 1"
    assert card.tiles == ()
    assert "rose/2.png" in card.problem


def test_no_mistakes_are_a_sheet_too(reader: Reader) -> None:
    sheet = mistakes_sheet([], reader)
    assert sheet.width > SIDE
    assert sheet.height < 50
    assert len(colours(sheet)) > 1  # there is a line on it


def test_what_has_no_images_is_refused() -> None:
    reader = Arrays({"x": torch.zeros(3, 2)})
    with pytest.raises(InputError, match=r"There is no image to show in the field 'image'\.\n.*the fields are x"):
        mistakes_sheet([Mistake(0, 2.0, 0, 1)], reader)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.fixture
def detected() -> Evaluation:
    """An evaluation with numbers of metrics among its scores."""
    return Evaluation({"top1": 1.0}, 4, step=3, computed={"coco": {"map": 0.25, "map50": math.nan}, "auroc": 0.5})


def test_the_numbers_of_metrics_are_a_table_in_the_log(detected: Evaluation, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_scores(detected, "validation")
    assert caplog.messages == [
        "validation accuracy 25.00 % (1 of 4)",
        "validation coco/map    0.2500",
        "validation coco/map50  nan",
        "validation auroc       0.5000",
    ]


def test_the_numbers_of_metrics_are_scores_in_all_files(detected: Evaluation, tmp_path: Path) -> None:
    files = ScoreFiles(tmp_path)
    files.write(detected, "validation")
    files.close()
    write_result(detected, "validation", tmp_path / "scores.json")
    found = [json.loads((tmp_path / name).read_text())["scores"] for name in (EVALUATIONS, "scores.json")]
    assert found == [{"top1": 0.25, "coco/map": 0.25, "coco/map50": "nan", "auroc": 0.5}] * 2
    events = EventAccumulator(str(tmp_path / "summaries-evaluation/validation-raw")).Reload()
    assert [scalar.value for scalar in events.Scalars("evaluation/validation/coco/map")] == [0.25]


def test_scores_that_are_no_numbers_are_json(tmp_path: Path) -> None:
    result = Evaluation({"top1": math.nan, "loss": math.inf, "top5": 2.0}, 4)
    files = ScoreFiles(tmp_path)
    files.write(result, "test")
    files.close()
    write_result(result, "test", tmp_path / "scores.json")
    texts = [(tmp_path / name).read_text() for name in (EVALUATIONS, "scores.json")]
    found = [json.loads(text, parse_constant=refuse)["scores"] for text in texts]
    assert found == [{"top1": "nan", "loss": "inf", "top5": 0.5}] * 2
