"""Runs that are disturbed on purpose, and compared with one left in peace: what `lockstep chaos` does."""
