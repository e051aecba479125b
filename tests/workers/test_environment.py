"""The environment that workers start with, beside what the user has set."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from lockstep.workers import environment
from lockstep.workers.environment import SETTINGS, SHORT_WAITS, short_waits_here, worker_environment

NAMES = st.sampled_from([*SETTINGS, "OMP_WAIT_POLICY", "PATH"])


def test_an_environment_without_them_gets_all_settings() -> None:
    assert worker_environment({"PATH": "/bin"}) == {**SETTINGS, "PATH": "/bin"}


@pytest.mark.parametrize(
    ("found", "alone"), [(["1"], True), (["2", "1"], True), (["2", "3", "2", "2", "1"], False), ([], False)]
)
def test_threads_wait_longer_where_nobody_else_computes(
    found: list[str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(found)
    text = "cpu 1 2 3\nprocs_running "
    monkeypatch.setattr(environment.Path, "read_text", lambda path: f"{text}{next(looks)}" if found else "cpu 1")
    assert environment.is_alone_here() == alone
    waits = worker_environment({}, is_alone=alone)["GOMP_SPINCOUNT"]
    assert waits == ("10000" if alone else "1000")


def test_without_a_proc_file_system_somebody_may_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(environment.Path, "read_text", missing)
    assert not environment.is_alone_here()


@hypothesis.given(st.dictionaries(NAMES, st.text(min_size=1)))
def test_what_the_user_has_set_stays(given: dict[str, Any]) -> None:
    assert worker_environment(given).items() >= given.items()
    assert worker_environment(worker_environment(given)) == worker_environment(given)


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
