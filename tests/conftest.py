"""What every test gets: a folder for a run, and a look at what it left when it is over.

After each test nothing may be left (processes, shared memory, descriptors, threads, temporary
files), and the accounts of each run in its folder must add up.

Tests marked ``nightly`` run with ``--nightly`` only; without it they are deselected.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import getpass
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from asynckfold.api import kfold
from asynckfold.engines import server_process, warm_pool
from asynckfold.system import background
from tests import accounts, leftovers, size
from tests.nursery import Nursery, fresh_server, nursery

# Asserts for several files of tests: they shall tell as much as those in the tests.
pytest.register_assert_rewrite("tests.training.multiprocess.attempts")

os.environ[leftovers.MARK] = "1"
# Without bytecode, each of the hundreds of interpreters would compile the package anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONFAULTHANDLER"] = "1"
# From Ray 2.60 on, a token in the home folder would lock out processes that the tests start.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    # A small sweep mostly waits for the disk: of 0.5 s, 0.3 s.
    (MEMORY / f"pytest-of-{getpass.getuser()}").mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run everything, at full size")


def pytest_configure(config: pytest.Config) -> None:
    size.NIGHTLY = config.getoption("nightly")
    import torch

    if is_worker(config):
        # Each worker has a core; what a job's threads are, its plan says.
        torch.set_num_threads(1)
    # Without a GPU, torch.compile lets torch's autograd see one that is not there. If the first
    # backward pass of a process comes after it, ranks forked in a test can run none.
    torch.ones(1, requires_grad=True).sum().backward()
    # A shell lets its background jobs ignore Ctrl-C, nohup the end of a terminal; what the tests
    # send themselves is to be heard.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # How long an example takes says how busy the machine is; no test asserts a speed.
    settings.register_profile("asynckfold", deadline=None, max_examples=size.examples(100))
    settings.load_profile("asynckfold")


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of several that pytest-xdist shares the tests among."""
    return hasattr(config, "workerinput")


@pytest.fixture(autouse=True)
def without_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the report that each call in this process would draw, but for `reports` tests."""
    if request.node.get_closest_marker("reports") is None:
        monkeypatch.setattr(kfold, "leave_report", lambda settings: contextlib.nullcontext())


@pytest.fixture(autouse=True)
def with_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train small sweeps with workers, too: most tests are about them. See `chooses_process`."""
    if request.node.get_closest_marker("chooses_process") is None:
        monkeypatch.setattr("asynckfold.api.process_choice.MOST_MODELS", 0)
        monkeypatch.setattr("asynckfold.planning.process_rule.MOST_SECONDS", 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, Any, Any]:
    """Look for examples in docstrings in the package only."""
    collectors = yield
    is_test = file_path.is_relative_to(Path(__file__).parent)
    return [item for item in collectors if not (is_test and type(item).__name__ == "DoctestModule")]


# What is left to the night


LONG = ("docs/test_pages", "faults/test_signals", "faults/test_crashes", "api/test_budget")
"""Files with tests of more than ten seconds: first, so that no core waits for them at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [] if size.NIGHTLY else [item for item in items if is_nightly(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not is_nightly(item)]
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))


def pytest_collection_finish() -> None:
    # Thousands of collected tests live to the end: each full collection would visit them all.
    gc.collect()
    gc.freeze()


def is_nightly(item: pytest.Item) -> bool:
    """Whether a test is left to the night; ``nightly(but=[...])`` keeps these parameters."""
    marker = item.get_closest_marker("nightly")
    if marker is None:
        return False
    callspec = getattr(item, "callspec", None)
    return callspec is None or callspec.id not in marker.kwargs.get("but", ())


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(name: str) -> Generator[None, Any, Any]:
    made = yield
    if isinstance(made, list) and made and isinstance(made[0], pytest.Function):
        _check_kept(name, made)
    return made


def _check_kept(name: str, items: list[pytest.Function]) -> None:
    """Refuse to leave all of a test to the night because its parameters were renamed."""
    marker = items[0].get_closest_marker("nightly")
    if marker is None or "but" not in marker.kwargs:
        return
    known = {item.callspec.id for item in items if hasattr(item, "callspec")}
    if unknown := set(marker.kwargs["but"]) - known:
        raise pytest.UsageError(f"{name} has no parameters {sorted(unknown)}, but {sorted(known)}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a run that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def close_workers() -> Callable[[], None]:
    """What ends the workers that wait for the next call."""
    return warm_pool.close_warm


@pytest.fixture(scope="module")
def no_worker_stays(close_workers: Callable[[], None]) -> Iterator[None]:
    """What a module does to its workers is not met by the tests of the next one."""
    yield
    close_workers()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for small products: on a busy machine, several mostly wait for each other."""
    import torch

    from asynckfold.training import seeding

    with seeding.preserved():
        torch.set_num_threads(1)
        yield


