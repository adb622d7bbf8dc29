"""Signals in real terminals and processes: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import multiprocessing
import os
import pty
import random
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from asynckfold import AsyncKFold, InterruptedRunError, RunStore
from asynckfold.cli.output import Output
from asynckfold.cli.summary import partial_report
from asynckfold.store.run_file import RunFile
from asynckfold.system.signals import listening
from tests import here
from tests.leftovers import descendants, gone, shared_memory, until
from tests.size import NIGHTLY
from tests.started import Nursery, finished, training
from tests.toy import Tiny, adam, samples

HOME = Path(__file__).parents[2]
OURS = ("torch_", "psm_", "sem.")
"""What torch and Python call what they share by name."""

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

GUARD = 200
"""Seconds after which something hangs, on the busiest machine."""

pytestmark = pytest.mark.timeout(600)

ROUNDS = 50 if NIGHTLY else 3

SWEEP = """
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, inputs):
        if self.training:
            slow = 0.02 if (HERE / "SLOW").exists() else 0
            time.sleep(3600 if (HERE / "STUCK").exists() else slow)
        return self.layers(inputs)


X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
dataset = (X, (X[:, 0] > 0).long())
criterion = nn.CrossEntropyLoss()
models = {"net": Net}
schedulers = ["cosine", "step"]
opt_fn = lambda model: torch.optim.Adam(model.parameters(), 1e-2)
trainer_params = {"epochs": 12}
settings = {"kfolds": 3, "batch_size": 4, "baseline": None, "n_jobs": 2}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.py"
    path.write_text(SWEEP)
    (tmp_path / "SLOW").touch()
    return path


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("golden")
    (folder / "sweep.py").write_text(SWEEP)
    finish(folder / "sweep.py", folder / "run")
    return fingerprint(folder / "run")


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _none_stays() -> Iterator[None]:
    """A test that fails leaves no process to the next one."""
    yield
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    started.clear()


def words(sweep: Path, root: Path) -> list[str]:
    return ["run", str(sweep), "--root", str(root)]


def command(sweep: Path, root: Path) -> list[str]:
    """What a nursery starts."""
    return ["-m", "asynckfold", *words(sweep, root)]


def printed(root: Path) -> Path:
    return root.with_name("printed")


def start(
    *line: str,
    patch: Path | None = None,
    before: Callable[[], object] = lambda: None,
    **settings: Any,
) -> subprocess.Popen[str]:
    """Start the command, with a ``sitecustomize`` of its own if `patch` is a folder with one."""

    def in_the_child() -> None:
        # The tests themselves may run where these are ignored.
        for number in ENDINGS:
            signal.signal(number, signal.SIG_DFL)
        before()

    path = [str(HOME)] if patch is None else [str(patch), str(HOME)]
    process = subprocess.Popen(
        [sys.executable, "-m", "asynckfold", *line],
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        preexec_fn=in_the_child,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings},
    )
    started.append(process)
    return process


def finish(sweep: Path, root: Path) -> None:
    """Run the same command to its end, without delay."""
    (sweep.parent / "SLOW").unlink(missing_ok=True)
    here.command(*words(sweep, root), "--no-report")


def fingerprint(root: Path) -> str:
    with RunStore.read(root) as store:
        counts = store.counts()
        assert counts["done"] == counts["planned"]
        return store.fingerprint()


class Terminal:
    """A run in a terminal of its own: what is typed reaches its whole foreground group."""

    def __init__(self, *line: str) -> None:
        self.master, slave = pty.openpty()
        self.process = start(
            *line,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            before=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.shown = b""

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> None:
        os.close(self.master)

    def end(self) -> tuple[int, str]:
        """Read to the end; return the exit code and what was shown, on one line."""
        while True:
            try:
                piece = os.read(self.master, 4096)
            except OSError:  # nobody has it open any more
                break
            if not piece:
                break
            self.shown += piece
        self.close()
        text = self.shown.decode("utf-8", "replace")
        return self.process.wait(timeout=GUARD), " ".join(text.split())


def listens(pid: int) -> bool:
    """Whether a process has taken the signals for itself."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt"))[7:], 16)
    return bool(caught >> (signal.SIGHUP - 1) & 1)


def nothing_left(root: Path, family: set[int], memory: set[str]) -> None:
    assert gone(family)
    # What others on this machine have there now goes away again; what we left would stay.
    until(lambda: {name for name in shared_memory() if name.startswith(OURS)} <= memory, 20)
    assert not list(root.rglob("*.tmp"))


# In a terminal


def test_ctrl_c_once_saves_everything_and_tells_how_to_continue(
    sweep: Path, root: Path, golden: str
) -> None:
    memory = shared_memory()
    terminal = Terminal(*words(sweep, root))
    until(lambda: finished(root) >= 1 and training(root))
    family = descendants(terminal.process.pid)
    terminal.type(b"\x03")
    code, shown = terminal.end()
    assert code == 130, shown
    assert f"continue with: asynckfold {shlex.join(words(sweep, root))}" in shown
    assert "interrupted by SIGINT" in shown
    assert "partial report: " in shown
    assert (root / "report" / "index.html").is_file()
    assert "Traceback" not in shown
    nothing_left(root, family, memory)
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
        saved = [ref for job in store.plan.jobs for ref in store.checkpoints(job.id)]
    assert "interrupted" in outcomes
    assert None not in outcomes
    assert saved
    finish(sweep, root)
    assert fingerprint(root) == golden


AT_A_CALL = """
import os, signal, sys
from asynckfold.cli import program

strikes, calls = [int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])], 0

