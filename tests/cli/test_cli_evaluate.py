"""`lockstep evaluate`: what it says and writes down, and how it follows a run that another process trains."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.cli import evaluate as cli_evaluate
from lockstep.cli import train as cli_train
from lockstep.cli.given_run import scored_run
from lockstep.cli.main import parse
from lockstep.cli.scoring import Details, reference_names
from lockstep.evaluation.follow import Polling
from lockstep.recipes.parts import CrossEntropy, Evaluate, Stage
from lockstep.recipes.shipped import find
from lockstep.recipes.tasks import CONFUSION, MISTAKES, Classification
from lockstep.recipes.toml import to_toml
from lockstep.runs.workdir import Workdir, class_names
from lockstep.types import Interval

ROOT = Path(__file__).parent.parent.parent
WRITES_LITTLE = [
    "--set", "checkpoints.every=2 steps", "--set", "watch.metrics=0", "--set", "watch.summaries=0",
]  # fmt: skip
SETTINGS = [
    "batch_size=24", "average.decay=0.5", "evaluate.weights=average", "evaluate.examples=60", "evaluate.every=0",
    "evaluate.top=[1, 5]",
]  # fmt: skip
FACTS = ["step", "split", "weights", "precision", "num_examples", "num_bad_examples", "scores"]


def train(workdir: Path, *words: str) -> list[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["train", "mnist", "--workdir", str(workdir), "--workers", "1", *settings, *WRITES_LITTLE, *words]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    assert cli_train.train_as_worker(train(workdir, "--steps", "6")) == 0
    return workdir


@pytest.fixture
def workdir(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def unfinished(workdir: Path) -> Path:
    """The same run, which is not over yet."""
    path = workdir / "history.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    return workdir


def evaluate(workdir: Path, *words: str) -> int:
    """The command in this process."""
    return cli_evaluate.evaluate_as_worker(["evaluate", str(workdir), *words])


def evaluations(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class TestWhatIsSaidAndWritten:
    @pytest.fixture(autouse=True)
    def _everything_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "lockstep")

    def test_the_scores_are_the_same_wherever_they_stand(
        self, workdir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
        assert evaluate(workdir, "--to", str(tmp_path / "result.json")) == 0
        assert {path: path.read_bytes() for path in before} == before, "those of the run are its own"
        (line,) = evaluations(workdir)
        assert list(line) == FACTS
        assert [line[name] for name in FACTS[:-1]] == [6, "test", "average", "fp32", 60, 0]
        top1, top5 = line["scores"]["top1"], line["scores"]["top5"]
        assert 0 < top1 < top5 < 1
        assert caplog.messages == [
            f"average weights of step 6, from {workdir}/checkpoints/step-00000006",
            f"test accuracy {100 * top1:.2f} % ({60 * top1:.0f} of 60)",
            f"precision @ 1 = {top1:.4f} recall @ 5 = {top5:.4f} [60 examples]",
        ]
        assert json.loads((tmp_path / "result.json").read_text()) == line
        shown = EventAccumulator(str(workdir / "summaries-evaluation/test-average")).Reload()
        tags = {tag: shown.Scalars(tag)[0] for tag in shown.Tags()["scalars"]}
        assert {tag: event.value for tag, event in tags.items()} == pytest.approx(
            {"Precision @ 1": top1, "Recall @ 5": top5, "evaluation/test/top1": top1, "evaluation/test/top5": top5}
        )
        assert {event.step for event in tags.values()} == {6}

    def test_flags_win_over_the_recipe(self, workdir: Path) -> None:
        evaluate(workdir, "--raw", "--step", "4", "--split", "validation", "--examples", "30")
        evaluate(workdir, "--average", "--split", "train")
        first, second = evaluations(workdir)
        assert [first[name] for name in FACTS[:5]] == [4, "validation", "raw", "fp32", 30]
        assert [second[name] for name in FACTS[:5]] == [6, "train", "average", "fp32", 60]
        names = {path.name for path in (workdir / "summaries-evaluation").iterdir()}
        assert names == {"validation-raw", "train-average"}

    def test_evaluate_writes_a_confusion_table_and_a_sheet_of_mistakes(self, workdir: Path, tmp_path: Path) -> None:
        table, sheet = tmp_path / "table.csv", tmp_path / "sheet.png"
        evaluate(workdir, "--confusion", str(table), "--mistakes", str(sheet))
        header, *rows = csv.reader(table.read_text().splitlines())
        counts = [[int(cell) for cell in row[1:]] for row in rows]
        assert header[1:] == [row[0] for row in rows] == [str(digit) for digit in range(10)]
        assert sum(map(sum, counts)) == 60
        right = sum(counts[digit][digit] for digit in range(10))
        assert right == round(60 * evaluations(workdir)[0]["scores"]["top1"])
        with Image.open(sheet) as image:
            assert image.width > 300 < image.height

    def test_scores_are_printed_where_the_workdir_cannot_be_written(
        self, workdir: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (workdir / "evaluations.jsonl").mkdir()
        (workdir / "summaries-evaluation").touch()
        assert evaluate(workdir) == 0
        assert any(message.startswith("test accuracy") for message in caplog.messages)
        skipped = [message for message in caplog.messages if "are not written down" in message]
        assert len(skipped) == 2
        assert f"{workdir}/evaluations.jsonl cannot be written: Is a directory." in skipped[0]
        assert f"{workdir}/summaries-evaluation/test-average cannot be written: Not a directory." in skipped[1]

    def test_a_run_that_is_over_is_followed_to_its_last_checkpoint(
        self, workdir: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert evaluate(workdir, "--follow") == 0
        assert [line["step"] for line in evaluations(workdir)] == [6]
        assert caplog.messages[-1] == "the run is over: no checkpoint will follow"

    def test_a_run_that_keeps_silent_is_followed_until_the_timeout(
        self, workdir: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert evaluate(unfinished(workdir), "--follow", "--timeout", "0") == 0
        assert [line["step"] for line in evaluations(workdir)] == [6]
        assert caplog.messages[-1].startswith("no new checkpoint in ")

    @pytest.mark.parametrize(("words", "signal_name", "code"), [([], "SIGTERM", 143), (["--follow"], "SIGINT", 130)])
    def test_a_request_to_stop_ends_an_evaluation_before_it_writes(
        self, workdir: Path, words: list[str], signal_name: str, code: int
    ) -> None:
        ls.join().pulse.stop_requested = signal_name
        assert evaluate(workdir, *words) == code
        assert evaluations(workdir) == []


@pytest.mark.slow
def test_each_stage_of_a_run_is_scored(tmp_path: Path) -> None:
    """In the first one other parameters have averages than in the second."""
    shorten = replace(
        find("mnist"),
        batch_size=24,
        average=ls.optim.MovingAverage(0.5),
        end=None,
        stages=(Stage(ls.Steps(2), train_only=("^local",)), Stage(ls.Steps(2))),
        evaluate=Evaluate(every=Interval(0, "steps"), weights="average", examples=20),
    )
    (tmp_path / "few.toml").write_text(to_toml(shorten))
    cli_train.train_as_worker(["train", str(tmp_path / "few.toml"), "--workdir", str(tmp_path / "run"), *WRITES_LITTLE])
    assert evaluate(tmp_path / "run", "--step", "2") == 0
    assert evaluate(tmp_path / "run") == 0
    assert [(line["step"], line["weights"]) for line in evaluations(tmp_path / "run")] == [
        (2, "average"),
        (4, "average"),
    ]


class Task(Classification):
    """Scores as a classifier's are."""

    def score(self, model: object, batch: object) -> dict[str, object]:
        return {"top1": 1}

    def score_in_detail(self, model: object, batch: object) -> dict[str, object]:
        return {"top1": 1, CONFUSION: (2,), MISTAKES: (3,)}


