"""What of a machine, its software and a recipe lets a run train, limits it, or forbids it: `lockstep doctor`."""
