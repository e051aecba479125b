"""Readers: examples by their index, from whatever lies on the disk or in memory."""
