"""What is refused before any worker starts: each a plain error, and nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.cli import evaluate, shared, train, training
from lockstep.cli import run as cli_run
from lockstep.cli.given_run import given_recipe
from lockstep.cli.main import main, parse
from lockstep.errors import InputErrors, WorkdirError
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml, with_settings
from lockstep.runs.lease import take
from lockstep.runs.workdir import Workdir
from lockstep.workers import devices


def plan(*words: str) -> dict[str, object]:
    return train.plan_train(["train", *words])


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["mnst"], ls.RecipeError, 'did you mean "mnist"'),
        (
            ["mnist", "--towers", "3"],
            ls.InputError,
            r"split evenly.*\n.*128 over 3 towers.*\n.*\n.*126 or 129",
        ),
        (["mnist", "--towers", "2", "--workers", "3"], ls.InputError, r"no tower to run.*\n.*3 workers, 2 towers"),
        (["mnist", "--workers", "0"], ls.InputError, "num_workers is out of range"),
        (["mnist", "--towers", "0"], ls.InputError, "num_towers is out of range"),
        (["mnist", "--steps", "0"], ls.InputError, r"0 steps has no step to do"),
        (["mnist", "--epochs", "-1"], ls.InputError, r"-1.0 epochs has no step to do"),
        (["mnist", "--hours", "0"], ls.InputError, r"0.0 hours has no step to do"),
        (
            ["mnist", "--set", "optimizer.lr.initialize=1"],
            ls.RecipeError,
            "initialize.*there is no such field",
        ),
        (["mnist", "--set", "batch_size=many"], ls.RecipeError, "batch_size"),
        (["mnist", "--set", "optimizer.lr.kind=cosin"], ls.RecipeError, "cosin"),
        (
            ["mnist", "--workdir", "none", "--set", "watch.images=4"],
            ls.InputError,
            r'Without a workdir nothing is written.*\n.*--set watch.images="4"',
        ),
        (
            ["mnist", "--workers", "3", "--set", "exchange.kind=backups", "--set", "towers.batch_norm=sync"],
            ls.InputError,
            "Backup workers cannot share the statistics of a batch",
        ),
        (
            ["mnist", "--workdir", "none", "--set", "nonfinite=rollback"],
            ls.WorkdirError,
            r"Without a workdir there is no checkpoint to go back to",
        ),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        plan(*words)
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_field_is_guessed() -> None:
    with pytest.raises(ls.RecipeError, match=r"did you mean.*initial"):
        plan("mnist", "--set", "optimizer.lr.initialize=1")


def test_without_a_workdir_nothing_else_has_to_be_said() -> None:
    # Without restarts: there would be nothing to go on from.
    planned = {"workers": 1, "hang_seconds": 600.0, "restarts": 0, "survival": None}
    assert plan("mnist", "--workdir", "none", "--workers", "1") == planned
    assert plan("mnist", "--workdir", "none", "--workers", "1", "--set", "watch.metrics=0") == planned


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(ls.WorkdirError, match=r"holds something that is not a run.*\n.*thesis.tex"):
        plan("mnist", "--workdir", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_workdir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ls.WorkdirError, match=r"not a run.*\n.*a file"):
        plan("mnist", "--workdir", str(tmp_path / "file"))


class TestResume:
    @pytest.fixture
    def workdir(self, tmp_path: Path) -> Path:
        import dataclasses

        Workdir(tmp_path).write_recipe(dataclasses.replace(find("mnist"), num_towers=2))
        return tmp_path

    def test_towers_stay_those_of_the_first_start(self, workdir: Path) -> None:
        assert plan("mnist", "--workdir", str(workdir), "--workers", "2")["workers"] == 2

    def test_another_recipe_is_shown(self, workdir: Path) -> None:
        with pytest.raises(ls.WorkdirError, match=r"has another recipe.*\n.*optimizer.momentum: saved 0.9, given 0.5"):
            plan("mnist", "--workdir", str(workdir), "--set", "optimizer.momentum=0.5")

    def test_changes_can_be_accepted(self, workdir: Path) -> None:
        words = ["mnist", "--workdir", str(workdir), "--set", "optimizer.momentum=0.5", "--accept-changes"]
        assert plan(*words)["workers"] in {1, 2}

    def test_harmless_fields_may_differ(self, workdir: Path) -> None:
        words = ["mnist", "--workdir", str(workdir), "--steps", "7", "--device", "cpu", "--workers", "1"]
        assert plan(*words, "--set", "checkpoints.every=1 epochs")["workers"] == 1


class TestWorkers:
    def test_on_a_cpu_as_many_as_towers_and_cores_allow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "num_accelerators", lambda: 0)
        monkeypatch.setattr(shared, "usable_cores", lambda: 4)
        assert [shared.choose_num_workers(None, None, towers) for towers in (None, 2, 8)] == [1, 2, 4]

    def test_one_for_each_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "num_accelerators", lambda: 3)
        assert [shared.choose_num_workers(None, None, towers) for towers in (None, 2, 8)] == [3, 2, 3]
        assert shared.choose_num_workers(2, None, 8) == 2

    def test_more_than_there_are_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "num_accelerators", lambda: 2)
        with pytest.raises(ls.InputError, match=r"cannot be started here.*\n.*4 workers\n.*1 to 2, 1 a device"):
            shared.choose_num_workers(4, None, 8)
        assert shared.choose_num_workers(4, "cpu", 8) == 4

    def test_several_a_device_where_that_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "num_accelerators", lambda: 2)
        assert [shared.choose_num_workers(wanted, None, 8, 2) for wanted in (None, 3, 4)] == [4, 3, 4]
        with pytest.raises(ls.InputError, match="1 to 4, 2 a device"):
            shared.choose_num_workers(5, None, 8, 2)
        with pytest.raises(ls.InputError, match="--workers-per-device"):
            shared.choose_num_workers(None, None, 8, 0)

    def test_one_that_serves_comes_on_top_of_those_that_compute_on_accelerators(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(devices, "num_accelerators", lambda: 4)
        chosen = [shared.choose_num_workers(None, None, towers, num_servers=1) for towers in (None, 2, 8, 1)]
        assert chosen == [5, 3, 5, 1]
        assert shared.choose_num_workers(5, None, 8, num_servers=1) == 5
        with pytest.raises(ls.InputError, match="1 to 5, 1 a device and one that serves"):
            shared.choose_num_workers(6, None, 8, num_servers=1)

    def test_the_flag_is_a_field_of_the_recipe(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(devices, "num_accelerators", lambda: 1)
        monkeypatch.setattr(training, "num_accelerators", lambda: 1)
        assert plan("mnist", "--workers-per-device", "2")["workers"] == 2
        assert plan("mnist", "--set", "workers_per_device=2")["workers"] == 2

    def test_devices_that_are_left_alone_are_told_with_the_flag_that_uses_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for module in (devices, training):
            monkeypatch.setattr(module, "num_accelerators", lambda: 8)
        caplog.set_level("INFO", "lockstep")
        assert plan("mnist")["workers"] == 2
        assert caplog.messages == [
            "6 devices are left alone: the run has 2 towers; to use more: --towers 8, which is another experiment"
        ]
        caplog.clear()
        for words in (["--towers", "8"], ["--workers", "2"], ["--device", "cpu"], ["--rehearse", "--towers", "8"]):
            plan("mnist", *words)
        assert caplog.messages == []

    def test_workers_that_do_not_divide_the_batch_are_told_as_workers(self, tmp_path: Path) -> None:
        mine = tmp_path / "mine.toml"
        mine.write_text(to_toml(replace(find("mnist"), num_towers=None)))
        with pytest.raises(ls.InputError) as caught:
            plan(str(mine), "--workers", "99", "--device", "cpu", "--workdir", str(tmp_path / "run"))
        assert str(caught.value) == (
            "The batch cannot be split evenly over the workers.\n"
            "  given:    batch_size=128 over 99 workers, and no number of towers\n"
            "  expected: workers that divide the batch size, or towers that do\n"
            "  hint:     --workers 64; or --towers, at least one for each worker"
        )


def test_what_is_wrong_is_told_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the recipe, data, weights and workdir."""
    monkeypatch.chdir(tmp_path)
    Path("thesis").mkdir()
    Path("thesis/thesis.tex").touch()
    Path("runs/other/checkpoints/step-00000002").mkdir(parents=True)
    words = ["flowers", "--set", "data.train=phtos", "--workdir", "thesis", "--device", "cpu"]
    with pytest.raises(InputErrors) as caught:
        plan(*words, "--fork-from", "runs/other@7")
    assert [error.what for error in caught.value.errors] == [
        "There is no data at phtos.",
        "Nothing would say which checkpoints are the best: there are no validation examples.",
        "thesis holds something that is not a run.",
        "This recipe starts from trained weights, and has not been told which.",
        "There is no checkpoint of step 7 in runs/other/checkpoints.",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "thesis"]


