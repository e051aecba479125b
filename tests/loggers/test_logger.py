from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import lockstep as ls
from lockstep.loggers import logger as module
from lockstep.loggers.logger import check_loggers

METHODS = {name: lambda *arguments: None for name in ("begin", "log", "log_artifact", "end")}


@pytest.mark.parametrize("kind", [ls.loggers.Wandb, ls.loggers.Mlflow, ls.loggers.Trackio])
def test_a_logger_without_its_library_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda library: None)
    with pytest.raises(ls.InputError) as caught:
        check_loggers("loggers", (ls.loggers.Csv(), kind()))
    library = kind.__name__.lower()
    assert caught.value.what == f"This logger needs {library}, which is not installed."
    assert caught.value.given == f'loggers = [{{kind = "{library}"}}]'
    assert caught.value.hint == f"pip install 'lockstep-train[{library}]'"
    assert caught.value.exit_code == 2


def test_all_that_is_missing_is_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda library: None)
    with pytest.raises(ls.InputError, match=r"^2 things cannot be used as given"):
        check_loggers("loggers", [ls.loggers.Wandb(), ls.loggers.Trackio()])


def test_what_follows_the_protocol_is_a_logger() -> None:
    check_loggers("loggers", [SimpleNamespace(**METHODS), ls.loggers.Csv()])


@pytest.mark.parametrize(
    ("given", "what", "shown"),
    [
        ([ls.loggers.Csv], "loggers[0] is of the wrong type.", "loggers[0] is the class Csv"),
        ([ls.loggers.Csv(), "wandb"], "loggers[1] is of the wrong type.", "loggers[1] is str"),
        ([SimpleNamespace(log=print)], "loggers[0] is of the wrong type.", "loggers[0] is SimpleNamespace"),
        (ls.loggers.Csv(), "loggers is of the wrong type.", "loggers is Csv"),
    ],
)
def test_what_is_no_logger_is_refused(given: Any, what: str, shown: str) -> None:
    with pytest.raises(ls.InputError) as caught:
        check_loggers("loggers", given)
    assert (caught.value.what, caught.value.given) == (what, shown)
    with pytest.raises(ls.InputError):
        ls.loggers.Loggers(given)


@pytest.mark.parametrize("given", [{"project": 3}, {"mode": "of"}, {"tags": "a"}])
def test_wrong_fields_are_refused(given: Any) -> None:
    with pytest.raises(ls.InputError, match=next(iter(given))):
        ls.loggers.Wandb(**given)
