"""The files of a run by their names, in its folder and on a bucket.

recipe.toml           the complete recipe, as it runs now
choices.json          threads, kernels, versions: what can change bits
data.json             the folder that relative paths of the recipe are read in, and the names of the classes
history.jsonl         each start, with the step it started from and what had changed, and how it ended
checkpoints/          one folder a checkpoint
saves.jsonl           each checkpoint, with how many lines metrics.jsonl had
metrics.jsonl         losses, learning rate, evaluations
chain.jsonl           the same of every update, each line with a hash over it and the line before
timings.jsonl         how fast it went, a line about every ten seconds, and how long it still took
summaries/            the same for TensorBoard
evaluations.jsonl     scores of its checkpoints, a line for each `lockstep evaluate`; no times
confusion.csv         which classes are taken for which, where a person has `lockstep evaluate` write it there; likewise
curves.csv            precision over recall of each class of a detector
mistakes.png          the examples with the largest losses, or with the most mistakes
summaries-evaluation/ the same for TensorBoard, by split and weights
result.json           how a run that has reached its end ended: its scores, its best checkpoint
refused/              batches that were not finite
traces/               timelines of all workers and profiles of operators, where `watch` asks for them
memory/               torch's snapshots of GPUs that lacked memory, where `watch.memory_snapshot` asks for them
quarantine.jsonl      examples that could not be read
loggers/              what each live logger has been given
warm_start.json       where the run started from weights in a file: which tensors were loaded
.lease-*              the process that holds the folder
.mirror.json          the folder on a bucket that this one is the mirror of
latest.json           on a bucket alone: which of the checkpoints there count
"""

from __future__ import annotations

import re

RECIPE, CHOICES, HISTORY, SAVES = "recipe.toml", "choices.json", "history.jsonl", "saves.jsonl"
QUARANTINE, RESULT, WARM_START, DATA = "quarantine.jsonl", "result.json", "warm_start.json", "data.json"
METRICS, TIMINGS, EVALUATIONS = "metrics.jsonl", "timings.jsonl", "evaluations.jsonl"
CONFUSION, CURVES, MISTAKES = "confusion.csv", "curves.csv", "mistakes.png"
CHECKPOINTS, SUMMARIES, EVALUATION_SUMMARIES = "checkpoints", "summaries", "summaries-evaluation"
MARKER, LATEST = ".mirror.json", "latest.json"
KEPT_HERE = (EVALUATIONS, EVALUATION_SUMMARIES)
"""What `lockstep evaluate` writes, also where another machine trains; it is not uploaded."""
OF_WORKERS = ("refused", "memory", "traces")
"""What each worker writes into the folder of its host; of several hosts the chief's alone is uploaded."""
LEASE = ".lease-"
LEASE_NAME = re.compile(r"\.lease-([0-9]{6,})")
STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")
"""The folder of a checkpoint, and its step; whoever can write to a bucket can give names there."""


def step_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def named_step(name: str) -> int | None:
    """The step of the checkpoint whose folder has this name; None if it is none's."""
    match = STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None
