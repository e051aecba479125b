"""Scoring a model under training; `lockstep` itself exports the names for users."""
