"""All-reduce with a GPU for each rank; CPUs stand for the GPUs, and gloo for NCCL."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import RANK_ENDED, CheckpointRef, RunEvent, Task
from asynckfold.jobs.result import DONE, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.multiprocess import train
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.collectives import Collectives, Packed
from tests.fake_gpu import CpuToTake
from tests.leftovers import descendants, descriptors
from tests.training.multiprocess.attempts import (
    OPTIMIZERS,
    Fragile,
    each_sample,
    noted,
    noting,
    problems,
    samples_in,
)
from tests.training.tiny import Noisy, Plain, Tiny, always, checkpoints, never

pytestmark = pytest.mark.usefixtures(
    "one_thread", "hasty_disk", "_meeting_places", "_this_process_stays"
)

END_WORKER = ranks.end_worker


@pytest.fixture
def _this_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests are the worker here, and a busy machine may use up its time to find an end."""
    monkeypatch.setattr(ranks, "end_worker", lambda text: None)


@pytest.fixture
def _meeting_places() -> Iterator[None]:
    """A worker ends after its job, and with it the memory in which its ranks met."""
    yield
    for number, what in descriptors().items():
        if "asynckfold-ranks" in what:
            os.close(number)


def tiny(root: Path, processes: int = 2, **given: Any) -> Tiny:
    """40 samples to train on, 20 to evaluate in batches of 4; running statistics and dropout."""
    words = {"epochs": 2, "eval_batch_size": 4, "lr_step": "batch"}
    changes = {"models": {"noisy": Noisy}, "lr_schedules": {"onecycle": "onecycle"}, **given}
    params = TrainerParams(
        trainer="allreduce", processes=processes, **{**words, **changes.pop("params", {})}
    )
    return Tiny(root, params=params, batch_size=7, **changes)


def attempt(
    made: Tiny,
    on_gpus: bool = True,
    number: int = 1,
    refs: list[CheckpointRef] | None = None,
    stop: Any = never,
) -> tuple[Result | None, list[RunEvent]]:
    """One attempt at the first job; it leaves no process."""
    events: list[RunEvent] = []
    task = Task(made.jobs[0], number, tuple(refs or ()))
    gpus = [CpuToTake(made.root / f"gpu-{rank}") for rank in range(made.params.processes)]
    bundle, before = replace(made.bundle, backend="gloo"), descendants()
    try:
        found = train.train(
            bundle, task, made.batches, (), events.append, stop, gpus=gpus if on_gpus else ()
        )
    finally:
        assert descendants() <= before
    return found, events


def trained(made: Tiny, on_gpus: bool = True) -> Result:
    found, _ = attempt(made, on_gpus)
    assert found is not None
    assert found.status == DONE
    return found


def losses(result: Result) -> list[tuple[Any, ...]]:
    return [(item.train_loss, item.valid_loss, item.accuracy, item.lr) for item in result.epochs]


class Branching(Noisy):
    """A part only for some samples, another for none, and a frozen one with integers."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.never = nn.Linear(3, 3), nn.Linear(3, 3).double()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("shift", torch.tensor([1, 2, 3]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.frozen(super().forward(inputs)) + self.shift
        return self.some(found) if (inputs[:, 0] < 20).any() else found


class Centred(nn.Module):
    """A loss that keeps a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = nn.functional.cross_entropy(outputs, targets)
        if self.training:
            self.mean.mul_(0.9).add_(found.detach(), alpha=0.1)
        return found * (1 + self.mean)


def opt_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([item for item in model.parameters() if item.requires_grad], 0.05)


@pytest.mark.nightly(but=["2-adam", "branching"])
@pytest.mark.parametrize(
    ("processes", "given"),
    [
        (1, {}),
        (2, {"opt_fn": OPTIMIZERS["adam"]}),
        (3, {"opt_fn": OPTIMIZERS["momentum"], "params": {"clip_grad_norm": 0.5}}),
        (3, {"models": {"m": Branching}, "opt_fn": opt_fn}),
        (2, {"criterion": Centred()}),
        (2, {"criterion": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.0]))}),
    ],
    ids=["alone", "2-adam", "3-clipped", "branching", "state", "weights"],
)
def test_where_they_compute_changes_no_bit(
    tmp_path: Path, processes: int, given: dict[str, Any]
) -> None:
    on_gpus = trained(tiny(tmp_path / "gpus", processes, **given))
    on_cores = trained(tiny(tmp_path / "cores", processes, **given), on_gpus=False)
    assert on_gpus.digest == on_cores.digest
    assert on_gpus.weights == on_cores.weights
    assert losses(on_gpus) == losses(on_cores)


def test_each_rank_takes_its_own_gpu_and_they_share_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "noted"
    made = tiny(tmp_path / "run", 3, models={"m": noting(path, Plain)})
    trained(made)
    takers = [int((made.root / f"gpu-{rank}").read_text()) for rank in range(3)]
    assert takers[0] == os.getpid()
    assert len(set(takers)) == 3
    assert samples_in(path) == each_sample(made, 2)
    assert {pid for pid, _ in noted(path)} == set(takers)
    assert not torch.distributed.is_initialized()


