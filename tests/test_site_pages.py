"""The pages that the site has beside those of the repository have each public name, field and command, with links."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.cli.main import COMMANDS
from lockstep.recipes.fields import all_fields

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_public_name_field_and_command_has_its_place(site: ModuleType) -> None:
    library = "\n".join(text for _, text in site.library_pages())
    fields = "\n".join(text for _, text in site.field_topics())
    commands = "\n".join(text for _, text in site.command_page())
    assert [name for name in site.PUBLIC if f":: {name}\n" not in library] == []
    assert [path for path in all_fields() if f"\n## `{path}`\n" not in fields] == []
    assert [name for name in COMMANDS if f"\n## `lockstep {name}`\n" not in commands] == []


def test_a_field_says_what_it_means_takes_and_is_by_default(site: ModuleType) -> None:
    fields = dict(site.field_topics())["fields-run"]
    _, _, entry = fields.partition("(field-evaluate.patience)=\n")
    entry = entry.partition("\n(field-")[0]
    assert "Early stopping" in entry
    assert "\n- takes a whole number (1 or more, below 2\\*\\*63), or left out\n" in entry
    assert "\n- default: left out\n" in entry
    assert "\n- `--set evaluate.patience=1`" in entry


@pytest.mark.process
def test_versions_stand_beside_each_other_and_those_published_are_kept(tmp_path: Path) -> None:
    built, site = tmp_path / "built", tmp_path / "site"
    built.mkdir()

    def publish(version: str, text: str) -> subprocess.CompletedProcess[str]:
        (built / "index.html").write_text(text)
        words = [ROOT / "scripts" / "publish_docs", site, "--built", built, "--version", version]
        return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)

    assert publish("latest", "main").returncode == 0
    assert "url=latest/" in (site / "index.html").read_text()
    for version in ("0.9.0", "0.10.0", "latest"):
        assert publish(version, version).returncode == 0
    assert publish("0.10.0", "changed").stderr.endswith("remove it to publish it again\n")
    assert publish("../elsewhere", "changed").returncode == 1
    listed = json.loads((site / "switcher.json").read_text())
    assert [each["name"] for each in listed] == ["0.10.0 (stable)", "0.9.0", "latest"]
    assert {each["version"]: (site / each["url"] / "index.html").read_text() for each in listed} == {
        "0.10.0": "0.10.0", "0.9.0": "0.9.0", "latest": "latest",
    }  # fmt: skip
    assert "url=0.10.0/" in (site / "index.html").read_text()
    assert sorted(each.name for each in site.iterdir()) == ["0.10.0", "0.9.0", "index.html", "latest", "switcher.json"]


def test_a_public_name_without_a_docstring_is_a_warning_which_fails_the_build(
    site: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "_log", logging.getLogger("of the test"))
    site.read_docstring(None, "function", "lockstep.nothing", None, None, [])
    assert caplog.messages == ["lockstep.nothing is public, and has no docstring"]


def test_docstrings_are_read_as_they_are_meant(site: ModuleType) -> None:
    lines = ["Sum of |w| * `rate`, for `Ragged`s.", "", "Args:", "    rate: above 0."]
    site.read_docstring(None, "function", "lockstep.nothing", None, None, lines)
    assert lines[0] == r"Sum of \|w\| \* \ ``rate``\ , for \ ``Ragged``\ s."
    assert ":param rate: above 0." in lines


def test_names_in_back_ticks_become_links(site: ModuleType) -> None:
    targets = {
        "ls.Towers(2)": "lockstep.Towers",
        "ls.data.Loader": "lockstep.data.Loader",
        "exchange.exact=true": "field-exchange.exact",
        "evaluate.patience": "field-evaluate.patience",
    }
    assert {text: site._link_of(text, "page")["reftarget"] for text in targets} == targets
    assert [site._link_of(text, "page") for text in ("ls.nothing", "torch.nn", "seed", "a.b=1")] == [None] * 4
