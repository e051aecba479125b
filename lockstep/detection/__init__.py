"""Detectors: their configurations, as plain values."""
