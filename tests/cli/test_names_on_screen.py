"""Names from files that hold escape codes and line breaks, through the real commands: none reaches the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lockstep.cli.main import main
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import from_toml, to_toml
from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import write_records

EVIL = "\x1b[2J\x1b]0;owned\x07\nerror: forged \u202egpj.\x9b\x7f"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\nerror: forged \u202egpj.\x9b\x7f"


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command writes to both streams, which must be printable but for its line breaks."""

    def run(*words: str | Path, code: int = 0) -> str:
        assert main([*map(str, words)]) == code
        written = "".join(capsys.readouterr())
        assert all(line.isprintable() for line in written.split("\n")), repr(written)
        assert "\nerror: forged" not in written
        return written

    return run


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / f"net {EVIL}.safetensors"
    save_file({EVIL: torch.zeros(2), "w": torch.ones(1)}, path, metadata={EVIL: EVIL})
    return path


def test_inspected_tensors(weights: Path, tmp_path: Path, screen: Any) -> None:
    text = screen("inspect", weights)
    assert f"\n  {SHOWN}: {SHOWN}\n" in text, "metadata"
    assert f"\n  {SHOWN}  (2,)" in text, "the table"
    assert f"net {SHOWN}.safetensors: " in text
    assert EVIL in json.loads(screen("inspect", weights, "--json"))["beside"]
    assert f"{SHOWN}: (2,)" in screen("inspect", weights, "--values", EVIL)
    other = tmp_path / "other.safetensors"
    save_file({"w": torch.zeros(1)}, other)
    assert f"\n  {SHOWN}\n" in screen("inspect", weights, "--diff", other, code=1)
    assert SHOWN in screen("inspect", weights, "--values", f"no {EVIL}", code=2)


def test_imported_tensors(weights: Path, tmp_path: Path, screen: Any) -> None:
    text = screen("import", "checkpoint", weights, "--to", tmp_path / f"{EVIL}.safetensors")
    assert f"{SHOWN}.safetensors: 2 tensors" in text


def test_inspected_records(tmp_path: Path, screen: Any) -> None:
    path = tmp_path / f"{EVIL}.tfrecord"
    write_records(path, [serialize_example({EVIL: [EVIL.encode()], "label": np.array([1])})])
    text = screen("inspect", path)
    assert f"{SHOWN}.tfrecord: 1 records" in text
    assert f"\n  {SHOWN}" in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of images, one of them named by an attacker, with a file that is no image."""
    for name in ("cat", EVIL):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(2):
            pixels = np.full((9, 12, 3), number, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}{EVIL}.png")
    (tmp_path / "images" / EVIL / f"3{EVIL}.png").write_bytes(b"no image")
    (tmp_path / "images" / f"notes {EVIL}.txt").touch()
    return tmp_path / "images"


def test_converted_images(folder: Path, tmp_path: Path, screen: Any) -> None:
    to = tmp_path / f"to {EVIL}"
    text = screen("convert", "images", folder, "--to", to, "--validation-share", "0", "--processes", "1")
    assert f"warning: Not read in {folder}: notes {SHOWN}.txt\n" in text
    assert f"Skipped {SHOWN}/3{SHOWN}.png: " in text


def test_shown_images(folder: Path, tmp_path: Path, screen: Any) -> None:
    page = tmp_path / f"<b>{EVIL}.html"
    assert f"<b>{SHOWN}.html: " in screen("show", folder, "--to", page)
    assert all(line.isprintable() for line in page.read_text().split("\n"))


@pytest.mark.process
def test_a_training_error(tmp_path: Path, screen: Any) -> None:
    path = tmp_path / f"{EVIL}.toml"
    path.write_text(to_toml(find("mnist")) + '\n["a\\u001b[2J\\nerror: forged"]\n')
    text = screen("train", path, "--workers", "1", "--device", "cpu", "--workdir", tmp_path / "run", code=2)
    assert f"{SHOWN}.toml" in text
    assert r"a\x1b[2J\nerror: forged" in text


def test_a_printed_recipe_is_the_same_recipe(tmp_path: Path, screen: Any) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(find("mnist")).replace("frozen = []", 'frozen = ["a\u009b31m\u202eb\u00a0c"]'))
    text = screen("train", path, "--print-recipe")
    assert from_toml(text, "printed").frozen == ("a\u009b31m\u202eb\u00a0c",)


def test_arguments_that_a_pattern_of_the_shell_made(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "a", EVIL], ["show", "a", "--to", "b", "--repeat", EVIL]):
        with pytest.raises(SystemExit):
            main(words)
        assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))


def test_a_label_map(tmp_path: Path, screen: Any) -> None:
    labels = tmp_path / "labels.pbtxt"
    labels.write_text('item { id: 1 name: "\\033[2J\\nerror: forged" } item { id: 1 name: "b" }')
    (tmp_path / "voc" / "Annotations").mkdir(parents=True)
    text = screen(
        "convert", "voc", "--data-dir", tmp_path / "voc", "--label-map", labels, "--to", tmp_path / "to", code=2
    )
    assert r"\x1b[2J\nerror: forged" in text
