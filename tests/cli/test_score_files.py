"""The files of JSON that `lockstep evaluate` writes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from lockstep.cli.scoring import EVALUATIONS, ScoreFiles, write_result
from lockstep.evaluation.evaluate import Evaluation


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_scores_that_are_no_numbers_are_json(tmp_path: Path) -> None:
    result = Evaluation({"top1": math.nan, "loss": math.inf, "top5": 2.0}, 4)
    files = ScoreFiles(tmp_path)
    files.write(result, "test")
    files.close()
    write_result(result, "test", tmp_path / "scores.json")
    texts = [(tmp_path / name).read_text() for name in (EVALUATIONS, "scores.json")]
    found = [json.loads(text, parse_constant=refuse)["scores"] for text in texts]
    assert found == [{"top1": "nan", "loss": "inf", "top5": 0.5}] * 2
