"""Notebooks, in kernels of their own: the tutorials as they are, and what an interrupt and a lost kernel do."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

from lockstep.owner import processes_by_parent

pytest.importorskip("ipykernel", reason="needs ipykernel")
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
PRELUDE = """
from dataclasses import replace
import own_script
import lockstep as ls
recipe = replace(
    ls.recipes.find("mnist"),
    model=ls.models.LeNet(num_classes=2),
    data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
    optimizer=ls.optim.SGD(0.01),
    batch_size=8,
    num_towers=2,
    device="cpu",
)
"""


class KilledError(Exception):
    """The kernel was killed while a cell ran, which nobody ends then."""


class Kernel:
    """A kernel in a folder, and what a front end does with it."""

    def __init__(self, folder: Path, python_path: str = "") -> None:
        bin_folder = str(Path(sys.executable).parent)  # `!lockstep` is the one that is tested
        environment = {
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), python_path]),
            "IPYTHONDIR": str(folder / ".ipython"),
        }
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=HANG_SECONDS)
        [self.pid] = [self.manager.provisioner.pid]

    def run(self, code: str, heard: Callable[[str], object] = lambda text: None) -> tuple[str, str]:
        """Run a cell; returns all that is shown below it as text, and its error."""
        request, shown, error = self.client.execute(code), "", ""
        while True:
            message = self.client.get_iopub_msg(timeout=HANG_SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            text = content.get("text") or content.get("data", {}).get("text/plain", "")
            if kind in ("stream", "execute_result"):
                shown += text
                heard(text)
            elif kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return shown, error

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def descendants(pid: int) -> set[int]:
    parents, found = processes_by_parent(), {pid}
    while more := {child for each in found for child in parents.get(each, ())} - found:
        found |= more
    return found - {pid}


@pytest.fixture
def open_kernel(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    kernels: list[Kernel] = []

    def start(python_path: str = "") -> Kernel:
        kernels.append(Kernel(tmp_path, python_path))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((TUTORIALS / name).read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    found: list[dict[str, Any]] = notebook["cells"]
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("own_network.ipynb", ["2 towers on 2 workers", "resumed at step 40", "(40, 'end', 0."]),
        pytest.param("own_images.ipynb", ["held out", "raccoon: ", "cells: "], marks=pytest.mark.slow),
    ],
)
def test_tutorials_run_as_they_are(
    name: str, shown: list[str], tmp_path: Path, open_kernel: Callable[..., Kernel]
) -> None:
    (tmp_path / "data").symlink_to(ROOT / "data")
    kernel, text = open_kernel(), ""
    for cell in cells(name):
        if cell["cell_type"] == "code":
            said, error = kernel.run("".join(cell["source"]))
            assert not error, said
            text += said
    for each in shown:
        assert each in text, text


def test_tutorials_are_stripped() -> None:
    for path in TUTORIALS.glob("*.ipynb"):
        for cell in cells(path.name):
            assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None), path


@pytest.mark.slow
@pytest.mark.process
def test_an_interrupt_saves_the_cell_goes_on_and_a_kernel_that_is_killed_leaves_no_process(
    tmp_path: Path, open_kernel: Callable[..., Kernel]
) -> None:
    kernel = open_kernel(str(ROOT / "tests" / "runs"))
    assert kernel.run(PRELUDE) == ("", "")
    told: list[str] = []

    def once(act: Callable[[], object]) -> Callable[[str], None]:
        def hear(text: str) -> None:
            if " of 100000 | loss" in text and not told:
                told.append(text)
                act()

        return hear

    for how in ("workers=2", "workers=1", "workers=None"):
        told.clear()
        cell = f"""
r = ls.run(replace(recipe, end=ls.Steps(STEPS)), {how[-4:]!r}, reader=own_script.stripes, {how})
print(r.reason, r.step)
"""
        shown, error = kernel.run(cell.replace("STEPS", "100000"), once(kernel.manager.interrupt_kernel))
        assert not error, shown
        reason, step = shown.split()[-2:]
        assert reason == "stopped"
        assert not descendants(kernel.pid), "the workers are gone"
        shown, error = kernel.run(cell.replace("STEPS", str(int(step) + 2)))
        assert not error, shown
        assert f"resumed at step {step}, " in shown
        assert shown.split()[-2:] == ["end", str(int(step) + 2)]
    told.clear()
    left: set[int] = set()

    def kill() -> None:
        left.update(descendants(kernel.pid))
        os.kill(kernel.pid, signal.SIGKILL)
        raise KilledError

    with pytest.raises(KilledError):
        kernel.run(cell.replace("STEPS", "100000").replace("workers=None", "workers=2"), once(kill))
    assert len(left) >= 3, "two workers and the process that forks them"
    deadline = time.monotonic() + HANG_SECONDS
    while left & {pid for pids in processes_by_parent().values() for pid in pids}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
