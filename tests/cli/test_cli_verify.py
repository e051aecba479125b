"""`lockstep verify`: an untouched run is verified, and whatever was changed is named."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tiny_images import image_folder
from worker_processes import HANG_SECONDS

from lockstep.checkpoints.manifest import FileEntry, Manifest
from lockstep.checkpoints.store import Store
from lockstep.cli import train, verify, verifying
from lockstep.errors import InputError, LockstepError, VerificationError, WorkdirError
from lockstep.reporting.chain import CHAIN, ChainFile, read_chain
from lockstep.runs import replay
from lockstep.runs.replay import Replayed, Window
from lockstep.runs.segment import Segment
from lockstep.runs.workdir import Workdir
from lockstep.training.replicas import digest
from lockstep.types import StepReport
from lockstep.workers.rank import leave

STEPS, PHOTOS = 12, 5
CODE = """
from torch import nn

class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, images):
        return self.last(self.norm(self.conv(images)).relu().mean((2, 3)))
"""
TOML = f"""
name = "pixels"
batch_size = 4
num_towers = 2
end = {{kind = "steps", count = {STEPS}}}
device = "cpu"
num_threads = 1
watch = {{metrics = "2 steps", summaries = "0", console = "0"}}
evaluate = {{every = "6 steps"}}
checkpoints = {{every = "4 steps"}}
verify = {{every = 3}}
feed = {{num_processes = 0}}
[model]
kind = "python"
function = "pixels_of_mine:Pixels"
num_classes = 3
[data]
kind = "image_data"
image_size = 16
train = "photos"
validation = "photos"
[data.preprocessing]
kind = "cifarnet"
[optimizer]
kind = "sgd"
lr = {{kind = "cosine", initial = 0.05, steps = {STEPS}}}
momentum = 0.9
"""

Verify = Callable[..., str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its photos and its network."""
    folder = tmp_path_factory.mktemp("verified")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        image_folder(Path("photos"), PHOTOS)
        Path("pixels_of_mine.py").write_text(CODE)
        Path("pixels.toml").write_text(TOML)
        assert train.train_as_worker(["train", "pixels.toml", "--workdir", "run"]) == 0
        leave()
        linked_anew(in_place=True)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder: a run looks there for its data and code."""
    shutil.copytree(made, tmp_path / "copy", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "copy"


@pytest.fixture
def verified(here: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Verify the run in the current folder on this worker; returns what is printed."""

    def run(*flags: str) -> str:
        argv = ["verify", "run", *flags]
        try:
            verify.plan_verify(argv)
            assert verify.verify_as_worker(argv) == 0
        finally:
            leave()
        return capsys.readouterr().out

    return run


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()
    }


def lines_of(name: str) -> list[str]:
    return Path("run", name).read_text().splitlines(keepends=True)


def write_lines(name: str, lines: list[str]) -> None:
    Path("run", name).write_text("".join(lines))


def linked_anew(change: Callable[[dict[str, Any]], object] = lambda facts: None, *, in_place: bool = False) -> None:
    """Change lines of the chain, and make all links anew, as somebody who knows how would.

    Digests come late where the machine is busy: those `in_place` stand as early as they can.
    """
    lines = [line.facts for line in read_chain(Path("run", CHAIN))]
    if in_place:
        positions = list(accumulate((facts.get("position", 0) for facts in lines), max))
        late = [facts.get("at", position) for facts, position in zip(lines, positions, strict=True)]
        ends = ["result" in facts or facts.get("event") == "end" for facts in lines]
        order = sorted(range(len(lines)), key=lambda n: (late[n], ends[n], "digests" in lines[n]))
        lines = [lines[n] for n in order]
    Path("run", CHAIN).unlink()
    file = ChainFile(Path("run", CHAIN), from_position=0)
    for facts in lines:
        change(facts)
        (file.write_event if "event" in facts else file.write)(facts)
    file.close()


# Untouched ------------------------------------------------------------------------------------------------------------


def test_an_untouched_run_is_bit_identical_and_nothing_is_written(verified: Verify) -> None:
    before = snapshot(Path("run"))
    said = verified()
    assert "updates 9 to 12, from the checkpoint of step 8, on 1 worker: bit-identical" in said
    assert "all tensors after step 8, 9, 12" in said
    assert "verdict: bit-identical" in said
    assert "note" not in said
    assert snapshot(Path("run")) == before


