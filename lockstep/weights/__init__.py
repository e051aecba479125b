"""Weights from anywhere: files of other systems as named tensors, and which of them go where."""