@pytest.mark.parametrize("asked", [[], [CONFUSION], [MISTAKES], [CONFUSION, MISTAKES]], ids="-".join)
def test_what_is_not_asked_for_is_not_made(asked: list[str], tmp_path: Path) -> None:
    files = {name: tmp_path / name if name in asked else None for name in (CONFUSION, MISTAKES)}
    details: Any = Details(Task(len, CrossEntropy()), 10, **files)  # type: ignore[arg-type]
    assert list(details.metrics) == asked
    assert list(details.score(None, None)) == ["top1", *asked]


def test_a_class_may_be_called_what_is_no_text(tmp_path: Path) -> None:
    """As a folder is whose name is of another encoding."""
    table = tmp_path / "table.csv"
    reader: Any = SimpleNamespace(classes=(os.fsdecode(b"r\xffd"), "ü"))
    details = Details(Task(len, CrossEntropy()), 2, confusion=table, mistakes=None)  # type: ignore[arg-type]
    details.write(reader, class_names(reader))
    assert table.read_text().splitlines()[0] == r"is / predicted,r\udcffd,ü"


def refused(workdir: Path, *words: str) -> str:
    """What the command says before any worker starts."""
    with pytest.raises(ls.InputError) as raised:
        cli_evaluate.plan_evaluate(["evaluate", str(workdir), *words])
    return str(raised.value)


