"""The documents: their code runs, and what they name is there. Their commands: `test_document_commands.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

from lockstep.augmentations.lists import AUGMENTATIONS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lockstep"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(each for each in (ROOT / "docs").rglob("*.md") if each.parent.name != "generated")]
)
README, TOUR, ARCHITECTURE = ROOT / "README.md", ROOT / "docs" / "tour.md", ROOT / "docs" / "architecture.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.process
def test_the_loop_of_the_readme_trains_and_saves(tmp_path: Path) -> None:
    code, *_ = blocks(README, "python")
    short = code.replace("ls.Epochs(1)", "ls.Steps(2)").replace("% 100", "% 2")
    assert short.count("ls.Steps(2)") == short.count("% 2") == 1
    (tmp_path / "mine.py").write_text(short)
    (tmp_path / "data").symlink_to(ROOT / "data")
    run = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("2 {'cross_entropy': 2.3")
    assert (tmp_path / "runs/mine/checkpoints/step-00000002").is_dir()


@pytest.mark.slow
@pytest.mark.process
def test_the_update_of_the_tour_is_made(tmp_path: Path) -> None:
    update, _ = blocks(TOUR, "python")
    model = """
import torch, lockstep as ls
from torch.nn import BatchNorm1d, Linear
stem, backbone = torch.nn.Sequential(Linear(4, 4), BatchNorm1d(4)), BatchNorm1d(4)
model = torch.nn.ModuleDict({"stem": stem, "backbone": backbone, "head": Linear(4, 1)})
"""
    run = """
def losses(model, batch):
    return {"square": model["head"](model["backbone"](model["stem"](batch["x"]))).square().mean()}
loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(64, 4)}), batch_size=16)
print(sorted(ls.train(state, losses, loader, towers, until=ls.Steps(2)).losses))
"""
    ran = subprocess.run(
        [sys.executable, "-c", model + update + run], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ran.stdout == "['l2', 'square']\n", ran.stderr


@pytest.mark.process
def test_the_data_of_the_tour_is_read(tmp_path: Path) -> None:
    _, data = blocks(TOUR, "python")
    script = f"""
import numpy as np, lockstep as ls
from pathlib import Path
Path("imagenet").mkdir()
jpeg = Path({str(ROOT / "tests/fixtures/images/hopper.jpg")!r}).read_bytes()
example = {{"image/encoded": [jpeg], "image/class/label": np.array([3])}}
example |= {{f"image/object/bbox/{{side}}": np.array([value], np.float32)
            for side, value in {{"xmin": 0.2, "ymin": 0.2, "xmax": 0.9, "ymax": 0.9}}.items()}}
ls.records.write_records(Path("imagenet/train-00000-of-00001"), [ls.records.serialize_example(example)] * 4)
{data.replace("batch_size=256", "batch_size=2, num_processes=0")}
batch = next(loader.batches(range(1), 1))
print(batch["image"].shape, batch["label"].tolist())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ran.stdout == "torch.Size([2, 3, 299, 299]) [3, 3]\n", ran.stderr


def test_links_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not path.startswith("https://") and (not target.exists() or (anchor and anchor not in anchors(target))):
                lost.append(f"{page}: {link}")
    assert not lost


def test_files_named_are_there() -> None:
    names = {
        (page, name)
        for page in PAGES
        for name in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|tsv))`", page.read_text())
    }
    assert not [each for each in names if not any((f / each[1]).exists() for f in (ROOT, PACKAGE, each[0].parent))]


def test_the_architecture_names_each_package() -> None:
    layers = ARCHITECTURE.read_text().partition("## Layers")[2].partition("##")[0]
    named = re.findall(r"`(\w+)/`", layers)
    assert sorted(named) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_the_page_of_augmentations_has_each_with_its_defaults() -> None:
    """Also those of the other packages that a detector's data may name."""
    page = (ROOT / "docs" / "reference" / "augmentations.md").read_text()
    with_objects = page.partition("## Of images with objects")[2]
    rows = re.findall(r"^\|.*?`([A-Z]\w+\(.*?\))`", with_objects, re.MULTILINE)
    assert sorted(rows) == sorted(map(as_called, AUGMENTATIONS))


def as_called(kind: Any) -> str:
    """As a call with all defaults is written, but for the name of the field of images."""
    names = (f.name if f.default is MISSING else f"{f.name}={f.default!r}" for f in fields(kind) if f.name != "field")
    return f"{kind.__name__}({', '.join(names)})"
