"""The engine "joblib" with backends of real processes, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import pytest
from joblib.parallel import ParallelBackendBase
from torch import nn

from asynckfold import AsyncKFold, InputError, RunStore
from asynckfold.engines.joblib_backend import joblib_engine
from asynckfold.errors import UnpackError
from asynckfold.jobs.placement import Command, Load, Placement
from asynckfold.system.machine import resolve_n_jobs
from tests.leftovers import descendants, gone, joblibs_memory, until
from tests.toy import Tiny, adam, samples, toy_bundle

SWEEP = Path(__file__).with_name("joblib_sweep.py")


# What is refused, and what is understood


class Threads(ParallelBackendBase):
    """A backend that does not say that it runs its tasks in this process."""

    def effective_n_jobs(self, n_jobs: int) -> int:
        return 2

    supports_retrieve_callback = True

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], None]) -> Any:
        try:
            func()
        except RuntimeError as error:
            callback(error)

    def retrieve_result_callback(self, out: Exception) -> Any:
        raise out


joblib.register_parallel_backend("hidden-threads", Threads)


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    settings = {"verbose": 0, "baseline": None, "engine": "joblib", **settings}
    return AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, **settings)


def test_threads_of_this_process_are_refused_with_the_reason(root: Path) -> None:
    load = Load((0,), (0,), 1 << 30)
    with (
        toy_bundle(root) as (bundle, data),
        joblib.parallel_config("hidden-threads"),
        joblib_engine(bundle, data.handle(), lambda running, own: load, print) as engine,
        pytest.raises(UnpackError, match=r"in threads of the calling process.*engine='serial'"),
    ):
        engine.submit(Placement((), (0,), command=Command.DRY_RUN), []).result(10)


def test_a_backend_that_forks_is_refused(root: Path) -> None:
    with (
        joblib.parallel_config("multiprocessing"),
        pytest.raises(InputError, match="a backend that does not fork this process"),
    ):
        kfold(root)([Tiny], ["step"], adam)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine": "jolib"}, r"one of 'auto', 'process', 'serial', 'joblib', 'ray': .*'joblib'\?"),
        ({"nice": 3}, "nice=3 and engine='joblib'"),
        ({"yield_to_others": True}, "yield_to_others=True and engine='joblib'"),
        ({"stall_timeout": 60}, "stall_timeout is for engine='process' or 'serial' or 'ray'"),
        ({"engine": "serial", "nice": 3}, "nice=3 and engine='serial'"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    root: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        kfold(root, **settings)


def test_several_processes_of_a_job_need_the_engine_process(root: Path) -> None:
    with pytest.raises(InputError, match="processes is for engine='process' or 'ray'"):
        kfold(root, trainer="hogwild", processes=2)([Tiny], ["step"], adam)


def test_parallelize_false_is_the_engine_serial(root: Path) -> None:
    assert kfold(root, engine="process", parallelize=False).settings.engine == "serial"


@pytest.mark.parametrize(
    ("context", "n_jobs", "count"),
    [
        ({"n_jobs": 3}, None, 3),
        ({"n_jobs": -2}, None, 3),
        ({"n_jobs": 3}, 2, 2),
        ({"n_jobs": 3}, "auto", None),
        ({"backend": "threading"}, None, None),
    ],
)
def test_n_jobs_honours_the_context_as_joblib_does(
    context: dict[str, Any], n_jobs: Any, count: int | None
) -> None:
    assert resolve_n_jobs(None, 4) is None
    with joblib.parallel_config(**context):
        assert resolve_n_jobs(n_jobs, 4) == count


def test_a_context_without_jobs_is_refused() -> None:
    with (
        joblib.parallel_config(n_jobs=0),
        pytest.raises(InputError, match=r"n_jobs in joblib.parallel_config must be"),
    ):
        resolve_n_jobs(None, 4)


# Real processes


def started(backend: str, root: Path, **variables: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    words = [sys.executable, str(SWEEP), backend, str(root)]
    return subprocess.Popen(
        words, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return out.splitlines()[-1]  # what models print with the serial engine comes before


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the sweep prints with the serial engine."""
    return ended(started("serial", tmp_path_factory.mktemp("serial") / "run"))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["loky", "own"])
def test_other_backends_give_the_same_numbers_and_logs(
    root: Path, backend: str, serial: str
) -> None:
    assert ended(started(backend, root)) == serial
    assert "a word for the log" in (root / "net/cosine/fold-0/log.txt").read_text()


@pytest.mark.nightly
def test_a_killed_process_of_loky_costs_one_attempt(
    root: Path, tmp_path: Path, serial: str
) -> None:
    (tmp_path / "kill").touch()
    kill = {"KILL_ONCE": str(tmp_path / "kill"), "KILL_IN": str(root), "SLOW": "0.02"}
    assert ended(started("loky", root, **kill)) == serial
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
    assert outcomes.count("died") == 1
    assert set(outcomes) <= {"ok", "died", "interrupted"}


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_sweep_leaves_no_process_and_is_continued(
    root: Path, serial: str, number: signal.Signals
) -> None:
    process = started("loky", root, SLOW="0.05")
    until(lambda: list(root.glob("net/*/*/checkpoint*")), 300)
    workers = descendants(process.pid)
    assert workers
    # Ctrl-C reaches all processes of a terminal.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    assert process.wait(60) != 0
    process.stdout.close()  # type: ignore[union-attr]
    assert gone(workers, 30)
    assert process.pid not in {pid for pid, _ in joblibs_memory()}
    assert ended(started("loky", root)) == serial
