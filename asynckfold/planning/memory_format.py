"""Which models train in channels-last memory format: a pure rule over their convolutions' shapes.

On GPUs it holds for TF32, bfloat16 and float16, whose matrix units take channels last: PyTorch's
tutorial on the format reports gains of 8 to 35 % with them. That was not measured here.

The format changes bits, so the same sweep must get the same one on an idle and on a busy machine:
timings have no say. The choice is written in the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asynckfold.jobs.plan import Plan


@dataclass(frozen=True)
class Convolution:
    """A 2-D convolution in one training step.

    Parameters
    ----------
    outputs : tuple of int
        (batch, channels, height, width).
    weights : tuple of int
        (channels, channels of the input in a group, height, width).
    """

    outputs: tuple[int, ...]
    weights: tuple[int, ...]


NARROW = 16
"""Fewer channels do not fill a vector of 16 float32."""

MOST_NARROW = 0.5
"""Largest share of narrow outputs."""

MOST_PRODUCTS = 400
"""Products per output above which convolutions may not gain: channels-last kernels save copies of
inputs and outputs, which cost little compared with so many products.

From three runs (1 core of a shared AMD EPYC; torch 2.15; batches
of 32 unless stated): seconds of a contiguous / a channels-last step, interleaved.

===================================  ==================  ========  ============
model                                products an output  narrow %  ratio
===================================  ==================  ========  ============
MobileNet, quarter width                             32        16  1.31 to 1.34
MobileNet, half the width                            59         0  1.30 to 1.31
MobileNet                                           113         0  0.99 to 1.23
MobileNet, batch 8                                  113         0  1.84 to 1.90
VGG11, an eighth of the width                       136        43  1.23
VGG11, quarter width                                261         0  1.20 to 1.28
VGG16, quarter width                                288         0  1.10 to 1.18
VGG11, half the width                               510         0  1.09 to 1.13
VGG11, half the width, batch 128                    510         0  1.24 to 1.34
AlexNet                                             786         0  1.15 to 1.16
VGG11                                              1008         0  0.99 to 1.15
VGG11, batch 128                                   1008         0  1.02 to 1.07
LeNet5                                               57        75  1.02 to 1.03
LeNet CIFAR                                          94        75  1.00
===================================  ==================  ========  ============

On two cores of a Xeon with AMX: VGG11 0.87, LeNet5 0.93, VGG11 of quarter width 1.37, MobileNet
1.33 to 1.38."""


def why_not_paying(plan: Plan, convolutions: Sequence[Convolution]) -> str:
    """Return why a model does not train in channels-last format; empty if it does.

    Examples
    --------
    >>> from asynckfold.jobs.trainer_params import TrainerParams
    >>> plan = Plan((), TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
    >>> why_not_paying(plan, [Convolution((32, 64, 32, 32), (64, 16, 3, 3))])
    ''
    >>> why_not_paying(plan, [Convolution((32, 6, 28, 28), (6, 1, 5, 5))])
    '100 % of its convolution outputs have fewer than 16 channels; the limit is 50 %'
    """
    requested = plan.params.memory_format
    if requested == "contiguous":
        return "memory_format is 'contiguous'"
    if not convolutions:
        return "it has no 2-D convolution"
    if requested == "channels_last":
        return ""
    if plan.params.trainer != "plain":
        return f"its jobs use the trainer {plan.params.trainer!r}"
    if plan.device != "cpu" and plan.params.precision == "fp32":
        return "in float32, convolutions of GPUs do not use the matrix units that it is for"
    counts = [math.prod(item.outputs) for item in convolutions]
    narrow = sum(
        count for item, count in zip(convolutions, counts, strict=True) if item.outputs[1] < NARROW
    ) / sum(counts)
    if narrow > MOST_NARROW:
        return (
            f"{100 * narrow:.0f} % of its convolution outputs have fewer than {NARROW} channels; "
            f"the limit is {100 * MOST_NARROW:.0f} %"
        )
    if plan.device != "cpu":
        return ""
    products = sum(
        math.prod(item.weights[1:]) * count
        for item, count in zip(convolutions, counts, strict=True)
    ) / sum(counts)
    if products > MOST_PRODUCTS:
        return (
            f"its convolutions take {products:.0f} products per output; the limit is "
            f"{MOST_PRODUCTS}"
        )
    return ""


def chosen(plan: Plan, why_not: Mapping[str, str], before: Plan | None) -> tuple[str, ...]:
    """Return the models of a plan that train in channels-last format.

    The formats of `before`, a plan of this run or of another, are kept unless one is requested.
    """
    kept = before if plan.params.memory_format == "auto" else None
    known = set() if kept is None else {job.model for job in kept.jobs}
    return tuple(
        model
        for model in dict.fromkeys(job.model for job in plan.jobs)
        if (kept is not None and model in kept.channels_last)
        or (model not in known and why_not.get(model) == "")
    )