@pytest.mark.parametrize(
    ("steps", "done"), [("1..12", "1 to 12"), ("6..7", "5 to 7"), ("5", "5 to 5"), ("12..12", "9 to 12")]
)
def test_a_window_is_made_again_from_the_checkpoint_before_it(verified: Verify, steps: str, done: str) -> None:
    said = verified("--steps", steps)
    assert f"updates {done}, from the checkpoint of step {int(done.split()[0]) - 1}, on 1 worker: bit-identical" in said


def test_the_files_alone(verified: Verify) -> None:
    said = verified("--no-replay")
    assert "no update was made again: --no-replay" in said
    assert "verdict: as written down" in said
    assert "checkpoints: 4, of step 0, 4, 8, 12" in said


def test_a_run_that_was_killed_may_lack_the_last_line_of_metrics(verified: Verify) -> None:
    write_lines("metrics.jsonl", lines_of("metrics.jsonl")[:4])
    write_lines(CHAIN, [*lines_of(CHAIN)[: next(n for n, line in enumerate(lines_of(CHAIN)) if '"step": 9' in line)],
                        '{"step": 9, "posi'])  # fmt: skip
    shutil.rmtree("run/checkpoints/step-00000012")
    Path("run/result.json").unlink()
    assert "verdict: bit-identical" in verified()


def test_digests_of_a_step_that_was_saved_before_them_are_of_the_state_alone(verified: Verify) -> None:
    lines = lines_of(CHAIN)
    [number] = [n for n, line in enumerate(lines) if '"step": 8, ' in line and '"values": ' in line]
    facts = json.loads(lines[number])
    del facts["values"], facts["digests"]["slots"]
    write_lines(CHAIN, [*lines[: number + 1], json.dumps(facts) + "\n", *lines[number + 1 :]])
    linked_anew()
    assert "verdict: bit-identical" in verified()


def test_digests_of_a_version_that_took_each_tensor_alone_and_did_not_tell_their_place(verified: Verify) -> None:
    store = Store(Path("run/checkpoints"))

    def as_of_old(facts: dict[str, Any]) -> None:
        if "digests" in facts:
            checkpoint = store.read(facts["step"]) if facts["step"] in store.steps() else None
            tensors = checkpoint.tensors if checkpoint else {}
            facts["digests"] = {section: {n: digest(t) for n, t in each.items()} for section, each in tensors.items()}
            for name in ("at", "values", "of"):
                facts.pop(name, None)

    linked_anew(as_of_old)
    assert "verdict: bit-identical" in verified()
    flip_and_hash("parameters")
    with pytest.raises(VerificationError, match=r"checkpoint of step 8: parameters '[\w.]+' is not as in the chain"):
        verified("--no-replay")


KILLED = """
import os, signal, sys
from lockstep.cli import train
from lockstep.runs.metrics_logger import MetricsLogger

write_digests = MetricsLogger.write_digests

def killed(logger, step, *args):
    if step < 8 or sys.argv[1] == "after its line":
        write_digests(logger, step, *args)
    if step == 8:
        os.kill(os.getpid(), signal.SIGKILL)

MetricsLogger.write_digests = killed
train.train_as_worker(["train", "pixels.toml", "--workdir", "run"])
"""


