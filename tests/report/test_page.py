from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from written_runs import event, metrics_line, timing_line, write_run

from lockstep.listing import csv_line
from lockstep.recipes.shipped import find
from lockstep.report.curves import SPEED
from lockstep.report.facts import recipe_differences
from lockstep.report.page import report_json, report_page, run_report
from lockstep.runs.record import RunRecord

PACKAGE = Path(__file__).parents[2] / "lockstep"
EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[2J\u202e'


class Parsed(HTMLParser):
    """The elements of a page, its text, and what is in its scripts."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.scripts += [""] * (tag == "script")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data
        self.text += data


def page_of(*folders: Path) -> Parsed:
    records = list(map(RunRecord, folders))
    runs = [run_report(record, record.path.name) for record in records]
    return Parsed(report_page(runs, recipe_differences([record.recipe for record in records]), "2026-11-26 08:00:00"))


def evil_run(folder: Path) -> Path:
    refused = {"step": 3, "reasons": [EVIL], "culprits": EVIL, "examples": {EVIL: EVIL}}
    run = write_run(
        folder / "<b>mine<b>",
        metrics=[metrics_line(1, losses={EVIL: 1.0}, smoothed={EVIL: 1.0}, metrics={EVIL: 0.5})],
        history=[event("start", 0, 0, changed=[EVIL]), event("failed", 1, 1, error=EVIL)],
        quarantine=[{"example": EVIL, "reason": EVIL}],
        evaluations=[
            {
                "step": 1,
                "split": EVIL,
                "weights": EVIL,
                "scores": {f"PerformanceByCategory/{EVIL}": 0.5},
                "by_class": {"classes": [{"name": EVIL, "objects": EVIL}, EVIL], "all": None, "min_score": EVIL},
            }
        ],
        choices={"device": EVIL, EVIL: "cpu"},
    )
    with (run / "recipe.toml").open("a") as file:
        file.write(f"# {EVIL}\n")
    (run / "confusion.csv").write_text('x,"<i>a</i>",b\n"<i>a</i>",1,2\nb,3,4\n')
    (run / "curves.csv").write_text("class,recall,precision,score\n" + csv_line([EVIL, 0.5, 1, EVIL]))
    kept = run / "refused/position-000000000"
    kept.mkdir(parents=True)
    (kept / "report.json").write_text(json.dumps(refused))
    return run


def test_names_from_files_are_text_and_nothing_else(tmp_path: Path) -> None:
    for page in (page_of(evil_run(tmp_path)), page_of(evil_run(tmp_path / "again"), write_run(tmp_path / "other"))):
        tags = [tag for tag, _ in page.tags]
        assert tags.count("script") == 3
        assert not {"b", "i"} & {*tags}
        assert all(attributes["src"].startswith("data:image/") for tag, attributes in page.tags if tag == "img")
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        assert EVIL[:40] in page.text
        assert not {"\x1b", "\u202e"} & {*page.text}


def test_a_page_loads_nothing_and_runs_its_own_scripts_alone(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", metrics=[metrics_line(1)]))
    (policy,) = [each["content"] for tag, each in page.tags if each.get("http-equiv") == "Content-Security-Policy"]
    _, *run_scripts = page.scripts
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in run_scripts]
    assert re.findall(r"'sha256-([^']+)'", policy or "") == hashes
    assert (policy or "").startswith("default-src 'none'; ")
    links = [each.get(name) for _, each in page.tags for name in ("src", "href") if each.get(name)]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links if link)
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base")]


def test_the_charts_are_json_in_which_what_is_not_finite_is_null(tmp_path: Path) -> None:
    lines = [metrics_line(step, total) for step, total in ((1, 2.0), (2, "nan"), (3, "-inf"))]
    lines.append(metrics_line(3, "nan", refused=True))
    history = [event("start", 0, 0), event("resume", 2, 1)]
    page = page_of(write_run(tmp_path / "run", metrics=lines, history=history, timings=[timing_line(3, 2)]))
    charts = json.loads(page.scripts[0])
    assert charts[0]["curves"][0] == {"name": "cross_entropy", "steps": [1, 2, 3], "values": [2.0, None, None]}
    assert charts[0]["marks"] == [{"step": 2, "name": "resume"}]
    assert charts[-2]["curves"][0]["values"] == [128.0]
    assert charts[-2]["from_zero"]
    assert "an attempt was not finite once, and changed nothing: refused/" in page.text
    assert "4 values are not finite: a gap." in page.text  # of the loss, and of its smoothed value


def test_many_lines_of_metrics_make_a_page_that_opens_at_once(tmp_path: Path) -> None:
    """The browser gets at most 4,000 points of each of 20,000."""
    page = page_of(write_run(tmp_path / "run", metrics=(metrics_line(step, 1 / (step + 1)) for step in range(20_000))))
    curves = [curve for chart in json.loads(page.scripts[0]) for curve in chart["curves"]]
    assert all(2 <= len(curve["steps"]) <= 4_002 for curve in curves)
    assert "Of a curve with more than 4,000 points, the lowest and the highest of each stretch are drawn." in page.text


def test_several_runs_begin_with_the_differences_of_their_recipes(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", metrics=[metrics_line(1)], choices={"threads": 1, "torch": "2.13"})
    other = replace(find("mnist"), batch_size=64)
    two = write_run(tmp_path / "two", other, metrics=[metrics_line(1)], choices={"threads": 2, "torch": "2.13"})
    page = page_of(one, two)
    text = " ".join(page.text.split())
    assert text.index("Differences of the recipes field one two batch_size 128 64") < text.index("Side by side run one")
    assert "threads 1 2" in text[text.index("Side by side run") : text.index("Curves", text.index("Side by side run"))]
    assert [curve["name"] for curve in json.loads(page.scripts[0])[0]["curves"]] == ["one", "two"]


def test_what_a_run_has_not_left_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "my run")
    assert (
        f"lockstep evaluate '{run}' --confusion '{run}'/confusion.csv --mistakes '{run}'/mistakes.png"
        in page_of(run).text
    )
    detector = write_run(tmp_path / "detector", find("bccd"))
    assert f"Pictures of detections: lockstep evaluate {detector}" in page_of(detector).text


def test_json_has_the_facts_and_all_points(tmp_path: Path) -> None:
    lines = [metrics_line(1, "nan"), {"step": 1, "evaluation": "validation", "scores": {"top1": "inf"}}]
    records = [RunRecord(write_run(tmp_path / "run", metrics=lines, timings=[timing_line(1, 0)]))]
    told: Any = report_json([run_report(records[0], "run")], [])
    assert json.loads(json.dumps(told, allow_nan=False)) == json.loads(json.dumps(told))
    assert told["runs"][0]["curves"]["Losses"]["cross_entropy"] == {1: "nan"}
    assert told["runs"][0]["curves"][SPEED] == {SPEED.lower(): {1: 128.0}}
    assert told["runs"][0]["scores"][0]["value"] == "inf"


def test_a_wheel_has_what_the_page_is_made_of() -> None:
    """What is no module comes along by the patterns of pyproject.toml, by package."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    taken = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in PACKAGE.parent.joinpath(*package.split(".")).glob(pattern)
    }
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {path.name for path in others} > {"page.html", "page.css", "page.js", "uplot.min.js", "uplot-LICENSE.txt"}
    assert others == taken
