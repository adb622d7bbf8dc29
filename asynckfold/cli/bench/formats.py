"""The gain of channels last in memory: steps of one model in both formats, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from asynckfold.cli.bench.loops import (
    BATCH,
    Case,
    as_in_worker,
    small_vgg,
    step_of,
    thread_seconds,
    turns_for,
)
from asynckfold.cli.bench.table import BenchTable
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.models import VGG, AlexNet, LeNet, LeNet5, MobileNet
from asynckfold.planning import memory_format as formats
from asynckfold.training.flops import FlopCounter

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
QUICK = {"seconds": 1.0}


def table(cases: Sequence[Case] = CASES, seconds: float = 10.0) -> BenchTable:
    """Time training steps of each model in both formats, `seconds` per row."""
    with as_in_worker(1):
        rows = tuple(_row(case, seconds) for case in cases)
    return BenchTable(
        "What channels last brings",
        "model | products per output | narrow % | contiguous ms | channels last ms | "
        "contiguous / channels last | of the turns, from | to | turns | rule",
        rows,
        (
            f"1 thread, float32, Adam, batches of {BATCH} unless noted; medians of the thread's "
            "own time of one step, both formats in each turn; then the middle half of the turns' "
            "ratios, and the rule of `asynckfold.planning.memory_format`.",
        ),
    )


def _row(case: Case, seconds: float) -> tuple[object, ...]:
    steps = [step_of(case, channels_last=last) for last in (False, True)]
    with FlopCounter() as counter:
        steps[0]()

    def turn(number: int) -> tuple[float, float]:
        # The second one finds the other's data in the caches: they take turns.
        order = (0, 1) if number % 2 else (1, 0)
        found = {place: thread_seconds(steps[place]) for place in order}
        return found[0], found[1]

    turns = turns_for(seconds, turn)
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
