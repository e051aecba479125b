"""The page of `lockstep report` in a real browser: no error in the console, read by keys, narrow, dark, printed."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from written_runs import event, metrics_line, timing_line, write_run

from lockstep.cli.main import main
from lockstep.recipes.shipped import find

pytestmark = pytest.mark.process
EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
LIGHT_CURVE, DARK_CURVE = [0x0B, 0x5C, 0xAD], [0x6C, 0xB6, 0xFF]
HAS_COLOUR = """
const canvas = document.querySelector(".plot canvas"), wanted = arguments[0];
const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
copy.drawImage(canvas, 0, 0);
const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
for (let at = 0; at < data.length; at += 4)
  if (data[at + 3] === 255 && wanted.every((level, place) => data[at + place] === level)) return true;
return false;
"""


class Page:
    """A report that is open in the browser."""

    def __init__(self, chromium: Any, folder: Path) -> None:
        self.browser, self.folder = chromium, folder

    def show(self, *runs: Path, width: int = 1200, scheme: str = "light") -> None:
        target = self.folder / "report.html"
        assert main(["report", *map(str, runs), "--to", str(target)]) == 0
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        self.prefer(scheme)
        self.browser.get(target.as_uri())

    def wait_until_drawn(self) -> None:
        wait = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"
        self.browser.execute_async_script(wait)

    def command(self, name: str, **arguments: Any) -> Any:
        return self.browser.execute_cdp_cmd(name, arguments)

    def prefer(self, scheme: str) -> None:
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        self.wait_until_drawn()  # before its first frame the browser drops what is pressed
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.command("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.command("Input.dispatchKeyEvent", type="keyUp", key=key)

    def move_mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.command("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    @property
    def reading(self) -> str:
        """What is said at the top of the first chart, once the browser has drawn."""
        self.wait_until_drawn()
        said: str = self.run("return document.querySelector('.reading').textContent")
        return said

    def errors(self) -> list[str]:
        """What the console has said since it was asked last."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def page(chromium: Any, tmp_path: Path) -> Page:
    page = Page(chromium, tmp_path)
    page.errors()
    return page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with curves, marks and tables; it is called, and tells of, what is not to be taken for HTML."""
    lines = [metrics_line(step, 2 / step, metrics={EVIL: 0.5}) for step in range(10, 2010, 10)]
    lines.append({"step": 2000, "evaluation": "validation", "scores": {"top1": 0.9}})
    history = [event("start", 0, 0, changed=[EVIL]), event("resume", 500, 9), event("end", 2000, 59, host=EVIL)]
    timings = [timing_line(step, step // 40) for step in range(20, 2001, 20)]
    evaluations = [{"step": 2000, "split": "test", "scores": {f"PerformanceByCategory/AP/{EVIL}": 0.5}}]
    folder = write_run(
        tmp_path / "<b>mine<b>", metrics=lines, history=history, timings=timings, evaluations=evaluations
    )
    classes = ",".join(f"class {place}" for place in range(30))
    rows = "".join(f"class {place},{','.join(map(str, range(30)))}\n" for place in range(30))
    (folder / "confusion.csv").write_text(f"right,{classes}\n{rows}")
    kept = folder / "refused/position-000000001"
    kept.mkdir(parents=True)
    autopsy = {"step": 1, "reasons": [EVIL], "culprits": ["tower 1"], "examples": ["x" * 300]}
    (kept / "report.json").write_text(json.dumps(autopsy))
    return folder


def test_a_report_opens_without_an_error(page: Page, run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", replace(find("mnist"), batch_size=64), metrics=[metrics_line(5, "nan")])
    for shown in ([run], [run, other], [write_run(tmp_path / "empty")]):
        page.show(*shown)
        charts = page.run("return document.querySelectorAll('figure.chart').length")
        assert page.run("return document.querySelectorAll('.plot canvas').length") == charts
        assert (charts > 0) == (run in shown)
        assert page.errors() == []


def test_names_from_files_run_nothing(page: Page, run: Path) -> None:
    page.show(run)
    assert page.run("return document.scripts.length") == 3
    assert page.run("return document.querySelector('h1').firstChild.textContent.trim()") == "<b>mine<b>"
    page.run("const made = document.createElement('script'); made.text = 'window.made = 1'; document.body.append(made)")
    assert page.run("return window.made") is None  # by the policy of the page
    (refused,) = page.errors()
    assert "Content Security Policy" in refused


@pytest.mark.parametrize("runs", [1, 2])
def test_on_a_narrow_screen_the_page_does_not_scroll_sideways(page: Page, run: Path, tmp_path: Path, runs: int) -> None:
    page.show(*[run, write_run(tmp_path / ("long-name" * 12), metrics=[metrics_line(1)])][:runs], width=400)
    page.run("for (const each of document.querySelectorAll('details')) each.open = true")
    widths = page.run(
        "const { scrollWidth, clientWidth } = document.documentElement; return [scrollWidth, clientWidth]"
    )
    assert widths[0] == widths[1] <= 400
    assert page.run("return document.querySelector('.plot canvas').getBoundingClientRect().width") < 400


def test_all_of_a_page_is_reached_by_keys(page: Page, run: Path) -> None:
    page.show(run)
    active = (
        "const at = document.activeElement; return [`${at.tagName}.${at.className}`, getComputedStyle(at).outlineStyle]"
    )
    reached = []
    page.press("Tab")
    while (found := page.run(active))[0] != "BODY.":
        reached.append(found[0])
        assert found[1] in ("auto", "solid"), found
        page.press("Tab")
    assert reached[0] == "A.skip"
    assert {"DIV.plot", "BUTTON.zoom-in", "INPUT.log", "SUMMARY.", "DIV.scroll", "BUTTON."} <= {*reached}


def test_a_chart_is_read_and_zoomed_by_keys(page: Page, run: Path) -> None:
    page.show(run)
    page.run("document.querySelector('.plot').focus()")
    page.press("Home")
    assert page.reading == "step 10"
    assert page.run("return document.querySelector('.spoken').textContent").startswith("step 10: cross_entropy 0.2, ")
    page.press("ArrowRight", "ArrowRight")
    assert page.reading == "step 30"
    page.press("End", "ArrowLeft")
    assert page.reading == "step 1,990"
    page.press("+", "Home")
    assert page.reading == "step 1,010"
    page.press("Escape", "Home")
    assert page.reading == "step 10"
    values = page.run("return [...document.querySelectorAll('.legend b')].map((each) => each.textContent)")
    # What was not scored there is read at the nearest step; all charts are read together.
    assert values == ["0.2", "0.2", "0.5", "0.9 (step 2,000)", "0.05", "1", "128", "0.1"]


def test_a_chart_is_read_and_zoomed_by_the_mouse(page: Page, run: Path) -> None:
    page.show(run)
    box = page.run("return document.querySelector('.u-over').getBoundingClientRect().toJSON()")
    middle = box["top"] + box["height"] / 2
    page.move_mouse("Moved", box["left"] + 1, middle)
    assert page.reading == "step 10"
    page.move_mouse("Pressed", box["left"] + box["width"] * 0.5, middle, button="left", clickCount=1)
    page.move_mouse("Moved", box["left"] + box["width"] * 0.75, middle, button="left", buttons=1)
    page.move_mouse("Released", box["left"] + box["width"] * 0.75, middle, button="left", clickCount=1)
    page.move_mouse("Moved", box["left"] + 1, middle)
    assert page.reading in ("step 1,000", "step 1,010")
    for count in (1, 2):
        page.move_mouse("Pressed", box["left"] + 1, middle, button="left", clickCount=count)
        page.move_mouse("Released", box["left"] + 1, middle, button="left", clickCount=count)
    page.move_mouse("Moved", box["left"] + 2, middle)
    assert page.reading in ("step 10", "step 20")


def test_a_curve_is_hidden_and_a_scale_is_logarithmic_on_demand(page: Page, run: Path) -> None:
    page.show(run)
    assert page.run("return document.querySelector('.log').checked")  # from 0.2 to 0.001
    assert page.run(HAS_COLOUR, LIGHT_CURVE)
    page.run("document.querySelector('.legend button').click()")
    assert page.run("return document.querySelector('.legend button').ariaPressed") == "false"
    assert page.reading == ""
    assert not page.run(HAS_COLOUR, LIGHT_CURVE)
    page.run("document.querySelector('.log').click(); document.querySelector('.legend button').click()")
    assert page.reading == ""
    assert page.run(HAS_COLOUR, LIGHT_CURVE)
    assert page.errors() == []


def test_curves_are_told_apart_without_colours(page: Page, run: Path) -> None:
    page.show(run)
    dashes = page.run(
        "return [...document.querySelectorAll('.chart .legend')].map((legend) => "
        "[...legend.querySelectorAll('path')].map((line) => line.getAttribute('stroke-dasharray')))"
    )
    assert len(dashes[0]) == 2
    assert all(len({*each}) == len(each) for each in dashes)


def test_the_page_is_light_or_dark_as_the_system_is_and_prints_light(page: Page, run: Path) -> None:
    page.show(run, scheme="dark")
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert page.run(ground) == "rgb(15, 20, 25)"
    assert page.run(HAS_COLOUR, DARK_CURVE)
    page.run(
        "addEventListener('beforeprint', () => { window.printed = [document.querySelector('.plot canvas').width,"
        "document.querySelector('details.autopsy').open] })"
    )
    pdf = base64.b64decode(page.command("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")
    assert page.run("return window.printed") == [640, True]
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.reading == ""
    assert page.run(HAS_COLOUR, LIGHT_CURVE)
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.reading == ""
    assert page.run(HAS_COLOUR, DARK_CURVE)
    page.prefer("light")
    assert page.reading == ""
    assert page.run(ground) == "rgb(251, 252, 253)"
    assert page.run(HAS_COLOUR, LIGHT_CURVE)
    assert page.errors() == []


def test_where_scripts_are_off_the_values_are_in_tables(page: Page, run: Path) -> None:
    page.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.show(run)
        text = page.browser.find_element("css selector", "#curves").text
    finally:
        page.command("Emulation.setScriptExecutionDisabled", value=False)
    assert "Their values are in the tables below." in text
    assert "Values of Losses" in text
    assert "whole run" not in text
