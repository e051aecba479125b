"""What slow workers cost: steps with backup workers beside those that wait, what serving costs, asynchronous updates.

    python benchmarks/survival.py [--rounds 5] [--only slow update rate] [--workers 4] [--quick]

All on one host, one thread a worker, one worker more than compute: it serves. Those of a comparison take turns in the
same processes; what counts is the ratio of a turn to its neighbour. The parts that run in workers are in
served_parts.py. The result is printed and appended to benchmarks/results/survival.jsonl.
"""

from __future__ import annotations

import argparse
import json

from measuring import Line, record, run_part, show
from served_parts import PARTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--workers", type=int, default=4, help="those that compute")
    parser.add_argument("--quick", action="store_true", help="few short rounds: does it run?")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, is_quick = json.loads(arguments.part)
        PARTS[name](arguments.rounds, is_quick)
        return
    rounds = 2 if arguments.quick else arguments.rounds
    lines: list[Line] = []
    for name in arguments.only:
        part = json.dumps([name, arguments.quick])
        for line in run_part(__file__, part, rounds, threads=1, num_workers=1 + arguments.workers):
            show(line)
            lines.append({**line, "workers": arguments.workers})
    if not arguments.quick:
        record(__file__, lines)


if __name__ == "__main__":
    main()
