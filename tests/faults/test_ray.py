"""Several nodes of a Ray cluster on this machine: placed by name, killed, lost with the head."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asynckfold import InputError
from asynckfold.engines.ray_engine import RayEngine
from asynckfold.jobs.messages import CheckpointWritten, EpochEnded, Note, Task
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.result import DONE
from asynckfold.store import RunStore
from tests.engines.ray_start import ended, first_checkpoint, needs_ray, started, sweep
from tests.leftovers import until
from tests.toy import task, toy_bundle

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

ENGINES = Path(__file__).parents[1] / "engines"


class Nodes:
    """A cluster in a process of its own, see `tests.engines.ray_nodes`."""

    def __init__(self, folder: Path) -> None:
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, str(ENGINES / "ray_nodes.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "RAY_worker_niceness": "0", "SLOW": "0.03"},
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


def news(events: queue.SimpleQueue[Any], kind: type) -> Any:
    """Return the next event of a kind."""
    while not isinstance(event := events.get(timeout=200), kind):
        pass
    return event


def loads(engine: RayEngine) -> dict[str, tuple[int, ...]]:
    """Return the cores of each node that is there."""
    return {load.node: load.cores for load in engine.load([]).nodes if not load.blocked}


def place(bundle: Any, index: int, node: str) -> Placement:
    return Placement((bundle.plan.jobs[index].id,), (min(os.sched_getaffinity(0)),), node=node)


def test_jobs_run_on_the_nodes_that_they_are_placed_on(root: Path, nodes: Nodes) -> None:
    for name in ("one", "two"):
        nodes("add", name)
    with toy_bundle(root) as (bundle, data), started(nodes.address) as cluster:
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with closing(RayEngine(cluster, bundle, data, events.put)) as engine:
            assert {*loads(engine)} == {"", "one", "two"}
            # Each has one core of Ray, whatever the machine has.
            assert {len(cores) for cores in loads(engine).values()} == {1}
            jobs = bundle.plan.jobs
            futures = [
                engine.submit(place(bundle, index, node), [task(jobs[index])])
                for index, node in enumerate(("", "one", "two"))
            ]
            results = [future.result(300).results[0] for future in futures]
            pids = {future.result().pid for future in futures}
            assert [result.status for result in results] == [DONE] * 3
            assert len(pids) == 3
            saved = [news(events, CheckpointWritten).ref for _ in range(3)]
            assert all((root / item.file).stat().st_size == item.bytes for item in saved)
            # Elsewhere, from where another node has left off.
            again = engine.submit(
                place(bundle, 0, "two"),
                [Task(jobs[0], 2, tuple(saved))],
            )
            assert again.result(300).results[0].digest == results[0].digest


def test_a_killed_node_costs_an_attempt_and_one_that_comes_later_takes_jobs(
    root: Path, nodes: Nodes
) -> None:
    nodes("add", "one")
    with toy_bundle(root, epochs=10**6) as (bundle, data), started(nodes.address) as cluster:
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with closing(RayEngine(cluster, bundle, data, events.put)) as engine:
            jobs = bundle.plan.jobs
            lost = engine.submit(place(bundle, 0, "one"), [task(jobs[0])])
            news(events, EpochEnded)
            stays = engine.submit(place(bundle, 1, ""), [task(jobs[1])])
            nodes("kill", "one")
            assert lost.result(200).results == [None]
            assert "node one is lost: " in news(events, Note).text
            assert {*loads(engine)} == {""}
            nodes("add", "late")
            until(lambda: "late" in loads(engine), 200)
            assert "more nodes: " in news(events, Note).text
            there = engine.submit(place(bundle, 2, "late"), [task(jobs[2])])
            while news(events, EpochEnded).job_id != jobs[2].id:
                pass
            assert not stays.done()
            engine.close(60)
            assert stays.result(0).results == there.result(0).results == [None]


def test_a_node_with_another_asynckfold_is_refused(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "99")
    told = r"needs asynckfold and torch.*here 99.*pip install"
    with pytest.raises(InputError, match=told), started(nodes.address):
        pass


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


@pytest.mark.skipif(
    find_spec("asynckfold.scheduling.cluster") is None,
    reason="jobs of a sweep are placed on this machine only",
)
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
