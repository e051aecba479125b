"""The commands of the documents, of `deploy/` and of the help are run: planned, where they would start processes.

What a command reads is made by hand in a folder of its own, under the names that the documents use.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.cli import chaos
from lockstep.cli import run as cli_run
from lockstep.cli.main import main, parse, parser
from lockstep.cli.training import choose_workers, plan_training, train_in_worker
from lockstep.errors import InputError
from lockstep.recipes.toml import to_toml
from tests.saved_runs import recipe_of_photos, saved

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "deploy" / "slurm.sh",
    ROOT / "deploy" / "kubernetes.yaml",
]
IS_FORM = re.compile(r"\b[A-Z][A-Z_]{2,}\b(?![=/.\w])|\.\.\.|\[")
"""In a command that shows a form (`lockstep evaluate RUN`) and cannot be run as it stands."""

PARSED_ALONE = {
    "benchmark": "it measures for seconds: tests/cli/test_benchmark.py",
    "convert": "archives of ImageNet and others, which the pages only name: tests/cli/test_convert.py",
    "import": "files of TensorFlow and configs that the pages only name: tests/cli/test_import_checkpoint.py",
    "show": "shards and photos, which the pages only name: tests/cli/test_show.py",
}
"""Commands of which the arguments alone are checked here, and why."""
PARSED_TRAINING = {
    "shards/train-": "shards of ImageNet: tests/runs/test_run_photos.py trains by such",
    "warm_start.path": "weights that are to be downloaded, or come from TensorFlow",
    "--fork-from": "a checkpoint of step 1000",
    "detector.toml": "a recipe that the reader imports",
    "ssdlite.toml": "a recipe that the reader imports",
    "misspelt.toml": "a recipe with a mistake, which the page shows",
}
"""Words in commands that train of which the arguments alone are checked here, and why."""
PARSED_WITH_A_RUN = {
    "--best": "a run that was scored while it trained: tests/cli/test_cli_evaluate.py",
    "--follow": "it waits for checkpoints: tests/cli/test_cli_evaluate.py",
    "--set evaluate.detection": "a trained detector: tests/cli/test_cli_evaluate_detector.py",
    "--data photos/val": "labels as those of the run: tests/cli/test_cli_evaluate_data.py",
    "--split train": "the training data of ImageNet: tests/cli/test_cli_evaluate.py",
    "runs/inception_v3": "the validation data of ImageNet: tests/cli/test_cli_evaluate.py",
    "runs/mine": "data of the reader's own",
    "predict": "photos: tests/cli/test_cli_predict.py",
}
"""Words in commands that read a run of which the arguments alone are checked here, and why."""


def commands() -> list[str]:
    """All commands, as a shell would take them, in fenced and indented blocks, in quotes, and in the help."""
    pages = [(page, page.read_text().replace("\\\n", " ")) for page in PAGES]
    lines = [line for page, text in pages for line in _lines_of_blocks(page, text)]
    quoted = [code for page, text in pages if page.suffix == ".md" for code in re.findall(r"`([^`\n]+ [^`\n]+)`", text)]
    found = [re.split(r"\s{2,}|\s+# | > |: ", line)[0].strip() for line in [*lines, *quoted, *_epilogs()]]
    is_command = re.compile(
        r"(\w+=\S* )*(lockstep|(torchrun|mpirun|srun) .*\blockstep|sbatch .*deploy/slurm.sh) [\w./'-]"
    )
    return sorted({each for each in found if is_command.match(each)})


def _lines_of_blocks(page: Path, text: str) -> Iterator[str]:
    if page.suffix != ".md":
        yield from (line.lstrip("# ") for line in text.splitlines() if line.startswith("#     "))
        return
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language not in ("python", "toml", "text", "yaml"):
            yield from map(str.strip, block.splitlines())
    yield from re.findall(r"^ {4}(\S.*)", text, re.MULTILINE)


def _epilogs() -> Iterator[str]:
    top = parser()
    inner = next(action.choices for action in top._actions if isinstance(action.choices, dict))
    for each in (top, *inner.values()):
        yield from map(str.strip, (each.epilog or "").splitlines())


def words_of(command: str) -> list[str]:
    """The words after `lockstep`; what a launcher of workers or hosts would say stands behind them, as flags."""
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    launcher, text = words[0], " ".join(words)
    if launcher == "sbatch":
        hosts = re.findall(r"--nodes=(\d+)", text)[0]
        given = words[words.index("deploy/slurm.sh") + 1 :]
        return ["train", *given, "--hosts", hosts, "--host-rank", "1", "--chief", "node0:29500"]
    given = words[words.index("lockstep") + 1 :]
    counts = [int(number) for number in re.findall(r"(?:--nproc-per-node|--nnodes|-np) (\d+)", text)]
    return [*given, "--workers", str(int(np.prod(counts)))] if counts else given


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents name: the data of the repository, runs, photos, shards, scripts and recipes."""
    here = tmp_path_factory.mktemp("documents")
    (here / "data").symlink_to(ROOT / "data")
    (here / "examples").symlink_to(ROOT / "examples")
    (here / "runs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        assert train_in_worker(["train", "mnist", "--workdir", "runs/mnist", "--steps", "2", "--device", "cpu"]) == 0
    saved(here / "runs" / "mine", recipe_of_photos(), 7)
    for name in ("mine.py", "my_script.py", "script.py"):
        (here / name).write_text("import lockstep as ls\nls.join()\n")
    picture = Image.new("RGB", (40, 40), (90, 20, 30))
    for split in ("photos/train", "photos/val", "flowers/train", "flowers/val", "flowers5/train", "flowers5/val"):
        for label in "abcde":
            (here / split / label).mkdir(parents=True)
            picture.save(here / split / label / "1.jpg")
    recipe = replace(recipe_of_photos(num_classes=5, train="photos/train"), batch_size=8)
    (here / "mine.toml").write_text(to_toml(recipe))
    return here


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LOCKSTEP_KEY", "a key of sixteen")


def reason_to_parse(command: str) -> str | None:
    """Why the arguments of a command alone are checked here."""
    words = words_of(command)
    if (
        IS_FORM.search(command)
        or (len(words) <= 2 and words[0] in ("import", "convert"))
        or len(words) == 1
        or "--help" in words
    ):
        return "a form, not a command"
    of_kind = PARSED_TRAINING if words[0] == "train" else PARSED_WITH_A_RUN
    return PARSED_ALONE.get(words[0]) or next((why for word, why in of_kind.items() if word in command), None)


def with_own_workdir(words: list[str]) -> list[str]:
    """The words of a command that begins a run with a workdir that nobody else has; as they are where it goes on."""
    if "--workdir" in words:
        position = words.index("--workdir")
        words = [*words[:position], *words[position + 2 :]]
    return words if words[1].startswith("runs/") else [*words, "--workdir", "runs/new"]


def run(words: list[str]) -> int:
    """Run a command; one that would start workers is planned, and a run of MNIST built, too."""
    if words[0] == "chaos":
        return choose_workers(chaos._recipe(parse(words)))
    if words[0] == "run":
        cli_run._check_script(parse(words).script)
        return int(cli_run._plan(words)["workers"])
    if words[0] != "train" or "--print-recipe" in words:
        assert main([*words, "--examples", "500"] if words[0] == "evaluate" else words) == 0
    else:
        words = with_own_workdir(words)
        assert plan_training(words)["workers"] >= 1
        if "mnist" in words and "--hosts" not in words and "--dry-run" not in words:
            assert train_in_worker([word for word in words if word != "--rehearse"] + ["--dry-run"]) == 0
    return 0


@pytest.mark.process
@pytest.mark.parametrize("command", commands())
def test_a_command_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(command)
    if reason_to_parse(command) is None:
        run(words)
    elif "--help" in words or (len(words) <= 2 and not IS_FORM.search(command)):  # a command by its name alone
        with pytest.raises(SystemExit) as leaving:
            main([*words, "--help"])
        assert leaving.value.code == 0
    elif "..." not in command and "[" not in command:
        parse(words)


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [
        "lockstep train mnist --workers 4 --set watch.on_loss=continue",
        "lockstep train mnist --set exchange.exact=true --workers 4",
        "lockstep chaos mnist --workers 4 --set watch.on_loss=continue",
        "torchrun --nproc-per-node 4 -m lockstep train mnist",
        "lockstep train mnist --workdir /shared/mnist --hosts 4 --host-rank 0 --chief node0:29500",
        "sbatch --nodes=4 deploy/slurm.sh mnist --workdir runs/mnist",
    ],
)
def test_a_command_for_more_workers_than_towers_would_fail(command: str) -> None:
    """Commands that the documents had, and that were parsed alone."""
    with pytest.raises(InputError, match=r"Some workers would have no tower to run|fewer towers than hosts"):
        run(words_of(command))


def test_what_is_parsed_alone_is_named_once() -> None:
    """A reason that no command needs any more hides the next one that does."""
    found = commands()
    for words in (PARSED_TRAINING, PARSED_WITH_A_RUN):
        assert [word for word in words if not any(word in command for command in found)] == []


@pytest.mark.parametrize(
    "target", sorted({t for page in PAGES for t in re.findall(r"`?make ([a-z-]+)`", page.read_text())})
)
def test_make_has_the_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
