"""`lockstep convert` as a user runs it: what is on the screen, in the folder, and left after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from worker_processes import HANG_SECONDS

from lockstep.cli.convert import CONVERTERS
from lockstep.cli.main import main, parse
from lockstep.convert.image_folder import image_sets
from lockstep.listing import format_size
from lockstep.records.example import parse_example
from lockstep.records.record_files import RecordFiles

Convert = Callable[..., tuple[int, str]]
ROOT = Path(__file__).parent.parent.parent
DOG, FOX = "n02092002", "n02119247"
BOX = (
    "<annotation><filename>x</filename><size><width>10</width><height>10</height></size><object><name>{}</name>"
    "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox></object></annotation>"
)


def image_bytes(shade: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (4, 3), (shade, shade, shade)).save(file, "JPEG")
    return file.getvalue()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten images for training and four for validation, of two classes."""
    for number in range(10):
        write(tmp_path / f"photos/train/{'ab'[number % 2]}/{number}.jpg", image_bytes(number))
    for number in range(4):
        write(tmp_path / f"photos/val/{'ab'[number % 2]}/{number}.jpg", image_bytes(number))
    return tmp_path / "photos"


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Convert:
    """Run the command in this process: its exit code, and what it said."""

    def run(*words: object) -> tuple[int, str]:
        code = main(["convert", *map(str, words)])
        return code, capsys.readouterr().err

    return run


@pytest.mark.process
def test_convert_prints_what_it_has_written(photos: Path, tmp_path: Path, convert: Convert) -> None:
    code, said = convert("images", photos, "--to", tmp_path / "out")
    assert code == 0, said
    num_bytes = sum(map(len, shards_in(tmp_path / "out").values()))
    last = said.splitlines()[-1]
    assert re.fullmatch(rf"14 records in 4 shards in {tmp_path}/out, {format_size(num_bytes)}, in \d s", last)
    assert sorted(shards_in(tmp_path / "out")) == [
        f"{name}-0000{number}-of-00002" for name in ("train", "validation") for number in (0, 1)
    ]


