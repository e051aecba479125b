from __future__ import annotations

import os
import pty
import subprocess
import sys

WRITES = """
import sys

from lockstep.workers.terminal import outlive_terminal

outlive_terminal()
print("there", sys.stdout.isatty(), sys.stdout.encoding)
sys.stdin.readline()
print("nobody reads this" * 10_000)
sys.stderr.write("nor this")
sys.exit(7)
"""


def test_what_is_written_after_the_terminal_is_closed_is_no_error() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100) == b"there True utf-8\r\n"
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 7


def test_what_is_no_terminal_is_left_as_it_is() -> None:
    code = (
        "import sys; from lockstep.workers.terminal import outlive_terminal; before = sys.stdout; outlive_terminal(); "
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{code} print(sys.stdout is before)"], capture_output=True, check=True
    )
    assert ended.stdout == b"True\n"


def test_closed_streams_are_opened_on_nothing() -> None:
    code = (
        "import os, sys; from lockstep.workers.terminal import outlive_terminal; outlive_terminal(); "
        "print('out'); print('error', file=sys.stderr); file = os.open('/dev/null', 0); sys.exit(file)"
    )
    ended = subprocess.run(["sh", "-c", '"$0" -c "$1" 2>&- >&-', sys.executable, code], check=False)
    assert ended.returncode == 3
