"""A parameter server and its replicas: the same steps, and what becomes of who dies."""

from __future__ import annotations

import contextlib
import copy
import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from asynckfold import Hogwild, InputError, PeerLostError, Server
from tests.leftovers import gone
from tests.started import Nursery, Started

ANY = "127.0.0.1:0"


class Net(nn.Module):
    """Tied weights, and a parameter that no gradient reaches."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 3)
        self.second.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.again = self.second
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.again(torch.tanh(self.first(inputs)))
        return found


def net(seed: int = 0, **given: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**given)


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 3, generator=generator) for _ in range(count)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs).backward()
    optimizer.step()


def hogwild(model: nn.Module, address: Any, **given: Any) -> Hogwild:
    return Hogwild(model.parameters(), 0.1, 1, 1, model, **{"address": address, **given})


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs in itertools.cycle(batches(5)):
        step(model, optimizer, inputs)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def alike(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()))


@contextlib.contextmanager
def serving(
    *models: nn.Module, replicas: int = 1, **settings: Any
) -> Iterator[tuple[list[str], list[Future[Any]]]]:
    """Addresses of servers in threads, one for each model; what they did is there afterwards."""
    count = len(models)
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        settings = {"address": ANY, "timeout_s": 20, **settings}
        servers = [
            stack.enter_context(Server(model, shard=(number, count), **settings))
            for number, model in enumerate(models)
        ]
        done = [pool.submit(server.serve, replicas) for server in servers]
        try:
            yield [server.address for server in servers], done
        except BaseException:
            stack.close()
            raise


def test_one_replica_takes_the_steps_of_sgd() -> None:
    served, replica, plain = net(), net(9), net()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    with (
        serving(served) as (addresses, done),
        Hogwild(replica.parameters(), 0.1, 1, 1, replica, address=addresses) as ours,
    ):
        alike(replica, plain)  # it has the server's parameters from the start
        for inputs in batches(6):
            step(plain, optimizer, inputs)
            step(replica, ours, inputs)
            alike(replica, plain)
    alike(served, plain)
    assert astuple(done[0].result()) == (1, (), (), 6, 0.0, 0)


def test_an_lr_schedule_and_groups_count_at_the_step_that_they_were_for() -> None:
    def groups(model: Net) -> list[dict[str, Any]]:
        return [
            {"params": model.first.parameters(), "lr": 0.3},
            {"params": model.second.parameters()},
        ]

    served, replica, plain = net(), net(), net()
    optimizer = torch.optim.SGD(groups(plain), 0.1)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with (
        serving(served) as (addresses, _),
        Hogwild(groups(replica), 0.1, 4, 100, replica, address=addresses[0]) as ours,
    ):
        our_rates = torch.optim.lr_scheduler.StepLR(ours, 2)
        for inputs in batches(7):
            step(plain, optimizer, inputs)
            step(replica, ours, inputs)
            rates.step()
            our_rates.step()
    alike(replica, plain)
    alike(served, plain)  # one push of four steps, and what was left at the end


def test_accumulated_gradients_are_those_of_one_large_batch() -> None:
    served, replica, plain = net(), net(), net()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    parts = batches(6)
    with serving(served) as (addresses, done), hogwild(replica, addresses, accumulate=3) as ours:
        for inputs in parts:
            step(replica, ours, inputs)
    for low in (0, 3):
        step(plain, optimizer, torch.cat(parts[low : low + 3]))
    alike(served, plain)
    assert done[0].result().pushes == 2


def test_a_replica_sees_what_another_pushed() -> None:
    served, one, other = net(), net(), net()
    with serving(served, replicas=2) as (addresses, done):
        first = Hogwild(one.parameters(), 0.1, 1, 1, one, address=addresses)
        second = Hogwild(other.parameters(), 0.1, 1, 100, other, address=addresses)
        for inputs in batches(3):
            step(one, first, inputs)
        step(other, second, batches(1, seed=5)[0])
        second.pull()
        second.close()
        first.pull()
        alike(one, other)
        first.close()
    alike(served, one)
    with pytest.raises(AssertionError, match="not close"):
        alike(served, net())
    assert astuple(done[0].result()) == (2, (), (), 4, 3 / 4, 3)


@pytest.mark.parametrize("aware", [False, True])
def test_a_stale_push_counts_less_where_asked(aware: bool) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.zeros(1))

    served, fast, slow = One(), One(), One()
    with serving(served, replicas=2, staleness_aware=aware) as (addresses, done):
        late = Hogwild(slow.parameters(), 1.0, 1, 100, slow, address=addresses)
        early = Hogwild(fast.parameters(), 1.0, 1, 1, fast, address=addresses)
        for _ in range(4):
            fast.value.grad = torch.ones(1)
            early.step()
        for _ in range(2):
            slow.value.grad = torch.ones(1)
            late.step()
        late.pull()
        # Both of its pushes are four others' behind, none its own.
        assert slow.value.item() == -4 - (2 / 4 if aware else 2)
        late.close()
        early.close()
    assert done[0].result().max_staleness == 4


def test_several_servers_hold_what_one_would() -> None:
    whole, parts, one, other = net(), [net(), net(), net()], net(9), net(9)
    with serving(whole) as (addresses, _), serving(*parts) as (several, _):
        alone = Hogwild(one.parameters(), 0.1, 2, 2, one, address=addresses)
        # Addresses may stand in any order.
        divided = Hogwild(other.parameters(), 0.1, 2, 2, other, address=several[::-1])
        for inputs in batches(5):
            step(one, alone, inputs)
            step(other, divided, inputs)
        alone.close()
        divided.close()
    count = len(flat(whole))
    for number, part in enumerate(parts):
        place = slice(count * number // 3, count * (number + 1) // 3)
        assert torch.equal(flat(part)[place], flat(whole)[place])
        assert not torch.equal(flat(part), flat(whole))


def test_other_types_of_parameters() -> None:
    dtype = torch.bfloat16
    served, replica = net().to(dtype), net(9).to(dtype)
    with (
        serving(served) as (addresses, _),
        Hogwild(replica.parameters(), 0.1, 1, 1, replica, address=addresses) as ours,
    ):
        assert replica.first.weight.dtype == dtype
        alike(replica, net().to(dtype))
        step(replica, ours, batches(1)[0].to(dtype))
    alike(served, replica)
    assert not torch.equal(served.first.weight, net().first.weight.to(dtype))


def test_a_replica_with_another_model_is_refused_and_missed_by_nobody() -> None:
    with serving(net(), net()) as (addresses, done):
        for model, told in (
            (net(width=6), r"server: received \['first.weight', \[6, 3\]\], where .* \[5, 3\]\]"),
            (nn.Linear(3, 5), r"received \['weight', \[5, 3\]\], where the server has \['spare'"),
            (net().double(), "received float64, where the server has float32"),
        ):
            with pytest.raises(InputError, match=told):
                hogwild(model, addresses)
        hogwild(net(), addresses).close()
    assert [(item.result().replicas, len(item.result().refused)) for item in done] == [(1, 3)] * 2


def test_servers_that_are_not_all_of_one_model_are_refused() -> None:
    with serving(net(), net()) as (addresses, done):
        for given in ([addresses[0]], [addresses[0]] * 2, [*addresses, addresses[0]]):
            with pytest.raises(InputError, match="addresses must be those of servers with shard="):
                hogwild(net(), given, timeout_s=5)
        hogwild(net(), addresses).close()
    assert [len(item.result().refused) for item in done] == [5, 1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "n_push": ({"n_push": 0}, "n_push must be a whole number of at least 1: received 0"),
    "n_pull": ({"n_pull": 1.5}, "n_pull must be a whole number of at least 1: received 1.5"),
    "lr": ({"lr": float("nan")}, "lr must be a number of at least 0: received nan"),
    "checkpoint": ({"checkpoint": "/no/such/x"}, "the folder of checkpoint must exist"),
    "model": ({"model": net()}, "params must be parameters of the model: received 5 that are not"),
    "address": ({"address": "nowhere"}, "an address must be host:port"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_a_replica(name: str) -> None:
    model, (given, told) = net(), BAD[name]
    given = {"lr": 0.1, "n_push": 1, "n_pull": 1, "model": model, "address": ANY, **given}
    with pytest.raises(InputError, match=told):
        Hogwild(model.parameters(), **given)


def test_what_no_server_can_hold_is_refused() -> None:
    for shard in ((1, 1), (-1, 2), (0, 1000)):
        with pytest.raises(InputError, match=r"shard must be \(index, count\)"):
            Server(net(), address=ANY, shard=shard)
    with pytest.raises(InputError, match="parameters must be real numbers: received weight of"):
        Server(nn.Linear(2, 1, dtype=torch.complex64), address=ANY)


def test_an_address_that_no_server_can_have_is_refused() -> None:
    for address in ("", ":1", "host:x", "host:65536"):
        with pytest.raises(InputError, match=r"must be host:port.* Write for instance '127"):
            Server(net(), address=address)
    for address in ("203.0.113.1:0", "no.such.host.invalid:0"):
        with pytest.raises(InputError, match="an address of this machine"):
            Server(net(), address=address)
    with Server(net(), address=ANY) as server, pytest.raises(InputError, match="already in use"):
        Server(net(), address=server.address)


def test_they_meet_where_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with serving(net(), address=None):
        model = net()
        Hogwild(model.parameters(), 0.1, 1, 1, model).close()


def test_an_address_that_does_not_answer_is_told_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(PeerLostError, match=rf"no parameter server answered at {address} within"):
        hogwild(net(), address, timeout_s=0.3)


def test_nobody_comes() -> None:
    server = Server(net(), address=ANY, timeout_s=0.2)
    with pytest.raises(PeerLostError, match=f"no replica joined {server.address} within 0.2"):
        server.serve()


def test_a_missing_replica_is_not_waited_for_once_others_have_left() -> None:
    with serving(net(), replicas=2, timeout_s=0.3) as (addresses, done):
        hogwild(net(), addresses).close()
    assert done[0].result().replicas == 1


def test_nothing_answers_and_something_else_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            PeerLostError, match=rf"at {address} has ended or does not answer \(timed"
        ):
            hogwild(net(), address, timeout_s=0.3)
        with ThreadPoolExecutor() as pool:
            pool.submit(_speak_smtp, silent)
            with pytest.raises(PeerLostError, match="has ended or does not answer"):
                hogwild(net(), address, timeout_s=5)


def _speak_smtp(listener: socket.socket) -> None:
    for _ in range(2):
        line, _ = listener.accept()  # the first one was given up above
        with line, contextlib.suppress(OSError):
            line.sendall(b"220 mail ESMTP\r\n")


WRONG = {
    "noise": b"\0" * 64,
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no text": b"\xff\n",
    "half a push": b"push\n" + b"\0" * 9,
    "nothing": b"",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_replica_that_talks_nonsense_harms_nobody(name: str) -> None:
    served, replica = net(), net()
    before = copy.deepcopy(served)
    with serving(served, replicas=2) as (addresses, done):
        ours = hogwild(replica, addresses)
        host, port = addresses[0].split(":")
        for begin in (b"begin\n", b""):
            with (
                socket.create_connection((host, int(port)), 5) as line,
                line.makefile("rb") as answers,
            ):
                assert answers.readline().startswith(b"[[0, 1], [")
                assert answers.readline() == b"values\n"
                assert len(answers.read(4 * len(flat(served)))) == 4 * len(flat(served))
                line.sendall(begin + WRONG[name])
        step(replica, ours, batches(1)[0])
        ours.close()
    told = done[0].result()
    assert (told.replicas, len(told.lost), len(told.refused), told.pushes) == (2, 1, 1, 1)
    with pytest.raises(AssertionError, match="not close"):
        alike(served, before)
    alike(served, replica)


def test_a_replica_whose_code_raises_is_lost_and_another_takes_its_place() -> None:
    with serving(net(), replicas=2) as (addresses, done):
        stays = hogwild(net(), addresses)
        model = net()
        with pytest.raises(ZeroDivisionError), hogwild(model, addresses):
            raise ZeroDivisionError
        hogwild(net(), addresses).close()
        stays.close()
    told = done[0].result()
    assert (told.replicas, len(told.lost)) == (3, 1)


def test_a_server_that_is_closed_ends_its_replica_with_a_checkpoint(tmp_path: Path) -> None:
    path, replica = tmp_path / "model.safetensors", net()
    with Server(net(), address=ANY) as server, ThreadPoolExecutor() as pool:
        done = pool.submit(server.serve)
        ours = hogwild(replica, server.address, checkpoint=path)
        step(replica, ours, batches(1)[0])
        server.close()
        with pytest.raises(
            PeerLostError, match=rf"{server.address} has ended .*saved in {path}\. "
        ):
            train_on(replica, ours)
        assert len(done.result().lost) == 1
    other = net(9)
    other.load_state_dict(load_file(path))
    alike(other, replica)


# Real processes

SERVE = """
import sys
from asynckfold import Server
from tests.training.parameter_server.test_parameter_server import net
server = Server(net(), address="127.0.0.1:0", timeout_s=60)
print(server.address, flush=True)
print(server.serve(int(sys.argv[1])), flush=True)
"""

TRAIN = """
import os, sys, time
from asynckfold import Hogwild
from tests.training.parameter_server.test_parameter_server import batches, net, step
address, checkpoint, enough = sys.argv[1:]
model = net()
with Hogwild(
    model.parameters(), 0.1, 1, 1, model,
    address=address, checkpoint=checkpoint, timeout_s=float(os.environ.get("PATIENCE", 60)),
) as optimizer:
    print("began", flush=True)
    while not os.path.exists(enough):
        for inputs in batches(5):
            step(model, optimizer, inputs)
        time.sleep(0.01)
