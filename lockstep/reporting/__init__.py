"""Reports of a run while it goes: the screen, `metrics.jsonl`, TensorBoard, and the log."""
