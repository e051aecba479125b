"""Detectors: what their losses are computed from."""
