"""The commands of the documents, of `deploy/` and of the help are run, in a folder with small things of all names.

What runs for long is kept short: training ends after two steps, and where processes would start, this one takes their
place. Placeholders of commands that show a form are filled in.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import image_folder
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.store import Store
from lockstep.cli import chaos, evaluate, plan, verify
from lockstep.cli import run as cli_run
from lockstep.cli import train as cli_train
from lockstep.cli.main import main, parse, parser
from lockstep.cli.shared import _innermost
from lockstep.cli.training import choose_workers
from lockstep.doctor import libraries
from lockstep.doctor.libraries import LoadResult
from lockstep.errors import InputError
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import Checkpoints, Evaluate
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml
from lockstep.records.record_files import RecordFiles
from lockstep.records.tfrecord import write_records
from lockstep.types import Interval
from tests.saved_runs import recipe_of_photos
from tests.test_tutorials import files_of

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
PAGES = [
    *ROOT.glob("*.md"),
    *(each for each in (ROOT / "docs").rglob("*.md") if each.parent.name != "generated"),
    ROOT / "deploy" / "slurm.sh",
    ROOT / "deploy" / "kubernetes.yaml",
]
STAND_INS = {
    "FILES|FOLDER": "photos",
    "FILE|FOLDER ...": "photos a.jpg",
    "--to FILE [--raw-images [HEIGHTxWIDTH]] [--batch] [--force]": "--to model.pt2 --force",
    "--to RECIPE": "--to new.toml",
    "pipeline FILE": "pipeline old.config",
    "train ...": "train mnist",
    "RUN[@STEP]": "runs/mnist@2",
    "RUN_FOLDER": "runs/mnist",
    "RUN": "runs/mnist",
    "--steps 101..200": "--steps 1..2",
    "model.num_classes=2 --set 'evaluate.top=[1]' --set data.train=photos": "data.train=photos/train",
    "CONFIG": "old.config",
    "RECIPE": "mnist",
    "NAME": "mnist",
    "DIR": "out",
}
"""What is run in place of what a form, such as `lockstep evaluate RUN`, leaves open."""
REFUSED = ("lockstep train misspelt.toml",)
"""Commands of which the page says that they are refused."""
SHORTENED = {
    "benchmark input": ["--seconds", "1"],
    "benchmark batch-size": ["--seconds", "1"],
    "benchmark settings": ["--seconds", "1", "--set", "num_threads=1"],
    "doctor ": ["--seconds", "0"],
    "doctor mnist": ["--workdir", "runs/new"],
    "convert imagenet ": ["--train-shards", "2", "--validation-shards", "1"],
}
"""How commands begin that are run with these flags behind them."""
DRY = {
    "train inception_v3": "a net of 24 million parameters and 256 images",
    "train detector.toml": "the detector of blood cells, whose run here was trained from the same weights",
    "--epochs 8": "eight passes over MNIST",
    "--trace": "a hundred steps before it begins",
    "--workers": "several processes, which the slow test of this module starts",
}
"""Words in commands that train which are run to their first step, and why."""
PLANNED = {
    "inception_v3.ckpt": "the weights of a whole Inception-v3, which are to be downloaded",
    "--hosts": "several hosts: tests/hosts",
}
"""Words in commands that train which are planned alone, and why."""


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
    for form, stand_in in STAND_INS.items():
        command = re.sub(rf"(?<![\w=]){re.escape(form)}(?!\w)", stand_in, command)
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


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other beside other tests take many times as long."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda number: None)
        yield


@pytest.fixture(scope="module")
def world(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents name: data, photos, shards, files of TensorFlow, scripts, recipes and runs."""
    here = tmp_path_factory.mktemp("documents") / "world"
    here.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        _link_files_of_the_repository()
        _make_images()
        _make_recipes()
        _make_runs()
    return here


def _link_files_of_the_repository() -> None:
    config = FIXTURES / "odapi_configs" / "ssdlite_mobilenet_v3_small_320x320_coco.config"
    tensorflow = FIXTURES / "inception" / "model.ckpt-6"
    squeezenet = ROOT / "data" / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"
    links = {
        "data": ROOT / "data",
        "examples": ROOT / "examples",
        "val2017": FIXTURES / "coco" / "images",
        "annotations/instances_val2017.json": FIXTURES / "coco" / "instances.json",
        squeezenet.name: squeezenet,
        "squeezenet1_1.safetensors": squeezenet,
        config.name: config,
        "old.config": config,
        "ssd.config": FIXTURES / "odapi_configs" / "ssd_mobilenet_v1_coco.config",
    }
    for name in ("net.ckpt", "inception_v3.ckpt"):
        for ending in (".index", ".data-00000-of-00001"):
            links[name + ending] = tensorflow.with_name(tensorflow.name + ending)
    for name, target in links.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(target)
    (image, *_), boxes = (
        json.loads(links["annotations/instances_val2017.json"].read_text())[key] for key in ("images", "annotations")
    )
    box = next(each for each in boxes if each["image_id"] == image["id"])
    detection = {name: box[name] for name in ("image_id", "category_id", "bbox")}
    Path("results.json").write_text(json.dumps([detection | {"score": 0.9}]))


