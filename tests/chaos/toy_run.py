"""A run that costs nothing, for tests of what watches it: a launcher, its fork server and workers, without torch.

toy_run.py MISTAKE --steps N --workdir DIR

The chief writes the files of a real run. When a worker is killed, all of them start again from the last checkpoint, as
under `watch.restarts`. MISTAKE names what is wrong with the run, or is "none".
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

SAVE_EVERY, STEP_SECONDS, NUM_WORKERS = 5, 0.004, 3
GATE = "gate"
"""A file beside the workdir with the last step that may be made now; where there is none, all may be."""
PR_SET_PDEATHSIG = 1


def append(path: Path, **facts: object) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(facts).encode() + b"\n")


def saved_step(workdir: Path) -> int:
    for folder in sorted((workdir / "checkpoints").glob("step-*"), reverse=True):
        step = int(folder.name.removeprefix("step-"))
        if (folder / "weights").read_bytes() == f"weights {step}".encode():  # else it is damaged
            return step
    return 0


def save(workdir: Path, step: int) -> None:
    """Write a checkpoint as the real store does: under another name, which becomes its own once it is whole."""
    folder = workdir / "checkpoints" / f"step-{step:08d}"
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / "weights").write_text(f"weights {step}")
    shutil.rmtree(folder, ignore_errors=True)  # damaged, or of a step that is computed again
    unfinished.rename(folder)


def cut(metrics: Path, step: int) -> None:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def last_allowed(workdir: Path) -> float:
    try:
        return int((workdir.parent / GATE).read_text())
    except FileNotFoundError:
        return math.inf


def train(workdir: Path, steps: int, mistake: str) -> None:
    """The chief's part."""
    stops = list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    (workdir / ".lease-000001").write_text(json.dumps({"pid": os.getpid(), "released": False}))
    step, metrics = saved_step(workdir), workdir / "metrics.jsonl"
    if mistake == "repeats steps":
        step = max(0, step - SAVE_EVERY)
    else:
        cut(metrics, step)
    append(workdir / "history.jsonl", event="resume" if step else "start", step=step, workers=NUM_WORKERS)
    step += 1 if step and mistake == "skips a step" else 0
    while step < steps and not stops:
        time.sleep(STEP_SECONDS)
        if step >= last_allowed(workdir):
            continue
        step += 1
        append(metrics, step=step, position=8 * step)
        if step % SAVE_EVERY == 0:
            save(workdir, step)
        while mistake == "hangs" and step > steps // 2:
            time.sleep(1)
    save(workdir, step)
    os._exit(143 if stops else 0)


def fork_worker(rank: int, workdir: Path, steps: int, mistake: str) -> int:
    pid = os.fork()
    if not pid:
        end_with_parent(mistake)
        if rank == 0:
            train(workdir, steps, mistake)
        signal.pause()
    return pid


def serve(workdir: Path, steps: int, mistake: str) -> NoReturn:
    """The fork server's part: start workers again and again until the chief has ended by itself."""
    end_with_parent(mistake)
    while True:
        workers = [fork_worker(rank, workdir, steps, mistake) for rank in range(NUM_WORKERS)]
        ended, status = os.wait()
        for pid in set(workers) - {ended}:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0 or mistake == "gives up":
            print(f"error: a worker ended with {code}\n  given:    a signal", flush=True)
            os._exit(abs(code))


def end_with_parent(mistake: str) -> None:
    if mistake != "outlives its launcher":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    mistake, steps, workdir = sys.argv[1], int(sys.argv[3]), Path(sys.argv[5])
    workdir.mkdir(exist_ok=True)
    if any(not path.is_symlink() for path in (workdir.parent / "links").glob("*")):
        sys.exit("error: a file is cut short\n  given:    half of it")
    server = os.fork()
    if not server:
        serve(workdir, steps, mistake)

    def pass_on(number: int, _: object) -> None:
        os.kill(json.loads((workdir / ".lease-000001").read_text())["pid"], number)

    signal.signal(signal.SIGTERM, pass_on)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))


if __name__ == "__main__":
    main()
