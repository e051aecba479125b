"""A run beside another user of the same machine, who can list nothing of it, write nothing, and stop nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")]

NOBODY = 65534
RUN = """
import os

import torch

import lockstep as ls

here = ls.join()
torch.manual_seed(0)


class Numbers:
    def __len__(self):
        return 64

    def read(self, index):
        return {"x": torch.full((3,), index / 64)}


state = ls.TrainState(torch.nn.Linear(3, 1), ls.optim.SGD(lr=0.1))
loader = ls.data.Loader(Numbers(), batch_size=4)


def squares(model, batch):
    return {"squares": model(batch["x"]).square().mean()}


for report in ls.train_steps(state, squares, loader, ls.Towers(2)):
    if report.step == 3:
        os.write(1, b"%d\\n" % os.getpid())
"""

# Tries everything it can as another user; prints what has succeeded.
STRANGER = """
import os
import signal
import socket
import sys
from pathlib import Path

os.setgid(65534)
os.setuid(65534)
pids = list(map(int, sys.argv[1:]))
for pid in pids:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGSTOP, 0):
        try:
            os.kill(pid, number)
            print("signalled", pid, number)
        except PermissionError:
            pass
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            print("listed", pid, descriptor)
    except PermissionError:
        pass
    for descriptor in range(64):
        try:
            print("opened", os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR))
        except OSError:
            pass
for segment in Path("/dev/shm").iterdir():
    if os.access(segment, os.R_OK):
        print("shared memory", segment)
"""


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in descendants(int(child)))]


def sockets(pids: list[int]) -> set[str]:
    """The inodes of the sockets that the processes hold."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    targets = [os.readlink(link) for link in links if link.exists() or link.is_symlink()]  # noqa: PTH115
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


def reachable(inodes: set[str]) -> list[str]:
    """Which of the sockets have an address, or listen: those that another process can reach."""
    found = []
    for table, inode_column in (("tcp", 9), ("tcp6", 9), ("udp", 9), ("udp6", 9)):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        found += [f"{table} {row[1]}" for row in rows if row[inode_column] in inodes]
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return found + [f"unix {row[7:]}" for row in rows if row[6] in inodes and len(row) > 7]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", "--workers", "2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] != ["", ""], process.communicate()[1]
    yield process
    process.kill()
    process.communicate()


def test_another_user_can_list_set_and_stop_nothing(run: subprocess.Popen[str]) -> None:
    pids = descendants(run.pid)
    assert len(pids) >= 4  # the launcher, its fork server and two workers
    assert reachable(sockets(pids)) == []
    stranger = subprocess.run(
        [sys.executable, "-S", "-c", STRANGER, *map(str, pids)], capture_output=True, text=True, check=False
    )
    assert (stranger.stdout, stranger.stderr, stranger.returncode) == ("", "", 0)
    run.send_signal(signal.SIGINT)
    assert run.wait(HANG_SECONDS) == 130
