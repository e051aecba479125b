"""The environment that workers start with, beside what the user has set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.workers.environment import SETTINGS, SHORT_WAITS, short_waits_here, worker_environment

NAMES = st.sampled_from([*SETTINGS, "OMP_WAIT_POLICY", "PATH"])


def test_an_environment_without_them_gets_all_settings() -> None:
    assert worker_environment({"PATH": "/bin"}) == {**SETTINGS, "PATH": "/bin"}


@given(st.dictionaries(NAMES, st.text(min_size=1)))
def test_what_the_user_has_set_stays(environment: dict[str, Any]) -> None:
    assert worker_environment(environment).items() >= environment.items()
    assert worker_environment(worker_environment(environment)) == worker_environment(environment)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"])
def test_waits_of_the_user_are_the_only_ones(name: str) -> None:
    with_settings = worker_environment({name: "active"})
    assert SHORT_WAITS.keys() & with_settings.keys() <= {name}
    assert with_settings["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", SETTINGS)
def test_an_empty_variable_leaves_its_setting_off(name: str) -> None:
    assert name not in worker_environment({name: ""})


def test_the_openmp_that_torch_has_loaded_is_known() -> None:
    torch.ones(1)
    expected = {"GOMP_SPINCOUNT": "1000"} if "+cpu" in torch.__version__ else SHORT_WAITS
    assert short_waits_here().items() & expected.items()
