"""`examples/thirty`: each plain script and its twin train alike, and the page that shows them says how much differs."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import thirty_scripts
import torch
from thirty_scripts import FOLDER, STEPS, THIRTY, Pair, num_changed, train, train_plainly
from worker_processes import HANG_SECONDS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "thirty-scripts.md").read_text()
MOST_LINES, MEDIAN_LINES = 85, 10


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_there_are_thirty_and_each_has_a_twin() -> None:
    names = [pair.name for pair in THIRTY]
    assert len(set(names)) == 30
    expected = {f"{name}.py" for name in ["common", *names, *(f"{name}_lockstep" for name in names)]}
    assert {path.name for path in FOLDER.glob("*.py")} == expected
    for pair in THIRTY:
        plain, ours = pair.texts()
        assert "lockstep" not in plain
        assert plain.splitlines()[0] == ours.splitlines()[0], "what it is about"
        assert max(len(text.splitlines()) for text in (plain, ours)) <= MOST_LINES, pair.name


@pytest.mark.parametrize("pair", THIRTY, ids=lambda pair: pair.name)
def test_the_losses_are_equal(pair: Pair) -> None:
    plain, ours = train_plainly(pair), train(f"{pair.name}_lockstep", pair)
    assert len(ours) == max(STEPS, pair.epochs) * (2 if pair.name == "gan" else 1)
    assert ours == pytest.approx(plain, rel=1e-5)
    assert len(set(ours)) == len(ours), "it is trained"


def test_other_examples_or_random_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = next(pair for pair in THIRTY if pair.name == "vae")
    plain = train_plainly(pair)
    monkeypatch.setattr(thirty_scripts, "SEED", 1)
    assert train_plainly(pair) != pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@pytest.mark.process
def test_two_workers_have_the_losses_of_one_unless_the_page_says_why_not() -> None:
    command = [sys.executable, "-m", "lockstep", "run", "--workers", "2", thirty_scripts.__file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_SECONDS, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for pair in THIRTY:
        alone = pytest.approx(train(f"{pair.name}_lockstep", pair), rel=1e-3 if pair.name == "bfloat16" else 1e-5)
        assert (found[pair.name] == alone) == (not pair.of_slices), (pair.name, found[pair.name], alone)


def row(pair: Pair) -> str:
    about = pair.texts()[0].splitlines()[0].strip('"')
    plain, ours = (f"../../examples/thirty/{name}.py" for name in (pair.name, f"{pair.name}_lockstep"))
    links = f"[`{pair.name}`]({plain}), [with Lockstep]({ours})"
    workers = f"a slice has {pair.of_slices}" if pair.of_slices else "the same losses"
    return f"| {links} | {about} | {' | '.join(map(str, pair.num_lines()))} | {workers} |"


def test_the_table_of_the_page_is_true() -> None:
    rows = "\n".join(map(row, THIRTY))
    assert rows in PAGE, f"write this table into the page:\n{rows}"


def test_the_median_is_what_the_page_says() -> None:
    total, written, gone = (statistics.median(column) for column in zip(*map(Pair.num_lines, THIRTY), strict=True))
    assert written <= MEDIAN_LINES
    said = f"In the median a script of {total:g} lines gets {written:g} new ones and loses {gone:g}"
    assert said in " ".join(PAGE.split()), said


def test_the_page_says_why_a_script_takes_more_lines() -> None:
    explained = PAGE.partition("## Where it takes more")[2].partition("\n## ")[0]
    long = {pair.name for pair in THIRTY if pair.num_lines()[1] > MEDIAN_LINES}
    assert set(re.findall(r"\[`(\w+)`\]", explained)) == long


def test_the_difference_that_the_page_shows_is_that_of_the_first_pair() -> None:
    shown = f"```diff\n{THIRTY[0].diff()}```"
    assert shown in PAGE, f"write this into the page:\n{shown}"


def test_lines_are_counted_whatever_their_margin() -> None:
    assert num_changed("a\n\n  b\nc\n", "a\nb\n  x\n  y\n") == (2, 1)
    assert num_changed("a\nb\n", "a\n    b\n\n") == (0, 0)
