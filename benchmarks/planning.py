"""What `lockstep plan` says, beside what the runs take that it is about.

    python benchmarks/planning.py [--seconds 20] [--steps 24] [--only mnist "sleeping, shared memory" ...]

Each case is planned once, and then trained with each number of workers by `lockstep train`; what counts is the time of
a step by the plan over the lower quartile of the run's, on the chief's clock, after the first steps: the plan is of
hosts that do nothing else, and takes the lower quartile, too. Where computing is asleep, workers do not compete for the
cores, and there may be more of them. Hosts are network namespaces with links that are shaped, whose bandwidth is
measured by TCP; where the kernel or the user's rights do not allow them, their cases are left out, and it is said why.
The result is printed and appended to benchmarks/results/planning.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from measuring import Line, record

ROOT = Path(__file__).parent.parent
AIM, WARM_UP_STEPS, NUM_TOWERS = 0.15, 4, 8
PARTS = """
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x, seconds):
        time.sleep(seconds)
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient, None


class Net(nn.Module):
    def __init__(self, width=1024, seconds=0.02):
        super().__init__()
        self.first, self.seconds = nn.Linear(16, width), seconds
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = Sleep.apply(layer(x).relu(), self.seconds)
        return self.last(x)


def reader(split):
    return {"x": torch.arange(4096.0).view(256, 16) / 4096, "y": torch.arange(256) % 10} if split == "train" else None


def losses(model, batch):
    return {"loss": cross_entropy(model(batch["x"]), batch["y"])}


def note(report):
    if os.environ.get("RANK", "0") == "0":
        with Path(os.environ["TIMES"]).open("a") as file:
            file.write(f"{report.progress.elapsed_seconds}\\n")
"""
RECEIVE = """
import socket, time
connection, _ = socket.create_server(("", 29501)).accept()
number, began = 0, time.perf_counter()
while some := connection.recv(1 << 20):
    number += len(some)
print("bits per second", 8 * number / (time.perf_counter() - began))
"""
SEND = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection(("host1", 29501))
        break
    except OSError:
        time.sleep(0.1)
connection.sendall(bytes(int(sys.argv[1])))
"""
SLEEPING = f"""
name = "sleeping"
batch_size = 64
num_towers = {NUM_TOWERS}
model = {{ kind = "python", function = "planned_parts:Net" }}
task = {{ losses = "planned_parts:losses" }}
data = {{ kind = "python", function = "planned_parts:reader" }}
optimizer = {{ kind = "sgd", lr = 1e-3 }}
"""
NOTED = 'hooks=[{kind="python",function="planned_parts:note"}]'


@dataclass(frozen=True)
class Case:
    """A recipe, and the numbers of workers for which it is planned and trained."""

    recipe: str
    numbers: Sequence[int]
    per_host: int
    flags: Sequence[str] = ()
    megabits: int | None = None
    """The link of each host, of which there are as many as workers; None: all workers are on this one."""


