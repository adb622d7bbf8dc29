"""The engine "ray" on a stand-in for Ray: nodes, losses, warm actors, and what is refused."""

from __future__ import annotations

import errno
import os
import queue
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError, StorageError
from asynckfold.api.arguments import MachineArguments
from asynckfold.engines import ray_cluster as clusters
from asynckfold.engines import ray_engine
from asynckfold.engines.ray_cluster import RayCluster, ray_cluster
from asynckfold.engines.ray_engine import RayEngine
from asynckfold.engines.ray_node import NodeSettings
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import EpochEnd, NewCheckpoint, Note, Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.reservations import within
from tests.engines import fake_ray
from tests.engines.fake_ray import Cluster
from tests.leftovers import Snapshot, descendants, gone, left_since, until
from tests.toy import Tiny, adam, samples, task, toy_bundle

# What is refused before anything starts


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    return AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ray_address": "x:1"}, "ray_address is for engine='ray'"),
        ({"ray_runtime_env": {"pip": []}}, "ray_runtime_env is for engine='ray'"),
        ({"engine": "ray", "yield_to_others": True}, "yield_to_others is for engine='process'"),
        ({"engine": "ray", "connect_timeout_s": 0}, "connect_timeout_s must be a number of sec"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    root: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        kfold(root, **settings)


@pytest.mark.parametrize(
    ("address", "is_installed", "message"),
    [
        (None, False, r"Run: pip install 'asynckfold\[ray\]'"),
        ("ray://head:10001", True, "Start the call on a node of the cluster"),
        ("127.0.0.1:1", True, "Start the call on a node of the cluster"),
        ("nowhere", True, "Start the call on a node of the cluster"),
    ],
)
def test_a_ray_that_cannot_be_used_is_refused(
    root: Path,
    address: str | None,
    is_installed: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_ray.installed():
        if not is_installed:
            monkeypatch.setattr(clusters, "find_spec", lambda name: None)
        asked = kfold(root, engine="ray", ray_address=address, connect_timeout_s=0.5)
        with pytest.raises(InputError, match=message):
            asked([Tiny], ["step"], adam)
    assert not root.exists()


def test_a_load_within_what_ray_grants_keeps_running_jobs_and_the_idlest() -> None:
    load = Load((0, 1, 2, 3), (3, 1, 0), 1)
    limited = within(load, [Placement(("a",), (2,))], 2)
    assert (limited.cores, limited.idle) == ((2, 3), (3,))
    assert within(load, [], 0).cores == ()


@contextmanager
def joined() -> Iterator[RayCluster]:
    settings = NodeSettings(MachineArguments().machine, "auto", 0, 2.0, ("test",))
    with ray_cluster("", None, 60.0, settings, 2) as made:
        yield made


@pytest.mark.nightly
def test_a_cluster_from_its_start_to_the_loss_of_its_head(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One for all: the fork server of each node imports torch.
    with fake_ray.installed() as cluster:
        cluster.add("one")
        with joined() as made:
            folders = [Path(node.described.folder) for node in made.nodes.values()]
            assert all(folder.is_dir() for folder in folders)
            jobs_run_on_their_nodes_and_continue_on_others(root / "jobs", made)
            a_hang_and_a_full_disk_end_their_jobs_only(root / "faults", made)
            monkeypatch.setattr(ray_engine, "HEAD_SECONDS", 0.1)
            monkeypatch.setattr(ray_engine, "LOOK_SECONDS", 0.1)
            jobs_of_a_lost_node_are_placed_again_until_the_head_is_lost(
                root / "losses", made, cluster
            )
        assert not cluster.is_joined
    until(lambda: not any(folder.exists() for folder in folders), 60)


def place(bundle: Any, index: int, node: str = "") -> Placement:
    return Placement((bundle.plan.jobs[index].id,), (min(os.sched_getaffinity(0)),), node=node)


def next_of(events: queue.SimpleQueue[Any], kind: type) -> Any:
    """Return the next event of a kind."""
    while not isinstance(event := events.get(timeout=120), kind):
        pass
    return event


def loads(engine: RayEngine) -> dict[str, tuple[int, ...]]:
    """Return the cores of each node that is there."""
    return {load.node: load.cores for load in engine.load([]).nodes}


def test_a_node_with_another_version_is_refused() -> None:
    before = Snapshot.take()
    with pytest.MonkeyPatch.context() as patch, fake_ray.installed():
        patch.setattr(clusters, "versions", lambda: ("99", "99"))
        refusal = pytest.raises(InputError, match=r"needs asynckfold and torch.*here 99.*pip inst")
        with refusal, joined():
            pass
    assert left_since(before) == []


def jobs_run_on_their_nodes_and_continue_on_others(root: Path, made: RayCluster) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with (
        toy_bundle(root) as (bundle, data),
        closing(RayEngine(made, bundle, data, events.put)) as engine,
    ):
        assert {*loads(engine)} == {"", "one"}
        # Ray gives away one core there, whatever the machine has.
        assert len(loads(engine)["one"]) == 1
        jobs = bundle.plan.jobs
        futures = [
            engine.submit(place(bundle, index, node), [task(jobs[index])])
            for index, node in enumerate(("", "one", "one"))
        ]
        results = [future.result(120).results[0] for future in futures]
        assert [result.status for result in results] == ["done"] * 3
        saved = [next_of(events, NewCheckpoint).ref for _ in range(3)]
        assert all((root / item.file).stat().st_size == item.bytes for item in saved)
        # From where another node has left off.
        again = engine.submit(place(bundle, 0, "one"), [Task(jobs[0], 2, tuple(saved))])
        assert again.result(120).results[0].digest == results[0].digest


class Sleeps(Tiny):
    """Hangs in its third epoch."""

    steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps > 20:
            time.sleep(1000)
        return super().forward(inputs)


def a_hang_and_a_full_disk_end_their_jobs_only(root: Path, made: RayCluster) -> None:
    models = {"Sleeps": Sleeps, "Tiny": Tiny}
    with (
        toy_bundle(root, models, epochs=50) as (bundle, data),
        closing(RayEngine(made, bundle, data, lambda event: None)) as engine,
    ):
        numbers = {job.model: at for at, job in enumerate(bundle.plan.jobs) if not job.fold}
        at = numbers["Sleeps"]
        hanging = engine.submit(place(bundle, at), [task(bundle.plan.jobs[at])])

        def full(path: Path, data: bytes) -> None:
            raise StorageError(errno.ENOSPC, f"{path}: no room")

        at = numbers["Tiny"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_engine, "write_whole", full)
            future = engine.submit(place(bundle, at, "one"), [task(bundle.plan.jobs[at])])
            error = future.exception(120)
        assert isinstance(error, StorageError)
        assert error.errno == errno.ENOSPC
        hung = hanging.exception(120)
        assert isinstance(hung, WorkerDiedError)
        assert hung.outcome == "hang", hung
        assert "in forward" in (root / "Sleeps/cosine/fold-0/log.txt").read_text()


def jobs_of_a_lost_node_are_placed_again_until_the_head_is_lost(
    root: Path, made: RayCluster, cluster: Cluster
) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with (
        toy_bundle(root, epochs=10**6) as (bundle, data),
        closing(RayEngine(made, bundle, data, events.put)) as engine,
    ):
        jobs = bundle.plan.jobs
        lost = engine.submit(place(bundle, 0, "one"), [task(jobs[0])])
        next_of(events, EpochEnd)
        stays = engine.submit(place(bundle, 1), [task(jobs[1])])
        folder = Path(made.nodes["one"].described.folder)
        (server,) = (actor.process.pid for name, actor in cluster.actors if name == "one")
        left = descendants(server)
        cluster.end("one")
        assert lost.result(120).results == [None]
        assert "node one is lost: " in next_of(events, Note).text
        assert {*loads(engine)} == {""}
        # It leaves nothing.
        assert gone(left, 60)
        until(lambda: not folder.exists(), 60)
        cluster.add("late")
        until(lambda: "late" in loads(engine), 120)
        assert "more nodes: " in next_of(events, Note).text
        there = engine.submit(place(bundle, 2, "late"), [task(jobs[2])])
        while next_of(events, EpochEnd).job_id != jobs[2].id:
            pass
        assert not stays.done()
        cluster.server.close()
        with pytest.raises(StorageError, match=r"head of the Ray cluster.*the same call continues"):
            stays.result(120)
        assert engine.load([]).idle == (0,)
        engine.close(60)
        assert there.result(0).results == [None]
