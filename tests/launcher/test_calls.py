"""Functions called on workers: what they get and return, what they write, and how they end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import called
import pytest

import lockstep as ls
from lockstep.owner import processes_by_parent


def no_function_of_a_module() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (no_function_of_a_module(), {"workers": 2}, "is not in a module: workers are new processes"),
        (lambda: None, {"workers": 2}, "is not in a module"),
        (called, {"workers": 2}, "is not in a module"),
        (partial(called.tell, Path()), {"workers": 2}, "An argument of called:tell cannot be sent"),
        (called.fail, {"workers": 0}, "workers is out of range"),
        (called.fail, {"workers": 2, "restarts": -1}, "restarts is out of range"),
        (called.fail, {"workers": 2, "hang_seconds": -1.0}, "hang_seconds is out of range"),
    ],
)
def test_what_cannot_be_called_is_refused(function: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ls.InputError, match=said):
        ls.launch(function, **options)


def test_code_of_a_cell_or_script_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called.tell, "__module__", "__main__")
    with pytest.raises(ls.InputError, match=r"begin the cell that defines it with %%writefile my_code.py, then: from "):
        ls.launch(called.tell, 2)


def test_other_threads_are_refused() -> None:
    errors: list[str] = []

    def call() -> None:
        try:
            ls.launch(called.fail, 2)
        except ls.InputError as error:
            errors.append(error.what)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert errors == ["Workers are started by the main thread alone, which gets Ctrl-C."]


@pytest.mark.skipif(sys.platform == "linux", reason="elsewhere")
def test_elsewhere_one_worker_runs_here() -> None:
    assert ls.launch(partial(called.tell, "x"), 1)["of"] == 1


@pytest.mark.process
def test_lines_of_workers_stay_whole_without_buffers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    ls.launch(partial(called.count_to, 20_000), 2)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"{rank} counts {number}" for rank in range(2) for number in range(20_000))


@pytest.mark.process
def test_workers_return_and_write_here(capsys: pytest.CaptureFixture[str]) -> None:
    returned = ls.launch(partial(called.tell, "no", times=2), 2)
    assert returned == {
        "rank": 0,
        "of": 2,
        "is a copy of this process": False,
        "starts others": "This process is a worker, and starts none.",
    }
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["0 says nono", "1 says nono"]
    assert sorted(said.err.splitlines()) == ["0 cannot say é", "1 cannot say é"]
    assert ls.join().num_workers == 1, "this process is none of them"


@pytest.mark.process
@pytest.mark.parametrize(
    ("function", "kind", "given", "said"),
    [
        (called.fail, ls.WorkerError, "worker 1 failed at step 0", "ZeroDivisionError: by worker 1 alone"),
        (called.return_object, ls.InputError, "cannot be sent", "save it in a file, and return the file's path"),
    ],
)
def test_failures_are_shown_and_raised(
    function: Any, kind: type[ls.LockstepError], given: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(kind, match="The workers have not returned from called:") as raised:
        ls.launch(function, 2)
    assert given in str(raised.value.given)
    assert said in caplog.text


@pytest.mark.process
def test_an_interrupt_is_a_request_and_leaves_no_process(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while len([*tmp_path.iterdir()]) < 2:
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert ls.launch(partial(called.wait_for_stop, str(tmp_path)), 2) == "SIGINT"
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    alive = {pid for pids in processes_by_parent().values() for pid in pids}
    assert not alive & {int(path.name) for path in tmp_path.iterdir()}
