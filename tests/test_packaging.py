"""What is published: the README of an index, one version, and files for contributors that name what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import yaml

from lockstep.version import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PAGE = ROOT / "docs/contributing/add-an-optimizer.md"


def readme_of(text: str, repository: str) -> str:
    pytest.importorskip("setuptools")
    spec = spec_from_loader("setup", SourceFileLoader("setup", str(ROOT / "setup.py")))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.readme_of(text, repository, "1.2.3"))


def test_links_and_pictures_of_the_readme_hold_on_an_index() -> None:
    text = (ROOT / "README.md").read_text()
    shown = readme_of(text, "https://example.org/lockstep")
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert len(targets) == len(re.findall(r"\]\(", text)) > 40
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert (
        "![The report of the demo: steps, scores, curves of losses and scores](https://example.org/lockstep/raw/v1.2.3/"
        in shown
    )
    assert "[LICENSE](https://example.org/lockstep/blob/v1.2.3/LICENSE)" in shown


def test_a_readme_without_an_address_has_no_link_that_leads_nowhere() -> None:
    assert readme_of("see [a page](docs/a.md) and [torch](https://pytorch.org) ![a picture](b.png)", "") == (
        "see a page and [torch](https://pytorch.org) "
    )


def test_each_extra_is_documented_in_one_place() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/reference/install.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(.+?)`", " ".join(rows))) == sorted(extras)


def test_the_citation_and_the_changelog_have_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == __version__


def test_workflows_call_what_the_project_has_with_the_least_rights() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(WORKFLOWS) == 2
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 90
            for step in job["steps"]:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+\.\d+\.\d+", step.get("uses", "actions/a@v1.2.3"))
                command = step.get("run", ".ci/run")
                assert command == ".ci/run" or "apt-get" in command or command.removeprefix("make ") in targets


def test_commits_are_checked_by_the_versions_of_the_project() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    found = {hook["id"].partition("-")[0]: repo["rev"] for repo in hooks if "rev" in repo for hook in repo["hooks"]}
    assert found == {name: f"v{pins[name]}" for name in ("ruff", "codespell")}


@pytest.mark.process
def test_the_optimizer_of_the_page_has_its_formula_and_trains(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    files = dict(blocks)
    assert [*files] == ["lion.py", "test_lion.py", "train_lion.py"]
    assert len(files["lion.py"].splitlines()) <= 30
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    both = [sys.executable, "-c", "import test_lion, train_lion"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(both, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout == "the same numbers as the formula\ntrained to step 20\n", ran.stderr
