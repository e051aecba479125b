"""Running an example as a user does, and reading what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

ROOT = Path(__file__).parent.parent.parent
ALONE: tuple[str, ...] = ()
ON_TWO_WORKERS = ("-m", "lockstep", "run", "--workers", "2")
UNDER_TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.05"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
)


class Examples:
    """The scripts of `examples/`, in processes of their own, one thread a worker."""

    alone, on_two_workers, under_torchrun = ALONE, ON_TWO_WORKERS, UNDER_TORCHRUN
    folder = ROOT / "examples"

    def start(self, script: str, launcher: Sequence[str], workdir: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, str(self.folder / script), "--workdir", str(workdir), *options]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )

    def run(self, script: str, launcher: Sequence[str], workdir: Path, *options: str) -> list[str]:
        """The lines that the example has printed, once it has ended well."""
        with self.start(script, launcher, workdir, *options) as process:
            said = self.end(process)
        assert process.returncode == 0, said
        return said.splitlines()

    def end(self, process: subprocess.Popen[str]) -> str:
        """What the process says until its end; a launcher that has to be told to end takes its workers along."""
        try:
            return process.communicate(timeout=HANG_SECONDS)[0]
        finally:
            if process.poll() is None:
                process.terminate()

    def checkpoint(self, workdir: Path, step: int) -> dict[str, bytes]:
        """Every byte of a checkpoint but those of its manifest, which holds the time of saving."""
        folder = workdir / "checkpoints" / f"step-{step:08d}"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.fixture(scope="session")
def examples() -> Examples:
    return Examples()