@pytest.mark.process
def test_the_command_tells_it_and_blames_no_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "train", "flowers", "--set", "data.train=phtos"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert ended.returncode == 2
    first, second, *others = ended.stderr.splitlines()
    assert first.startswith("error: ")
    assert first.endswith(" things cannot be used as given.")
    assert second == "1. There is no data at phtos."
    assert not [line for line in others if "worker" in line or "Traceback" in line]
    assert list(tmp_path.iterdir()) == []


class TestParse:
    def test_a_script_gets_what_is_not_ours(self) -> None:
        arguments = parse(["run", "a.py", "--workers", "3", "--rate", "0.1", "--", "--device", "x"])
        assert (arguments.workers, arguments.arguments) == (3, ["--rate", "0.1", "--device", "x"])

    def test_an_unknown_option_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            parse(["train", "mnist", "--towrs", "2"])
        assert "unrecognized arguments: --towrs 2" in capsys.readouterr().err


class TestEvaluate:
    @pytest.fixture
    def workdir(self, tmp_path: Path) -> Path:
        Workdir(tmp_path).write_recipe(find("mnist"))
        return tmp_path

    def test_a_run_without_averages(self, workdir: Path) -> None:
        with pytest.raises(ls.InputError, match=r"keeps no averages.*\n.*--average.*\n.*\n.*leave --average out"):
            evaluate.plan_evaluate(["evaluate", str(workdir), "--average"])

    def test_a_run_without_a_checkpoint(self, workdir: Path) -> None:
        with pytest.raises(ls.InputError, match=r"no such checkpoint.*\n.*the newest\n.*one at least"):
            evaluate.plan_evaluate(["evaluate", str(workdir)])

    def test_a_step_that_was_not_saved(self, workdir: Path) -> None:
        for step in (0, 20):
            (workdir / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        with pytest.raises(ls.InputError, match=r"no such checkpoint.*\n.*--step 7\n.*one of step 0, 20"):
            evaluate.plan_evaluate(["evaluate", str(workdir), "--step", "7"])

    def test_no_workers_on_a_device(self, workdir: Path) -> None:
        (workdir / "checkpoints/step-00000000").mkdir(parents=True)
        with pytest.raises(ls.InputError, match="--workers-per-device is out of range"):
            evaluate.plan_evaluate(["evaluate", str(workdir), "--workers-per-device", "0"])

    def test_a_split_that_does_not_exist(self, workdir: Path) -> None:
        with pytest.raises(ls.InputError, match=r"no split 'tset'.*\n.*--split tset\n.*train, validation, test"):
            evaluate.plan_evaluate(["evaluate", str(workdir), "--split", "tset"])

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(ls.WorkdirError, match=r"There is no run in .*\n.*\n.*\n.*lockstep train mnist --workdir"):
            evaluate.plan_evaluate(["evaluate", str(tmp_path / "none")])

    def test_workers_need_no_towers(self, workdir: Path) -> None:
        (workdir / "checkpoints/step-00000000").mkdir(parents=True)
        assert evaluate.plan_evaluate(["evaluate", str(workdir), "--workers", "3", "--device", "cpu"]) == {"workers": 3}


def test_only_the_setting_at_fault_is_named() -> None:
    with pytest.raises(ls.RecipeError) as caught:
        plan("mnist", "--set", "batch_size=64", "--set", "optimizer.momentun=0.5", "--set", "seed=1")
    assert str(caught.value) == (
        "optimizer.momentun in --set: there is no such field.\n"
        "  given:    momentun\n"
        "  expected: one of lr, momentum, nesterov, weight_decay\n"
        '  hint:     did you mean "momentum"?'
    )


def test_a_rehearsal_needs_no_workdir() -> None:
    assert plan("mnist", "--workdir", "none", "--rehearse", "--workers", "1")["workers"] == 1


def test_flags_and_settings_are_taken_at_once() -> None:
    """A batch of 20 cannot be split over the 8 towers of the recipe, but over the 2 of the flag."""
    given = given_recipe(parse(["train", "inception_v3", "--set", "batch_size=20", "--towers", "2"]))
    assert (given.batch_size, given.num_towers) == (20, 2)


def test_the_plan_says_how_long_a_worker_may_hang() -> None:
    assert plan("mnist")["hang_seconds"] == 600.0
    assert plan("mnist", "--set", "watch.hang_seconds=30")["hang_seconds"] == 30.0
    assert cli_run._plan(["run", "--hang-seconds", "0", "script.py"])["hang_seconds"] == 0.0


def test_a_run_with_a_workdir_starts_its_workers_again_and_a_script_where_it_is_asked_to() -> None:
    assert plan("mnist")["restarts"] == 3
    assert plan("mnist", "--set", "watch.restarts=0")["restarts"] == 0
    assert plan("mnist", "--rehearse")["restarts"] == 0
    assert cli_run._plan(["run", "script.py"])["restarts"] == 0
    assert cli_run._plan(["run", "--restarts", "2", "script.py"])["restarts"] == 2
    with pytest.raises(ls.InputError, match="--restarts"):
        cli_run._plan(["run", "--restarts", "-1", "script.py"])


def test_the_plan_says_whether_workers_go_on_when_some_are_lost() -> None:
    assert plan("mnist")["survival"] is None
    goes_on = plan("mnist", "--workdir", "none", "--set", "watch.on_failure=continue", "--set", "watch.min_workers=2")
    assert (goes_on["survival"], goes_on["restarts"]) == ({"min_workers": 2, "replacements": 3}, 0)
    assert cli_run._plan(["run", "script.py"])["survival"] is None
    script = cli_run._plan(["run", "--on-failure", "continue", "--restarts", "2", "script.py"])
    assert script["survival"] == {"min_workers": 1, "replacements": 2}
    with pytest.raises(ls.InputError, match="--min-workers"):
        cli_run._plan(["run", "--min-workers", "0", "script.py"])
    with pytest.raises(ls.InputError, match="--hang-seconds is out of range"):
        cli_run._plan(["run", "--hang-seconds", "-1", "script.py"])


def test_the_old_flag_and_the_old_field_of_what_follows_a_failure_do_what_the_new_ones_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD_NAMES", "")
    assert cli_run._plan(["run", "--on-loss", "continue", "script.py"])["survival"] is not None
    assert plan("mnist", "--workdir", "none", "--set", "watch.on_loss=continue")["survival"] is not None
    old = [message for message in caplog.messages if "is called" in message]
    assert old == [
        "--on-loss is called --on-failure now",
        "watch.on_loss in --set is called watch.on_failure now",
    ]


def test_a_run_that_is_going_on_is_not_started(tmp_path: Path) -> None:
    lease = take(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(WorkdirError, match="is going on already"):
        plan("mnist", "--workdir", str(tmp_path), "--workers", "1")
    assert sorted(tmp_path.iterdir()) == before
    lease.release()
    assert plan("mnist", "--workdir", str(tmp_path), "--workers", "1")["workers"] == 1


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        (["--towers", "2"], 2),
        (["--towers", "2", "--set", "exchange.kind=backups"], 3),
        (["--towers", "8", "--set", "exchange.kind=asynchronous"], 5),
        (["--towers", "2", "--workers", "7", "--set", "exchange.kind=backups"], 7),
    ],
)
def test_one_worker_more_serves_the_others(monkeypatch: pytest.MonkeyPatch, words: list[str], workers: int) -> None:
    monkeypatch.setattr(shared, "usable_cores", lambda: 4)
    assert plan("mnist", "--workdir", "none", "--device", "cpu", *words)["workers"] == workers


