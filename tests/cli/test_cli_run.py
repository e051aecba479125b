"""`lockstep run` in workers that another launcher has started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import parse
from lockstep.cli.run import COMMAND

SCRIPT = """
import os
import signal

import torch

import lockstep as ls

def losses(model, batch):
    return {"size": model(batch["x"]).square().mean()}

here = ls.join("cpu")
loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 1)}), batch_size=4)
state = ls.TrainState(torch.nn.Linear(1, 1), ls.optim.SGD(lr=0.1))
for report in ls.train_steps(state, losses, loader, ls.Towers(2)):
    if report.step == 2 and here.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
assert report.stop_requested
"""


def run_script(path: str) -> int:
    words = ["run", path]
    return COMMAND.run(parse(words), words)


@pytest.mark.process
def test_a_signal_to_one_worker_is_the_exit_code_of_all(run_workers: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run_workers(run_script, 2, str(tmp_path / "script.py")) == [75, 75]
