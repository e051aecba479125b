from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_calls import accelerator


@pytest.fixture(scope="module", params=["cpu", "accelerator"])
def each_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once as on a CPU, and once as on a device that the host would wait for: each attempt is read late there."""
    if request.param == "cpu":
        yield
    else:
        with accelerator():
            yield
