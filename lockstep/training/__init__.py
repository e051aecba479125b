"""The state of a run, its step and its loop, saving and resuming; `lockstep` itself exports the names for users."""
