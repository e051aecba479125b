"""Runs without a workdir: what they must not ask for."""

from __future__ import annotations

from lockstep.errors import WorkdirError
from lockstep.recipes.recipe import Recipe


def check_needs_no_files(recipe: Recipe) -> None:
    """Refuse a recipe that asks for files where there is no workdir.

    Raises:
        WorkdirError: checkpoints, summaries or metrics are asked for, or a policy that needs checkpoints.
    """
    if recipe.nonfinite == "rollback":
        raise WorkdirError(
            "Without a workdir there is no checkpoint to go back to.",
            given="nonfinite=rollback",
            expected="a workdir, or another policy",
            hint="name a --workdir, or add --set nonfinite=skip",
        )
    watch = recipe.watch
    asked = {
        "checkpoints.every": recipe.checkpoints.every,
        "watch.summaries": watch.summaries,
        "watch.metrics": watch.metrics,
        "watch.images": watch.images,
        "watch.gradients": watch.gradients,
        "watch.variables": watch.variables,
        "watch.activations": watch.activations,
    }
    wanted = [f"{field}={interval}" for field, interval in asked.items() if getattr(interval, "amount", interval)]
    if wanted:
        raise WorkdirError(
            "Without a workdir nothing can be written, and the recipe asks for files.",
            given=", ".join(wanted),
            expected="a workdir, or 0 for each of these",
            hint="name a --workdir, or add " + " ".join(f"--set {each.partition('=')[0]}=0" for each in wanted),
        )
