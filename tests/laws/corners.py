"""Cases of a law on both devices: the corners, which are quick enough for each run of the suite, and the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def on_devices(names: Sequence[str], quick: Sequence[Any], slow: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by `each_device` and these names; each case begins with its device."""
    cases = [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]
    return pytest.mark.parametrize(("each_device", *names), cases, indirect=["each_device"])