@pytest.mark.nightly(but=["adam"])
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_stopped_after_every_batch_the_bits_are_the_same(tmp_path: Path, optimizer: str) -> None:
    def made(name: str) -> Tiny:
        return tiny(tmp_path / name, opt_fn=OPTIMIZERS[optimizer], params={"epochs": 1})

    stopped, refs = made("stopped"), list[CheckpointRef]()
    result: Result | None = None
    for number in range(1, 100):
        result, events = attempt(stopped, True, number, refs, always)
        if result is not None:
            break
        refs = checkpoints(events)
    assert number > 3
    assert result is not None
    assert result.digest == trained(made("whole")).digest
    # What was saved goes on where there is no GPU, too, with the same bits here.
    last, _ = attempt(stopped, False, number, refs)
    assert last is not None
    assert last.digest == result.digest


class AfterSome(Plain):
    """Does something in a further process, in its second batch."""

    lead = os.getpid()

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act, self.count = act, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += os.getpid() != self.lead
        if self.count == 2:
            self.act()
        return super().forward(inputs)


def test_a_rank_that_dies_in_the_middle_ends_the_attempt_and_the_next_goes_on(
    tmp_path: Path,
) -> None:
    def model() -> nn.Module:
        return AfterSome(lambda: (tmp_path / "deadly").exists() and os.kill(os.getpid(), 9))

    def made(name: str) -> Tiny:
        return tiny(tmp_path / name, models={"m": model})

    broken, few = made("broken"), iter([True])
    _, events = attempt(broken, stop=lambda: next(few, False))
    (tmp_path / "deadly").touch()
    with pytest.raises(WorkerDiedError, match=r"process 2 of the job ended \(SIGKILL\)"):
        attempt(broken, refs=checkpoints(events), number=2)
    (tmp_path / "deadly").unlink()
    found, _ = attempt(broken, refs=checkpoints(events), number=3)
    assert found is not None
    assert found.digest == trained(made("whole")).digest


def test_what_a_rank_raises_is_raised_as_it_is(tmp_path: Path) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "gone", "x.png")

    with pytest.raises(FileNotFoundError, match="gone"):
        attempt(tiny(tmp_path, models={"m": lambda: Fragile(fail)}))


def test_a_rank_that_dies_in_a_collective_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, lead = Collectives.offer, os.getpid()

    def dying(self: Collectives, part: Packed) -> None:
        if os.getpid() != lead:
            os.kill(os.getpid(), signal.SIGKILL)
        offer(self, part)

    monkeypatch.setattr(Collectives, "offer", dying)
    with pytest.raises(WorkerDiedError, match=r"process 2 of the job ended \(SIGKILL\)"):
        attempt(tiny(tmp_path))


@pytest.mark.parametrize(("dies_in", "waits_in"), [("offer", "collect"), ("join", "join")])
def test_a_worker_that_would_wait_for_a_dead_rank_for_ever_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    dies_in: str,
    waits_in: str,
) -> None:
    """As with NCCL, of which no call fails: the host waits for a kernel that waits for the rank."""
    lead: list[int] = []

    def act(name: str, usual: Any) -> Any:
        def called(self: Collectives, *given: Any) -> None:
            if os.getpid() in lead and name == waits_in:
                time.sleep(600)
            elif os.getpid() not in lead and name == dies_in:
                # After its answer, so that rank 0 goes on to the collective.
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                usual(self, *given)

        return called

    for name in {dies_in, waits_in}:
        monkeypatch.setattr(Collectives, name, act(name, getattr(Collectives, name)))
    if waits_in == "join":
        monkeypatch.setattr(Collectives, "spread", lambda self, tensors: time.sleep(600))
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "end_worker", END_WORKER)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        worker = os.fork()
    if not worker:
        lead.append(os.getpid())
        try:
            attempt(tiny(tmp_path))
        finally:
            os._exit(0)
    while not (ended := os.waitpid(worker, os.WNOHANG))[0]:
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == RANK_ENDED
    assert "process 2 of the job ended (SIGKILL), and with it the attempt" in capfd.readouterr().err


def test_a_gpu_that_cannot_be_taken_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(self: CpuToTake) -> torch.device:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy")

    monkeypatch.setattr(CpuToTake, "take", take)
    with pytest.raises(RuntimeError, match="devices are busy"):
        attempt(tiny(tmp_path))


def test_a_model_that_synchronises_its_normalisation_is_refused(tmp_path: Path) -> None:
    class Synchronised(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.SyncBatchNorm(3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.norm(super().forward(inputs))
            return found

    def made(name: str, **given: Any) -> Tiny:
        return tiny(tmp_path / name, models={"m": Synchronised}, params=given)

    ((rule, received, remedy),) = problems(made("gpus", gpu_processes=2))
    assert rule == "allreduce normalises the part of each GPU by itself"
    assert received == "model m with SyncBatchNorm"
    assert "processes=1" in remedy
    assert problems(made("cores")) == []


def test_tensors_of_any_kind_lie_side_by_side() -> None:
    like = [
        torch.randn(3, 2).T,
        torch.empty(0),
        torch.tensor(True),
        torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.tensor(1 + 2j),
    ]
    packed = Packed(like, torch.device("cpu"))
    for view, tensor in zip(packed.views, like, strict=True):
        assert (view.dtype, view.shape, view.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        view.copy_(tensor)
    other = Packed(like, torch.device("cpu"))
    other.raw.copy_(packed.raw)
    for view, tensor in zip(other.views, like, strict=True):
        np.testing.assert_array_equal(view, tensor)