@pytest.mark.process
@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_after_ctrl_c_the_same_command_goes_on(
    photos: Path, tmp_path: Path, num_processes: int, convert: Convert
) -> None:
    last = photos / image_sets(photos)["train"][-1].path
    changed = last.stat().st_mtime_ns
    last.unlink()
    os.mkfifo(last)  # Whoever reads it waits until it is closed again.
    os.utime(last, ns=(changed, changed))
    words = [str(photos), "--to", str(tmp_path / "out"), "--processes", str(num_processes), "--train-shards", "5"]
    command = [sys.executable, "-m", "lockstep", "convert", "images", *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with last.open("wb"):
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "Stopped. What is finished is kept: the same command goes on."
    assert "Traceback" not in said
    assert not list((tmp_path / "out").glob(".*.partial"))
    assert "train-00004-of-00005" not in shards_in(tmp_path / "out")
    last.unlink()
    write(last, b"")
    os.utime(last, ns=(changed, changed))
    code, said = convert("images", *words)
    assert code == 0
    assert f"warning: Skipped {last.relative_to(photos)}: no bytes" in said
    assert re.search(
        r"13 records in 7 shards \(\d of them before\) in .*, 1 skipped \(listed in .*/out/\.\*\.conversion\.json\)\n$",
        said,
    )
    code, _ = convert("images", photos, "--to", tmp_path / "whole", "--train-shards", 5)
    assert code == 0
    assert shards_in(tmp_path / "out") == shards_in(tmp_path / "whole")


@pytest.mark.process
def test_another_conversion_is_not_written_over_unless_told_so(photos: Path, tmp_path: Path, convert: Convert) -> None:
    assert convert("images", photos, "--to", tmp_path / "out")[0] == 0
    write(photos / "val/a/9.jpg", image_bytes(9))
    code, said = convert("images", photos, "--to", tmp_path / "out")
    assert code == 2
    assert "error: There are shards in " in said
    code, said = convert("images", photos, "--to", tmp_path / "out", "--force")
    assert code == 0
    assert "15 records in 4 shards (2 of them before) in " in said


@pytest.mark.process
def test_too_many_skipped_are_an_error(photos: Path, tmp_path: Path, convert: Convert) -> None:
    write(photos / "val/a/9.jpg", b"nothing")
    code, said = convert("images", photos, "--to", tmp_path / "out", "--max-skipped", 0)
    assert code == 2
    assert "error: Too many items cannot be converted, at last val/a/9.jpg." in said
    assert convert("images", photos, "--to", tmp_path / "out", "--max-skipped", 1)[0] == 0


@pytest.mark.process
def test_a_part_of_each_class_validates(photos: Path, tmp_path: Path, convert: Convert) -> None:
    labels = write(tmp_path / "labels.txt", "b\na\n")
    words = ["--labels", labels, "--validation-per-class", 1, "--validation-shards", 1]
    code, said = convert("images", photos / "train", "--to", tmp_path / "out", *words)
    assert (code, "10 records in 3 shards" in said) == (0, True)
    records = RecordFiles(tmp_path / "out" / "validation-*")
    examples = [parse_example(records.read(index)) for index in range(len(records))]
    found = {example["image/class/text"][0]: int(example["image/class/label"][0]) for example in examples}
    assert found == {b"b": 1, b"a": 2}


@pytest.mark.process
def test_imagenet_goes_through_all_its_commands(tmp_path: Path, convert: Convert) -> None:
    synsets = write(tmp_path / "synsets.txt", f"{DOG}\n{FOX}\n")
    metadata = write(tmp_path / "metadata.txt", f"{DOG}\tdog\n{FOX}\tfox\n")
    of_images = write(tmp_path / "validation_labels.txt", f"{FOX}\n{DOG}\n")
    for synset in (DOG, FOX):
        write(tmp_path / f"imagenet/train/{synset}/{synset}_1.JPEG", image_bytes(1))
        write(tmp_path / f"xml/{synset}/{synset}_1.xml", BOX.format(synset))
    for number in (1, 2):
        write(tmp_path / f"flat/ILSVRC2012_val_0000000{number}.JPEG", image_bytes(number))
    code, said = convert("boxes", tmp_path / "xml", "--to", tmp_path / "boxes.csv", "--labels", synsets)
    assert (code, said.splitlines()[-1]) == (
        0,
        f"2 boxes of 2 images in {tmp_path}/boxes.csv, from 2 files; 0 boxes skipped",
    )
    target = tmp_path / "imagenet/validation"
    code, said = convert("imagenet-validation", tmp_path / "flat", "--labels", of_images, "--to", target)
    assert (code, said.splitlines()[-1]) == (0, f"2 images in folders of their classes in {target}")
    words = ["--labels", synsets, "--metadata", metadata, "--boxes", tmp_path / "boxes.csv"]
    shards = ["--train-shards", 2, "--validation-shards", 1]
    code, said = convert("imagenet", tmp_path / "imagenet", "--to", tmp_path / "out", *words, *shards)
    assert (code, "4 records in 3 shards in" in said) == (0, True)
    records = RecordFiles(tmp_path / "out" / "train-*")
    examples = [parse_example(records.read(index)) for index in range(len(records))]
    assert sorted(example["image/class/text"][0] for example in examples) == [b"dog", b"fox"]
    assert all(example["image/object/bbox/xmin"].tolist() == [pytest.approx(0.1)] for example in examples)


def test_mnist(tmp_path: Path, convert: Convert) -> None:
    code, said = convert("mnist", ROOT / "data/mnist", "--to", tmp_path / "out")
    assert code == 0
    assert re.search(rf"70000 records in 3 files in {tmp_path}/out, 62\.4 MB, in \d+ s\n$", said)
    assert sorted(shards_in(tmp_path / "out")) == ["test.tfrecords", "train.tfrecords", "validation.tfrecords"]


@pytest.mark.parametrize(
    ("words", "train", "validation"),
    [
        (["images", "x", "--to", "y"], 2, 2),
        (["imagenet", "x", "--to", "y", "--labels", "l", "--metadata", "m"], 1024, 128),
    ],
    ids=["images", "imagenet"],
)
def test_there_are_as_many_shards_as_in_the_reference(words: list[str], train: int, validation: int) -> None:
    arguments = parse(["convert", *words])
    assert (arguments.train_shards, arguments.validation_shards) == (train, validation)


@pytest.mark.parametrize("kind", CONVERTERS)
def test_every_kind_says_what_it_takes(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["convert", kind, "--help"])
    assert f"usage: lockstep convert {kind} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2_500_000_000_000_000, "2500.0 TB")]
)
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