class TestRefusals:
    def test_no_examples(self, workdir: Path) -> None:
        assert "examples is out of range" in refused(workdir, "--examples", "0")

    @pytest.mark.parametrize(
        ("flag", "name", "ending"),
        [("to", "result", ".json"), ("confusion", "table", ".csv"), ("mistakes", "sheet", ".png")],
    )
    def test_a_file_that_cannot_be_written(
        self, workdir: Path, tmp_path: Path, flag: str, name: str, ending: str
    ) -> None:
        path = tmp_path / f"{name}{ending}"
        path.touch()
        assert f"given:    --{flag} {path}" in refused(workdir, f"--{flag}", str(path))
        assert "--force to overwrite it" in refused(workdir, f"--{flag}", str(path))
        cli_evaluate.plan_evaluate(["evaluate", str(workdir), f"--{flag}", str(path), "--force"])
        assert f"--{flag} {path}" in refused(workdir, f"--{flag}", str(path.with_suffix(".doc")))

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--interval", "5"], "Without --follow nothing is waited for, and --interval says how"),
            (["--interval", "5", "--timeout", "0"], "leave --interval and --timeout out"),
            (["--follow", "--interval", "-1"], "--interval is out of range"),
            (["--follow", "--timeout", "nan"], "--timeout is out of range"),
        ],
        ids=["interval", "both", "negative", "nan"],
    )
    def test_times_that_say_nothing(self, workdir: Path, words: list[str], said: str) -> None:
        assert said in refused(workdir, *words)

    @pytest.mark.parametrize(
        "words", [["--raw", "--average"], ["--follow", "--best"], ["--follow", "--step", "2"]], ids=" ".join
    )
    def test_flags_that_contradict_each_other(
        self, workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            parse(["evaluate", str(workdir), *words])
        assert "not allowed with argument" in capsys.readouterr().err


class TestWhatIsScored:
    def split(self, workdir: Path, *words: str) -> str:
        return scored_run(parse(["evaluate", str(workdir), "--follow", *words])).split

    @pytest.mark.parametrize(
        ("given", "expected"),
        [({"validation": "v", "test": "t"}, "test"), ({"validation": "v"}, "validation")],
        ids=["both", "one"],
    )
    def test_the_test_examples_where_there_are_some(self, tmp_path: Path, given: dict[str, str], expected: str) -> None:
        whole = find("inception_v3")
        paths = {split: str(tmp_path / name) for split, name in {"train": "x", **given}.items()}
        for path in paths.values():
            Path(path).mkdir()
        Workdir(tmp_path).write_recipe(replace(whole, data=replace(whole.data, **paths)))
        assert self.split(tmp_path) == expected
        assert self.split(tmp_path, "--split", "train") == "train"

    @pytest.mark.parametrize(
        ("words", "split"), [([], "validation"), (["--split", "test"], "test")], ids=["by itself", "asked for"]
    )
    def test_a_split_that_the_run_does_not_have(self, tmp_path: Path, words: list[str], split: str) -> None:
        whole = find("inception_v3")
        Workdir(tmp_path).write_recipe(replace(whole, data=replace(whole.data, train="x")))
        said = refused(tmp_path, "--follow", *words)
        assert f"The run in {tmp_path} has no {split} examples." in said
        assert f"lockstep evaluate {tmp_path} --split train" in said

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ([], None),
            (["--follow"], Polling(60, None)),
            (["--follow", "--interval", "0", "--timeout", "7"], Polling(0, 7)),
        ],
        ids=["not", "usual", "given"],
    )
    def test_how_it_is_followed(self, workdir: Path, words: list[str], expected: Polling | None) -> None:
        assert scored_run(parse(["evaluate", str(workdir), *words])).polling == expected

    def test_a_run_without_a_checkpoint_is_waited_for(self, tmp_path: Path) -> None:
        Workdir(tmp_path).write_recipe(find("mnist"))
        assert "add --follow to wait for it" in refused(tmp_path)
        assert cli_evaluate.plan_evaluate(["evaluate", str(tmp_path), "--follow", "--workers", "1", "--device", "cpu"])

    @pytest.mark.parametrize(
        ("history", "expected"),
        [
            (None, False),
            ("", False),
            ('{"event": "start"}\n{"event": "end"}\n', True),
            ('{"event": "end"}\n{"event": "resume"}\n', False),
            ('{"event": "start"}\n{"event": "en', False),
            ('{"event": "start"}\n{"event": "end"}\n{"event": "straggler"}\n', True),
            ('{"event": "verdict"}\n', False),
        ],
        ids=["none", "empty", "over", "resumed", "torn", "over with a remark", "a remark alone"],
    )
    def test_whether_the_run_is_over(self, tmp_path: Path, history: str | None, expected: bool) -> None:
        Workdir(tmp_path).write_recipe(find("mnist"))
        if history is not None:
            (tmp_path / "history.jsonl").write_text(history)
        assert scored_run(parse(["evaluate", str(tmp_path), "--follow"])).is_over() is expected

    def test_shares_by_the_names_of_the_inception_trainer(self) -> None:
        means = {"top5": 0.9, "top1": 0.7, "loss": 2.0}
        assert list(reference_names(means).items()) == [("Precision @ 1", 0.7), ("Recall @ 5", 0.9)]