@pytest.mark.process
@pytest.mark.parametrize("when", ["before its line", "after its line"])
def test_a_kill_between_a_checkpoint_and_its_line_is_no_fault(verified: Verify, here: Path, when: str) -> None:
    shutil.rmtree("run")
    done = subprocess.run([sys.executable, "-c", KILLED, when], timeout=HANG_SECONDS, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    steps = [line.facts["step"] for line in read_chain(Path("run", CHAIN)) if "digests" in line.facts]
    assert (8 in steps, Store(Path("run/checkpoints")).steps()) == (when == "after its line", [0, 4])
    assert "verdict: as written down" in verified("--no-replay")
    sys.modules.pop("pixels_of_mine", None)
    assert train.train_as_worker(["train", "pixels.toml", "--workdir", "run"]) == 0
    leave()
    assert "verdict: bit-identical" in verified()


def test_two_checkpoints_are_not_needed(verified: Verify) -> None:
    for step in (0, 4, 8):
        shutil.rmtree(f"run/checkpoints/step-{step:08d}")
    assert "no update was made again: no update follows a checkpoint that is kept" in verified()


# Changed --------------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int = -9, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def flip_and_hash(section: str) -> None:
    """Flip a bit of a checkpoint, and have its manifest say that it was so from the start."""
    flip(Path(f"run/checkpoints/step-00000008/{section}.safetensors"))
    reseal(Path("run/checkpoints/step-00000008"))


def reseal(folder: Path, **scores: float) -> None:
    """Have the manifest of a checkpoint say that its files, and further scores, were so from the start."""
    manifest = Manifest.read(folder)
    entries = [
        FileEntry(each.name, (folder / each.name).stat().st_size, sha256((folder / each.name).read_bytes()).hexdigest())
        for each in manifest.files
    ]
    named = {f"validation/{name}": score for name, score in scores.items()}
    resealed = replace(manifest, files=tuple(entries), scores={**manifest.scores, **named})
    (folder / "manifest.json").write_bytes(resealed.encode())


def add_section() -> None:
    """Have a checkpoint hold a copy of its parameters as a section of another name."""
    folder = Path("run/checkpoints/step-00000008")
    shutil.copy(folder / "parameters.safetensors", folder / "added.safetensors")
    manifest = Manifest.read(folder)
    resealed = replace(manifest, files=(FileEntry("added.safetensors", 0, ""), *manifest.files))
    (folder / "manifest.json").write_bytes(resealed.encode())
    reseal(folder)


def skip_examples() -> None:
    """Have a checkpoint leave examples out of the stream."""
    path = Path("run/checkpoints/step-00000008/values.json")
    values = json.loads(path.read_text())
    values["loader"]["skipped"] = [40]
    path.write_text(json.dumps(values))
    reseal(path.parent)


def edit(name: str, pattern: str, by: str) -> None:
    path = Path("run", name)
    text = path.read_text()
    changed = re.sub(pattern, by, text, count=1)
    assert changed != text
    path.write_text(changed)


def without(name: str, number: int) -> None:
    lines = lines_of(name)
    del lines[number]
    write_lines(name, lines)


def excuse() -> None:
    with Path("run/history.jsonl").open("a") as file:
        file.write('{"event": "resume", "step": 12, "lost_metrics_lines": 99, "from_step": 99}\n')


def swap_photos() -> None:
    """Exchange two examples of different classes."""
    red, blue = Path("photos/red/1.jpg"), Path("photos/blue/2.jpg")
    first, second = red.read_bytes(), blue.read_bytes()
    red.write_bytes(second)
    blue.write_bytes(first)


def recolour() -> None:
    """Change a photo but not its size, which is all that the fingerprint of a folder knows of it."""
    path = Path("photos/red/1.jpg")
    data = path.read_bytes()
    path.write_bytes(Path("photos/blue/1.jpg").read_bytes()[: len(data)].ljust(len(data), b"\0"))


CHANGES: dict[str, tuple[Callable[[], None], str]] = {
    "a bit of a checkpoint": (
        lambda: flip(Path("run/checkpoints/step-00000004/parameters.safetensors")),
        r"checkpoint of step 4: .*parameters.safetensors is damaged",
    ),
    "a bit of the place in the stream": (
        lambda: flip(Path("run/checkpoints/step-00000008/values.json"), 40),
        r"checkpoint of step 8: .*values.json is damaged",
    ),
    "a bit of a manifest": (
        lambda: flip(Path("run/checkpoints/step-00000000/manifest.json"), 30),
        r"checkpoint of step 0: .*manifest.json is damaged",
    ),
    "a bit of a parameter, hashed anew": (
        lambda: flip_and_hash("parameters"),
        r"checkpoint of step 8: parameters '[\w.]+' is not as in the chain",
    ),
    "a bit of a slot, hashed anew": (
        lambda: flip_and_hash("slots"),
        r"checkpoint of step 8: slots '[\w./]+' is not as in the chain",
    ),
    "a section more than was saved": (add_section, r"checkpoint of step 8: added '[\w.]+' .* not as in the chain"),
    "the place in the stream, hashed anew": (
        skip_examples,
        r"checkpoint of step 8: values.json is not as in the chain",
    ),
    "a score of a checkpoint": (
        lambda: reseal(Path("run/checkpoints/step-00000012"), top1=0.99),
        r"checkpoint of step 12: the score validation/top1 in manifest.json is 0.99, and in the chain 0",
    ),
    "a score of a checkpoint that has none": (
        lambda: reseal(Path("run/checkpoints/step-00000004"), top1=0.99),
        r"checkpoint of step 4: the score validation/top1 in manifest.json is 0.99, and in the chain there is none",
    ),
    "a rate in the recipe": (
        lambda: edit("recipe.toml", "initial = 0.05", "initial = 0.06"),
        r"recipe.toml: optimizer.lr.initial is 0.06, and the run was made with 0.05",
    ),
    "a recipe that cannot be read": (
        lambda: edit("recipe.toml", "batch_size = 4", "batch_size = "),
        r"recipe.toml: .*this is not TOML",
    ),
    "a loss in metrics.jsonl": (
        lambda: edit("metrics.jsonl", r'("step": 6[^{]*{"cross_entropy": )\d', r"\g<1>7"),
        r"metrics.jsonl, line 3 \(step 6\): losses.cross_entropy is 7\.\d+, and in the chain",
    ),
    "a score in metrics.jsonl": (
        lambda: edit("metrics.jsonl", r'("scores": {"top1": )0.\d+', r"\g<1>0.99"),
        r"metrics.jsonl, line 4 \(evaluation 'validation', step 6\): scores.top1 is 0.99",
    ),
    "a line of metrics.jsonl": (lambda: without("metrics.jsonl", 1), r"metrics.jsonl lacks the line of step 4"),
    "the last lines of metrics.jsonl": (
        lambda: write_lines("metrics.jsonl", lines_of("metrics.jsonl")[:-2]),
        r"metrics.jsonl lacks the line of step 12, and 1 more",
    ),
    "a line of metrics.jsonl twice": (
        lambda: write_lines("metrics.jsonl", [*lines_of("metrics.jsonl"), lines_of("metrics.jsonl")[0]]),
        r"metrics.jsonl, line 9 \(step 2\): the chain has no such line",
    ),
    "metrics.jsonl": (lambda: Path("run/metrics.jsonl").unlink(), r"metrics.jsonl lacks the line of step 2, and 7"),
    "what is no line of metrics": (
        lambda: edit("metrics.jsonl", '"step": 4', '"step": four'),
        r"metrics.jsonl, line 2 is not a line of metrics",
    ),
    "a line of the chain": (
        lambda: edit(CHAIN, '"refused": false', '"refused": true'),
        r"chain.jsonl, line 3 \(step 1",
    ),
    "a line less in the chain": (lambda: without(CHAIN, 4), r"chain.jsonl, line 5 .*step 4, where step 3 would follow"),
    "the first line of the chain": (lambda: without(CHAIN, 0), r"the line of event 'end', step 12 lacks choices, data"),
    "what is no line of a chain": (lambda: edit(CHAIN, '"position": 20', '"position": x'), r"which is none of a chain"),
    "the end of the chain": (
        lambda: write_lines(CHAIN, lines_of(CHAIN)[:8]),
        r"checkpoint of step \d+: the chain has no digests of it",
    ),
    "the last line of the chain": (lambda: without(CHAIN, -1), r"result.json has a result, and the chain has none"),
    "the end of the run": (
        lambda: write_lines(CHAIN, lines_of(CHAIN)[:-2]),
        r"result.json is of step 12, and the chain has no end there",
    ),
    "a score of the result": (
        lambda: edit("result.json", r'("top1": )0\.\d+', r"\g<1>0.999"),
        r"result.json: evaluations.validation.scores.top1 is 0.999, and in the chain 0",
    ),
    "the reason of the result": (
        lambda: edit("result.json", '"reason": "end"', '"reason": "patience"'),
        r"result.json: reason is 'patience', and in the chain 'end'",
    ),
    "a line of metrics, which a line of the history would excuse": (
        lambda: (without("metrics.jsonl", 1), excuse()),
        r"metrics.jsonl lacks the line of step 4",
    ),
    "a line of the history": (
        lambda: edit("history.jsonl", '"workers": 1', '"workers": 4'),
        r"history.jsonl: the line of event 'start', step 0 was changed or taken out",
    ),
    "a line less in the history": (lambda: without("history.jsonl", 1), r"history.jsonl: the line of event 'end'"),
    "the choices": (lambda: edit("choices.json", '"threads": 1', '"threads": 2'), r"choices.json: threads is 2"),
    "the result": (lambda: edit("result.json", '"step": 12', '"step": 13'), r"result.json is of step 13"),
    "two examples": (swap_photos, r"blue was .*red was .*update 11: losses.cross_entropy is .*its examples: red/1.jpg"),
    "the pixels of an example": (
        recolour,
        r"update 11: losses.cross_entropy is .*its examples: red/1.jpg, green/1.jpg",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_is_named(verified: Verify, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, named = CHANGES[what]
    change()
    with pytest.raises(VerificationError, match="is not what it has written down") as caught:
        verified()
    said = capsys.readouterr().out
    assert "verdict: differs" in said
    assert re.search(named, said.replace("\n", " ")), said
    assert caught.value.exit_code == 1


def test_a_harmless_change_of_the_recipe_is_a_note(verified: Verify) -> None:
    edit("recipe.toml", f"count = {STEPS}", "count = 99")
    assert f"note: recipe.toml: end.count is 99, and the run was made with {STEPS}" in verified()


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_start_that_came_to_nothing_may_have_left_its_recipe(verified: Verify, was_killed: bool) -> None:
    edit("recipe.toml", "momentum = 0.9", "momentum = 0.5")
    if was_killed:
        (lease,) = Path("run").glob(".lease-*")
        edit(lease.name, r'"pid": \d+', '"pid": 1')
    else:
        Workdir(Path("run")).note("failed", step=12, error="a hook")
    assert "note: recipe.toml: optimizer.momentum is 0.5, and the run was made with 0.9" in verified()


def test_a_start_that_came_to_nothing_may_have_left_its_choices(here: Path, verified: Verify) -> None:
    shutil.rmtree("run")
    interrupt("run", ["train", "pixels.toml", "--workdir", "run"])
    assert train.train_as_worker(["train", "pixels.toml", "--workdir", "run", "--threads", "2"]) == 0
    leave()
    said = verified("--no-replay")
    assert "choices.json: as at the start" in said
    edit("choices.json", '"threads": 1', '"threads": 3')
    with pytest.raises(VerificationError, match=r"choices.json: threads is 3, and in the chain 2"):
        verified("--no-replay")


def interrupt(method: str, command: list[str]) -> None:
    """Train up to the first call of a method of its segment."""

    def called(*args: object) -> None:
        raise InterruptedError

    sys.modules.pop("pixels_of_mine", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, method, called)
        with pytest.raises(InterruptedError):
            train.train_as_worker(command)
    leave()


def test_a_fork_that_was_killed_before_its_first_update(here: Path, verified: Verify) -> None:
    Path("run").rename("other")
    command = ["train", "pixels.toml", "--workdir", "run", "--fork-from", "other", "--set", f"end.count={STEPS + 2}"]
    interrupt("_train", command)
    assert train.train_as_worker(command) == 0
    leave()
    assert "evaluation" in lines_of("metrics.jsonl")[0]
    assert "note" not in verified()


def test_a_link_to_a_folder_is_not_followed(verified: Verify) -> None:
    Path("run/checkpoints").rename("aside")
    Path("run/checkpoints").symlink_to(Path("aside").absolute())
    with pytest.raises(WorkdirError, match="links to folders elsewhere, which are not followed") as raised:
        verified("--no-replay")
    assert raised.value.given == "checkpoints"


def test_no_workers(verified: Verify) -> None:
    linked_anew(lambda facts: facts.update(workers=0) if "event" in facts else None)
    with pytest.raises(VerificationError, match="which is none of a chain"):
        verified()


def test_a_chain_that_was_linked_anew_is_found_out_by_making_its_updates_again(
    verified: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(facts: dict[str, Any]) -> None:
        if facts.get("step") == 11 and "losses" in facts:
            facts["losses"]["cross_entropy"] *= 1 + 1e-12

    linked_anew(change)
    with pytest.raises(VerificationError, match=r"update 11: losses.cross_entropy is .* and in the chain"):
        verified("--steps", "9..12")
    assert "verdict: as written down" in verified("--no-replay")
    capsys.readouterr()


def test_the_first_tensor_that_differs_is_named(verified: Verify) -> None:
    def change(facts: dict[str, Any]) -> None:
        if facts.get("step") == 9 and "digests" in facts:
            facts["digests"]["slots"] = dict.fromkeys(facts["digests"]["slots"], "0" * 16)

    linked_anew(change)
    with pytest.raises(VerificationError, match=r"after update 9: slots '[\w./]+' is not as in the chain"):
        verified()


# Another environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "named"), [(1 + 1e-6, ""), (1.1, "update 9: losses.cross_entropy")])
def test_another_environment_explains_small_differences(verified: Verify, factor: float, named: str) -> None:
    def change(facts: dict[str, Any]) -> None:
        if facts.get("step") in (9, 11) and "losses" in facts:  # which metrics.jsonl has not
            facts["losses"]["cross_entropy"] *= factor

    linked_anew(change)
    if named:
        with pytest.raises(VerificationError, match=named):
            verified("--threads", "2", "--steps", "9..11")
        return
    said = verified("--threads", "2", "--steps", "9..11")
    assert "this environment is another one: threads was 1 and is 2" in said
    assert "verdict: equal within what the environment allows" in said
    assert re.search(r"largest relative difference: [\d.e-]+, and up to 0.001 is explained", said)
    with pytest.raises(VerificationError, match="update 9"):
        verified("--threads", "2", "--steps", "9..11", "--tolerance", "1e-9")


def growing(found: Replayed, *distances: float) -> list[bool]:
    return [found.explains(distance) for distance in distances]


def test_what_another_environment_changes_may_grow_from_update_to_update() -> None:
    on_gpu = Replayed(Window(1, 9, 0), 1, {}, ["not all kernels of cuda are deterministic"], 1e-3)
    assert all(growing(on_gpu, 1e-7, 1e-5, 9e-4, 1.1e-3, 4e-3, 2e-3))
    assert on_gpu.largest == 4e-3
    assert growing(on_gpu, 0.05, 0.1, math.inf) == [False, True, False]
    assert growing(Replayed(Window(1, 9, 0), 1, {}, ["threads was 1 and is 2"], 1e-3), 1e-7, 1.1e-3) == [True, False]
    assert not any(growing(Replayed(Window(1, 9, 0), 1, {}, [], 1e-3), 1e-16, 1e-15))


def test_a_stop_of_any_worker_ends_it_without_a_verdict(verified: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replay.steps_without_survival

    def stopped(*args: Any, **kwargs: Any) -> Generator[StepReport, None, None]:
        yield next(made(*args, **kwargs))._replace(stop_requested=True)

    monkeypatch.setattr(replay, "steps_without_survival", stopped)
    monkeypatch.setattr(verifying, "worker_exit_code", lambda worker: 0)  # not 143
    assert verified() == ""


def test_a_rate_is_the_same_on_every_machine(verified: Verify) -> None:
    def change(facts: dict[str, Any]) -> None:
        if facts.get("step") == 11 and "losses" in facts:
            facts["learning_rate"] *= 1 + 1e-9

    linked_anew(change)
    with pytest.raises(VerificationError, match="update 11: learning_rate is"):
        verified("--threads", "2", "--steps", "9..11")


def test_code_that_has_changed_is_named(
    verified: Verify, made: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: (made / "pixels_of_mine.py").write_text(CODE))
    (made / "pixels_of_mine.py").write_text(CODE.replace("self.last(", "self.last(0.5 * 2 * "))
    monkeypatch.delitem(sys.modules, "pixels_of_mine", raising=False)
    assert "this environment is another one: the code of pixels_of_mine:Pixels has changed" in verified()


def made_by(sums: str, workers: int) -> Callable[[dict[str, Any]], None]:
    def change(facts: dict[str, Any]) -> None:
        if "event" in facts:
            facts |= {"sums": sums, "workers": workers}

    return change


def test_sums_whose_order_was_another_may_have_other_bits(verified: Verify) -> None:
    linked_anew(made_by("gloo", 3))
    said = verified("--workers", "1")
    assert "another one: the sums were made by gloo over 3 workers, and are by tree over 1" in said.replace("\n", " ")
    linked_anew(made_by("tree", 3))
    assert "this environment is another one" not in verified("--workers", "1")


def test_updates_by_whose_gradients_came_first_cannot_be_made_again(verified: Verify) -> None:
    linked_anew(made_by("served", 3))
    said = verified()
    assert "no update was made again: These updates depend on whose gradients came first" in said
    assert "verdict: as written down" in said
    with pytest.raises(InputError, match="whose gradients came first"):
        verified("--steps", "9..12")


# Certificates ---------------------------------------------------------------------------------------------------------


def test_a_certificate_is_checked_beside_the_run(verified: Verify) -> None:
    verified("--certificate", "pixels.json", "--steps", "5..8")
    certificate = json.loads(Path("pixels.json").read_text())
    assert certificate["verdict"] == "bit-identical"
    assert certificate["replay"]["steps"] == [5, 8]
    assert certificate["replay"]["tensors_compared_at"] == [4, 6, 8]
    assert certificate["chain"]["head"] == list(read_chain(Path("run", CHAIN)))[-1].link
    assert certificate["code"]["functions"]["pixels_of_mine:Pixels"]
    assert "updates 5 to 8" in verified("--against", "pixels.json")
    assert json.loads(verified("--json", "--no-replay"))["chain"] == certificate["chain"]


def test_a_certificate_of_another_run(verified: Verify) -> None:
    verified("--certificate", "pixels.json", "--no-replay")

    def change(facts: dict[str, Any]) -> None:
        if facts.get("step") == 1 and "losses" in facts:
            facts["gradient_norm"] += 1

    linked_anew(change)
    with pytest.raises(VerificationError, match="the certificate is of another run: link 25 of its chain is"):
        verified("--against", "pixels.json")


def test_nothing_is_certified_that_differs(verified: Verify) -> None:
    without("history.jsonl", 0)
    with pytest.raises(VerificationError):
        verified("--certificate", "pixels.json")
    assert not Path("pixels.json").exists()


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda text: text.replace('"bit-identical"', '"differs"'), "its own hash is another one"),
        (lambda text: "[]", "no certificate of a run"),
        (lambda text: text[:99], "Expecting|Unterminated|delimiter"),
    ],
)
def test_what_is_no_certificate(verified: Verify, change: Callable[[str], str], given: str) -> None:
    verified("--certificate", "pixels.json")
    Path("pixels.json").write_text(change(Path("pixels.json").read_text()))
    with pytest.raises(InputError, match=given):
        verified("--against", "pixels.json")


# Wrong input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--steps", "0..3"], "no such updates"),
        (["--steps", "3..2"], "no such updates"),
        (["--steps", "12..13"], "no such updates"),
        (["--steps", "last"], "names no updates"),
        (["--tolerance", "-1"], "tolerance"),
        (["--certificate", "run/c.json"], "Nothing is written into the folder of a run"),
        (["--certificate", "c.txt"], "ends in .json"),
        (["--against", "missing.json"], "cannot be checked against"),
    ],
)
def test_wrong_flags(verified: Verify, flags: list[str], named: str) -> None:
    with pytest.raises(LockstepError, match=named) as caught:
        verified(*flags)
    assert caught.value.exit_code == 2


def test_a_window_before_the_first_checkpoint_that_is_kept(verified: Verify) -> None:
    for step in (0, 4):
        shutil.rmtree(f"run/checkpoints/step-{step:08d}")
    with pytest.raises(InputError, match="There is no checkpoint before update 3") as caught:
        verified("--steps", "3..10")
    assert "--steps 9..10" in caught.value.hint


def test_a_run_of_an_older_version(verified: Verify) -> None:
    Path("run", CHAIN).unlink()
    with pytest.raises(WorkdirError, match="has no chain, so it cannot be verified"):
        verified()


def test_a_run_that_an_older_version_has_begun(verified: Verify, here: Path) -> None:
    Path("run", CHAIN).unlink()
    assert train.train_as_worker(["train", "run", "--steps", "16"]) == 0
    leave()
    said = verified()
    assert "updates 13 to 16, from the checkpoint of step 12, on 1 worker: bit-identical" in said
    assert "note: checkpoint of step 4: it is older than the chain" in said
    with pytest.raises(InputError, match="no such updates"):
        verified("--steps", "9..12")


def test_a_change_of_the_data_that_was_accepted(verified: Verify) -> None:
    swap_photos()
    assert train.train_as_worker(["train", "run", "--steps", "16", "--accept-data-change"]) == 0
    leave()
    assert "updates 13 to 16, from the checkpoint of step 12, on 1 worker: bit-identical" in verified()
    with pytest.raises(InputError, match="At step 12 the run went on by another recipe, or with other data"):
        verified("--steps", "9..16")


def test_a_folder_without_a_run(verified: Verify) -> None:
    shutil.rmtree("run")
    with pytest.raises(WorkdirError, match="There is no run in run"):
        verified()


def test_a_chain_without_a_line(verified: Verify) -> None:
    Path("run", CHAIN).write_text("")
    with pytest.raises(WorkdirError, match="has no beginning yet"):
        verified()


# Many -----------------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_meanwhile(verified: Verify) -> None:
    write_lines("metrics.jsonl", lines_of("metrics.jsonl")[:3])
    write_lines(CHAIN, lines_of(CHAIN)[:-2])
    Path("run/result.json").unlink()
    with Workdir(Path("run")).held():
        assert "verdict: bit-identical" in verified()
    with pytest.raises(
        VerificationError, match=r"metrics.jsonl lacks the line of evaluation 'validation', step 6, and 4"
    ):
        verified()


def test_code_that_others_could_have_named_is_not_called(verified: Verify) -> None:
    Path("run", CHAIN).chmod(0o666)
    with pytest.raises(InputError, match="pixels_of_mine"):
        verified()
    assert "verdict: bit-identical" in verified("--allow-code")


@pytest.mark.process
def test_several_workers_make_the_updates_of_one(here: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "verify", "run", "--workers", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert "from the checkpoint of step 8, on 2 workers: bit-identical" in ended.stdout
    flip(Path("run/checkpoints/step-00000004/parameters.safetensors"))
    ended = subprocess.run([*command, "--no-replay"], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ended.returncode, "parameters.safetensors is damaged" in ended.stderr) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_each_of_a_hundred_changes_is_named(verified: Verify, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    kind = ("bit", "example", "rate", "metrics", "metrics less", "chain", "chain less", "history")[seed % 8]
    if kind == "bit":
        path = draw.choice(sorted(path for path in Path("run/checkpoints").rglob("*") if path.is_file()))
        flip(path, draw.randrange(path.stat().st_size), draw.randrange(8))
        named = f"checkpoint of step {int(path.parent.name[5:])}"
    elif kind == "example":
        first, second = draw.sample(sorted(Path("photos").rglob("*.jpg")), 2)
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
        named = f"its examples: .*({first.relative_to('photos')}|{second.relative_to('photos')})"
    elif kind == "rate":
        edit("recipe.toml", "initial = 0.05", f"initial = {draw.uniform(0.01, 0.049)}")
        named = "optimizer.lr.initial"
    else:
        name = {"metrics": "metrics.jsonl", "chain": CHAIN, "history": "history.jsonl"}[kind.split()[0]]
        lines = lines_of(name)
        number = draw.randrange(len(lines))
        digits = [match.start() for match in re.finditer(r"(?<=[\d.])\d(?=[\d,}])", lines[number])]
        if kind.endswith("less"):
            del lines[number]
        else:
            place = draw.choice(digits)
            lines[number] = f"{lines[number][:place]}{(int(lines[number][place]) + 1) % 10}{lines[number][place + 1 :]}"
        write_lines(name, lines)
        named = name if name != CHAIN else "chain"
    with pytest.raises(VerificationError):
        verified("--steps", "1..12")
    said = capsys.readouterr().out
    assert re.search(f"differs: .*({named})", said), said
