"""`lockstep predict`: the files that it writes, the weights that it takes, and what it refuses."""

from __future__ import annotations

import csv
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_images import image_folder

import lockstep as ls
from lockstep.checkpoints.store import Store
from lockstep.cli import predict
from lockstep.cli.main import main
from lockstep.recipes.shipped import find
from lockstep.runs.workdir import KnownData, Workdir

EVIL = "\x1b[2J\nerror: forged \u202egpj.\x9b"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a run of the MNIST net with two checkpoints, and two photos of each of two classes."""
    monkeypatch.chdir(tmp_path)
    recipe = replace(find("mnist"), average=ls.optim.MovingAverage(0.5))
    state = ls.TrainState(recipe.model.build(1), recipe.optimizer, average=recipe.average)
    Path("run").mkdir()
    Workdir(Path("run")).write_recipe(recipe)
    KnownData(tmp_path, {number: f"the {number}" for number in range(10)}).write(Workdir(Path("run")))
    for step in (3, 5):
        Store(Path("run/checkpoints")).write(step, state.sections(), {})
    image_folder(Path("photos"), 2, ("red", "green"))
    return tmp_path


def written(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_predict_writes_a_table_json_and_a_page(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("photos/red/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    caplog.set_level(logging.WARNING, "lockstep")
    assert main(["predict", "run", "photos", "--to", "new/out", "--top", "2"]) == 0
    *few, summary = capsys.readouterr().out.splitlines()
    assert summary == "new/out: 4 images, 1 skipped, by the raw weights of step 5"
    assert [message.split(" cannot")[0] for message in caplog.messages] == ["skipped: photos/red/broken.png"]
    assert written("new/out") == ["predictions.csv", "predictions.html", "predictions.json"]
    header, *rows = csv.reader(Path("new/out/predictions.csv").read_text().splitlines())
    assert len(header) == 2 + 2 * 3
    assert [row[0] for row in rows] == ["green/0.jpg", "green/1.jpg", "red/0.jpg", "red/1.jpg", "red/broken.png"]
    facts = json.loads(Path("new/out/predictions.json").read_text())
    assert facts["folder"] == "photos"
    firsts = [(each["file"], each["classes"][0]) for each in facts["predictions"]]
    assert [line.split(maxsplit=1) for line in few] == [
        [file, f"{first['class']} {100 * first['probability']:.1f} %"] for file, first in firsts
    ]
    best = firsts[0][1]
    assert best["class"] == rows[0][3] == f"the {best['label']}"
    page = Path("new/out/predictions.html").read_text()
    assert page.count("<img ") == 4
    assert f"{best['class']} {100 * best['probability']:.1f} %" in page
    assert '<p class="problem">' in page


def test_the_flags_choose_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    for number, words in enumerate((["run@3"], ["run", "--step", "3", "--average"], ["run", "--raw"])):
        assert main(["predict", *words, "photos/red/0.jpg", "--to", str(number)]) == 0
    said = capsys.readouterr().out.splitlines()[1::2]
    weights = ["raw weights of step 3", "average weights of step 3", "raw weights of step 5"]
    assert said == [f"{number}: 1 image, by the {each}" for number, each in enumerate(weights)]


def test_all_classes_and_no_page() -> None:
    assert main(["predict", "run", "photos", "--to", "out", "--top", "all", "--show", "0"]) == 0
    assert written("out") == ["predictions.csv", "predictions.json"]
    found = json.loads(Path("out/predictions.json").read_text())["predictions"]
    assert [sum(each["probability"] for each in image["classes"]) for image in found] == pytest.approx([1] * 4)


def test_the_page_shows_so_many_images() -> None:
    assert main(["predict", "run", "photos", "--to", "out", "--show", "3"]) == 0
    assert Path("out/predictions.html").read_text().count("<img ") == 3


def test_a_folder_that_is_there_is_overwritten_with_force_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    assert main(["predict", "run", "photos", "--to", "out"]) == 0, "it is empty"
    Path("out/mine.txt").touch()
    before = Path("out/predictions.csv").read_bytes()
    assert main(["predict", "run", "photos/red", "--to", "out"]) == 2
    assert "The folder out is not empty." in capsys.readouterr().err
    assert Path("out/predictions.csv").read_bytes() == before
    assert main(["predict", "run", "photos/red", "--to", "out", "--force"]) == 0
    assert Path("out/predictions.csv").read_bytes() != before
    assert "mine.txt" in written("out")


def test_names_that_would_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos/red/0.jpg").rename(f"photos/red/{EVIL}.jpg")
    Path(f"photos/red/broken {EVIL}.jpg").touch()
    assert main(["predict", "run", "photos", "--to", "out"]) == 0
    shown = "".join(capsys.readouterr()) + Path("out/predictions.html").read_text()
    assert all(line.isprintable() for line in shown.split("\n"))
    names = [each["file"] for each in json.loads(Path("out/predictions.json").read_text())["predictions"]]
    assert f"red/{EVIL}.jpg" in names


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["rn", "photos", "--to", "out"], 2, "There is no run in rn."),
        (["photos", "photos", "--to", "out"], 2, "There is no run in photos."),
        ([".", "photos", "--to", "out"], 2, "did you mean run?"),
        (["run@4", "photos", "--to", "out"], 2, "There is no such checkpoint"),
        (["run@3", "photos", "--to", "out", "--step", "5"], 2, "The checkpoint is chosen twice."),
        (["run", "photos", "--to", "out", "--best"], 2, "does not say which checkpoint is the best"),
        (["run", "phtos", "--to", "out"], 2, "did you mean photos?"),
        (["run", "photos", "phtos", "--to", "out"], 2, "phtos cannot be read."),
        (["run", "empty", "--to", "out"], 2, "There are no images."),
        (["run", "run/recipe.toml", "--to", "out"], 1, "The file cannot be read."),
        (["run", "photos", "--to", "run/recipe.toml"], 2, "The folder run/recipe.toml cannot be written."),
        (["run", "photos", "--to", "run/recipe.toml/out"], 2, "The folder run/recipe.toml/out cannot be written."),
        (["run", "photos", "--to", "out", "--top", "0"], 2, "--top is out of range."),
        (["run", "photos", "--to", "out", "--top", "few"], 2, "--top few"),
        (["run", "photos", "--to", "out", "--show", "-1"], 2, "--show is out of range."),
        (["ftp://host/run", "photos", "--to", "out"], 2, "is in no store that is known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_leaves_nothing_behind(
    words: list[str], code: int, what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    before = sorted(here.rglob("*"))
    assert main(["predict", *words]) == code
    said = capsys.readouterr().err
    assert what in said
    assert "Traceback" not in said
    assert sorted(here.rglob("*")) == before


def test_a_folder_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["predict", "run", "photos", "--to", "out"]) == 2
    assert "The folder out cannot be written." in capsys.readouterr().err


def test_ctrl_c_writes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "_write", interrupt)
    assert main(["predict", "run", "photos", "--to", "out"]) == 130
    assert not (here / "out").exists()


@pytest.mark.process
def test_loader_processes_read_more_than_a_batch(here: Path) -> None:
    text = (here / "run/recipe.toml").read_text().replace("batch_size = 128", "batch_size = 2")
    (here / "run/recipe.toml").write_text(text)
    assert main(["predict", "run", "photos", "--to", "out"]) == 0
    many = json.loads((here / "out/predictions.json").read_text())["predictions"]
    assert [each["file"] for each in many] == ["green/0.jpg", "green/1.jpg", "red/0.jpg", "red/1.jpg"]
