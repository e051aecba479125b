"""The commands as a user runs them: real processes, real kills, and what is on the screen and in the workdir."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worker_processes import HANG_SECONDS

from lockstep.cli.main import main
from lockstep.exchange.exchange import AllReduce
from lockstep.workers.rank import leave

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent
SMALL = [
    "--set", "batch_size=24", "--set", "checkpoints.every=2 steps", "--set", "watch.metrics=1 steps",
    "--set", "watch.summaries=1 steps", "--set", "average.decay=0.9", "--set", "exchange.exact=true",
    "--set", "evaluate.examples=500",
]  # fmt: skip
OFTEN = ["--set", "watch.console=1 steps", "--set", "checkpoints.every=600 s"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", *words]


def run(*words: str, code: int = 0, **options: object) -> str:
    """What the command says, on both streams; it must end with the code."""
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": HANG_SECONDS, **options}
    done = subprocess.run(command(*words), **options)  # type: ignore[call-overload]
    said = str(done.stdout + done.stderr)
    assert done.returncode == code, said
    return said


def train(workdir: Path, *words: str, code: int = 0) -> str:
    return run("train", "mnist", "--workdir", str(workdir), *SMALL, *words, code=code)


def contents(workdir: Path, step: int) -> dict[str, bytes]:
    files = [path for path in (workdir / f"checkpoints/step-{step:08d}").iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


def steps_in(workdir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 6 steps, 3 towers on 3 workers, and what it said."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    return workdir, train(workdir, "--towers", "3", "--workers", "3", "--steps", "6")


Here = Callable[..., str]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """Runs a command as its one worker does, in this process, which has torch already; returns what it says."""
    monkeypatch.chdir(ROOT)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)

    def call(*words: str, code: int = 0) -> str:
        leave()
        found = main(words)
        said = "".join(capfd.readouterr())
        assert found == code, said
        return said

    return call


def train_here(here: Here, workdir: Path, *words: str, code: int = 0) -> str:
    return here("train", "mnist", "--workdir", str(workdir), "--towers", "3", *SMALL, *words, code=code)


@pytest.fixture
def copy(finished: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def test_a_run_says_what_was_chosen_and_how_it_ended(finished: tuple[Path, str]) -> None:
    workdir, said = finished
    lines = said.splitlines()
    assert any("3 towers on 3 workers (cpu, 1 thread each, fp32)" in line for line in lines)
    assert any(line.startswith("step 6 of 6 | loss ") for line in lines)
    assert re.fullmatch(r"test accuracy \d+\.\d\d % \(\d+ of 500\)", lines[-3])
    assert lines[-2].endswith(f"lockstep evaluate {workdir}")
    assert lines[-1].endswith(f"tensorboard --logdir {workdir}/summaries")
    assert not [line for line in lines if "[worker" in line], "all workers say the same, so one is enough"


def test_the_workdir_tells_the_run(finished: tuple[Path, str]) -> None:
    workdir, _ = finished
    assert {"recipe.toml", "choices.json", "history.jsonl", "metrics.jsonl", "summaries", "checkpoints"} <= {
        path.name for path in workdir.iterdir()
    }
    assert steps_in(workdir) == [1, 2, 3, 4, 5, 6]
    scalars = EventAccumulator(str(workdir / "summaries")).Reload().Scalars("losses/total")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    events = [json.loads(line)["event"] for line in (workdir / "history.jsonl").read_text().splitlines()]
    assert events == ["start", "end"]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_other_numbers_of_workers_and_a_resume_give_the_same_bytes(
    finished: tuple[Path, str], tmp_path: Path, num_workers: int
) -> None:
    workdir = tmp_path / "run"
    words = ["--towers", "3", "--workers", str(num_workers)]
    train(workdir, *words, "--steps", "3")
    said = train(workdir, *words, "--steps", "6")
    assert "resumed at step 3, position 72" in said
    assert contents(workdir, 6) == contents(finished[0], 6)
    steps = [event.step for event in EventAccumulator(str(workdir / "summaries")).Reload().Scalars("losses/total")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_at_its_end_a_run_does_no_step_and_says_so(copy: Path, here: Here) -> None:
    before = (copy / "metrics.jsonl").read_bytes()
    assert "nothing to do: the run is at step 6" in train_here(here, copy, "--steps", "6")
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(copy: Path, here: Here) -> None:
    file = copy / "checkpoints/step-00000006/parameters.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said = train_here(here, copy, "--steps", "6")
    assert "step-00000006/parameters.safetensors is damaged" in said
    assert "resumed at step 4" in said
    assert steps_in(copy) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_said_once_whoever_reads(copy: Path) -> None:
    (copy / "checkpoints/step-00000006/values.json").write_bytes(b"")
    said = run("evaluate", str(copy), "--workers", "2")
    assert said.count("values.json is damaged") == 1
    assert "raw weights of step 4" in said


def test_changed_choices_are_named_and_refused_in_exact_mode(copy: Path, here: Here) -> None:
    path = copy / "choices.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    before = (copy / "recipe.toml").read_bytes()
    said = train_here(here, copy, "--steps", "7", code=2)
    assert "cannot go on with the same bits" in said
    assert "torch was 1.0 and is " in said
    assert (copy / "recipe.toml").read_bytes() == before, "what was refused has changed nothing"
    said = train_here(here, copy, "--steps", "7", "--set", "exchange.exact=false", "--accept-changes")
    assert "warning: changed since the first start, so the bits may differ: torch was 1.0 and is " in said
    noted = json.loads((copy / "history.jsonl").read_text().splitlines()[-2])["changed"]
    assert "exchange.exact: saved True, given False" in noted
    assert noted[-1].startswith("torch was 1.0 and is ")
    assert json.loads(path.read_text())["torch"] == "1.0", "the choices of the first start stay"


def test_accepted_changes_are_in_the_history(copy: Path, here: Here) -> None:
    words = ["--steps", "7", "--set", "optimizer.momentum=0.5"]
    assert "has another recipe" in train_here(here, copy, *words, code=2)
    train_here(here, copy, *words, "--accept-changes")
    resumed = [json.loads(line) for line in (copy / "history.jsonl").read_text().splitlines()][-2]
    assert resumed["event"] == "resume"
    assert "optimizer.momentum: saved 0.9, given 0.5" in resumed["changed"]


@pytest.mark.parametrize("num_workers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluate_gives_the_same_on_every_number_of_workers(
    finished: tuple[Path, str], here: Here, num_workers: int
) -> None:
    words = ["evaluate", str(finished[0])]
    said = here(*words) if num_workers == 1 else run(*words, "--workers", str(num_workers))
    results = [line for line in said.splitlines() if "accuracy" in line]
    assert results == [next(line for line in finished[1].splitlines() if "test accuracy" in line)]


def test_evaluate_takes_average_step_and_split(finished: tuple[Path, str], here: Here) -> None:
    said = here("evaluate", str(finished[0]), "--average", "--step", "4", "--split", "validation")
    assert "average weights of step 4" in said
    assert "validation accuracy" in said
    assert "of 500)" in said


class Started:
    """A run without an end, which is past its third step."""

    def __init__(self, workdir: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command("train", "mnist", "--workdir", str(workdir), *SMALL, *OFTEN, "--forever", *words),
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=env,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._lines = self.process.stdout
        self._said: list[str] = []
        self.read_until("step 3 ")

    def read_until(self, start: str) -> str:
        """Wait for a line; returns all that it has said."""
        while not self._said or not self._said[-1].startswith(start):
            self._said.append(self._lines.readline())
            assert self._said[-1], "".join(self._said)
        return "".join(self._said)

    def processes(self) -> tuple[list[str], list[str]]:
        """The processes that its launcher has started, and their workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return children, Path(f"/proc/{children[0]}/task/{children[0]}/children").read_text().split()

    def end(self, code: int) -> str:
        """All that it said; it must end with the code."""
        with self.process:
            said = "".join([*self._said, *self._lines])
        assert self.process.returncode == code, said
        return said


