"""What a run tells while it goes: the screen, `metrics.jsonl`, TensorBoard, and the log."""
