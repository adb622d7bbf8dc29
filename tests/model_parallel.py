"""Does dividing the layers of a network among processes pay? ``python -m tests.model_parallel``.

::

    one process   forward ─► backward ─► Adam, with 1 or 2 threads
    all-reduce    half a batch in each of two processes; all gradients are added up (DDP, gloo)
    pipeline      rank 0: lower layers ─ activations ─► rank 1: upper layers (gloo)
                               ◄─ their gradients ─     micro-batches keep both busy

All have the same gradients to rounding, which is checked. Prints a row for each network and batch:
speed against one thread in the same turn, as median and quartiles. The pipeline is cut where its
stages have the most equal numbers of operations, and shown with its best number of micro-batches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn, optim
from torch.nn.parallel import DistributedDataParallel

from asynckfold.models import DBN

Step = Callable[[], object]

NETWORKS = {
    "784-500-500-2000-10": (500, 500, 2000),
    "784-2000-2000-2000-10": (2000, 2000, 2000),
    "784, 8 × 1000, 10": (1000,) * 8,
}
BATCHES = (32, 128, 512, 1024)
MICRO_BATCHES = (1, 2, 4, 8)
TURN_SECONDS = 0.15


def fast_adam(model: nn.Module) -> optim.Optimizer:
    """Return Adam with torch's fused kernel."""
    return optim.Adam(model.parameters(), 1e-3, fused=True)


def network(hidden: Sequence[int]) -> DBN:
    """Return the same network on each call."""
    torch.manual_seed(0)
    return DBN(784, hidden)


def cut(model: DBN) -> int:
    """Return how many modules the lower stage has."""
    costs = [layer.weight.numel() if isinstance(layer, nn.Linear) else 0 for layer in model]
    # Forward, weights, inputs; the first layer needs no gradient of its inputs.
    work = [cost * (2 if number == 1 else 3) for number, cost in enumerate(costs)]
    layers = [number for number, cost in enumerate(costs) if cost][1:]
    return min(layers, key=lambda place: max(sum(work[:place]), sum(work[place:])))


def single(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Return a step of one process, or of one of two under DDP."""
    optimizer = fast_adam(model)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def lower(stage: nn.Module, inputs: Tensor, width: int, count: int) -> Step:
    """Return rank 0's step of a pipeline of `count` micro-batches."""
    optimizer = fast_adam(stage)
    parts = inputs.chunk(count)
    gradients = [torch.empty(len(part), width) for part in parts]

    def step() -> None:
        optimizer.zero_grad()
        coming = [dist.irecv(held, 1, tag=number) for number, held in enumerate(gradients)]
        outputs, sent = [], []
        for number, part in enumerate(parts):
            outputs.append(stage(part))
            sent.append(dist.isend(outputs[-1].detach(), 1, tag=number))
        for output, held, arrival in zip(outputs, gradients, coming, strict=True):
            arrival.wait()
            output.backward(held)
        for work in sent:
            work.wait()
        optimizer.step()

    return step


def upper(stage: nn.Module, targets: Tensor, width: int, count: int) -> Step:
    """Return rank 1's step of that pipeline."""
    optimizer = fast_adam(stage)
    parts = targets.chunk(count)
    received = [torch.empty(len(part), width) for part in parts]

    def step() -> None:
        optimizer.zero_grad()
        coming = [dist.irecv(held, 0, tag=number) for number, held in enumerate(received)]
        sent, leaves = [], []
        for number, (part, held, arrival) in enumerate(zip(parts, received, coming, strict=True)):
            arrival.wait()
            leaves.append(held.detach().requires_grad_())
            loss = nn.functional.cross_entropy(stage(leaves[-1]), part, reduction="sum")
            (loss / len(targets)).backward()  # type: ignore[no-untyped-call]
            sent.append(dist.isend(leaves[-1].grad, 0, tag=number))
        for work in sent:
            work.wait()
        optimizer.step()

    return step


def ways(rank: int, hidden: Sequence[int], batch: int) -> dict[str, Step]:
    """Return this rank's step in each way, after its first gradients were compared with plain ones.

    Of one process, rank 1 has none.
    """
    torch.manual_seed(1)
    inputs, targets = torch.rand(batch, 784), torch.randint(10, (batch,))
    plain = network(hidden)
    one = single(plain, inputs, targets)
    one()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def checked(step: Step, model: nn.Module) -> Step:
        step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name.removeprefix("module.")])
        return step

    found = {"1 thread": one, "2 threads": one} if rank == 0 else {}
    half = slice(rank * batch // 2, (rank + 1) * batch // 2)
    replica = DistributedDataParallel(network(hidden), gradient_as_bucket_view=True)
    found["all-reduce"] = checked(single(replica, inputs[half], targets[half]), replica)
    for count in MICRO_BATCHES:
        model = network(hidden)
        place = cut(model)
        modules = list(model.named_children())
        stage = nn.Sequential(OrderedDict(modules[place:] if rank else modules[:place]))
        width = model[place].in_features
        make = partial(upper, stage, targets) if rank else partial(lower, stage, inputs)
        found[f"pipeline, {count}"] = checked(make(width, count), stage)
    return found


def seconds_of(steps: dict[str, Step], way: str, count: int) -> float:
    """Return the seconds of `count` steps of all processes."""
    step = steps.get(way, lambda: None)
    torch.set_num_threads(2 if way == "2 threads" else 1)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        step()
    dist.barrier()
    seconds = time.perf_counter() - started
    torch.set_num_threads(1)
    return seconds


def measure(rank: int, store: str, turns: int, quick: bool) -> None:
    """Run one of the two processes; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    names = ["1 thread", "2 threads", "all-reduce", *(f"pipeline, {n}" for n in MICRO_BATCHES)]
    for network_name, hidden in list(NETWORKS.items())[: 1 if quick else None]:
        for batch in BATCHES[: 1 if quick else None]:
            steps = ways(rank, hidden, batch)
            count = torch.tensor([TURN_SECONDS / seconds_of(steps, "1 thread", 3) * 3 + 1])
            dist.broadcast(count, 0)
            found: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(turns):
                for name in names:
                    found[name].append(seconds_of(steps, name, int(count)))
            if rank == 0:
                print(row(network_name, batch, int(count), found), flush=True)
    dist.destroy_process_group()


def row(network_name: str, batch: int, count: int, found: dict[str, list[float]]) -> str:
    """Return a row of the table: speeds with their quartiles."""
    plain = found.pop("1 thread")
    speeds = {
        name: quantiles([one / own for one, own in zip(plain, seconds, strict=True)], n=4)
        for name, seconds in found.items()
    }
    best = max((name for name in speeds if name.startswith("pipeline")), key=lambda n: speeds[n][1])
    cells = [network_name, str(batch), f"{1000 * median(plain) / count:.2f}"]
    for name in ("2 threads", "all-reduce", best):
        low, middle, high = speeds[name]
        cells.append(f"{middle:.2f} ({low:.2f}–{high:.2f})")
    return f"| {' | '.join([*cells, best.split()[-1]])} |"


def main() -> None:
    """Start both processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="the first row only")
    parsed = parser.parse_args()
    print("| network | batch | ms of a step | 2 threads | all-reduce | pipeline | micro-batches |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        multiprocessing.spawn(measure, (store, parsed.turns, parsed.quick), nprocs=2)


if __name__ == "__main__":
    main()
