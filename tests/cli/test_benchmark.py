"""`lockstep benchmark input` as a user runs it, in this process."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_detector import tiny_recipe, write_coco

from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.cli import benchmark
from lockstep.cli.main import main, parse
from lockstep.detection.values import SqueezeSsd
from lockstep.recipes.data import DetectionData
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of three tiny images each."""
    for name in ("cat/1", "cat/2", "cat/3", "dog/1", "dog/2", "dog/3"):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (200, 100, 50)).save(path)
    return tmp_path / "images"


def run(*words: str, code: int = 0) -> None:
    assert main(["benchmark", "input", *words, "--device", "cpu"]) == code


@pytest.mark.process
def test_a_folder_of_images(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    run(str(images), "--seconds", "0.1", "--batch-size", "2", "--processes", "1")
    said, log = capsys.readouterr()
    lines = said.splitlines()
    assert lines[0] == f"{images}: 6 examples, batches of 2, RandomResizedCrop, HorizontalFlip"
    assert lines[1].endswith(" cores, 1 loader process a worker")
    assert lines[3].split() == ["examples/s", "a", "CPU-second", "read", "decode", "augment", "collate"]
    rows = ["reading, for the first time", "reading, again", "one process with one thread", "the loader as it runs"]
    assert [line[:27].strip() for line in lines[4:8]] == rows
    assert len({line.index("%") for line in lines[6:8]}) == 1, "numbers stand below one another"
    assert "% was there when a batch was taken" in lines[8]
    assert "warm caches" in lines[9]
    assert re.fullmatch(
        "cores that the input of a device needs: of 1000 examples/s [1-9][0-9]*, of 2500 examples/s [1-9][0-9]*, "
        "of 5000 examples/s [1-9][0-9]*, of 10000 examples/s [1-9][0-9]*",
        lines[10],
    )
    assert lines[12].startswith("The input gives ")
    assert all(line.startswith("- ") for line in lines[13:])
    assert len(lines) > 13
    told = [line for line in log.splitlines() if line.startswith("measuring ")]
    assert told[0] == "measuring reading, for the first time"
    assert told[-1] == "measuring the loader as it runs in training"
    assert torch.get_num_threads() == threads


def test_json_of_threads_and_a_preset(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(str(images), "--seconds", "0.1", "--batch-size", "2", "--threads", "2", "--augment", "lenet", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["what"], found["num_examples"], found["batch_size"]) == (str(images), 6, 2)
    assert (found["num_readers"], found["threads"], found["step"]) == (2, True, None)
    assert found["limit"] in ("read", "decode", "augment", "handing over")
    cores = [found["cores_for"][rate] for rate in ("1000", "2500", "5000", "10000")]
    assert 1 <= cores[0] <= cores[1] <= cores[2] <= cores[3]
    loader = found["loader"]
    assert loader["examples_per_second"] == pytest.approx(loader["num_examples"] / loader["seconds"])
    assert {*loader["stage_seconds"]} == {"read", "decode", "augment"}
    assert found["verdict"]
    assert found["changes"]


def test_images_with_objects_are_cropped_without_their_places(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parent.parent / "fixtures" / "coco"
    run(f"{folder / 'instances.json'}:{folder / 'images'}", "--seconds", "0.1", "--batch-size", "1", "--threads", "1")
    assert "RandomResizedCrop, HorizontalFlip" in capsys.readouterr().out.splitlines()[0]


def test_a_detectors_recipe_is_measured_with_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "detector.toml"
    of_objects = replace(tiny_recipe(write_coco(tmp_path, 4)), model=SqueezeSsd(2))
    recipe.write_text(to_toml(of_objects))
    run(str(recipe), "--seconds", "0.2", "--threads", "1")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{recipe}: 4 examples, batches of 4, FixedShapeResizer, DetectionTargets"
    assert any(line.startswith("the training step alone ") for line in lines)


def test_of_data_that_the_model_cannot_learn_the_loader_alone_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parent.parent / "fixtures" / "coco"
    data = DetectionData(f"{folder}/person_keypoints.json:{folder}/images", resizer=FixedShapeResizer(30, 30))
    recipe = tmp_path / "detector.toml"
    recipe.write_text(to_toml(replace(find("mnist"), data=data, batch_size=2, num_towers=1)))
    run(str(recipe), "--seconds", "0.1", "--threads", "1")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{recipe}: 2 examples, batches of 2, FixedShapeResizer, DetectionTargets"
    assert not any(line.startswith("the training step") for line in lines)


def test_a_recipe_is_measured_with_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    run("mnist", "--seconds", "1", "--batch-size", "16")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mnist: 55000 examples, batches of 16, not augmented"
    assert lines[1].endswith(" cores, the trainer's own process reads from memory")
    assert not any(line.startswith("cores that") for line in lines)
    assert any(line.startswith("the training step alone ") for line in lines)
    assert any(line.startswith("The input gives ") and "examples/s, the step takes " in line for line in lines)


def test_the_recipe_feeds_as_the_flags_say() -> None:
    recipe = benchmark._recipe(parse(["benchmark", "input", "mnist", "--threads", "3", "--batch-size", "32"]))
    assert (recipe.feed.num_threads, recipe.feed.num_processes, recipe.batch_size) == (3, None, 32)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["mnst"],
            ["There is neither a recipe nor data called mnst.", "`lockstep recipes` lists", 'did you mean "mnist"?'],
        ),
        (["gone/train"], ["nor data called gone/train", "given:    gone/train", "check the path"]),
        (["gone/train-*"], ["No file is named like gone/train-*", "there is no folder gone", "check the pattern"]),
        (["gone.toml"], ["gone.toml"]),
        (["mnist", "--augment", "vgg"], ["A recipe says itself", "--augment vgg for the recipe mnist", "leave it out"]),
        (["mnist", "--seconds", "0"], ["--seconds is out of range", "--seconds 0.0", "0.1 or more, finite"]),
        (["mnist", "--seconds", "nan"], ["--seconds is out of range", "--seconds nan"]),
        (["mnist", "--batch-size", "0"], ["--batch-size 0", "hint:"]),
        (["mnist", "--processes", "-1"], ["--processes is out of range", "--processes -1", "0 or more"]),
        (["mnist", "--processes", "1", "--threads", "1"], ["Either processes or threads read ahead", "one of the two"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_measured_is_refused(
    words: list[str],
    message: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run(*words, code=2)
    said, log = capsys.readouterr()
    assert said == ""
    for part in message:
        assert part in log


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--augment", "crop"], ["--augment cannot be 'crop'", "'lenet' or 'cifarnet' or 'vgg' or 'inception'"]),
        (["--batch-size", "0"], ["--batch-size is out of range", "--batch-size 0", "1 or more"]),
        (["--threads", "-1"], ["--threads is out of range"]),
    ],
    ids=["augment", "batch_size", "threads"],
)
def test_bad_flags_for_a_path_are_refused(
    images: Path, words: list[str], message: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(str(images), *words, code=2)
    log = capsys.readouterr().err
    for part in (*message, "given:", "expected:", "hint:"):
        assert part in log


def test_an_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(str(tmp_path), code=2)
    assert "given:    an empty folder" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_its_exit_code(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.cli.input_benchmark.measure", interrupted)
    run(str(images), code=130)
