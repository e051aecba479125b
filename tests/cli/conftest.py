from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lockstep.reporting.log import LineHandler


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command shows the log on the screen; no other test shall see it there."""
    yield
    logger = logging.getLogger("lockstep")
    for handler in [handler for handler in logger.handlers if isinstance(handler, LineHandler)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