class Named:
    """A reader that numbers its classes from 1 on."""

    offset = 1
    classes = ("background", "daisy", "rose")


def test_classes_are_named_by_the_numbers_of_the_model() -> None:
    names = class_names(Named())  # type: ignore[arg-type]
    assert (names[0], names[1]) == ("daisy", "rose")
    assert class_names(object()) == {}  # type: ignore[arg-type]


class Process:
    """A command that says line by line what it does."""

    def __init__(self, words: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._lines = self.process.stdout
        self.said: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The next line that begins so."""
        for line in self._lines:
            self.said.append(line)
            if found := re.match(pattern, line):
                return found
        raise AssertionError("".join(self.said))

    def end(self, code: int, number: int | None = None) -> str:
        """All that it said; it must end with the code, after the signal."""
        if number is not None:
            self.process.send_signal(number)
        with self.process:
            self.said.extend(self._lines)
        assert self.process.returncode == code, "".join(self.said)
        return "".join(self.said)


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands, and ends those that a failed test has left."""
    processes: list[Process] = []

    def begin(words: list[str]) -> Process:
        processes.append(Process(words))
        return processes[-1]

    yield begin
    for each in processes:
        with suppress(ProcessLookupError):
            each.process.kill()
        each.process.wait(HANG_SECONDS)


def follow(workdir: Path, *words: str) -> list[str]:
    return ["evaluate", str(workdir), "--follow", "--interval", "0", *words]


SCORED = r"average weights of step (\d+), from "


@pytest.mark.slow
@pytest.mark.process
def test_one_process_trains_and_another_follows_to_the_end(start: Start, tmp_path: Path) -> None:
    workdir, result = tmp_path / "run", tmp_path / "result.json"
    training = start(train(workdir, "--forever"))
    training.wait_for("step ")
    following = start(follow(workdir, "--to", str(result), "--workers", "1"))
    first, second = (int(following.wait_for(SCORED)[1]) for _ in range(2))
    stopped = re.search(r"stopped at step (\d+)", training.end(143, signal.SIGTERM))
    assert stopped, "and that is not the end of the run"
    last = int(stopped[1]) + 2
    start(train(workdir, "--steps", str(last))).end(0)
    assert following.end(0).splitlines()[-1] == "the run is over: no checkpoint will follow"
    steps = [line["step"] for line in evaluations(workdir)]
    assert steps[:2] == [first, second]
    assert steps == sorted(set(steps)), "each once, and none that is older"
    shown = EventAccumulator(str(workdir / "summaries-evaluation/test-average")).Reload()
    assert [event.step for event in shown.Scalars("Precision @ 1")] == steps
    assert len(list((workdir / "summaries-evaluation/test-average").iterdir())) == 1
    assert steps[-1] == last == json.loads(result.read_text())["step"]


@pytest.mark.slow
@pytest.mark.process
def test_following_a_run_waits_on_all_workers_until_a_signal(start: Start, workdir: Path) -> None:
    (workdir / "checkpoints").rename(workdir / "aside")
    following = start(follow(unfinished(workdir), "--workers", "2"))
    following.wait_for(f"waiting for the first checkpoint in {workdir}/checkpoints")
    (workdir / "aside").rename(workdir / "checkpoints")
    following.wait_for("precision @ 1 = ")
    said = following.end(143, signal.SIGTERM)
    assert said.splitlines()[-1] == "warning: stopping: the scoring is left off; Ctrl-C aborts"
    assert [line["step"] for line in evaluations(workdir)] == [6]


def test_scores_are_computed_with_the_threads_that_are_named_else_those_of_the_run(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    assert evaluate(workdir, "--threads", "3", "--examples", "20") == 0
    assert evaluate(workdir, "--examples", "20") == 0
    assert seen == [3, json.loads((workdir / "choices.json").read_text())["threads"]]
    with pytest.raises(ls.InputError, match="--threads is out of range"):
        evaluate(workdir, "--threads", "0")