def test_a_startup_delay_is_of_asynchronous_updates_alone() -> None:
    for kind in ("all_reduce", "backups"):
        with pytest.raises(ls.RecipeError, match=r"exchange\.startup_delay_steps in --set: there is no such field"):
            plan("mnist", "--set", f"exchange.kind={kind}", "--set", "exchange.startup_delay_steps=5")
    asynchronous = ["--set", "exchange.kind=asynchronous", "--set", "exchange.startup_delay_steps=5"]
    recipe = given_recipe(parse(["train", "mnist", *asynchronous]))
    assert recipe.exchange == ls.Asynchronous(startup_delay_steps=5)


# At the end -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher ends at once with exit code 3; a file that does not exist yet."""

    def launch(*_: object, check: Callable[[], None], **__: object) -> int:
        with suppress(ls.LockstepError):
            check()
        return 3

    monkeypatch.setattr("lockstep.launcher.launch.launch_command", launch)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "told"


TELL = 'watch.on_end="echo $LOCKSTEP_RUN $LOCKSTEP_EXIT_CODE > told"'


@pytest.mark.process
def test_a_command_of_the_users_own_is_told_of_the_end(ended: Path) -> None:
    assert main(["train", "mnist", "--workdir", "run", "--set", TELL]) == 3
    assert ended.read_text() == f"{ended.parent / 'run'} 3\n"


