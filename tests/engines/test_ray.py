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
from asynckfold.engines import ray_engine, ray_node
from asynckfold.engines.ray_cluster import RayCluster, close_warm, ray_cluster
from asynckfold.engines.ray_engine import EXCUSED_LOSSES, RayEngine
from asynckfold.engines.ray_node import NodeSettings
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import EpochEnd, NewCheckpoint, Note, Task
from asynckfold.jobs.placement import Load, NodeSize, Placement
from asynckfold.scheduling.reservations import within
from tests.engines import fake_ray
from tests.engines.fake_ray import Cluster
from tests.leftovers import descendants, gone, until
from tests.toy import Tiny, adam, samples, task, toy_bundle

# What is refused before anything starts


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    return AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ray_address": "auto"}, "ray_address is for engine='ray'"),
        ({"ray_runtime_env": {"pip": []}}, "ray_runtime_env is for engine='ray'"),
        ({"engine": "ray", "yield_to_others": True}, "the workers of one machine"),
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
        ("127.0.0.1:1", True, r"must answer within connect_timeout_s=0\.5"),
        ("nowhere", True, r"must answer within connect_timeout_s=0\.5"),
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


@pytest.mark.parametrize(
    ("raised", "remedy"),
    [
        ("Version mismatch: Ray: 2.60.0, Python: 3.11", "the cluster's versions here"),
        ("Can't find a node_ip_address.json file", "Run `ray start --address=HOST:PORT`"),
    ],
)
def test_a_cluster_that_cannot_be_joined_has_a_remedy(raised: str, remedy: str) -> None:
    problem = clusters.connection_problem("head:6379", RuntimeError(raised))
    assert raised in problem.received
    assert remedy in problem.remedy


def test_a_node_with_another_version_is_refused(cluster: Cluster) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "versions", lambda: ("99", "99"))
        refusal = pytest.raises(InputError, match=r"needs asynckfold and torch.*here 99.*pip inst")
        with refusal, joined(cluster):
            pass


def test_a_load_within_what_ray_grants_keeps_running_jobs_and_the_idlest() -> None:
    load = Load((0, 1, 2, 3), (3, 1, 0), 1)
    limited = within(load, [Placement(("a",), (2,))], 2)
    assert (limited.cores, limited.idle) == ((2, 3), (3,))
    assert within(load, [], 0).cores == ()


# Nodes


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with fake_ray.installed() as made:
        yield made
        close_warm()


@contextmanager
def joined(
    cluster: Cluster, address: str = "", nice: int = 0, stall_timeout: float | str = "auto"
) -> Iterator[RayCluster]:
    settings = NodeSettings(MachineArguments().machine, "auto", nice, stall_timeout, ("test",))
    with ray_cluster(address, None, 60.0, settings, 2) as made:
        yield made


def place(bundle: Any, index: int, node: str = "") -> Placement:
    return Placement((bundle.plan.jobs[index].id,), (min(os.sched_getaffinity(0)),), node=node)


def next_of(events: queue.SimpleQueue[Any], kind: type) -> Any:
    """Return the next event of a kind."""
    while not isinstance(event := events.get(timeout=120), kind):
        pass
    return event


def loads(engine: RayEngine) -> dict[str, tuple[int, ...]]:
    """Return the cores of each node that is there."""
    return {load.node: load.cores for load in engine.load([]).nodes if not load.blocked}


