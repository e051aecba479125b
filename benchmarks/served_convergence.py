"""How well backup workers and asynchronous updates learn, beside synchronous ones: MNIST, the same recipe, three seeds.

    python benchmarks/served_convergence.py [--data data/mnist] [--epochs 4] [--seeds 3] [--momentum 0] [--slow 0.01]

A net of one hidden layer, 3 towers and batches of 126. The synchronous run has one worker: with `exact` the number of
workers does not show in any bit. Both others have 5 workers, of which worker 0 serves; one of the 4 that compute is
slowed down. The test accuracy of each is the mean over the seeds; the result is printed as a table, with what became of
the gradients, and appended to benchmarks/results/served_convergence.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

EXCHANGES = ("synchronous", "backups", "asynchronous")
NUM_COMPUTING, NUM_TOWERS, BATCH_SIZE = 4, 3, 126
MOST_POINTS = 0.3


def main() -> int:
    """Run all exchanges one after the other; 1 where one learns less than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/mnist"))
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--slow", type=float, default=0.01, help="seconds that one worker sleeps with each gradient")
    parser.add_argument("--worker", choices=EXCHANGES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0
    results = {exchange: run(exchange) for exchange in EXCHANGES}
    return report(results)


def run(exchange: str) -> list[dict[str, Any]]:
    """Train with each seed in workers of their own; returns what each run has come to."""
    num_workers = 1 if exchange == "synchronous" else NUM_COMPUTING + 1
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "lockstep", "run", "--device", "cpu", "--workers", str(num_workers), __file__]
        subprocess.run([*command, *sys.argv[1:], "--worker", exchange, "--result", str(result)], check=True)
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found


def report(results: dict[str, list[dict[str, Any]]]) -> int:
    """Print the table, and append the result."""
    from measuring import record

    accuracies = {exchange: mean(each["accuracy"] for each in runs) for exchange, runs in results.items()}
    for exchange, runs in results.items():
        each = ", ".join(f"{100 * run['accuracy']:.2f}" for run in runs)
        print(f"{exchange:12}  test accuracy {100 * accuracies[exchange]:.2f} % ({each})")
        for name in ("used", "dropped", "staleness") if exchange != "synchronous" else ():
            total: Counter[str] = sum((Counter(run[name]) for run in runs), Counter())
            print(f"{'':12}  {name}: {', '.join(f'{key}: {total[key]}' for key in sorted(total, key=int))}")
    record(__file__, [{"exchange": exchange, "runs": runs} for exchange, runs in results.items()])
    least = accuracies["synchronous"] - MOST_POINTS / 100
    return int(any(accuracy < least for accuracy in accuracies.values()))


def work(arguments: argparse.Namespace) -> None:
    """Train with each seed, in one of the workers."""
    import lockstep as ls

    exchange = {"synchronous": ls.AllReduce(exact=True), "backups": ls.Backups(), "asynchronous": ls.Asynchronous()}
    found = [train(arguments, seed, exchange[arguments.worker]) for seed in range(arguments.seeds)]
    if ls.join().is_chief:
        arguments.result.write_text(json.dumps(found))


def train(arguments: argparse.Namespace, seed: int, exchange: Any) -> dict[str, Any]:
    """Train with one seed, and score the test examples."""
    import torch
    from torch import nn
    from torch.nn import functional

    import lockstep as ls
    from lockstep.readers.mnist import mnist_reader

    worker = ls.join()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    rate = ls.optim.Cosine(arguments.lr, ls.Epochs(arguments.epochs))
    state = ls.TrainState(model, ls.optim.SGD(rate, momentum=arguments.momentum))
    loader = ls.data.Loader(mnist_reader("train", arguments.data), batch_size=BATCH_SIZE, seed=seed)

    def pixels(batch: ls.Batch) -> torch.Tensor:
        return batch["image"].float() / 255 - 0.13

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        if worker.rank == 1:
            time.sleep(arguments.slow)
        return {"cross_entropy": functional.cross_entropy(model(pixels(batch)), batch["label"])}

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        return {"correct": model(pixels(batch)).argmax(1) == batch["label"]}

    last = ls.train(state, losses, loader, ls.Towers(NUM_TOWERS), exchange, until=ls.Epochs(arguments.epochs))
    assert last is not None
    test = ls.data.Loader(mnist_reader("test", arguments.data), batch_size=1000, order="sequential")
    accuracy = ls.evaluate(state, score, test)["correct"]
    return {"accuracy": accuracy, "steps": last.step, **(last.arrivals._asdict() if last.arrivals else {})}


if __name__ == "__main__":
    sys.exit(main())
