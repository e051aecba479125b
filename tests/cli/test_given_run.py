"""The run that a command line of `lockstep train` asks for: by a recipe, or by the folder of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import lockstep as ls
from lockstep.cli import train, training
from lockstep.cli.given_run import GivenRun, given_recipe, given_run
from lockstep.cli.main import parse
from lockstep.errors import WorkdirError
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find, names
from lockstep.recipes.toml import to_toml
from lockstep.runs.workdir import KnownData, Workdir
from lockstep.types import StepRange


def given(*words: str) -> GivenRun:
    return given_run(parse(["train", *words]))


def plan(*words: str) -> dict[str, object]:
    return train.plan_train(["train", *words, "--device", "cpu"])


# By the folder of a run -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, with a seed of its own."""
    Workdir(tmp_path / "run").path.mkdir()
    Workdir(tmp_path / "run").write_recipe(replace(find("mnist"), name="mine", seed=7))
    return tmp_path / "run"


def test_a_run_goes_on_in_its_folder_by_its_own_recipe(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, path = given(str(run), "--steps", "7")
    assert (recipe.name, recipe.seed, recipe.end, path) == ("mine", 7, ls.Steps(7), run)
    monkeypatch.chdir(run.parent)
    assert given("run").path == Path("run")
    assert given("run", "--workdir", str(run)).path == Path("run")
    assert plan("run", "--steps", "7")["workers"] in (1, 2)
    assert given_recipe(parse(["train", "run"])).seed == 7


def test_a_rehearsal_finds_the_data_of_a_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home/photos/rose").mkdir(parents=True)
    data = replace(find("flowers").data, train="photos")
    Workdir(run).write_recipe(replace(find("flowers"), data=data))
    KnownData(tmp_path / "home").write(Workdir(run))
    monkeypatch.chdir(run)
    assert given(str(run), "--rehearse").recipe.data.path_of("train") == str(tmp_path / "home/photos")
    assert given(str(run)).recipe.data.path_of("train") == "photos", "as it is saved"


def test_settings_of_a_run_by_its_folder_are_changes_to_accept(run: Path) -> None:
    with pytest.raises(ls.WorkdirError, match=r"has another recipe.*\n.*seed: saved 7, given 8"):
        plan(str(run), "--set", "seed=8")
    assert plan(str(run), "--set", "seed=8", "--accept-changes", "--towers", "1")["workers"] == 1


def test_a_run_by_its_folder_has_no_other_workdir(run: Path) -> None:
    for workdir in ("none", "runs/other"):
        with pytest.raises(ls.WorkdirError) as caught:
            given(str(run), "--workdir", workdir)
        assert f"lockstep train {run}/recipe.toml --workdir {workdir}" in caught.value.hint


def test_on_several_hosts_only_the_chiefs_minds_that_the_folder_is_held(run: Path) -> None:
    # Another host cannot see whether a worker of the chief's host is dead.
    words = ["train", str(run), "--hosts", "2", "--chief", "node0:29500", "--host-rank"]
    with Workdir(run).held():
        with pytest.raises(WorkdirError, match="going on"):
            training.check_given(parse([*words, "0"]), given(str(run)))
        training.check_given(parse([*words, "1"]), given(str(run)))


def test_a_folder_that_is_no_run_is_told_with_what_is_there(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (run / "checkpoints").mkdir()
    there = {
        "empty": ("an empty folder", "put a folder of images for each class into it, and give the same command again"),
        "run/checkpoints": ("an empty folder", f"lockstep train {run}"),
        "rum": ("no such file or folder", f"did you mean {run}?"),
        "run/recipe.json": ("no such file or folder", f"lockstep train {run}"),
    }
    for name, (found, hint) in there.items():
        with pytest.raises(ls.RecipeError, match="is neither data, nor a recipe") as caught:
            given(str(tmp_path / name))
        assert (caught.value.given, caught.value.hint) == (found, hint)


@pytest.mark.parametrize("words", [["x" * 256], ["x/" * 2048], ["mnist", "--workdir", "x" * 256]])
def test_names_that_no_system_takes(words: list[str]) -> None:
    with pytest.raises(ls.InputError, match="cannot be the path of a file"):
        given(*words)


def test_a_shipped_recipe_goes_before_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.chdir(tmp_path)
    assert given("mnist").path == Path("runs/mnist")


# The number of towers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_every_shipped_recipe_names_its_towers(name: str) -> None:
    recipe = find(name)
    assert recipe.num_towers
    assert given_recipe(parse(["train", name])).num_towers == recipe.num_towers


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The folder of a run that was begun when the recipe named no towers, on one worker."""
    (tmp_path / "older").mkdir()
    Workdir(tmp_path / "older").write_recipe(replace(find("mnist"), num_towers=1))
    return tmp_path / "older"


def file_of(recipe: Recipe, folder: Path) -> str:
    (folder / "mine.toml").write_text(to_toml(recipe))
    return str(folder / "mine.toml")


def test_a_run_keeps_the_towers_it_began_with(older: Path, tmp_path: Path) -> None:
    unsaid = file_of(replace(find("mnist"), num_towers=None), tmp_path)
    for words in (["mnist"], ["mnist", "--epochs", "9"], ["mnist", "--towers", "1"], [unsaid], [str(older)]):
        argv = [*words, "--workdir", str(older)]
        assert given(*argv).recipe.num_towers == 1
        assert plan(*argv)["workers"] == 1


def test_other_towers_have_to_be_given_and_are_a_change(older: Path, tmp_path: Path) -> None:
    said = file_of(find("mnist"), tmp_path)
    for words in (
        ["mnist", "--towers", "2"],
        ["mnist", "--set", "num_towers=2"],
        [said],
        [str(older), "--towers", "2"],
    ):
        with pytest.raises(ls.WorkdirError, match="num_towers: saved 1, given 2"):
            plan(*words, "--workdir", str(older))


def test_without_a_run_the_towers_are_those_of_the_recipe(tmp_path: Path) -> None:
    unsaid = file_of(replace(find("mnist"), num_towers=None), tmp_path)
    assert given("mnist", "--workdir", str(tmp_path / "new")).recipe.num_towers == 2
    assert given("mnist", "--workdir", "none").recipe.num_towers == 2
    assert given(unsaid, "--workdir", "none").recipe.num_towers is None
    assert plan(unsaid, "--workdir", "none", "--workers", "4")["workers"] == 4


# Traces ---------------------------------------------------------------------------------------------------------------


def test_a_trace_is_a_setting_of_the_recipe(run: Path) -> None:
    assert given("mnist", "--trace", "100:110").recipe.watch.trace == StepRange(100, 110)
    assert given(str(run), "--set", "watch.trace=:3").recipe.watch.trace == StepRange(0, 3)
    assert given("mnist", "--trace", "1:2", "--set", "watch.profile.every=100").recipe.watch.profile.every == 100
    assert 'trace = "100:110"' in to_toml(given("mnist", "--trace", "100:110").recipe)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "ten"], "watch.trace in --set: 'ten' is no range of steps."),
        (["--trace", '1:2"'], 'watch.trace in --set: \'"1:2""\' is no range of steps.'),
        (["--trace", "9:3"], "watch.trace in --set: There is no step in this range."),
        (["--set", "watch.trace=7"], "watch.trace in --set: this value does not fit."),
        (
            ["--trace", "9:12", "--steps", "9"],
            "The run would be over before the steps that are to be recorded.",
        ),
        (["--trace", "9:12", "--workdir", "none"], "Without a workdir nothing is written."),
        (
            ["--set", "watch.profile.every=0"],
            "watch.profile in --set: A profile is made at an interval, or of some steps.",
        ),
    ],
)
def test_a_trace_that_cannot_be_is_refused_before_torch_is_loaded(words: list[str], said: str) -> None:
    with pytest.raises(ls.LockstepError) as caught:
        plan("mnist", *words)
    assert caught.value.what == said