def count(frame, event, argument):
    global calls
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return  # nobody listens yet
    calls += 1
    if strikes and calls >= strikes[0]:
        del strikes[0]
        os.kill(os.getpid(), signal.SIGINT)

del sys.argv[1:3]
sys.setprofile(count)
sys.exit(program())
"""
"""A profiler that raises is removed: the second one comes where the first was only noted."""


@pytest.mark.nightly
@pytest.mark.timeout(300 * ROUNDS)
def test_ctrl_c_at_any_call_of_the_command(
    sweep: Path, root: Path, golden: str, warm: Nursery
) -> None:
    """From the parsing of its line to the last figure of the report; twice, up to 3,000 apart."""
    (sweep.parent / "SLOW").unlink()
    draw, memory = random.Random(0), shared_memory()
    for number in range(2 * ROUNDS):
        # All is over after some five million calls and returns, nine tenths of which draw figures.
        call, later = int(10 ** draw.uniform(0, 6.7)), int(10 ** draw.uniform(0, 3.5))
        folder, path = root.with_name(f"run-{number}"), root.with_name(f"printed-{number}")
        run = warm.start(["-c", AT_A_CALL, call, later, *words(sweep, folder)], path)
        code, shown = run.wait(GUARD), path.read_text()
        assert code in (0, 130), (call, later, shown)
        assert code == 0 or "interrupted by SIGINT" in shown
        assert not re.search("Traceback|Exception ignored|damaged", shown), (call, later, shown)
        nothing_left(folder, set(), memory)
        if (folder / "run.db").exists():
            finish(sweep, folder)
            assert fingerprint(folder) == golden, (call, later)


PATIENT = """
import sys
import asynckfold.sweep.loop
from asynckfold.cli import program
asynckfold.sweep.loop.GRACE_SECONDS = 3600
sys.exit(program())
"""


@pytest.mark.nightly
def test_a_second_ctrl_c_does_not_wait_for_a_job_that_hangs(
    sweep: Path, root: Path, warm: Nursery
) -> None:
    memory = shared_memory()
    run = warm.start(["-c", PATIENT, *words(sweep, root)], printed(root))
    until(lambda: training(root))
    (sweep.parent / "STUCK").touch()
    time.sleep(0.5)
    family = descendants(run.pid)
    run.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.poll() is None, run.printed()
    run.send_signal(signal.SIGINT)
    assert run.wait(GUARD) == 130, run.printed()
    nothing_left(root, family, memory)
    with RunStore.read(root) as store:
        outcomes = {item.outcome for item in store.attempts()}
    assert "interrupted" in outcomes
    assert outcomes <= {"interrupted", "ok"}


@pytest.mark.nightly
@pytest.mark.parametrize("ending", ["SIGTERM", "SIGHUP", "closed terminal"])
def test_other_endings_are_like_ctrl_c_with_143(
    sweep: Path, root: Path, golden: str, ending: str
) -> None:
    memory = shared_memory()
    terminal = Terminal(*words(sweep, root))
    until(lambda: training(root))
    family = descendants(terminal.process.pid)
    if ending == "closed terminal":
        terminal.close()
        assert terminal.process.wait(timeout=GUARD) == 143
    else:
        # A batch system signals every process, not the first alone.
        for pid in (*family, terminal.process.pid):
            os.kill(pid, signal.Signals[ending])
        code, shown = terminal.end()
        assert code == 143, shown
        assert f"continue with: asynckfold {shlex.join(words(sweep, root))}" in shown
        assert "partial report: " in shown
        assert "Traceback" not in shown
    nothing_left(root, family, memory)
    number = "SIGTERM" if ending == "SIGTERM" else "SIGHUP"
    with RunStore.read(root) as store:
        assert [item.text for item in store.events() if item.kind == "interrupted"] == [
            f"interrupted by {number}"
        ]
    finish(sweep, root)
    assert fingerprint(root) == golden


@pytest.mark.nightly
def test_nohup_is_heeded(sweep: Path, root: Path, golden: str, warm: Nursery) -> None:
    line = [*command(sweep, root), "--no-report"]
    run = warm.start(line, printed(root), ignored=[signal.SIGHUP])
    until(lambda: training(root))
    run.send_signal(signal.SIGHUP)
    (sweep.parent / "SLOW").unlink()
    assert run.wait(GUARD) == 0, run.printed()
    assert fingerprint(root) == golden


@pytest.mark.nightly
@pytest.mark.parametrize("flags", ["", "-vv"])
def test_head_takes_one_line_and_the_run_goes_on(
    sweep: Path, root: Path, golden: str, flags: str
) -> None:
    sweep.write_text("print('one')\n" + SWEEP + "for _ in range(3): print('more', flush=True)\n")
    (sweep.parent / "SLOW").unlink()
    line = shlex.join([sys.executable, "-m", "asynckfold", *words(sweep, root), *flags.split()])
    done = subprocess.run(
        ["bash", "-c", f"{line} 2>&1 | head -1; echo ${{PIPESTATUS[0]}}"],
        env={**os.environ, "PYTHONPATH": str(HOME), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=GUARD,
    )
    assert done.stdout.splitlines() == ["one", "0"], done.stderr
    assert fingerprint(root) == golden


def test_of_a_run_without_a_plan_there_is_nothing_to_report(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that was interrupted when its folder had just been made."""
    RunStore.hold(root).close()
    partial_report(root, Output(Namespace()))
    assert capsys.readouterr().err == ""