def test_jobs_run_on_their_nodes_and_continue_on_others(root: Path, cluster: Cluster) -> None:
    cluster.add("one")
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with (
        toy_bundle(root) as (bundle, data),
        joined(cluster) as made,
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
    assert not any(Path(node.folder).exists() for node in made.nodes.values())


def test_a_lost_node_costs_an_attempt_and_a_late_one_takes_jobs(
    root: Path, cluster: Cluster
) -> None:
    cluster.add("one")
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with (
        toy_bundle(root, epochs=10**6) as (bundle, data),
        joined(cluster) as made,
        closing(RayEngine(made, bundle, data, events.put)) as engine,
    ):
        jobs = bundle.plan.jobs
        lost = engine.submit(place(bundle, 0, "one"), [task(jobs[0])])
        next_of(events, EpochEnd)
        stays = engine.submit(place(bundle, 1), [task(jobs[1])])
        cluster.end("one")
        assert lost.result(120).results == [None]
        assert "node one is lost: " in next_of(events, Note).text
        assert {*loads(engine)} == {""}
        cluster.add("late")
        until(lambda: "late" in loads(engine), 120)
        assert "more nodes: " in next_of(events, Note).text
        there = engine.submit(place(bundle, 2, "late"), [task(jobs[2])])
        while next_of(events, EpochEnd).job_id != jobs[2].id:
            pass
        assert not stays.done()
        engine.close(60)
        assert stays.result(0).results == there.result(0).results == [None]


def test_jobs_of_nodes_that_are_lost_again_and_again_fail(root: Path, cluster: Cluster) -> None:
    with (
        toy_bundle(root, epochs=10**6) as (bundle, data),
        joined(cluster) as made,
        closing(RayEngine(made, bundle, data, lambda event: None)) as engine,
    ):
        job = bundle.plan.jobs[0]
        for number in range(EXCUSED_LOSSES + 1):
            until(lambda: "" in loads(engine), 120)
            future = engine.submit(place(bundle, 0), [task(job)])
            cluster.actors[-1][1].die()
            until(future.done, 120)
            assert (future.exception() is None) is (number < EXCUSED_LOSSES)


def test_a_head_that_is_lost_ends_the_sweep(
    root: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(ray_engine, "LOOK_SECONDS", 0.1)
    with (
        toy_bundle(root, epochs=10**6) as (bundle, data),
        joined(cluster) as made,
        closing(RayEngine(made, bundle, data, lambda event: None)) as engine,
    ):
        future = engine.submit(place(bundle, 0), [task(bundle.plan.jobs[0])])
        cluster.server.close()
        with pytest.raises(StorageError, match=r"head of the Ray cluster.*the same call continues"):
            future.result(120)
        assert engine.load([]).idle == (0,)


class Sleeps(Tiny):
    """Hangs in its third epoch."""

    steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps > 20:
            time.sleep(1000)
        return super().forward(inputs)


def test_a_hang_and_a_full_disk_end_their_jobs_only(
    root: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"Sleeps": Sleeps, "Tiny": Tiny}
    with (
        toy_bundle(root, models, epochs=50) as (bundle, data),
        joined(cluster, stall_timeout=2.0) as made,
        closing(RayEngine(made, bundle, data, lambda event: None)) as engine,
    ):
        numbers = {job.model: at for at, job in enumerate(bundle.plan.jobs) if not job.fold}

        at = numbers["Sleeps"]
        hung = engine.submit(place(bundle, at), [task(bundle.plan.jobs[at])]).exception(120)
        assert isinstance(hung, WorkerDiedError)
        assert hung.outcome == "hang", hung
        assert "in forward" in (root / "Sleeps/cosine/fold-0/log.txt").read_text()

        def full(path: Path, data: bytes) -> None:
            raise StorageError(errno.ENOSPC, f"{path}: no room")

        monkeypatch.setattr(ray_engine, "write_whole", full)
        until(lambda: "" in loads(engine), 120)
        at = numbers["Tiny"]
        error = engine.submit(place(bundle, at), [task(bundle.plan.jobs[at])]).exception(120)
        assert isinstance(error, StorageError)
        assert error.errno == errno.ENOSPC


def test_ray_holds_no_more_than_a_node_has() -> None:
    load = Load((0, 1), (0, 1), 1)
    node = clusters.Node("id", "x", None, "", 2.0, 1.0, 100, load, NodeSize(2))
    placement = Placement(("a",), (0, 1, 2), 3, gpu=0, jobs_per_gpu=2, memory=900, node="x")
    work = ray_engine.RayWork(1, placement, [], node)
    assert work.options == {"num_cpus": 2.0, "num_gpus": 0.5, "memory": 100, "name": "a"}


# Warm actors


def test_a_second_call_uses_the_same_actors_unless_it_asks_for_something_else(
    root: Path, cluster: Cluster
) -> None:
    host, port = cluster.server.getsockname()
    address = f"{host}:{port}"
    with toy_bundle(root) as (bundle, data), joined(cluster, address) as made:
        with closing(RayEngine(made, bundle, data, lambda event: None)) as engine:
            engine.submit(place(bundle, 0), [task(bundle.plan.jobs[0])]).result(120)
        first = cluster.actors[0][1]
        (server, *_) = descendants(first.process.pid)
    # It keeps its fork server, without a worker.
    until(lambda: not descendants(server), 60)
    with joined(cluster, address) as again:
        assert again is made
        assert [actor for _, actor in cluster.actors] == [first]
    # Killed while it waits.
    first.die()
    with joined(cluster, address):
        assert len(cluster.actors) == 2
    with joined(cluster, address, nice=5):
        assert len(cluster.actors) == 3
    assert gone({cluster.actors[1][1].process.pid}, 60)
    with pytest.raises(ZeroDivisionError), joined(cluster, address, nice=5):
        raise ZeroDivisionError
    assert gone({actor.process.pid for _, actor in cluster.actors}, 60)
    assert not cluster.is_joined


def test_a_node_leaves_nothing_when_it_is_killed(cluster: Cluster) -> None:
    with joined(cluster) as made:
        folder = Path(made.nodes[""].folder)
        assert folder.is_dir()
        actor = cluster.actors[0][1]
        left = descendants(actor.process.pid)
        actor.die()
        assert gone(left, 60)
        until(lambda: not folder.exists(), 60)


def test_a_load_is_read_again_when_it_is_old_or_something_else_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(ray_node.time, "monotonic", lambda: now[0])
    node = ray_node.RayNode(0, {})
    try:
        node.open(NodeSettings(MachineArguments().machine, 1, 0, "auto", ("test",)), False)
        first = node.poll(0.0)[0]
        assert node.poll(0.0)[0] is first
        now[0] += ray_node.LOAD_SECONDS * 1.01
        assert node.poll(0.0)[0] is not first
    finally:
        node.quit()