print("ended", flush=True)
"""


class Machines:
    """A server and replicas, each a process."""

    def __init__(self, warm: Nursery, folder: Path, replicas: int) -> None:
        self.enough = folder / "enough"
        self.server = warm.start(["-c", SERVE, replicas], folder / "server")
        self.address = said(self.server, ":").split()[0]
        self.replicas = [
            warm.start(["-c", TRAIN, self.address, folder / f"{number}.st", self.enough], output)
            for number, output in enumerate(folder / f"replica-{n}" for n in range(replicas))
        ]
        for replica in self.replicas:
            said(replica, "began")

    def end(self) -> None:
        for process in (self.server, *self.replicas):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)


def said(process: Started, word: str) -> str:
    while word not in process.printed():
        assert process.poll() is None, process.printed()
        time.sleep(0.01)
    return process.printed()


@pytest.fixture
def machines(
    warm: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def make(replicas: int, patience: float = 60) -> Machines:
        monkeypatch.setenv("PATIENCE", str(patience))
        made.append(Machines(warm, tmp_path, replicas))
        return made[-1]

    yield make
    for item in made:
        item.end()


def pids(processes: Sequence[Started]) -> set[int]:
    return {process.pid for process in processes}


@pytest.mark.nightly
def test_a_killed_replica_is_missed_by_nobody(machines: Callable[..., Machines]) -> None:
    group = machines(2)
    one, other = group.replicas
    one.kill()
    assert one.wait(10) == -signal.SIGKILL
    assert other.poll() is None
    group.enough.touch()
    assert other.wait(30) == 0, other.printed()
    assert group.server.wait(30) == 0, group.server.printed()
    assert "replicas=2, lost=('127.0.0.1:" in group.server.printed()
    assert gone(pids([group.server, one, other]))


@pytest.mark.nightly
def test_a_killed_server_ends_all_with_an_error_and_a_checkpoint(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    group = machines(2)
    group.server.kill()
    for number, replica in enumerate(group.replicas):
        assert replica.wait(30) == 1, replica.printed()
        last = replica.printed().splitlines()[-1]
        path = tmp_path / f"{number}.st"
        assert "PeerLostError: the parameter server at 127.0.0.1:" in last
        assert f"saved in {path}" in last
        model = net(9)
        model.load_state_dict(load_file(path))
        assert not torch.equal(model.first.weight, net().first.weight)
    assert gone(pids([group.server, *group.replicas]))


@pytest.mark.nightly
def test_a_server_that_stands_still_is_left_after_the_timeout(
    machines: Callable[..., Machines],
) -> None:
    group = machines(1, patience=1)
    group.server.send_signal(signal.SIGSTOP)
    (replica,) = group.replicas
    assert replica.wait(30) == 1
    assert "does not answer (timed out): the model was saved in" in replica.printed()


def test_a_closure_is_evaluated_with_gradients() -> None:
    replica, (inputs,) = net(), batches(1)

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = nn.functional.mse_loss(replica(inputs), inputs)
        loss.backward()
        return loss

    with (
        serving(net()) as (addresses, _),
        Hogwild(replica.parameters(), 0.1, 1, 1, replica, address=addresses) as ours,
    ):
        before = ours.step(closure).item()
        assert ours.step(closure).item() < before


def test_who_has_left_is_told_so() -> None:
    model = net()
    with serving(net()) as (addresses, _):
        ours = hogwild(model, addresses)
        ours.close()
        ours.close()
        with pytest.raises(PeerLostError, match="this replica has left its server"):
            step(model, ours, batches(1)[0])