# In code


def call(root: Path, models: Any = Tiny, **settings: Any) -> str:
    settings = {"baseline": None, "verbose": 0, "n_jobs": 1, **settings}
    sweeps = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **settings)
    return sweeps([models], ["cosine"], adam, {"epochs": 2}).fingerprint


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGINT, lambda number, frame: None),
        (signal.SIGINT, signal.SIG_DFL),
        (signal.SIGINT, signal.SIG_IGN),
        (signal.SIGTERM, lambda number, frame: None),
    ],
)
def test_in_code_handlers_are_taken_for_the_call_only_and_one_of_the_host_stays(
    root: Path, number: signal.Signals, handler: Any
) -> None:
    seen = []

    def look(outputs: Any, targets: Any) -> float:
        seen.append(signal.getsignal(number))
        return 1.0

    before = signal.signal(number, handler)
    try:
        call(root, scoring={"own": look})
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert (set(seen) == {handler}) is (handler is not signal.default_int_handler)


@pytest.mark.nightly
def test_an_exception_between_two_rows_loses_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As asyncio's own handler raises at the second Ctrl-C: in the middle of anything."""
    real, calls, strike = RunFile.write, [0], [0]

    def write(self: RunFile, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == strike[0]:
            raise KeyboardInterrupt
        real(self, *arguments)

    monkeypatch.setattr(RunFile, "write", write)
    golden = call(root / "golden", parallelize=False)
    # The last ones are those of leaving, by when nothing is buffered that could be lost.
    points = range(1, calls[0] - 1, 1 if ROUNDS == 50 else calls[0] // 12)
    for point in points:
        calls[0], strike[0] = 0, point
        with pytest.raises(KeyboardInterrupt):
            call(root / str(point), parallelize=False)
        strike[0] = 0
        if (root / str(point) / "run.db").exists():
            RunStore.read(root / str(point)).close()  # checks every row
        assert call(root / str(point), parallelize=False) == golden


def test_ctrl_c_while_a_run_is_released_releases_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RunFile.close

    def close(self: RunFile) -> None:
        if self.lock is not None:
            signal.raise_signal(signal.SIGINT)
        real(self)

    with monkeypatch.context() as patch, contextlib.suppress(InterruptedRunError):
        patch.setattr(RunFile, "close", close)
        call(root, parallelize=False)
    RunStore.hold(root).close()


@pytest.mark.parametrize("look", [RunStore.read, RunStore.hold])
def test_ctrl_c_while_a_run_is_checked_is_no_damage_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], RunStore]
) -> None:
    call(root, parallelize=False)
    real, calls = zlib.crc32, itertools.count()

    def crc32(*arguments: Any) -> int:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(zlib, "crc32", crc32)
    with pytest.raises(InterruptedRunError, match="SIGINT"), listening():
        look(root)


