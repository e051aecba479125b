"""Other systems than Linux: macOS trains with one worker, Windows is refused.

None is here. What Python has on Linux alone is taken away in a process of its own, which says it is the other system.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIKE_MACOS = """
import builtins, ctypes, fcntl, io, os, resource, select, signal, socket, sys, time
import torch, numpy, tensorboard

LACKING = {
    os: "sched_getaffinity sched_setaffinity memfd_create pidfd_open eventfd posix_fadvise posix_fallocate fdatasync"
    " pipe2 copy_file_range splice setns unshare getrandom MFD_CLOEXEC MFD_ALLOW_SEALING O_DIRECT O_TMPFILE O_PATH"
    " O_NOATIME getresuid sched_setscheduler",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_SEAL F_SEAL_GROW F_SEAL_SHRINK F_SEAL_WRITE F_OFD_SETLK F_OFD_GETLK"
    " F_OFD_SETLKW F_SETPIPE_SZ",
    select: "epoll EPOLLIN EPOLLOUT EPOLLHUP EPOLLERR EPOLLRDHUP EPOLLET EPOLLONESHOT",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGPOLL SIGSTKFLT SIGCLD",
    socket: "SO_PEERCRED SO_DOMAIN SO_PROTOCOL SO_BINDTODEVICE SO_MARK SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT"
    " TCP_QUICKACK TCP_CORK AF_NETLINK AF_VSOCK MSG_CMSG_CLOEXEC MSG_NOSIGNAL SO_PASSCRED SCM_CREDENTIALS",
    resource: "prlimit RUSAGE_THREAD",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
for module, names in LACKING.items():
    for name in names.split():
        vars(module).pop(name, None)

def guarded(function):
    def call(path=".", *args, **kwargs):
        if str(path).startswith(("/proc", "/dev/shm", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **kwargs)
    return call

builtins.open = io.open = guarded(io.open)
for name in ("stat", "open", "readlink", "listdir", "scandir", "statvfs"):
    setattr(os, name, guarded(getattr(os, name)))
ctypes.CDLL(None).__class__.prctl = property(lambda _: 1 / 0)
sys.platform = "darwin"
"""
COMMANDS = """
import shlex
from lockstep.cli.main import main
for line in sys.argv[1:]:
    sys.stderr.write("$ " + line + "\\n")
    sys.stderr.flush()
    if code := main(shlex.split(line)):
        sys.exit(code)
"""


def run_like_macos(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIKE_MACOS + COMMANDS, *lines]
    (folder / "data").symlink_to(ROOT / "data")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.process
def test_macos_trains_resumes_and_reads_runs_with_one_worker(tmp_path: Path) -> None:
    given = "--towers 2 --workdir run --set batch_size=16 --set evaluate.examples=16 --set end.kind=steps"
    found = run_like_macos(
        tmp_path,
        f"train mnist {given} --set end.count=2",
        f"train mnist {given} --set end.count=4",
        "status run",
        "report run",
        "verify run --device cpu",
        "inspect run",
    )
    assert found.returncode == 0, found.stderr
    assert "2 towers on 1 worker (cpu" in found.stderr
    assert "step 4 of 4" in found.stderr


@pytest.mark.process
def test_macos_refuses_what_needs_linux(tmp_path: Path) -> None:
    found = run_like_macos(tmp_path, "train mnist --workers 2 --workdir run")
    assert found.returncode == 2
    assert "Several workers need Linux" in found.stderr


WINDOWS = "Lockstep does not run on Windows: use Linux, for example in WSL 2, or macOS with one worker"


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "ends"),
    [
        ("sys.argv = ['C:\\\\Scripts\\\\lockstep.exe']; from lockstep.__main__ import run_command", WINDOWS),
        ("import runpy; sys.argv = ['-m']; runpy.run_module('lockstep')", WINDOWS),
        ("import lockstep.optim", f"ImportError: {WINDOWS}"),
    ],
)
def test_windows_is_refused_before_anything_is_imported(script: str, ends: str) -> None:
    # Python 3.13's own tempfile cannot be imported where the platform is said to be another.
    hidden = (
        "import sys, tempfile; sys.modules.update(dict.fromkeys(('fcntl', 'torch', 'numpy', 'resource', 'select')))"
    )
    command = [sys.executable, "-c", f"{hidden}; sys.platform = 'win32'; {script}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == ends
    assert found.stderr.count("\n") == 1 or ends != WINDOWS
