from __future__ import annotations

import pytest

from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find


@pytest.fixture
def mnist() -> Recipe:
    return find("mnist")
