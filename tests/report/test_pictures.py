from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.report.curves import SPEED, WAITING
from lockstep.report.pictures import Confusion, confusion, encoded, summarised, worst_mistakes
from lockstep.reporting.events import EventFile, image_summary, scalar_summary


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, "PNG")
    return file.getvalue()


def test_of_summaries_the_newest_images_are_taken(tmp_path: Path) -> None:
    (tmp_path / "summaries").mkdir()
    (tmp_path / "summaries-evaluation/test-raw").mkdir(parents=True)
    file = EventFile(tmp_path / "summaries")
    for step, level in ((1, 0), (9, 255)):
        image = np.full((3, 4, 6), level, np.uint8)
        file.write(image_summary({"input/0": image, "input/1": image, "histogram": image}), step)
        file.write(scalar_summary({"examples_per_second": 100.0 + step, "data_wait_share": 0.5, "other": 1.0}), step)
    file.close()
    of_evaluation = EventFile(tmp_path / "summaries-evaluation/test-raw")
    of_evaluation.write(image_summary({"image-0": np.zeros((3, 4, 6), np.uint8)}), 9)
    of_evaluation.close()
    shown = summarised([tmp_path / "summaries", tmp_path / "summaries-evaluation/test-raw"], problems := [])
    assert [picture.caption for picture in shown.inputs] == ["input/0, step 9", "input/1, step 9"]
    assert [picture.caption for picture in shown.detections] == ["image-0, step 9"]
    assert shown.speeds == {SPEED: {SPEED.lower(): {1: 101.0, 9: 109.0}}, WAITING: {WAITING.lower(): {1: 0.5, 9: 0.5}}}
    assert problems == []
    content = base64.b64decode(shown.inputs[0].url.partition("base64,")[2])
    assert Image.open(io.BytesIO(content)).getpixel((0, 0)) == (255, 255, 255)


def test_a_torn_file_of_summaries_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "summaries").mkdir()
    file = EventFile(tmp_path / "summaries")
    for step in (1, 2):
        file.write(scalar_summary({"examples_per_second": 1.0}), step)
    file.close()
    (path,) = (tmp_path / "summaries").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert summarised([tmp_path / "summaries"], []).speeds[SPEED] == {SPEED.lower(): {1: 1.0}}


def test_a_run_without_summaries_has_left_no_pictures(tmp_path: Path) -> None:
    shown = summarised([tmp_path / "summaries"], [])
    assert (shown.inputs, shown.detections, any(shown.speeds.values())) == ((), (), False)


def test_a_large_picture_is_made_smaller_and_loses_a_little() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (600, 1200, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    picture = encoded(file.getvalue(), "wide")
    assert picture is not None
    assert (picture.width, picture.height, picture.url[:22]) == (1100, 550, "data:image/jpeg;base64")
    small = encoded(png(28, 28), "a\nb")
    assert small is not None
    assert (small.width, small.caption, small.url[:21]) == (28, "a\\nb", "data:image/png;base64")


@pytest.mark.parametrize("data", [b"", b"<svg onload='x'/>", png(28, 28)[:40]])
def test_what_is_no_picture_is_left_out(data: bytes) -> None:
    assert encoded(data, "none") is None


def test_the_sheet_of_mistakes_is_shown_where_a_run_has_one(tmp_path: Path) -> None:
    assert worst_mistakes(tmp_path, "the worst", []) is None
    (tmp_path / "mistakes.png").write_bytes(png(300, 300))
    assert worst_mistakes(tmp_path, "the worst", problems := []) is not None
    assert problems == []
    (tmp_path / "mistakes.png").write_bytes(b"text")
    assert worst_mistakes(tmp_path, "the worst", problems) is None
    assert problems == ["mistakes.png is no picture, or too large a one"]


def test_a_confusion_matrix_names_its_most_frequent_mistakes(tmp_path: Path) -> None:
    (tmp_path / "confusion.csv").write_text('right \\ predicted,cat,"a ""dog"", or\nfox"\ncat,5,2\n"dog",7,0\n')
    matrix = confusion(tmp_path, problems := [])
    assert problems == []
    assert matrix == Confusion(("cat", 'a "dog", or\nfox'), ((5, 2), (7, 0)))
    assert matrix.largest == 7
    assert matrix.most_frequent == [('a "dog", or\nfox', "cat", 7), ("cat", 'a "dog", or\nfox', 2)]
    assert matrix.is_shown_whole


def test_of_many_classes_a_table_has_no_cell_for_each_pair() -> None:
    of_many = Confusion(tuple(map(str, range(1000))), tuple((1,) * 1000 for _ in range(1000)))
    assert not of_many.is_shown_whole
    assert len(of_many.most_frequent) == 10


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not enough values"),
        ("only a header\n", "it is not square"),
        ("x,a,b\na,1,2\n", "it is not square"),
        ("x,a\na,many\n", "invalid literal"),
        ("x,a\na,-1\n", "a count is negative"),
    ],
)
def test_a_file_that_is_no_confusion_matrix_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "confusion.csv").write_text(text)
    assert confusion(tmp_path, problems := []) is None
    assert problems[0].startswith(f"confusion.csv is no confusion matrix: {why}")