@pytest.fixture
def hasty_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of checkpoints without waiting: what survives a power cut is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def fake_gpus_stay_in_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes a fake for the GPU does so in the process that makes it: here, too."""
    if (handoff := sys.modules.get("asynckfold.training.process_group.gpu_handoff")) is not None:
        monkeypatch.setattr(handoff.HiddenGpu, "take", handoff.HiddenGpu.take)
    if (execute := sys.modules.get("asynckfold.training.worker.execute")) is not None:
        monkeypatch.setattr(execute, "_device", execute._device)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves anything behind; see `damages` and `crashes` for what may stay."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    before = leftovers.Snapshot.take()
    yield
    said = background.wait()  # as the exit does
    if request.node.stash.get(_FAILED, False):
        return  # the traceback holds what the test held
    # What other fixtures gave: they are torn down, but pytest holds their values till the very end.
    if request.node.funcargs is not None:  # an interrupt took them
        request.node.funcargs.clear()
    left = [*said, *leftovers.left_since(before)]
    if folder is not None:
        left += _wrong_in(folder, request.node)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def _wrong_in(folder: Path, test: pytest.Item) -> Iterator[str]:
    crashes, damages = (_reason(test, name) for name in ("crashes", "damages"))
    if not (crashes or damages):
        yield from (f"temporary file {name}" for name in leftovers.temporaries(folder))
    for path in [] if damages else leftovers.runs(folder):
        yield from (f"{path.name}: {text}" for text in accounts.wrong_in(path))


def _reason(test: pytest.Item, name: str) -> str:
    """Return the reason that a marker must give, or ``""`` where there is none."""
    marker = test.get_closest_marker(name)
    if marker is None:
        return ""
    (reason,) = marker.args
    assert reason, f"{name} needs a reason"
    return str(reason)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_of_all() -> Iterator[None]:
    """The warm pool goes with the session, and all of it."""
    before = leftovers.Snapshot.take()
    yield
    warm_pool.close_warm()
    left = leftovers.left_since(before)
    if left:
        pytest.fail("left behind by the session:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def nurseries(nothing_left_of_all: None) -> Iterator[Callable[[], Nursery]]:
    """One nursery, from the moment when it is needed; the servers of all pools come from it."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def one() -> Nursery:
            made = stack.enter_context(nursery())
            leftovers.helpers.add(made.pid)
            return made

        server_process.start_server = lambda *what: one().start_server(*what)  # type: ignore[assignment]
        yield one
        server_process.start_server = fresh_server
        warm_pool.close_warm()
        leftovers.helpers.clear()


@pytest.fixture
def warm(nurseries: Callable[[], Nursery]) -> Nursery:
    """Starts processes that need not import torch."""
    return nurseries()


@pytest.fixture
def fresh_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The servers of all pools are fresh interpreters, for what is about their start."""
    warm_pool.close_warm()
    monkeypatch.setattr(server_process, "start_server", fresh_server)
    yield
    warm_pool.close_warm()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report
