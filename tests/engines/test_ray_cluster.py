"""The engine "ray" on a Ray of this machine: equal numbers, faults, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError
from asynckfold.engines import ray_address, ray_engine
from asynckfold.engines.ray_engine import RayEngine
from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.reservations import within
from asynckfold.store import RunStore
from tests.engines.ray_start import (
    ended,
    first_checkpoint,
    named,
    needs_ray,
    raylet_of,
    started,
    sweep,
)
from tests.leftovers import descendants, gone, until
from tests.toy import Tiny, adam, samples, task, toy_bundle

# What is refused before anything starts


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    return AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, **settings)


def test_without_ray_the_line_that_installs_it_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_address, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"Run: pip install 'asynckfold\[ray\]'"):
        kfold(root, engine="ray")([Tiny], ["step"], adam)
    assert not root.exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ray_address": "auto"}, "ray_address is for engine='ray'"),
        ({"ray_runtime_env": {"pip": []}}, "ray_runtime_env is for engine='ray'"),
        ({"engine": "ray", "yield_to_others": True}, "the workers of one machine"),
        ({"engine": "ray", "connect_timeout_s": 0}, "connect_timeout_s must be a number of sec"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    root: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        kfold(root, **settings)


@needs_ray
@pytest.mark.parametrize("by_variable", [False, True])
def test_an_address_of_rays_client_is_refused(
    root: Path, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {} if by_variable else {"ray_address": "ray://head:10001"}
    if by_variable:
        monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(InputError, match="Start the call on a node of the cluster"):
        kfold(root, engine="ray", **given)([Tiny], ["step"], adam)
    assert not root.exists()


@pytest.mark.nightly(but=["127.0.0.1:1", "nowhere"])
@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "something else", "nowhere"])
def test_an_address_that_does_not_answer_is_refused_in_time(root: Path, address: str) -> None:
    begun = time.monotonic()
    silent = socket.create_server(("127.0.0.1", 0))
    if address == "something else":
        address = f"127.0.0.1:{silent.getsockname()[1]}"
    with pytest.raises(InputError, match=r"must answer within connect_timeout_s=0\.5"):
        kfold(root, engine="ray", ray_address=address, connect_timeout_s=0.5)(
            [Tiny], ["step"], adam
        )
    silent.close()
    assert time.monotonic() - begun < 60
    assert not root.exists()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("Version mismatch: Ray: 2.60.0, Python: 3.11", "the cluster's versions here"),
        ("Can't find a node_ip_address.json file", "Run `ray start --address=HOST:PORT`"),
    ],
)
def test_a_cluster_that_cannot_be_joined_has_a_remedy(raised: str, told: str) -> None:
    found = ray_address.connection_problem("head:6379", RuntimeError(raised))
    assert raised in found.received
    assert told in found.remedy


# What needs no cluster


def test_a_load_within_what_ray_grants_keeps_running_jobs_and_the_idlest() -> None:
    load = Load((0, 1, 2, 3), (3, 1, 0), 1)
    found = within(load, [Placement(("a",), (2,))], 2)
    assert (found.cores, found.idle) == ((2, 3), (3,))
    assert within(load, [], 0).cores == ()


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
@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
def test_the_numbers_are_those_of_the_engine_process(
    kind: str, root: Path, expected: Callable[[str], str]
) -> None:
    assert ended(sweep(kind, "ray", root)) == expected(kind)
    if kind == "plain":
        assert "a word for the log" in (root / "net/cosine/fold-0/log.txt").read_text()


@pytest.mark.usefixtures("no_folder_left")
@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
def test_a_killed_worker_costs_one_attempt(
    root: Path, tmp_path: Path, expected: Callable[[str], str]
) -> None:
    (tmp_path / "kill").touch()
    found = sweep("plain", "ray", root, KILL_ONCE=str(tmp_path / "kill"))
    assert ended(found) == expected("plain")
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
    assert sorted(outcomes) == ["died", *["ok"] * 6]


class Sleeps(Tiny):
    """Hangs in its third epoch; tells where its samples are."""

    steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 1:
            print(
                "samples in", "plasma" if "/plasma" in Path("/proc/self/maps").read_text() else ""
            )
        if self.steps > 20:
            time.sleep(1000)
        return super().forward(inputs)


@pytest.mark.usefixtures("no_folder_left")
@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(600)
def test_a_hang_and_a_full_disk_end_their_jobs_and_samples_are_shared(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"Sleeps": Sleeps, "Tiny": Tiny}
    with (
        toy_bundle(root, models, epochs=50) as (bundle, data),
        started(stall_timeout=1.0) as cluster,
        closing(RayEngine(cluster, bundle, data, lambda event: None)) as engine,
    ):
        jobs = {job.model: job for job in bundle.plan.jobs if not job.fold}
        core = (min(os.sched_getaffinity(0)),)

        def ends(model: str) -> BaseException | None:
            job = jobs[model]
            future = engine.submit(Placement((job.id,), core), [task(job)])
            until(lambda: bool(engine.load([]).cores) and future.done(), 200)
            return future.exception()

        found = ends("Sleeps")
        assert isinstance(found, WorkerDiedError)
        assert found.outcome == "hang"
        log = (root / "Sleeps/cosine/fold-0/log.txt").read_text()
        assert "samples in plasma" in log
        assert "in forward" in log

        def full(path: Path, data: bytes, root: Path) -> None:
            raise StorageError(errno.ENOSPC, f"{path}: no room")

        monkeypatch.setattr(ray_engine, "write_whole", full)
        found = ends("Tiny")
        assert isinstance(found, StorageError)
        assert found.errno == errno.ENOSPC


@pytest.mark.usefixtures("no_folder_left")
@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["net/", "RayNode"])
def test_a_killed_process_of_ray_costs_no_more_than_attempts(
    name: str, root: Path, expected: Callable[[str], str]
) -> None:
    process = sweep("plain", "ray", root, SLOW="0.02")
    first_checkpoint(root)
    os.kill(min(named(name, raylet_of(root))), signal.SIGKILL)
    assert ended(process) == expected("plain")
    with RunStore.read(root) as store:
        outcomes = [item.outcome for item in store.attempts()]
    assert outcomes.count("ok") == 6
    assert 1 <= len(outcomes) - 6 <= 2


@pytest.mark.usefixtures("no_folder_left")
@pytest.mark.crashes("a kill may leave a file that is being written")
@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_sweep_leaves_nothing_and_is_continued(
    root: Path, number: signal.Signals, expected: Callable[[str], str]
) -> None:
    process = sweep("plain", "ray", root, SLOW="0.02")
    first_checkpoint(root)
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
    assert gone(workers, 60)
    assert ended(sweep("plain", "ray", root)) == expected("plain")
