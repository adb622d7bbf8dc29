"""A step on a GPU: what it asks of the host, and that it draws the numbers of the CPU."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asynckfold.data.batches import Batches, _Held
from asynckfold.data.device_copies import Prefetcher, fetched_together
from asynckfold.data.transforms import Draw, Normalize, RandomCrop, RandomFlip, ToFloat, View
from asynckfold.jobs.messages import Task
from asynckfold.jobs.reproducibility import ARITHMETIC
from asynckfold.jobs.result import DIVERGED
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import setup
from asynckfold.training.job_log import NoLog
from asynckfold.training.software import REVISION, REVISION_ON_GPUS, software
from asynckfold.training.training_run import Training
from tests.training.counting import Counting
from tests.training.tiny import Plain, Tiny

META = torch.device("meta")
STEPS = (
    ToFloat(),
    RandomCrop((8, 8), (2, 2, 2, 2)),
    RandomFlip(),
    Normalize((0.5,) * 3, (0.2,) * 3),
)


def images(count: int = 60) -> Batches:
    array = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (count, 3, 8, 8)).astype(np.uint8)
    )
    train, valid = (_Held(array, View((), None, steps, ())) for steps in (STEPS, STEPS[:1]))
    return Batches(torch.arange(count) % 3, train, valid)


class Conv(nn.Module):
    """A convolution with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()
        )
        self.last = nn.Linear(4 * 6 * 6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layers(inputs))
        return found


class Event:
    """Says that it happened."""

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def training_on_meta(root: Path, data: Batches, criterion: Any) -> Training:
    params = TrainerParams(epochs=2, print_frequency=1, clip_grad_norm=1.0)
    tiny = Tiny(root, {"conv": Conv}, params=params, criterion=criterion)
    return setup.build(tiny.bundle, Task(tiny.jobs[0]), data, META, NoLog(), Heartbeat())


@pytest.mark.parametrize(
    ("criterion", "sent"),
    [
        (nn.functional.cross_entropy, 2),
        # Whether all samples count equally is found on the device.
        (nn.CrossEntropyLoss(), 3),
        (nn.CrossEntropyLoss(torch.ones(3)), 3),
    ],
)
def test_the_host_waits_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, criterion: Any, sent: int
) -> None:
    """The numbers of samples and the draws of an epoch are sent once."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    training = training_on_meta(tmp_path, images(), criterion)
    with training.log, Counting() as mode:
        training.begin_epoch()
        begun = mode.take()
        # The order, and the draws of two steps.
        assert (begun.sent, begun.synchronisations) == (3, 0), begun
        training.step()
        mode.take()
        for _ in range(training.batches - 1):
            training.step()
            training.report_progress(lambda event: None)
            step = mode.take()
            # A loss for the log, for which nothing waits.
            assert (step.sent, step.fetched, step.synchronisations) == (0, 1, 0), step
        training.end_epoch(0.0, lambda event: None)
        ended = mode.take()
        # One tensor: losses, outputs, loss and accuracy of the evaluation.
        assert (ended.sent, ended.fetched, ended.synchronisations) == (sent, 1, 1), ended


def test_what_is_fetched_together_has_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.empty(0, 5),
        torch.tensor([-0.0, float("nan"), float("inf")], dtype=torch.bfloat16),
        torch.arange(3),
    ]
    assert all(map(operator.is_, fetched_together(tensors), tensors))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for found, wanted in zip(fetched_together(tensors), tensors, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert bytes_of(found) == bytes_of(wanted)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def not_fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, foreach=False)


@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="sum")],
)
def test_an_epoch_that_is_fetched_at_once_has_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, criterion: Any
) -> None:
    words = {"criterion": criterion, "opt_fn": not_fused, "batch_size": 12}
    on_cores = Tiny(tmp_path / "cores", **words).train()
    tiny = Tiny(tmp_path / "device", **words)
    # As if the tensors were on a device: all that follows from it is how they are fetched.
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    found = tiny.train()
    for one, other in zip(found.epochs, on_cores.epochs, strict=True):
        assert replace(one, seconds=0.0) == replace(other, seconds=0.0)
    assert found.outputs is not None
    assert on_cores.outputs is not None
    assert found.outputs.tobytes() == on_cores.outputs.tobytes()


class Careful(Plain):
    """Refuses to be evaluated once its weights are not finite."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = super().forward(inputs)
        if not self.training and not found.isfinite().all():
            raise ValueError("not finite")
        return found


@pytest.mark.parametrize("on_cores", [True, False])
def test_a_loss_that_diverged_is_the_reason_for_what_the_evaluation_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cores: bool
) -> None:
    tiny = Tiny(
        tmp_path,
        {"careful": Careful},
        opt_fn=lambda model: torch.optim.SGD(model.parameters(), 1e38, foreach=False),
    )
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cores)
    result = tiny.train()
    assert (result.status, result.error[:16]) == (DIVERGED, "the loss became ")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.floats(0, 1))
