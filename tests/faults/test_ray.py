"""Several nodes of a Ray cluster on this machine: placed by name, killed, lost with the head."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from asynckfold import RunStore
from tests.engines.ray_start import (
    ended,
    first_checkpoint,
    named,
    needs_ray,
    raylet_of,
    sweep,
)
from tests.leftovers import descendants, gone, until

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

ENGINES = Path(__file__).parents[1] / "engines"


class Nodes:
    """A cluster in a process of its own, see `tests.engines.ray_nodes`."""

    def __init__(self, folder: Path) -> None:
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        variables = {"PYTHONPATH": paths, "RAY_worker_niceness": "0", "SLOW": "0.03"}
        self.process = subprocess.Popen(
            [sys.executable, str(ENGINES / "ray_nodes.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables},
            text=True,
            start_new_session=True,
        )
        self.address = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(self, word: str, *names: str) -> None:
        """Add a node, with GPUs or without, or kill it, or start all again."""
        assert self.process.stdin is not None
        print(word, *names, file=self.process.stdin, flush=True)
        self.address = self._line()
        assert self.address

    def close(self) -> None:
        """End the cluster."""
        self.process.communicate(timeout=120)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A cluster of a head, which is the node of this process."""
    # Short: Ray makes sockets below it.
    with (
        tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder,
        closing(Nodes(Path(folder))) as made,
    ):
        yield made


def refused(root: Path, address: str) -> str:
    """Return the error of a sweep, which begins nothing."""
    process = sweep("plain", "ray", root, address)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert not root.exists()
    (line,) = [line for line in out.splitlines() if line.startswith("asynckfold.errors.InputError")]
    return line


def test_a_node_without_asynckfold_is_refused(root: Path, nodes: Nodes) -> None:
    nodes("set", "BEFORE", str(ENGINES / "stand_in_bare"))
    nodes("add", "bare")
    told = refused(root, nodes.address)
    assert "needs asynckfold and torch, in the versions here" in told
    assert f"pip install 'asynckfold[ray]=={version('asynckfold')}'" in told


def test_the_head_is_lost_and_the_same_call_continues(
    root: Path, tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "1024")
    # The checkpoints are too large for a message: Ray would write them to the lost object store.
    nodes("add", "one")
    expected = ended(sweep("plain", "process", tmp_path / "process"))
    process = sweep("plain", "ray", root, nodes.address, N_JOBS="2")
    until(lambda: len([*root.glob("net/*/*/checkpoint*")]) == 2, 200)
    nodes("kill", "head")
    out, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "the same call continues" in out
    nodes("restart", "head")
    # The cluster is named by Ray's own variable as well.
    assert ended(sweep("plain", "ray", root, RAY_ADDRESS=nodes.address)) == expected
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
    assert outcomes.count("ok") == 6
    assert len(outcomes) > 6


def test_a_node_is_killed_in_the_middle_of_a_sweep(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    for name in ("one", "two"):
        nodes("add", name)
    expected = ended(sweep("plain", "process", tmp_path / "process"))
    process = sweep("plain", "ray", root, nodes.address, N_JOBS="3")
    # One job on each node.
    until(lambda: len([*root.glob("net/*/*/log.txt")]) == 3, 60)
    first_checkpoint(root)
    nodes("kill", "two")
    assert ended(process) == expected
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
    assert sorted(outcomes) == ["interrupted", *["ok"] * 6]


# A Ray of this machine


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return what a sweep prints with the engine "process"."""
    known: dict[str, str] = {}

    def printed(kind: str) -> str:
        if kind not in known:
            root = tmp_path_factory.mktemp(kind) / "run"
            known[kind] = ended(sweep(kind, "process", root))
        return known[kind]

    return printed


@pytest.fixture
def no_folder_left() -> Iterator[None]:
    """Fail if a folder of a Ray of ours, or of a node, is left."""

    def folders() -> set[Path]:
        return {*Path("/tmp").glob("akf-ray-*"), *Path("/tmp").glob("asynckfold-*")}

    before = folders()
    yield
    until(lambda: folders() <= before, 60)


@pytest.mark.parametrize("kind", ["plain", "fused", "allreduce"])
@pytest.mark.usefixtures("no_folder_left")
def test_the_numbers_are_those_of_the_engine_process(
    kind: str, root: Path, expected: Callable[[str], str]
) -> None:
    assert ended(sweep(kind, "ray", root)) == expected(kind)
    if kind == "plain":
        assert "a word for the log" in (root / "net/cosine/fold-0/log.txt").read_text()


@pytest.mark.usefixtures("no_folder_left")
def test_a_killed_worker_costs_one_attempt(
    root: Path, tmp_path: Path, expected: Callable[[str], str]
) -> None:
    (tmp_path / "kill").touch()
    found = sweep("plain", "ray", root, KILL_ONCE=str(tmp_path / "kill"))
    assert ended(found) == expected("plain")
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
    assert sorted(outcomes) == ["died", *["ok"] * 6]


@pytest.mark.usefixtures("no_folder_left")
@pytest.mark.parametrize("name", ["net/", "RayNode"])
def test_a_killed_process_of_ray_costs_attempts_or_the_node(
    name: str, root: Path, expected: Callable[[str], str]
) -> None:
    process = sweep("plain", "ray", root, SLOW="0.02")
    first_checkpoint(root)
    os.kill(min(named(name, raylet_of(root))), signal.SIGKILL)
    if name == "RayNode":
        assert "no node of the Ray cluster is left" in process.communicate(timeout=300)[0]
        process = sweep("plain", "ray", root)
    assert ended(process) == expected("plain")
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
    assert outcomes.count("ok") == 6
    assert 1 <= len(outcomes) - 6 <= 2


@pytest.mark.usefixtures("no_folder_left")
@pytest.mark.crashes("a kill may leave a file that is being written")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_sweep_leaves_nothing_and_is_continued(
    root: Path, number: signal.Signals, expected: Callable[[str], str]
) -> None:
    process = sweep("plain", "ray", root, SLOW="0.02")
    first_checkpoint(root)
    # They look for their raylet every minute or two.
    agents = named("DashboardAgent", process.pid) | named("RuntimeEnvAgent", process.pid)
    # Ctrl-C reaches all processes of a terminal.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    workers = descendants(process.pid)
    out, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert "InterruptedRunError: interrupted by SIGINT" in out
        with RunStore.read(root) as store:
            left = [item for item in store.attempts() if item.outcome == "interrupted"]
            assert left
            assert all(store.checkpoints(item.job_id) for item in left)
    assert gone(workers - agents, 60)
    assert gone(agents, 200)
    assert ended(sweep("plain", "ray", root)) == expected("plain")