GLOO = ("--set", "exchange.transport=gloo")
CASES: Mapping[str, Case] = {
    "mnist": Case("mnist", (1, 2), 2),
    "mnist, gloo": Case("mnist", (1, 2), 2, GLOO),
    "sleeping, shared memory": Case("sleeping.toml", (1, 2, 4, 8), 8),
    "sleeping, gloo": Case("sleeping.toml", (1, 2, 4, 8), 8, GLOO),
    "sleeping, hosts of 1 Gbit/s": Case("sleeping.toml", (2, 4, 8), 1, megabits=1000),
    "sleeping, hosts of 200 Mbit/s": Case("sleeping.toml", (2, 4, 8), 1, megabits=200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES])
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "hosts"))
    sys.path.insert(0, str(ROOT / "tests"))
    import separate_hosts

    lines: list[Line] = []
    for name in arguments.only:
        case = CASES[name]
        if case.megabits and (why := separate_hosts.missing()):
            print(f"{name} is left out: {why}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            (place / "planned_parts.py").write_text(PARTS)
            (place / "sleeping.toml").write_text(SLEEPING)
            (place / "data").symlink_to(ROOT / "data")
            planned = plan(case, place, arguments.seconds)
            for number in case.numbers:
                seconds = trained(case, place, number, arguments.steps)
                lines.append(told(name, number, planned[number], seconds))
    record(__file__, lines, {})


def told(name: str, number: int, planned: Line, seconds: float) -> Line:
    """Print a comparison; returns it as a line of the results."""
    ratio = planned["step_seconds"] / seconds
    print(
        f"{name:32} {number} worker{'s' if number > 1 else ' '} planned {1e3 * planned['step_seconds']:7.1f} ms, "
        f"took {1e3 * seconds:7.1f} ms: {ratio:.2f}{'' if abs(ratio - 1) <= AIM else ', missed'}",
        flush=True,
    )
    return {"case": name, "workers": number, "took_seconds": seconds, "ratio": ratio, "planned": planned}


def plan(case: Case, place: Path, seconds: float) -> dict[int, Line]:
    """Plan a case; returns the prediction for each number of workers."""
    network = ["--latency", "0.05", "--bandwidth", f"{goodput(case.megabits):.4f}"] if case.megabits else []
    words = ["plan", case.recipe, "--device", "cpu", "--json", "--seconds", str(seconds), *network, *case.flags]
    words += ["--workers", ",".join(map(str, case.numbers)), "--workers-per-host", str(case.per_host)]
    threads = ["--threads", "1"] if case.megabits else []  # as hosts that share these cores train
    found = subprocess.run(
        [sys.executable, "-m", "lockstep", *words, *threads], cwd=place, stdout=subprocess.PIPE, check=True
    )
    return {row["workers"]: row for row in json.loads(found.stdout)["plan"]}


def goodput(megabits: int) -> float:
    """Return what TCP gets through a link that is shaped so, in Gbit/s, as one would measure it for the plan."""
    from separate_hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts:
        for host in range(2):
            hosts.limit(host, f"{megabits}mbit")
        receiver = hosts.start(1, sys.executable, "-c", RECEIVE)
        hosts.start(0, sys.executable, "-c", SEND, str(megabits * 250_000))  # for two seconds
        found = float(receiver.wait_for("bits per second").split()[-1]) / 1e9
    print(f"a link of {megabits} Mbit/s lets {1000 * found:.0f} through", flush=True)
    return found


def trained(case: Case, place: Path, number: int, steps: int) -> float:
    """Train a case; returns the lower quartile of the times of its steps."""
    times = place / f"times-{number}"
    words = ["train", case.recipe, "--device", "cpu", "--steps", str(steps), "--workdir", "none", *case.flags]
    words += [
        "--set",
        NOTED,
        "--set",
        "evaluate.every=0",
        "--set",
        "evaluate.examples=4",
        "--set",
        "checkpoints.every=0",
        "--workers",
        str(number),
    ]
    command = [sys.executable, "-m", "lockstep", *words]
    if case.megabits:
        train_on_hosts([*command, "--threads", "1"], place, number, case.megabits, times)
    else:
        environment = {**os.environ, "TIMES": str(times)}
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elapsed = [float(line) for line in times.read_text().splitlines()][WARM_UP_STEPS:]
    return statistics.quantiles([later - earlier for earlier, later in pairwise(elapsed)], n=4)[0]


def train_on_hosts(command: Sequence[str], place: Path, number: int, megabits: int, times: Path) -> None:
    """Run the command on as many hosts, whose links let so much through."""
    from separate_hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(number, Path(folder)) as hosts:
        started = []
        for host in range(number):
            hosts.limit(host, f"{megabits}mbit")
            seat = ["--hosts", number, "--host-rank", host, "--chief", "host0:29500"]
            shell = ["sh", "-c", 'cd "$0" && exec "$@"', place]
            environment = {"TIMES": str(times), "LOCKSTEP_KEY": "a key for these hosts"}
            started.append(hosts.start(host, *shell, *command, *map(str, seat), **environment))
        for each in started:
            assert each.wait() == 0, each.text


if __name__ == "__main__":
    main()
