"""What `--dry-run` prints: the workers and their part of the stream, and where the state lives."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.cli import train
from lockstep.runs.build import Parts
from lockstep.runs.start import describe_topology
from lockstep.workers.rank import Worker
from tests.thread_workers import thread_workers


def parts_at(position: int) -> Parts:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), frozen=r"^2\.", average=ls.optim.MovingAverage(0.9))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.zeros(24, 3)}), batch_size=6)
    loader.load_state({**loader.state(), "position": position})
    nothing: Any = None
    return Parts(state, loader, ls.Towers(3), nothing, nothing)


def test_workers_of_two_hosts_and_their_state_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    workers = thread_workers(2, num_local_workers=1)

    def describe(worker: Worker) -> list[str]:
        here = replace(worker, host=f"node{worker.rank}")
        return describe_topology(parts_at(12), ls.AllReduce(), here)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(describe, workers)
    assert one == other
    assert one == [
        "3 x 2 examples an update, from step 0, position 12",
        f"exchange: {ls.AllReduce()} over gloo",
        "",
        "host   worker  device  threads  towers  first positions",
        "node0  0       cpu     1        0 to 1  12 to 15",
        "node1  1       cpu     1        2       16 to 17",
        "",
        "state: all of it on the device of each worker, 0.0 MB; the chief saves it",
        "",
        "parameter              shape       dtype    kept beside it",
        "0.weight               4x3         float32  momentum_buffer, average",
        "0.bias                 4           float32  momentum_buffer, average",
        "1.weight               4           float32  momentum_buffer, average",
        "1.bias                 4           float32  momentum_buffer, average",
        "2.weight               1x4         float32  not trained",
        "2.bias                 1           float32  not trained",
        "buffer                 shape       dtype",
        "1.running_mean         4           float32",
        "1.running_var          4           float32",
        "1.num_batches_tracked  one number  int64",
    ]


@pytest.mark.parametrize(
    ("exchange", "towers", "second"), [(ls.Backups(), "one at a time", 14), (ls.Asynchronous(), "all in turn", 18)]
)
def test_the_chief_of_a_served_exchange_computes_no_towers(exchange: Any, towers: str, second: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        lines, *_ = pool.map(lambda worker: describe_topology(parts_at(12), exchange, worker), thread_workers(3))
    assert lines[1] == f"exchange: {exchange}, served by worker 0"
    rows = [re.split(r"  +", line)[-2:] for line in lines[4:7]]
    assert [row[0] for row in rows] == ["serves", towers, towers]
    assert [row[1].split()[0] for row in rows] == ["none", "12", str(second)]


def test_a_run_that_is_tried_dry_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    assert train.train_as_worker(["train", "mnist", "--workdir", str(workdir), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 x 64 examples an update, from step 0, position 0"
    assert lines[1] == f"exchange: {ls.AllReduce()}, of one worker: nothing is sent"
    assert lines[4].split()[-6:] == ["0", "to", "1", "0", "to", "127"]
    assert list(tmp_path.iterdir()) == []


def test_what_would_be_refused_is_refused(tmp_path: Path) -> None:
    words = ["--set", 'towers.batch_norm="sync"', "--set", "exchange.exact=true"]
    with pytest.raises(ls.InputError, match="Synchronised batch norm cannot be exact"):
        train.train_as_worker(["train", "mnist", "--workdir", str(tmp_path / "run"), "--dry-run", *words])
    assert list(tmp_path.iterdir()) == []