@pytest.mark.parametrize("flag", ["--rehearse", "--dry-run"])
def test_what_trains_nothing_tells_nobody(ended: Path, flag: str) -> None:
    main(["train", "mnist", flag, "--set", TELL])
    assert not ended.exists()


@pytest.mark.process
def test_a_command_that_others_may_have_written_is_left_out(ended: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Workdir(ended.parent / "run")
    run.path.mkdir()
    run.write_recipe(with_settings(find("mnist"), [TELL]))
    (run.path / "recipe.toml").chmod(0o666)
    assert main(["train", str(run.path)]) == 3
    assert not ended.exists()
    assert "others may have written" in caplog.text
    main(["train", str(run.path), "--allow-code"])
    assert ended.exists()


@pytest.mark.process
@pytest.mark.parametrize(("command", "told"), [("exit 4", "failed with exit code 4"), ("sleep 9", "took more than")])
def test_a_command_that_fails_or_hangs_is_told(
    ended: Path, command: str, told: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "ON_END_SECONDS", 0.2)
    assert main(["train", "mnist", "--set", f'watch.on_end="{command}"']) == 3
    assert told in caplog.text


@pytest.mark.process
@pytest.mark.parametrize(
    ("why", "code"), [(subprocess.TimeoutExpired("command", 60), 3), (KeyboardInterrupt(), shared.INTERRUPTED)]
)
def test_all_that_a_command_has_started_ends_with_it(
    ended: Path, why: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(ended)
    wait, readers = subprocess.Popen.wait, list[int]()

    def wait_until_begun(shell: Any, *seconds: float) -> int:
        if readers:
            return wait(shell, *seconds)
        readers.append(os.open(ended, os.O_RDONLY))
        assert os.read(readers[0], 99) == b"begun\n"
        raise why

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_begun)
    command = 'watch.on_end="(echo begun; sleep 60; echo over) > told; true"'
    assert main(["train", "mnist", "--set", command]) == code
    assert os.read(readers[0], 99) == b"", "nothing has it open any more"
    os.close(readers[0])


@pytest.mark.process
def test_a_command_that_cannot_be_run_is_told(ended: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["train", "mnist", "--set", r'watch.on_end="a\u0000b"']) == 3
    assert "watch.on_end cannot be run: embedded null byte" in caplog.text


@pytest.mark.process
@pytest.mark.parametrize("name", ["mnist", "mine.toml"])
def test_the_command_is_the_one_that_the_recipe_named_when_the_run_began(
    ended: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = ended.parent / "mine.toml"
    recipe.write_text(to_toml(find("mnist")))
    (ended.parent / "mnist").mkdir()  # this is not what the name of a shipped recipe means

    def launch(*_: object, check: Callable[[], None], **__: object) -> int:
        with suppress(ls.LockstepError):
            check()
        recipe.unlink()
        return 5

    monkeypatch.setattr("lockstep.launcher.launch.launch_command", launch)
    assert main(["train", name, "--set", TELL]) == 5
    assert ended.read_text().endswith("/runs/mnist 5\n")