def _make_images() -> None:
    """Make photos of five classes in folders and shards, and what the archives of ImageNet have in them."""
    for split in ("photos/train", "photos/val", "flowers/train", "flowers/val", "flowers5/train", "flowers5/val"):
        image_folder(Path(split), 2, "abcde")
    shutil.copy("photos/val/a/0.jpg", "a.jpg")
    for name in ("b.png", "seven.png"):
        shutil.copy(FIXTURES / "images" / "hopper.png", name)
    assert main(["convert", "images", "photos", "--to", "shards", "--processes", "1"]) == 0
    few = RecordFiles("shards/train-*")
    records = [few.read(index) for index in range(len(few))]
    for shard in Path("shards").glob("train-*"):
        write_records(shard, records * 500)  # so that 10,000 of them can be scored

    synsets = ("n02092002", "n02119247")
    for split in ("train", "validation"):
        image_folder(Path("imagenet") / split, 1, synsets)
    image_folder(Path("ILSVRC2012_img_val"), 1, ("all",))
    for photo in [*Path("imagenet").glob("*/*/*.jpg"), *Path("ILSVRC2012_img_val").glob("*/*.jpg")]:
        photo.rename(photo.parent / f"{photo.parent.name}_1.JPEG")
    for synset in synsets:
        Path("annotations", synset).mkdir()
        Path("annotations", synset, f"{synset}_1.xml").write_text(
            f"<annotation><filename>{synset}_1</filename><size><width>32</width><height>24</height></size>"
            f"<object><name>{synset}</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>20</ymax></bndbox>"
            "</object></annotation>"
        )
    Path("ILSVRC2012_img_val/all/all_1.JPEG").rename("ILSVRC2012_img_val/ILSVRC2012_val_00000001.JPEG")
    Path("ILSVRC2012_img_val/all").rmdir()
    Path("imagenet_lsvrc_2015_synsets.txt").write_text("".join(f"{each}\n" for each in synsets))
    Path("imagenet_2012_validation_synset_labels.txt").write_text(f"{synsets[0]}\n")
    Path("imagenet_metadata.txt").write_text("".join(f"{each}\tdog {each}\n" for each in synsets))
    assert main(["convert", "boxes", "annotations", "--to", "boxes.csv"]) == 0
    assert main(["convert", "images", "flowers5", "--to", "flower-shards", "--processes", "1"]) == 0


def _make_recipes() -> None:
    for name, text in files_of(ROOT / "docs" / "tutorials" / "own-network.md").items():
        Path(name).write_text(text)
    for name in ("mine.py", "my_script.py", "script.py"):
        Path(name).write_text("import lockstep as ls\nls.join()\n")
    recipe = replace(recipe_of_photos(num_classes=5, train="photos/train"), batch_size=8)
    Path("mine.toml").write_text(to_toml(recipe))
    Path("misspelt.toml").write_text(to_toml(recipe).replace("batch_size", "bach_size"))
    Path("detector.toml").write_text(to_toml(replace(find("bccd"), batch_size=2)))
    assert main(["import", "pipeline", "old.config", "--to", "ssdlite.toml"]) == 0


def _make_runs() -> None:
    """Make a run of MNIST, one of photos under three names, and one of a detector, which are scored as they train."""
    few = ["--device", "cpu", "--steps", "2", "--set", "evaluate.examples=4"]
    scored = ["--set", "evaluate.every=2 steps", "--set", "checkpoints.retention.best=validation/top1"]
    assert cli_train.train_as_worker(["train", "mnist", *few, *scored]) == 0
    _save_also(Path("runs/mnist"), 1000)
    assert cli_train.train_as_worker(["train", "bccd", *few, "--set", "batch_size=2"]) == 0
    recipe = replace(
        recipe_of_photos(),
        model=ls.models.LeNet(num_classes=6, channels=3),
        data=ImageData(train="shards/train-*", validation="shards/validation-*", image_size=28),
        batch_size=100,
        average=ls.optim.MovingAverage(0.9),
        end=ls.Steps(2),
        evaluate=Evaluate(every=Interval(2, "steps")),
        checkpoints=Checkpoints(retention=Retention(best="validation/top1")),
    )
    Path("photos.toml").write_text(to_toml(recipe))
    assert cli_train.train_as_worker(["train", "photos.toml", "--workdir", "runs/inception_v3", "--device", "cpu"]) == 0
    for name in ("flowers", "mine", "photos"):
        shutil.copytree("runs/inception_v3", Path("runs") / name)
    shutil.copytree("runs/bccd", "runs/bccd_data")
    _save_also(Path("runs/flowers"), 500)


