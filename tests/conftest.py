"""What all tests share: each starts alone, on one thread, in an environment and a folder that are the suite's."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import platform
import re
import resource
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.configuration
import object_server
import pytest
import torch
import worker_processes

from lockstep.readers import mnist
from lockstep.screen import LineHandler
from lockstep.storage import remote_path
from lockstep.storage.remote_path import AnyPath

ROOT = Path(__file__).parent.parent
NUM_SLOWEST_SHOWN, MAX_CPU_SECONDS = 20, 300.0
"""The dearest tests take 20 s, and more on other processors or beside others: only an accident meets the limit."""
SLOW_SECONDS = 3600
"""The timeout of a slow test; that of others is in pyproject.toml."""
SECONDS_TO_END = 120
"""After its timeout, for a test to end of itself; for a test process to end after its last test."""
STDERR = pytest.StashKey[int]()
"""The descriptor of standard error as it was before pytest captured it."""
KEPT_VARIABLES = re.compile(
    r"PATH|LANG|LC_\w+|TZ|TMPDIR|USER|LOGNAME|CI|VIRTUAL_ENV|LD_\w+"
    r"|PYTHON(?!DONTWRITEBYTECODE)\w*|(PYTEST|HYPOTHESIS|COVERAGE)\w*"
    r"|(ATEN|ONEDNN|DNNL|MKL|CUDA|NVIDIA|NCCL)_\w+"
    r"|LOCKSTEP_GPU_TESTS"
)
"""Variables that tests and their processes see, of the system and of the processor. Others, as those of a scheduler or
of a run, would change what is tested; without bytecode each of many processes would compile the library anew."""
DATA_VARIABLES = re.compile(r"LOCKSTEP_(COCO|VOC|FLOWERS|MORE_TFRECORDS|INCEPTION_WEIGHTS)")
"""Paths of data that the user names for the suite, from the folder where pytest is started; tests see them, too."""
PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", worker_processes.EVENT}
process_starts: list[str] = []
watch_ends = 0.0
"""When this process is ended, by the clock of `time.monotonic`, unless the watch is set anew."""


def note_process_start(event: str, _arguments: object) -> None:
    """Audit hook, which cannot be removed again: note what has started a process."""
    if event in PROCESS_EVENTS:
        process_starts.append(event)


# Each of these runs a command once in a process; so would some test that imports h5py, or numpy.testing of numpy 1.26.
platform.processor()
import_module("numpy.testing")
sys.addaudithook(note_process_start)

# A busy machine takes seconds for what a quiet one does at once.
hypothesis.settings.register_profile(
    "ci", max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def cpu_seconds() -> float:
    """Of this process and of the children that have ended: a busy machine does not add to it."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_configure(config: pytest.Config) -> None:
    """Leave the variables that tests may see; show a GPU to the tests that are for one alone, on any machine."""
    config.stash[STDERR] = os.dup(2)
    for name, value in [*os.environ.items()]:
        if DATA_VARIABLES.fullmatch(name):  # of VOC several
            os.environ[name] = os.pathsep.join(str(Path(path).resolve()) for path in value.split(os.pathsep) if path)
        elif not KEPT_VARIABLES.fullmatch(name):
            del os.environ[name]
    if "gpu" in config.getoption("markexpr"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read once, when CUDA begins: exact steps ask for it
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of which most tests start processes: such a file as the last one would run alone."""
    costs = Counter(item.path for item in items if item.get_closest_marker("process"))
    items.sort(key=lambda item: -costs[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Make tests without a look, now and again, for garbage among those that are made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Spare tests that collect garbage a look through all that pytest has made, which took a second each time."""
    gc.collect()
    gc.freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        # For each test pytest adds handlers to all of torch that do not. This one alone would speak on the screen.
        if isinstance(logger, logging.Logger) and name != "torch.__trace":
            logger.propagate = True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give tests that take minutes an hour, where they do not ask for more."""
    if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def end_this_process_after(seconds: float, config: pytest.Config) -> None:
    """Show the stacks of all threads then, or a tenth later, and end the process: it hangs where no exception comes.

    pytest-timeout raises an exception in the test, which native code does not hear, and an `except` may swallow. One
    watch, a thread of its own, is for many tests: to start and to end it costs two waits for the system's scheduler.
    """
    global watch_ends
    now = time.monotonic()
    if not seconds <= watch_ends - now <= 1.1 * seconds:
        watch_ends = now + 1.1 * seconds
        faulthandler.dump_traceback_later(1.1 * seconds, exit=True, file=config.stash[STDERR])


def seconds_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else item.config.getini("timeout")) + SECONDS_TO_END


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let no test go on for ever: xdist names the one whose process has ended, and goes on with the others."""
    end_this_process_after(seconds_of(item), item.config)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Go on to watch: pytest stops to do so where a test has failed."""
    global watch_ends
    watch_ends = 0.0
    if isinstance(node, pytest.Item):
        end_this_process_after(seconds_of(node), node.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let no thread that a test has left hold up the end."""
    end_this_process_after(SECONDS_TO_END, session.config)


def files_of_the_checkout() -> set[Path]:
    """Files and folders that tests might leave; of `runs`, where a demo may be under way, its folders alone.

    What `make docs` makes is left out: it may run beside the tests.
    """
    found, folders = set[Path](), [ROOT]
    site = {ROOT / "build", ROOT / "docs" / "generated"}
    while folders:
        for path in folders.pop().iterdir():
            if path.name.startswith(".") or path.name == "__pycache__" or path in site:  # of tools
                continue
            found.add(path)
            if path.is_dir() and path.parent.name != "runs" and not path.is_symlink():
                folders.append(path)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note what a test costs, and refuse one that is slow, or starts a process, and is not marked so."""
    start = cpu_seconds()
    process_starts.clear()
    yield
    if process_starts and not {mark.name for mark in item.iter_markers()} & {"process", "slow"}:
        pytest.fail(f"it has started a process ({process_starts[0]}): mark it process")
    seconds = cpu_seconds() - start
    item.user_properties.append(("cpu_seconds", seconds))
    if seconds > MAX_CPU_SECONDS and not item.get_closest_marker("slow"):
        pytest.fail(
            f"it took {seconds:.0f} s of CPU time: make it cheaper, or mark it slow (limit {MAX_CPU_SECONDS:g} s)"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slowest tests, by CPU time."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    costs = [(dict(report.user_properties).get("cpu_seconds", 0.0), report.nodeid) for report in reports]
    slowest = [cost for cost in sorted(costs, reverse=True)[:NUM_SLOWEST_SHOWN] if cost[0] >= 1.0]
    if slowest:
        terminalreporter.write_sep("=", f"slowest {len(slowest)} tests, seconds of CPU time")
        for seconds, name in slowest:
            terminalreporter.write_line(f"{seconds:6.1f}  {name}")


@pytest.fixture(autouse=True, scope="session")
def _signals_are_heard() -> Iterator[None]:
    """Also where the tests run under nohup, or in the background of a shell: what they start would ignore signals."""
    heard = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests have a home of their own, and leave nothing in the checkout."""
    home, before = tmp_path_factory.mktemp("home"), files_of_the_checkout()
    hypothesis.configuration.set_hypothesis_home_dir(home / "hypothesis")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # What torch has compiled lies in /tmp by default: code for other vector instructions, as ATEN_CPU_CAPABILITY
        # names them, is taken from there, too, and then memory is overwritten.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    new = sorted(str(path.relative_to(ROOT)) for path in files_of_the_checkout() - before)
    assert not new, f"a test has left these in the checkout, unless somebody else has meanwhile: {', '.join(new)}"


@pytest.fixture(autouse=True, scope="session")
def _mnist_is_unpacked_once() -> Iterator[None]:
    """Most tests that read it are about something else; it is unpacked for a quarter of a second."""
    unpack, known = mnist.load_idx, dict[object, mnist.UInt8s]()

    def load_idx(path: AnyPath, most_rows: int | None = None) -> mnist.UInt8s:
        if not isinstance(path, Path):
            return unpack(path, most_rows)
        found = path.stat()
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, most_rows)
        return known[key] if key in known else known.setdefault(key, unpack(path, most_rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist, "load_idx", load_idx)
        yield


@pytest.fixture(autouse=True, scope="session")
def _working_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as recipes expect it: with the data of the checkout, and nothing else."""
    folder = tmp_path_factory.mktemp("working_folder")
    (folder / "data").symlink_to(ROOT / "data")
    return folder


@pytest.fixture(autouse=True)
def _away_from_the_checkout(_working_folder: Path) -> Iterator[None]:
    """Each test starts in the same folder, whatever lies where pytest was started, and leaves it as it was."""
    before = Path.cwd()
    os.chdir(_working_folder)
    yield
    os.chdir(before)
    left = sorted(path.name for path in _working_folder.iterdir() if path.name != "data")
    for name in left:
        path = _working_folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not left, f"the test has left {', '.join(left)} in the working folder: let it write into tmp_path"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two cores are shared by all tests: one thread each, which also pins the bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Each test starts outside of any run."""
    from lockstep.workers.rank import leave

    leave()
    yield
    leave()


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command shows the log on the screen; no other test shall see it there."""
    yield
    logger = logging.getLogger("lockstep")
    for handler in [handler for handler in logger.handlers if isinstance(handler, LineHandler)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def run_workers() -> Callable[..., list[Any]]:
    """See `worker_processes.run_workers`."""
    return worker_processes.run_workers


@pytest.fixture(scope="session")
def _object_store() -> Iterator[object_server.FaultyProxy]:
    """Started by the first test that asks for it: moto takes seconds to import."""
    if object_server.MISSING:
        pytest.skip(f"no object store to test with: {', '.join(object_server.MISSING)} not installed (extra [dev])")
    with object_server.start_store() as store:
        yield store


@pytest.fixture
def object_store(
    _object_store: object_server.FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[object_server.FaultyProxy]:
    """An empty store, which s3:// means to this process and those that it starts; see `object_server.FaultyProxy`."""
    for name, value in _object_store.environment.items():
        monkeypatch.setenv(name, value)
    remote_path._filesystem.cache_clear()  # of a test that had no store
    _object_store.reset()
    yield _object_store
    _object_store.reset()
    _object_store.ask_store("POST", "/moto-api/reset")


@pytest.fixture
def bucket(object_store: object_server.FaultyProxy) -> remote_path.RemotePath:
    """A bucket of the store, empty."""
    name = f"bucket-{uuid.uuid4().hex}"
    assert object_store.ask_store("PUT", f"/{name}").status == 200
    return remote_path.RemotePath(f"s3://{name}")
