"""Whether a stream of batches may go on where another one was saved: with the seed and the examples of that one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.errors import InputError
from lockstep.readers.fingerprint import fingerprint_changes


def check_same_stream(saved: Mapping[str, Any], here: Mapping[str, Any], *, accept_data_change: bool) -> list[str]:
    """Refuse to go on with another seed, another number of examples, or other examples.

    Args:
        saved: the state of the stream that was saved; one of an earlier version says nothing of the examples.
        here: the state of the stream that is to go on.
        accept_data_change: go on with other examples, if they are as many.

    Returns:
        What has changed in the examples, a line each.

    Raises:
        InputError: naming what differs.
    """
    changed = fingerprint_changes(saved["data"], here["data"]) if "data" in saved else []
    for name in ("seed", "num_examples", "epoch_size"):
        if saved.get(name, here[name]) != here[name]:
            raise InputError(
                f"The saved stream had another {name}.",
                given="; ".join([f"{name} {here[name]}", *changed]),
                expected=f"{name} {saved[name]}, as it was saved at position {saved['position']}",
                hint="resume with the seed and the examples that the run began with, or start a new run",
            )
    if changed and not accept_data_change:
        raise InputError(
            "The training data is not what it was when the run was saved.",
            given="; ".join(changed),
            expected=f"the data of the run, as it was at position {saved['position']}",
            hint="put the data back as it was, or start a new run; to go on with the data as it is now, give "
            "accept_data_change=True (lockstep train: --accept-data-change)",
        )
    return changed