def _save_also(run: Path, step: int) -> None:
    """Save the last checkpoint of a run once more, as that of a later step."""
    store = Store(run / "checkpoints")
    newest = store.read()
    assert newest
    states = {"": {**newest.values["states"][""], "step": step}}
    store.write(step, newest.tensors, {**newest.values, "states": states})


@pytest.fixture(autouse=True)
def folder(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that world, which the test may write into."""
    shutil.copytree(world, tmp_path, symlinks=True, dirs_exist_ok=True, copy_function=_link_or_copy)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_KEY", "a key of sixteen")
    return tmp_path


def _link_or_copy(source: str, target: str) -> None:
    """Link a file; but lines are added to these in their place."""
    (shutil.copyfile if source.endswith(".jsonl") else os.link)(source, target)


def run(words: list[str]) -> None:
    """Run a command as it stands, with flags behind it that keep it short."""
    if "--to" in words:
        _remove(Path(words[words.index("--to") + 1]))
    if words[0] == "chaos":
        assert choose_workers(chaos._recipe(parse(words))) >= 1
    elif words[0] == "plan":
        assert plan._request(parse(words)).seatings(1)
    elif words[0] == "doctor":
        with pytest.MonkeyPatch.context() as patch:  # a process of its own, which loads torch again
            patch.setattr(libraries, "load_apart", lambda modules: dict.fromkeys(modules, LoadResult("", 0.0)))
            assert main(words) == 0
    elif words[0] == "run":
        cli_run._check_script(parse(words).script)
        assert cli_run._plan(words)["workers"] >= 1
    elif words[0] == "train" and "--print-recipe" not in words:
        train(words)
    elif words[0] == "evaluate":
        assert evaluate.plan_evaluate(words)["workers"] >= 1
        assert evaluate.evaluate_as_worker(words) == 0
    elif words[0] == "verify":
        _verify(words)
    else:
        assert main(words) == 0


def _verify(words: list[str]) -> None:
    """Verify a run without the checkpoint that was made by hand; a certificate is made before it is needed."""
    shutil.rmtree("runs/mnist/checkpoints/step-00001000")
    if "--against" in words:
        assert verify.verify_as_worker(["verify", "runs/mnist", "--no-replay", "--certificate", words[-1]]) == 0
    assert verify.plan_verify(words)["workers"] >= 1
    assert verify.verify_as_worker(words) == 0


def _remove(made: Path) -> None:
    """Remove what a command makes, and others of the documents read."""
    if made.is_dir():
        shutil.rmtree(made)
    made.unlink(missing_ok=True)


def train(words: list[str]) -> None:
    """Plan a run, and train its first step in this process, as far as the tables above let it come."""
    words = bounded(words)
    assert cli_train.plan_train(words)["workers"] >= 1
    if _is_among(PLANNED, words):
        return
    dry = ["--dry-run"] if _is_among(DRY, words) and "--dry-run" not in words else []
    assert cli_train.train_as_worker([*words, *dry]) == 0


def bounded(words: list[str]) -> list[str]:
    """The words of a command that trains; those that begin a run do so in a workdir of its own, for a step."""
    if words[1].startswith("runs/"):
        return words
    steps = words[words.index("--trace") + 1].partition(":")[2] if "--trace" in words else "1"
    end = [] if "--dry-run" in words or "--rehearse" in words else ["--steps", steps]
    return [*words, "--workdir", "runs/new", *end, "--set", "evaluate.examples=4"]


def _is_among(table: Iterable[str], words: list[str]) -> bool:
    return any(each in " ".join(words) for each in table)


def cases() -> Iterator[Any]:
    """Each command once; one with the flags and settings of another is slow: it differs in a path or a value."""
    forms = set()
    for words, command in {tuple(words_of(each)): each for each in commands()}.items():
        flags = {word.partition("=")[0] for word in words if word.startswith("--") or "=" in word}
        name = words[: 2 if words[0] in ("benchmark", "convert", "import") else 1]
        form = (name, len(words), frozenset(flags), command in REFUSED)
        is_slow = "--examples 10000" in command or form in forms
        yield pytest.param(command, marks=[pytest.mark.slow] * is_slow)
        forms.add(form)


@pytest.mark.process
@pytest.mark.parametrize("command", [*cases()])
def test_a_command_runs(command: str) -> None:
    words = words_of(command)
    if command in REFUSED:
        assert main(words) == 2
    elif "--help" in words or len(words) == 1 or (len(words) == 2 and words[0] in ("benchmark", "convert", "import")):
        with pytest.raises(SystemExit) as leaving:  # a command by its name alone
            main([*words, "--help"])
        assert leaving.value.code == 0
    else:
        shortened = [flags for start, flags in SHORTENED.items() if " ".join(words).startswith(start)]
        run([*words, *itertools.chain(*shortened)])


OBJECTS: dict[str, dict[str, Any]] = {
    "benchmark input photos/train --batch-size 2 --augment lenet --seconds 0.1 --json": {"what": "photos/train"},
    "convert images photos --to new --json": {"to": "new", "shards": 4, "records": 20},
    "doctor --seconds 0 --workdir none --json": {"can_train": True},
    "evaluate runs/mine --json": {"step": 2, "weights": "raw", "split": "validation"},
    "explain optimizer.lr --json": {"field": "optimizer.lr"},
    "export runs/flowers@2 --to model.safetensors --json": {"step": 2, "weights": "raw"},
    "import checkpoint net.ckpt --to net.safetensors --json": {"file": "net.safetensors"},
    "import pipeline old.config --to new.toml --json": {"file": "new.toml", "refused": None},
    "inspect runs/mine --json": {"problems": []},
    "inspect shards --json": {"kind": "records", "problems": []},
    "predict runs/flowers@2 photos/val/a --json": {"step": 2, "skipped": []},
    "recipes --json": {},
    "report runs/mine --json": {},
    "runs runs --where batch_size=100 --json": {},
    "show photos/train --to page.html --json": {"file": "page.html", "examples": 16, "problems": 0},
    "status runs/mine --json": {},
    "verify runs/mnist --no-replay --json": {},
}
"""What commands tell programs; of `chaos` and `plan`, which start processes, their own tests read it."""


@pytest.mark.process
@pytest.mark.parametrize(("command", "told"), OBJECTS.items())
def test_what_reports_writes_one_json_object_and_nothing_else(
    command: str, told: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(command.split())
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    assert {name: found.get(name) for name in told} == told, found
    if (listed := command.split()[0]) in ("recipes", "runs", "status", "report"):
        assert found["recipes" if listed == "recipes" else "runs"]


def test_all_commands_that_write_json_are_tried() -> None:
    inner = next(action.choices for action in parser()._actions if isinstance(action.choices, dict))
    writes = {
        name
        for name, each in inner.items()
        if any("--json" in leaf._option_string_actions for leaf in _innermost(each))
    }
    assert writes == {command.split()[0] for command in OBJECTS} | {"chaos", "plan"}
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert writes == set(re.findall(r"`(\w+)`", page.partition("These have it:")[2].partition(".")[0]))


def starts_workers(command: str) -> bool:
    """Whether a command starts several processes on one host, and needs no launcher that few machines have."""
    of_script = command.startswith("lockstep run ") and ".py" in command
    trains = command.startswith(("lockstep train ", "torchrun --nproc-per-node "))
    return of_script or (trains and "--workers" in words_of(command) and "--dry-run" not in command)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("command", [each for each in commands() if starts_workers(each)])
def test_a_command_starts_its_workers(command: str) -> None:
    launcher, *words = shlex.split(command)
    module = "torch.distributed.run" if launcher == "torchrun" else "lockstep"
    if words[0] != "run":
        words = bounded(words)
    elif words[-1] == "examples/own_model.py":
        words += ["--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", module, *words]
    done = subprocess.run(start, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    assert (
        words[0] == "run" or json.loads(Path("runs/new/history.jsonl").read_text().splitlines()[-1])["event"] == "end"
    )


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [
        "lockstep train mnist --workers 4 --set watch.on_failure=continue",
        "lockstep train mnist --set exchange.exact=true --workers 4",
        "lockstep chaos mnist --workers 4 --set watch.on_failure=continue",
        "torchrun --nproc-per-node 4 -m lockstep train mnist",
        "lockstep train mnist --workdir /shared/mnist --hosts 4 --host-rank 0 --chief node0:29500",
        "sbatch --nodes=4 deploy/slurm.sh mnist --workdir runs/mnist",
    ],
)
def test_a_command_for_more_workers_than_towers_would_fail(command: str) -> None:
    """Commands that the documents had, and that were parsed alone."""
    with pytest.raises(InputError, match=r"Some workers would have no tower to run|fewer towers than hosts"):
        run(words_of(command))


def test_what_is_not_run_as_it_stands_is_named_once() -> None:
    """A reason that no command needs any more hides the next one that does."""
    found, given = commands(), [" ".join(words_of(command)) for command in commands()]
    for words, texts in ((STAND_INS, found), (REFUSED, found), (SHORTENED, given), (DRY, given), (PLANNED, given)):
        assert [word for word in words if not any(word in text for text in texts)] == []


@pytest.mark.parametrize(
    "target", sorted({t for page in PAGES for t in re.findall(r"`?make ([a-z-]+)`", page.read_text())})
)
def test_make_has_the_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
