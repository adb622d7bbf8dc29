"""Node actors that stay warm between two calls: what they are kept for, and what ends them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.api.resources import Sharing
from asynckfold.engines import ray_groups, ray_warm
from asynckfold.engines.ray_cluster import RayCluster, ray_cluster
from asynckfold.engines.ray_engine import RayEngine
from asynckfold.engines.ray_handle import NodeSettings
from asynckfold.engines.ray_warm import Key
from asynckfold.jobs.messages import Progress
from asynckfold.jobs.placement import Load, Placement
from asynckfold.system.signals import Interruption
from tests import leftovers
from tests.engines.ray_start import PATIENCE_SECONDS, SWEEP, named, needs_ray
from tests.faults.test_ray import Nodes
from tests.leftovers import descendants, gone, until
from tests.toy import adam, samples, task, toy_bundle

# Without Ray: which cluster is taken, and when it ends

KEY = Key("head:6379", {"env_vars": {"A": "1"}}, 0, {"MKL_CBWR": "AVX2"})


class Fake:
    """A cluster that notes what happens to it."""

    def __init__(self, key: Key = KEY) -> None:
        self.key, self.is_there = key, True
        self.told: list[str] = []

    def suits(self, key: object) -> bool:
        return key == self.key

    def is_reachable(self) -> bool:
        return self.is_there

    def end(self) -> None:
        self.told.append("end")

    def disconnect(self) -> None:
        self.told.append("disconnect")


@pytest.fixture(autouse=True)
def nothing_warm() -> Iterator[None]:
    yield
    ray_warm.close_warm()


def test_an_equal_call_takes_the_warm_cluster_and_nobody_else_does() -> None:
    fake = Fake()
    ray_warm.give_back(fake)
    assert ray_warm.take(replace(KEY, variables=dict(KEY.variables))) is fake
    assert ray_warm.take(KEY) is None
    assert fake.told == []


@pytest.mark.parametrize(
    "other",
    [
        {"address": "other:6379"},
        {"runtime_env": {"env_vars": {"A": "2"}}},
        {"runtime_env": {}},
        {"nice": 5},
        {"variables": {}},
    ],
)
def test_a_call_that_asks_for_something_else_ends_it(other: dict[str, Any]) -> None:
    fake = Fake()
    ray_warm.give_back(fake)
    assert ray_warm.take(replace(KEY, **other)) is None
    assert fake.told == ["end"]


def test_a_runtime_environment_with_files_is_not_kept() -> None:
    assert KEY.lasts
    assert not replace(KEY, runtime_env={"working_dir": "."}).lasts
    assert not replace(KEY, runtime_env={"env_vars": {}, "pip": "requirements.txt"}).lasts


def test_a_cluster_that_is_gone_is_left_and_asked_for_nothing() -> None:
    fake = Fake()
    ray_warm.give_back(fake)
    fake.is_there = False
    # By the watching thread, or by the next call.
    assert ray_warm.take(KEY) is None
    assert fake.told == ["disconnect"]


def test_a_cluster_whose_head_goes_while_it_waits_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_warm, "LOOK_SECONDS", 0.01)
    fake = Fake()
    ray_warm.give_back(fake)
    fake.is_there = False
    until(lambda: bool(fake.told), 60)
    assert fake.told == ["disconnect"]


def test_it_ends_after_an_idle_time() -> None:
    fake = Fake()
    ray_warm.give_back(fake, idle_s=0.05)
    until(lambda: bool(fake.told), 60)
    assert fake.told == ["end"]
    assert ray_warm.take(KEY) is None


def test_a_forked_process_takes_and_ends_nothing() -> None:
    fake = Fake()
    ray_warm.give_back(fake)
    if not (child := os.fork()):
        is_none = ray_warm.take(KEY) is None
        ray_warm.close_warm()
        os._exit(0 if is_none and not fake.told else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ray_warm.take(KEY) is fake


@pytest.mark.parametrize("change", ["edit", "remove", "add"])
def test_an_installation_that_changes_is_noticed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engines" / "ray_warm.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(ray_warm, "__file__", str(file))
    is_same = ray_warm.installed()
    assert is_same()
    if change == "edit":
        file.write_text("x = 1\n")
    elif change == "remove":
        file.unlink()
    else:
        (tmp_path / "more.py").touch()
    assert not is_same()


def test_events_wait_for_others_and_answers_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    event = ("event", Progress("a", 1, 1, 1, 1, 1, 0.5), [])
    monkeypatch.setattr(ray_groups, "GATHER_SECONDS", 100.0)
    waiting.put(event)
    later = threading.Timer(0.05, lambda: (waiting.put(()), waiting.put(("answer", 1, ()))))
    later.start()
    # The end of a rest, `()`, is for nobody.
    assert ray_groups.gathered(waiting, 60)[0] == event
    later.join()
    for urgent in (("answer", 1, ()), ("begun", 1), ("log", None, b"")):
        waiting.put(event)
        waiting.put(urgent)
        assert [*filter(None, ray_groups.gathered(waiting, 60))][-2:] == [event, urgent]
    assert ray_groups.gathered(waiting, 0.01) == []


def test_a_load_is_read_again_when_it_is_old_or_something_else_runs() -> None:
    reads: list[Load] = []

    def read() -> Load:
        reads.append(Load((len(reads),), (), 0))
        return reads[-1]

    now = [0.0]
    recent = ray_groups.RecentLoad(read, lambda: now[0])
    first = recent.get([(1, (0,))])
    now[0] = ray_groups.LOAD_SECONDS
    assert recent.get([(1, (0,))]) is first
    # The job has moved to another core.
    assert recent.get([(1, (1,))]) is reads[1]
    now[0] += ray_groups.LOAD_SECONDS * 1.01
    assert recent.get([(1, (1,))]) is reads[2]
    assert recent.get([]) is reads[3]


NEXT_CALL = """
import pickle
from dataclasses import replace
from asynckfold.api.resources import Sharing
from asynckfold.engines.ray_handle import NodeSettings
from asynckfold.engines.ray_node import RayNode

