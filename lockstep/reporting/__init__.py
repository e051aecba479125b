"""Reports of a run while it goes: progress on the screen, `metrics.jsonl` and TensorBoard."""
