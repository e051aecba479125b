"""Detectors: their configurations as plain values, and the targets of their losses."""