told = NodeSettings(Sharing().machine, 1, 0, "auto", ("test",))
node = RayNode(*vars(told).values())
print(len(pickle.loads(node.poll(0.0))[0].cores))
node.rest()
node.renew(*vars(replace(told, n_jobs=2)).values())
print(len(pickle.loads(node.poll(0.0))[0].cores))
node.quit()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_warm_node_tells_the_load_of_the_next_call() -> None:
    # At once: with a load of the call before, too few jobs would be placed.
    found = subprocess.run(
        [sys.executable, "-c", NEXT_CALL], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["1", "2"]


# On a cluster


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with (
        tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder,
        closing(Nodes(Path(folder))) as made,
    ):
        leftovers.rays.append(made.address)
        yield made
        # Before the cluster ends.
        ray_warm.close_warm()


@contextmanager
def joined(
    nodes: Nodes, nice: int = 0, env: Mapping[str, Any] | None = None
) -> Iterator[RayCluster]:
    told = NodeSettings(Sharing().machine, "auto", nice, "auto", ("test",))
    with ray_cluster(nodes.address, env, PATIENCE_SECONDS, told, 1, Interruption()) as cluster:
        yield cluster


def actors(nodes: Nodes) -> set[int]:
    """Return the processes of the actors in this cluster."""
    return named("RayNode", nodes.process.pid)


def trained(root: Path, nodes: Nodes | None, width: int) -> str:
    """Train a class that is defined anew at each call; return the fingerprint."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layers(inputs)
            return found

    given: dict[str, Any] = {"engine": "serial"}
    if nodes is not None:
        given = {"engine": "ray", "ray_address": nodes.address}
    kfold = AsyncKFold(
        2,
        samples(),
        root,
        nn.CrossEntropyLoss(),
        10,
        verbose=0,
        baseline=None,
        report=False,
        fuse=False,
        threads_per_job=1,
        **given,
    )
    return kfold({"Net": Net}, ["step"], adam, {"epochs": 2}).fingerprint


@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
def test_a_second_call_uses_the_same_actors_and_the_code_of_now(
    root: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [trained(root / f"serial{width}", None, width) for width in (4, 6)]
    assert trained(root / "one", nodes, 4) == expected[0]
    first = actors(nodes)
    assert len(first) == 1
    (pid,) = first
    # It keeps its fork server, without a worker, and no resource of Ray.
    until(lambda: not any(descendants(server) for server in _servers(pid)), 60)
    assert _servers(pid)
    import ray

    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], 60)
    assert trained(root / "two", nodes, 6) == expected[1]
    assert actors(nodes) == first
    # Kernels are chosen once in a process's life.
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    trained(root / "three", nodes, 6)
    second = actors(nodes)
    assert len(second) == 1
    assert second != first
    # Killed while it waits.
    os.kill(*second, signal.SIGKILL)
    trained(root / "four", nodes, 6)
    third = actors(nodes)
    assert len(third) == 1
    assert not third & (first | second)
    ray_warm.close_warm()
    assert gone(third, 60)
    assert not ray.is_initialized()


def _servers(actor: int) -> set[int]:
    return {pid for pid in descendants(actor) if leftovers.is_server(pid)}


@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
def test_settings_environments_and_failures_end_actors(nodes: Nodes) -> None:
    with joined(nodes):
        first = actors(nodes)
    with joined(nodes, env={"env_vars": {"A": "1"}}):
        second = actors(nodes)
    assert len(second) == 1
    assert not second & first
    with joined(nodes, env={"env_vars": {"A": "1"}}):
        assert actors(nodes) == second
    with pytest.raises(ZeroDivisionError), joined(nodes, env={"env_vars": {"A": "1"}}):
        raise ZeroDivisionError
    assert gone(second, 60)
    with joined(nodes, env={"working_dir": tempfile.mkdtemp(dir=tempfile.gettempdir())}):
        third = actors(nodes)
    assert gone(third, 60)


@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
def test_nodes_that_drain_die_or_come_between_two_calls(root: Path, nodes: Nodes) -> None:
    for name in ("drains", "dies", "stays"):
        nodes("add", name)
    with joined(nodes) as cluster:
        assert {*cluster.nodes} == {"", "drains", "dies", "stays"}
        identity = cluster.nodes["drains"].identity
        stays = cluster.nodes["stays"].actor
    words = ["drain-node", "--address", nodes.address, "--node-id", identity]
    words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
    words += ["--deadline-remaining-seconds", "600"]
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    nodes("kill", "dies")
    nodes("add", "late")
    with toy_bundle(root) as (bundle, data), joined(nodes) as cluster:
        assert {*cluster.nodes} == {"", "stays", "late"}
        assert cluster.nodes["stays"].actor is stays
        with closing(RayEngine(cluster, bundle, data, lambda event: None)) as engine:
            jobs, core = bundle.plan.jobs, (min(os.sched_getaffinity(0)),)
            futures = [
                engine.submit(Placement((jobs[at].id,), core, node=node), [task(jobs[at])])
                for at, node in enumerate(("", "stays", "late"))
            ]
            assert all(future.result(200).results[0].digest for future in futures)


@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill", [False, True])
def test_the_drivers_end_is_the_end_of_its_actors(root: Path, nodes: Nodes, kill: bool) -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], None, '__main__');"
        "sys.stdout.flush(); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(SWEEP), "plain", "ray", str(root), nodes.address]
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "EPOCHS": "1"},
        text=True,
        cwd=root.parent,
    )
    assert process.stdout is not None
    assert process.stdout.readline().split()[1:] == ["6"]
    started = actors(nodes)
    assert len(started) == 1
    (actor,) = started
    left = {actor, *descendants(actor)}
    assert len(left) > 1
    if kill:
        process.kill()
    process.communicate(timeout=120)
    assert gone(left, 120)
