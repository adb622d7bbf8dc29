"""What channels last in memory brings: steps of one model in both formats, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from asynckfold.cli.bench.loops import BATCH, fast_adam, small_vgg, threads
from asynckfold.cli.bench.table import BenchTable, machine_facts
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.models import VGG, AlexNet, LeNet, LeNet5, MobileNet
from asynckfold.planning import memory_format as formats
from asynckfold.system import process
from asynckfold.training import seeding
from asynckfold.training.flops import FlopCounter


@dataclass(frozen=True)
class Case:
    """A model, the shape of its samples, and how many of them a step takes."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)
    batch_size: int = BATCH


CASES = (
    Case("LeNet5", LeNet5, (1, 32, 32)),
    Case("LeNet CIFAR", LeNet),
    Case("AlexNet", AlexNet, (1, 32, 32)),
    Case("VGG11, an eighth of the width", partial(VGG, width=0.125)),
    Case("VGG11, quarter width", small_vgg),
    Case("VGG16, quarter width", partial(VGG, "VGG16", width=0.25)),
    Case("VGG11, half the width", partial(VGG, width=0.5)),
    Case("VGG11, half the width, batch 128", partial(VGG, width=0.5), batch_size=128),
    Case("VGG11", VGG),
    Case("VGG11, batch 128", VGG, batch_size=128),
    Case("MobileNet, quarter width", partial(MobileNet, width=0.25)),
    Case("MobileNet, half the width", partial(MobileNet, width=0.5)),
    Case("MobileNet", MobileNet),
    Case("MobileNet, batch 8", MobileNet, batch_size=8),
)


def format_table(cases: Sequence[Case] = CASES, seconds: float = 10.0) -> BenchTable:
    """Time training steps of each model in both formats, turn by turn.

    Parameters
    ----------
    cases : sequence of Case
        What to train, with torch's fused Adam, on random samples.
    seconds : float
        How long each row is timed.
    """
    # As in a worker.
    process.keep_freed_memory()
    with seeding.preserved(), threads(1):
        rows = tuple(_row(case, seconds) for case in cases)
    return BenchTable(
        "What channels last brings",
        (
            "model",
            "products per output",
            "narrow %",
            "contiguous ms",
            "channels last ms",
            "contiguous / channels last",
            "of the turns, from",
            "to",
            "turns",
            "rule",
        ),
        rows,
        (
            f"1 thread, float32, Adam, batches of {BATCH} unless said; medians of the thread's own "
            "time for one step, both formats in each turn; then the middle half of the turns' "
            "ratios, and what the rule of `asynckfold.planning.memory_format` says.",
        ),
        machine_facts(),
    )


def _row(case: Case, seconds: float) -> tuple[object, ...]:
    inputs, targets = torch.randn(case.batch_size, *case.shape), torch.arange(case.batch_size) % 10
    steps = [step_of(case, inputs, targets, last) for last in (False, True)]
    with FlopCounter() as counter:
        steps[0]()
    times: list[tuple[float, ...]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 4:
        # Whoever comes second finds the other's data in the caches: they take turns at it.
        order = (0, 1) if len(times) % 2 else (1, 0)
        found = {place: _timed(steps[place]) for place in order}
        times.append((found[0], found[1]))
    turns = times[max(1, len(times) // 10) :]
    one, other = (median(column) * 1e3 for column in zip(*turns, strict=True))
    ratios = sorted(plain / last for plain, last in turns)
    convolutions = counter.convolutions
    plan = Plan((), TrainerParams(), case.batch_size, 1, 0, "cpu", ("accuracy",), "", "")
    return (
        case.name,
        formats.products_per_output(convolutions),
        100 * formats.narrow_share(convolutions),
        one,
        other,
        one / other,
        ratios[len(ratios) // 4],
        ratios[-1 - len(ratios) // 4],
        len(turns),
        formats.why_not_paying(plan, convolutions) or "channels last",
    )


def step_of(
    case: Case, inputs: torch.Tensor, targets: torch.Tensor, last: bool
) -> Callable[[], None]:
    """Return a training step, channels last in memory or not."""
    torch.manual_seed(0)
    model = case.model()
    if last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = fast_adam(model)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _timed(step: Callable[[], None]) -> float:
    # Seconds of this thread: a busy machine does not count.
    started = time.thread_time()
    step()
    return time.thread_time() - started