@settings(deadline=None)
def test_a_gpu_draws_what_a_cpu_draws(bits: list[int], p: float) -> None:
    class Fixed(Draw):
        def bits(self) -> Any:
            return np.array(bits, np.int64).view(np.uint64)

    draw, sent = Fixed(0, 0, np.arange(len(bits))), torch.tensor(bits)
    assert torch.equal(draw.bits_on(torch.device("cpu")), sent)
    chances = (draw.bits() >> np.uint64(11)) * 2.0**-53
    assert RandomFlip(p).flips(sent).tolist() == (chances < p).tolist()
    for counts in ((1, 1), (5, 9), (4000, 3)):
        for here, there in zip(
            RandomCrop.corners(*counts, draw), RandomCrop.corners_on(*counts, sent), strict=True
        ):
            assert here.tolist() == there.tolist()


def test_ordered_batches_are_those_of_their_samples() -> None:
    data, order = images(), np.random.default_rng(1).permutation(60)
    ordered = data.ordered(order, 7, 3, training=True)
    for low, high in ((0, 16), (16, 32), (50, 60)):
        for one, other in zip(
            ordered.batch(low, high, (high, 60)), data.train(order[low:high], 7, 3), strict=True
        ):
            assert torch.equal(one, other)
    inputs, _ = data.ordered(order, training=False).batch(0, 60)
    assert torch.equal(inputs, data.eval(order)[0])


def test_sent_draws_give_the_same_batch() -> None:
    """The path of a GPU, on values: its batch steps compute on what says that it is on none."""
    data, rows = images(), np.arange(20)
    draw = Draw(7, 3, rows)
    sent = {place: draw.at(place).bits_on(torch.device("cpu")) for place in (1, 2)}
    expected, _ = data.train(rows, 7, 3)
    flip, crop = RandomFlip(), RandomCrop((8, 8), (2, 2, 2, 2))
    batch = ToFloat()(data._train.arrays[0][:20], draw)
    padded = nn.functional.pad(batch, (2, 2, 2, 2))
    tops, lefts = crop.corners_on(5, 5, replace(draw, sent=sent, place=1).bits_on(META))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)
    batch = windows[torch.arange(20), :, tops, lefts]
    flips = flip.flips(replace(draw, sent=sent, place=2).bits_on(META)).view(-1, 1, 1, 1)
    batch = torch.where(flips, batch.flip(-1), batch)
    assert torch.equal(Normalize((0.5,) * 3, (0.2,) * 3)(batch, draw), expected)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A side stream, whose calls are noted."""
    calls: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            calls.append("wait")

    class Noted(Event):
        def synchronize(self) -> None:
            calls.append("synchronize")

    @contextlib.contextmanager
    def stream(side: Any) -> Iterator[None]:
        calls.append("copy")
        yield

    for name, value in (
        ("Stream", Stream),
        ("Event", Noted),
        ("stream", stream),
        ("current_stream", Stream),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return calls


def test_batches_of_the_host_are_moved_one_ahead(streams: list[str]) -> None:
    array = torch.randn(40, 5)
    prefetcher = Prefetcher(array, torch.device("cpu"))
    order = torch.randperm(40)
    places = [(0, 8), (8, 16), (16, 24), (24, 40)]
    for number, place in enumerate(places):
        found = prefetcher.take(place, order[slice(*place)])
        # "Moved" shares the buffer here: it is read before the next one fills it.
        assert torch.equal(found, array[order[slice(*place)]])
        if number + 1 < len(places):
            following = places[number + 1]
            prefetcher.start(following, order[slice(*following)])
    # Each is copied once; a buffer is filled again after its last copy, not sooner.
    assert streams.count("copy") == len(places)
    assert streams.count("synchronize") == len(places) - 2
    assert streams.count("wait") == len(places)
    # What was started for another place is not taken.
    prefetcher.start((0, 4), order[:4])
    assert torch.equal(prefetcher.take((4, 8), order[4:8]), array[order[4:8]])


def test_small_data_stay_on_the_gpu_for_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 60 * 3 * 64 * 100
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    monkeypatch.setattr(Batches, "to", lambda self, device, room=None: images())
    gpu = torch.device("cuda", 0)
    for on_gpu, is_kept in ((total // 100, True), (total // 10, False)):
        monkeypatch.setattr(Batches, "bytes_on", lambda self, device, size=on_gpu: size)
        data = images()
        first = setup.to_device(data, gpu)
        assert (setup.to_device(data, gpu) is first) == is_kept


def test_other_kernels_on_gpus_are_other_software() -> None:
    assert software(1)[ARITHMETIC] == REVISION != REVISION_ON_GPUS
    assert software(1, ["H100"])[ARITHMETIC] == REVISION_ON_GPUS