Start = Callable[..., Started]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts runs without an end, and ends those that a failed test has left."""
    runs: list[Started] = []

    def begin(*arguments: Any, **options: Any) -> Started:
        runs.append(Started(*arguments, **options))
        return runs[-1]

    yield begin
    for each in runs:
        each.process.kill()
        each.process.wait(HANG_SECONDS)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it_with_a_checkpoint(start: Start, tmp_path: Path, number: int, code: int) -> None:
    started = start(tmp_path / "run", "--towers", "2", "--workers", "2")
    started.process.send_signal(number)
    said = started.end(code)
    last = steps_in(tmp_path / "run")[-1]
    assert said.count(f"stopped at step {last}, and saved: the same command goes on from there") == 1
    again = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C"
    assert said.count(f"warning: stopping after this step, with a checkpoint; {again} aborts") == 1
    assert f"resumed at step {last}, " in train(tmp_path / "run", "--towers", "2", "--steps", str(last + 1))
    assert steps_in(tmp_path / "run") == list(range(1, last + 2))


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_at_once_and_is_named(start: Start, tmp_path: Path) -> None:
    started = start(tmp_path / "run", "--towers", "2", "--workers", "2", "--set", "watch.restarts=0")
    children, workers = started.processes()
    os.kill(int(workers[-1]), signal.SIGKILL)
    said = started.end(1)
    assert f"(pid {workers[-1]}) was killed by SIGKILL at step " in said.splitlines()[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*children, *workers])


@pytest.mark.slow
def test_a_run_goes_on_by_itself_when_a_worker_was_killed(start: Start, tmp_path: Path) -> None:
    started = start(tmp_path / "run", "--towers", "2", "--workers", "2")
    _, workers = started.processes()
    os.kill(int(workers[-1]), signal.SIGKILL)
    said = started.read_until("resumed at step ")
    started.process.send_signal(signal.SIGTERM)
    started.end(143)
    assert f"(pid {workers[-1]}) was killed by SIGKILL at step " in said
    assert ": in 1 s (restart 1 of 3 without progress)" in said
    steps = steps_in(tmp_path / "run")
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_worker_of_another_launcher_says_by_its_exit_code_that_it_was_stopped(start: Start, tmp_path: Path) -> None:
    started = start(tmp_path / "run", env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
    started.process.send_signal(signal.SIGTERM)
    said = started.end(143)
    assert f"stopped at step {steps_in(tmp_path / 'run')[-1]}, and saved" in said


@pytest.mark.slow
def test_a_run_is_started_once_at_a_time(start: Start, here: Here, tmp_path: Path) -> None:
    started = start(tmp_path / "run", "--towers", "3")
    said = train_here(here, tmp_path / "run", "--forever", code=2)
    assert "is going on already" in said
    started.process.send_signal(signal.SIGTERM)
    started.end(143)


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoints(copy: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    words = ["train", "mnist", "--workdir", str(copy), *SMALL, "--towers", "3", "--workers", "1", "--steps", "8"]
    done = subprocess.run(
        command(*words), cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, preexec_fn=limit
    )
    assert done.returncode == 1, done.stderr
    assert "step-00000008" in done.stderr or "cannot be written" in done.stderr
    names = [path.name for path in (copy / "checkpoints").iterdir()]
    assert "step-00000006" in names
    assert all(name.startswith("step-") for name in names), "nothing half written"
    assert "resumed at step 6" in run(*words)


def test_torchrun_joins(finished: tuple[Path, str], tmp_path: Path) -> None:
    words = ["train", "mnist", "--workdir", str(tmp_path / "run"), *SMALL, "--towers", "3", "--steps", "6"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lockstep", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launcher, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "run", 6) == contents(finished[0], 6)


@pytest.mark.slow
def test_a_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said = run(
        "train", "mnist", "--rehearse", "--workdir", str(tmp_path / "run"), *SMALL, "--workers", "2", env=environment
    )
    assert "rehearsed: two steps, saved, resumed, step 3, evaluated" in said
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_how_a_run_would_go_on_and_leaves_it_as_it_is(copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in [copy, *copy.rglob("*")]}
    said = run("train", str(copy), "--workers", "2", "--steps", "9", "--dry-run").splitlines()
    assert "3 x 8 examples an update, from step 6, position 144" in said
    assert f"exchange: {AllReduce(exact=True)} over shared memory" in said
    assert [line.split()[-7:] for line in said if line.endswith((" 144 to 159", " 160 to 167"))] == [
        ["1", "0", "to", "1", "144", "to", "159"],
        ["1", "cpu", "1", "2", "160", "to", "167"],
    ]
    assert {path: path.stat().st_mtime_ns for path in [copy, *copy.rglob("*")]} == before


def test_a_dry_run_says_what_would_be_fetched_and_fetches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    said = run("train", "mnist", "--dry-run", "--workers", "2", "--workdir", "none", "--set", f"data.folder={folder}")
    (line,) = [line for line in said.splitlines() if line.startswith("not here yet")]
    assert f"fetched to {folder} by training: train-images-idx3-ubyte.gz, " in line
    assert "; 11.6 MB from https://" in line
    assert "first positions" not in said
    assert not folder.exists()


def test_a_printed_recipe_is_a_recipe(tmp_path: Path, here: Here) -> None:
    printed = here("train", "mnist", "--set", "batch_size=64", "--print-recipe")
    (tmp_path / "mine.toml").write_text(printed)
    assert here("train", str(tmp_path / "mine.toml"), "--print-recipe") == printed
    assert "batch_size = 64" in printed


def test_wrong_input_has_exit_code_2_and_starts_nothing(tmp_path: Path) -> None:
    said = run("train", "mnist", "--towers", "3", "--workdir", str(tmp_path / "run"), code=2)
    assert said.startswith("error: The batch cannot be split evenly over the towers.\n  given:")
    assert list(tmp_path.iterdir()) == []


def test_without_a_workdir_nothing_is_written(tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    off = [
        word for name in ("checkpoints.every", "watch.summaries", "watch.metrics") for word in ("--set", f"{name}=0")
    ]
    words = ["train", "mnist", "--workdir", "none", *SMALL, *off, "--steps", "2"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = here(*words, "--set", f"data.folder={ROOT / 'data/mnist'}")
    assert re.search(r"^test accuracy .* of 500\)\Z", said.rstrip(), re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys

import torch

import lockstep as ls

here = ls.join()
reader = ls.data.Arrays({"x": torch.arange(24.0).reshape(12, 2)})
loader = ls.data.Loader(reader, batch_size=4, seed=0)
state = ls.TrainState(torch.nn.Linear(2, 1), ls.optim.SGD(lr=0.001))


def losses(model, batch):
    if "fail" in sys.argv and here.rank == 1:
        raise LookupError("the real cause")
    return {"square": (model(batch["x"]) ** 2).mean()}


torch.nn.init.ones_(state.model.weight)
torch.nn.init.zeros_(state.model.bias)
for report in ls.train_steps(state, losses, loader, ls.Towers(2), until=ls.Steps(3)):
    pass
if here.is_chief:
    print(report.step, here.num_workers, sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_of_the_users_own_on_two_workers(script: Path) -> None:
    assert run("run", "--workers", "2", str(script), "--rate", "0.1") == (
        "3 2 ['--rate', '0.1']\n2 towers on 2 workers (cpu, 1 thread each, fp32)\n"
    )


def test_a_script_that_raises_is_shown_by_its_traceback(script: Path) -> None:
    lines = run("run", str(script), "fail", "--workers", "2", code=1).splitlines()
    assert lines[1] == "error: worker 1 failed at step 0 (phase first step):"
    assert lines[-3].startswith(f'  File "{script}", line ')
    assert lines[-2:] == ['    raise LookupError("the real cause")', "LookupError: the real cause"]
    assert [line for line in lines if "/lockstep/" in line] == [], "folded"
    assert len(lines) < 12
    whole = run("run", str(script), "fail", "--workers", "2", "--full-traceback", code=1)
    assert "/lockstep/training/step.py" in whole


def test_there_is_no_script(tmp_path: Path) -> None:
    missing = tmp_path / "missing.py"
    assert f"error: There is no script {missing}.\n" in run("run", str(missing), code=2)
