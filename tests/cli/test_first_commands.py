"""What somebody mistypes in the first minutes: answered in five lines at most, with the command that was meant."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.recipes.shipped import find
from lockstep.run_files import HISTORY
from lockstep.runs.workdir import Workdir

MOST_LINES, MOST_CHARACTERS = 5, 600
FILES = (
    *(f"{folder}/{name}/{number}.jpg" for folder in ("photos", "my photos", "a/b") for name in ("red", "green")
      for number in range(9)),
    *(f"{folder}/{number}.jpg" for folder in ("flat", "single/red") for number in range(12)),
    *("few/red/1.jpg", "few/green/2.jpg", "heic/red/1.heic", "heic/green/2.HEIC", "films/red/1.mp4", "film.mp4"),
    *("photos.zip", "labels.csv", "net.pt", "train.py", "notes.txt", "set/train/a/1.jpg", "set/valid/b/1.jpg"),
    *(f"set/train/{name}/{number}.jpg" for name in "ac" for number in range(6)),
    "runs/old/checkpoints/step-00000005/state.json", "texts/a.txt",
    *(f"project/{name}" for name in ("pyproject.toml", "tests/a.jpg", "docs/b.jpg")),
    "half/red/1.jpg", "half/green/1.txt",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what people have: no file is one that can be read, so each answer comes from names alone."""
    place = tmp_path_factory.mktemp("place")
    for name in FILES:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    (place / "empty").mkdir()
    Workdir(place / "runs" / "old").write_recipe(find("mnist"))
    (place / "runs" / "old" / HISTORY).touch()
    return place


ANSWERS = [
    ("train", "lockstep train photos"),
    ("photos", "lockstep train photos"),
    ("mnist", "lockstep train mnist"),
    ("tarin photos --steps 5", "lockstep train photos --steps 5"),
    ("help", "lockstep --help"),
    ("version", "lockstep --version"),
    ("train my photos", "lockstep train 'my photos'"),
    ("train photos/red photos/green", "lockstep train photos"),
    ("train photos/red", "lockstep train photos"),
    ("train photos/red/1.jpg", "lockstep train photos"),
    ("train a", "lockstep train a/b"),
    ("train flat", "labels.csv, with the columns filename,label"),
    ("train single", "single/other"),
    ("train half", "add images to half/green, which has none"),
    ("train few", "add images"),
    ("train heic", "mogrify -format jpg heic/green/*.HEIC"),
    ("train films", "ffmpeg -i films/red/1.mp4"),
    ("train film.mp4", "ffmpeg -i film.mp4"),
    ("train photos.zip", "unzip photos.zip -d photos; then lockstep train photos"),
    ("train labels.csv", "lockstep train ."),
    ("train set", "move b out of set/valid, or add images to set/train/b"),
    ("train . --workdir here", "lockstep train . --workdir ../runs/"),
    ("train . --workdir here --dry-run", "lockstep train . --workdir ../runs/"),
    ("train project", "lockstep train project/docs"),
    ("train project --dry-run", "lockstep train project/docs"),
    ("train texts --dry-run", "name the folder that the folders of the classes are in"),
    ("train notes.txt", "name the folder of your images"),
    ("train train.py", "lockstep run train.py"),
    ("train net.pt", "--set warm_start.path=net.pt"),
    ("train photos --batch-size 8", "lockstep train photos --set batch_size=8"),
    ("train photos --learning-rate=0.1", "lockstep train photos --set optimizer.lr=0.1"),
    ("train photos --towrs 2", 'did you mean "--towers"?'),
    ("predict photos", "lockstep predict runs/flowers photos --to out"),
    ("predict photos runs/old --to out", "train on it first: lockstep train photos"),
    ("report photos", "train on it first: lockstep train photos"),
    ("report runs", "did you mean runs/old?"),
    ("report runs/old/recipe.toml", "did you mean runs/old?"),
    ("status photos", "train on it first: lockstep train photos"),
    ("export photos --to net.pt2", "train on it first: lockstep train photos"),
    ("plan photos", "lockstep train photos --print-recipe > mine.toml"),
    ("run photos", "lockstep train photos"),
    ("show runs/old --to page.html", "runs/old/recipe.toml"),
    ("show phtos --to page.html", "did you mean photos?"),
    ("show mnits --to page.html", 'did you mean "mnist"?'),
    ("benchmark input wrongword", "check the path; it is read from {}"),
    ("inspect ntes.txt", "did you mean notes.txt?"),
    ("inspect wrongword", "check the path; it is read from {}"),
    ("explain wrongword", "`lockstep explain` lists the parts"),
    ("train mnist --print-recipe --set wrongword=1", "`lockstep explain` lists what there is"),
    ("convert photos", "lockstep convert images photos --to shards"),
]  # fmt: skip
ANSWERS_OF_PROCESSES = [
    ("train photo", "did you mean photos?"),
    ("train Photos", "did you mean photos?"),
    ("train mnits", 'did you mean "mnist"?'),
    ("train nowhere_at_all", "check the path; it is read from {}"),
    ("train empty", "put a folder of images for each class into it"),
    ("train runs", "lockstep train runs/old"),
    ("train runs/old/checkpoints/step-00000005", "lockstep train runs/old"),
    ("evaluate photos", "train on it first: lockstep train photos"),
    ("evaluate old", "did you mean runs/old?"),
]
"""Those that are given after the process has been started that is to start the workers."""


@pytest.mark.parametrize(
    ("command", "meant"), [*ANSWERS, *(pytest.param(*row, marks=pytest.mark.process) for row in ANSWERS_OF_PROCESSES)]
)
def test_it_is_answered_with_what_was_meant(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    command: str,
    meant: str,
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    try:
        code: object = main(shlex.split(command))
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err or caplog.text  # of `run`, whose script says where log lines go
    assert code == 2
    assert len(said.splitlines()) <= MOST_LINES, said
    assert len(said) <= MOST_CHARACTERS, said
    last = next(line for line in said.splitlines() if line.startswith(("  hint: ", "  such as: ")))
    assert meant.format(place) in last
    assert sorted(place.rglob("*")) == before