@pytest.mark.nightly
def test_it_works_in_a_thread_in_a_loop_and_in_a_daemon(root: Path) -> None:
    found = [call(root / "here")]

    async def within() -> str:
        return call(root / "loop")

    found.append(asyncio.run(within()))
    thread = threading.Thread(target=lambda: found.append(call(root / "thread")))
    thread.start()
    thread.join()
    pipe, end = multiprocessing.Pipe(duplex=False)
    daemon = multiprocessing.get_context("spawn").Process(
        target=_call_and_tell, args=(root / "daemon", end), daemon=True
    )
    daemon.start()
    end.close()
    found.append(pipe.recv())
    daemon.join(timeout=GUARD)
    assert daemon.exitcode == 0
    # Python's own helper, which `spawn` started here and would keep until this process ends.
    resource_tracker._resource_tracker._stop()
    assert len(found) == 4
    assert len(set(found)) == 1


def _call_and_tell(root: Path, end: Any) -> None:
    end.send(call(root))


# What is taken when


def test_signals_are_noted_where_something_is_written_and_the_second_breaks_user_code() -> None:
    with listening() as signals, signals.noted():
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop_requested()
        assert not signals.urgent()
        signal.raise_signal(signal.SIGINT)
        assert signals.urgent()
        with pytest.raises(InterruptedRunError, match="SIGTERM") as caught:
            signals.check()
    assert caught.value.exit_code == 143
    with listening() as signals, signals.noted(), signals.breakable():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(InterruptedRunError):
            signal.raise_signal(signal.SIGINT)


def test_what_an_interruption_unwinds_is_not_struck_again() -> None:
    cleaned = []

    def unwound() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)

    with listening(), pytest.raises(InterruptedRunError):
        unwound()
    assert cleaned


INTO_AN_IMPORT = """
import os, signal, sys
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from asynckfold.system.signals import listening

def strike(frame, event, argument):
    if struck(frame):
        sys.setprofile(None)
        print("struck", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

def compiled(frame):
    caller = frame.f_back and frame.f_back.f_back
    loader = caller and caller.f_locals.get("self")
    return isinstance(loader, ExtensionFileLoader) and "importlib" not in frame.f_code.co_filename

def between(frame):
    code, spec = frame.f_code, frame.f_locals.get("spec")
    return code.co_name == "_init_module_attrs" and spec.name == sys.argv[1]

def python(frame):
    return frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == "torch.distributed"

name, way = sys.argv[1:]
struck = {"compiled": compiled, "between": between, "python": python}[way]
try:
    with listening():
        sys.setprofile(strike)
        import_module(name)
        while True:
            pass
except KeyboardInterrupt as interrupt:
    print(interrupt, type(interrupt.__context__), sys.modules[name].__spec__._initializing)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("matplotlib.ft2font", "compiled"),
        ("matplotlib.ft2font", "between"),
        ("kiwisolver._cext", "between"),
        ("torch", "python"),
    ],
)
def test_an_interruption_waits_for_the_import_of_a_compiled_library(name: str, way: str) -> None:
    """Given up halfway, these may end the process by an abort: in their code, not in Python's."""
    ended = subprocess.run(
        [sys.executable, "-c", INTO_AN_IMPORT, name, way],
        capture_output=True,
        text=True,
        timeout=GUARD,
        check=False,
    )
    told = "struck\ninterrupted by SIGINT <class 'NoneType'> False\n"
    assert ended.stdout == told, ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_what_a_library_makes_of_an_interruption_is_one_still() -> None:
    def library() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    with listening() as outer:
        with pytest.raises(InterruptedRunError), listening():
            library()
        with pytest.raises(InterruptedRunError), listening(), outer.anew():
            library()


def test_an_error_of_its_own_stays_one_after_a_signal() -> None:
    def broken() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), listening() as signals, signals.noted():
        broken()


def test_a_call_inside_a_command_listens_with_it() -> None:
    with listening() as outer:
        with listening() as inner:
            assert inner is outer
        with pytest.raises(InterruptedRunError):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(InterruptedRunError), outer.anew():
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
