"""Server and replicas of a torch process group find each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

# Registers the backend "fake": a group without other ranks, over a store that is real.
from torch.testing._internal.distributed import fake_pg

from asynckfold import Hogwild, InputError, PeerLostError, Server

Group = Callable[..., dist.HashStore]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Makes this process rank 0 of a process group, whose store it returns."""
    assert fake_pg is not None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    # The address of the group's store, where a server could not listen.
    monkeypatch.setenv("MASTER_PORT", "1")

    def make(world_size: int) -> dist.HashStore:
        store = dist.HashStore()
        dist.init_process_group("fake", rank=0, world_size=world_size, store=store)
        return store

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def replica(model: nn.Module | None = None, **given: Any) -> Hogwild:
    model = model or nn.Linear(2, 1)
    return Hogwild(model.parameters(), lr=0.1, n_push=5, n_pull=5, model=model, **given)


def test_a_replica_needs_no_address_and_the_servers_rank_ends_after_it(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    group(2)
    served, trained = nn.Linear(2, 1), nn.Linear(2, 1)
    with ThreadPoolExecutor() as pool, Server(served, timeout_s=20) as server:
        done = pool.submit(server.run)
        optimizer = replica(trained, timeout_s=20)
        trained.weight.grad = trained.weight.detach().clone().fill_(1.0)
        optimizer.step()
        optimizer._end()  # as at the end of its script: one step is not pushed yet
        assert astuple(done.result()) == (1, (), (), 1, 0.0, 0)
    assert served.weight.tolist() == trained.weight.tolist()
    # A script whose server never returned goes on to its optimizer.
    with pytest.raises(SystemExit) as ended:
        replica()
    assert ended.value.code == 0
    assert "this rank has served" in capsys.readouterr().err
    # A group that is made afterwards has not been served.
    dist.destroy_process_group()
    group(2)
    with pytest.raises(PeerLostError, match="no rank of the process group serves"):
        replica(timeout_s=0.1)


def test_a_script_that_raises_counts_as_lost(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group(2)
    monkeypatch.setattr("sys.last_value", ValueError("in the script"), raising=False)
    with ThreadPoolExecutor() as pool, Server(nn.Linear(2, 1), timeout_s=20) as server:
        done = pool.submit(server.run)
        replica(timeout_s=20)._end()
        assert len(done.result().lost) == 1


@pytest.mark.parametrize("make", [replica, lambda: Server(nn.Linear(2, 1)).run()])
def test_a_world_of_one_is_refused(group: Group, make: Callable[[], object]) -> None:
    group(1)
    with (
        contextlib.closing(Server(nn.Linear(2, 1))),
        pytest.raises(InputError, match="at least one replica: received a world size of 1"),
    ):
        make()


def test_without_a_group_a_server_is_told_how_many_replicas() -> None:
    with (
        Server(nn.Linear(2, 1), address="127.0.0.1:0") as server,
        pytest.raises(
            InputError,
            match=r"needs a torch process group .*none in this process.* or Server.serve with",
        ),
    ):
        server.run()


def test_a_second_server_is_refused(group: Group) -> None:
    group(3)
    store = dist.distributed_c10d._get_default_store()
    store.set("asynckfold/parameter_server", "2 127.0.0.1:4")
    with (
        Server(nn.Linear(2, 1)) as server,
        pytest.raises(InputError, match="is the server: received rank 0 while rank 2 serves"),
    ):
        server.run()
    assert store.check(["asynckfold/parameter_server"])


def test_nobody_serves(group: Group) -> None:
    group(2)
    with pytest.raises(PeerLostError, match=r"within 0.1 s: is Server\(model\).run\(\) called"):
        replica(timeout_s=0.1)


def test_an_address_stands_above_the_group(group: Group) -> None:
    group(2)
    with ThreadPoolExecutor() as pool, Server(nn.Linear(2, 1), timeout_s=20) as server:
        done = pool.submit(server.serve)
        replica(address=server.address).close()
        assert done.result().replicas == 1
