"""The rule: seconds of a training step from its floating-point operations, by threads.

Seconds with one thread are interpolated between measured models, `POINTS`. Their speed-up with two
threads gives the share of a step that threads divide, by Amdahl's law (Amdahl 1967).

A step of one process takes `step` seconds. Each of several processes takes a separate batch, or
with ``allreduce`` a part of one; then they exchange parameters or gradients::

    plain        ├── step ──┤
    hogwild      ├── step ──┼─ exchange ─┤      processes × batches
    allreduce    ├─ part ─┼─ exchange ─┤        one batch

An exchange takes a constant, seconds for each byte of the parameters, and a share of the step, in
which processes disturb each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asynckfold.jobs.cost import Cost


@dataclass(frozen=True)
class MeasuredModel:
    """One measured model."""

    flops: float  # operations of a step
    seconds: float  # of a step with one thread
    two_threads: float  # speed-up with two
    products: int  # convolutions and matrix products in a step


POINTS = (
    MeasuredModel(1.29e6, 0.00033, 1.00, 5),
    MeasuredModel(1.31e7, 0.00082, 1.14, 5),
    MeasuredModel(7.25e7, 0.0039, 1.36, 15),
    MeasuredModel(1.03e8, 0.0039, 1.39, 15),
    MeasuredModel(1.87e9, 0.020, 1.66, 27),
    MeasuredModel(2.92e10, 0.260, 1.72, 27),
)
"""MLP on digits (64-128-10), MLP on MNIST (784-128-10), LeNet5 on MNIST, LeNet on CIFAR-10, VGG11
of quarter width, VGG11: batches of 32, float32, Adam, medians on two cores of a Xeon with AVX-512,
torch 2.15. More than two threads are extrapolated.

Threads synchronise after each product, so the speed-up depends on the operations per product.
MobileNet of half width has as many operations as VGG11 of quarter width, in 84 products of 2.8e7
instead of 27 of 6.9e7. On two cores of an AMD EPYC a sweep over its 5 folds took 11.9 s with one
thread for each of two jobs and 14.4 s with two threads per job (medians of 2, interleaved), where
operations alone predict a tie."""


def rule_cost(flops: int, cores: int, eval_ratio: float = 1.0, products: int | None = None) -> Cost:
    """Return the cost of a model by the rule.

    `flops` and `products` are those of a training step; without products they are like those of the
    measured models. `eval_ratio` is evaluation batch size / training batch size.

    Examples
    --------
    >>> cost = rule_cost(29_200_000_000, cores=2)
    >>> round(cost.step_seconds[1] / cost.step_seconds[2], 2)
    1.72
    >>> divided = rule_cost(29_200_000_000, cores=2, products=260)
    >>> round(divided.step_seconds[1] / divided.step_seconds[2], 2)
    1.67
    """
    # A layer has three products (output, input gradient, weight gradient); evaluation needs one.
    evaluation = flops * eval_ratio / 3
    each = None if products is None else flops / max(1, products)
    counts = thread_counts(cores)
    return Cost(
        {count: _seconds(flops, count, each) for count in counts},
        {count: _seconds(evaluation, count, each and each * eval_ratio) for count in counts},
        flops,
    )


def _seconds(flops: float, threads: int, each: float | None) -> float:
    """Seconds by Amdahl's law, interpolated between the points.

    Constant below the first point, proportional to the operations beyond the last. The parallel
    share follows from the operations of a product (`each`), or else of a step.
    """
    logs = [math.log(point.flops) for point in POINTS]
    size = math.log(max(flops, POINTS[0].flops))
    alone = math.exp(between(logs, [math.log(point.seconds) for point in POINTS], size))
    shares = [2 * (1 - 1 / point.two_threads) for point in POINTS]
    if each is None:
        share = between(logs, shares, size)
    else:
        sizes = [math.log(point.flops / point.products) for point in POINTS]
        share = between(sizes, shares, max(math.log(max(1.0, each)), sizes[0]))
    beyond = max(1.0, flops / POINTS[-1].flops)
    return alone * beyond * (1 - share + share / threads)


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly; beyond the last point its value."""
    for (left, low), (right, high) in pairwise(zip(xs, ys, strict=True)):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return ys[-1]


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts to try: the cores divided equally among 1, 2, 3, ... jobs.

    >>> thread_counts(16)
    (1, 2, 3, 4, 5, 8, 16)
    """
    return tuple(sorted({cores // jobs for jobs in range(1, cores + 1)}))


@dataclass(frozen=True)
class Exchange:
    """Seconds of one exchange between the processes of a job."""

    seconds: float  # of an exchange of nothing
    per_byte: float  # of each byte of the parameters
    share: float  # of the step, by which processes slow each other down

    def gain(self, trainer: str, processes: int, step: float, part: float, size: int) -> float:
        """Return how many times as fast as one process a job trains.

        `step` and `part` are seconds of a step of one process on a batch, and on a part of one;
        `size` bytes of the parameters.

        Examples
        --------
        >>> round(EXCHANGES["allreduce"].gain("allreduce", 2, 0.76e-3, 0.6e-3, 407_000), 1)
        0.6
        >>> round(EXCHANGES["hogwild"].gain("hogwild", 2, 4.8e-3, 3.6e-3, 247_000), 1)
        1.8
        """
        alone, batches = (part, 1) if trainer == "allreduce" else (step, processes)
        together = alone * (1 + self.share) + self.seconds + self.per_byte * size
        return batches * step / together


EXCHANGES: Mapping[str, Exchange] = {
    "allreduce": Exchange(5e-4, 5e-10, 0.05),
    "averaging": Exchange(0.0, 1e-10, 0.2),
    "hogwild": Exchange(0.0, 1e-10, 0.1),
    "parameter_server": Exchange(1e-3, 2.3e-9, 0.2),
}
"""Fitted by hand to reports/bench/trainers.md, two processes on two cores of a Xeon. Gains for an
MLP of 407 kB, LeNet5 and an MLP of 2.6 MB, as they follow from these numbers and as measured:

================  ================  ================
trainer           from here         measured
================  ================  ================
allreduce         0.57, 1.21, 0.65  0.61, 1.30, 0.68
averaging         1.60, 1.66, 1.52  1.71, 1.62, 1.62
hogwild           1.73, 1.81, 1.65  1.75, 1.99, 1.72
parameter_server  0.53, 1.31, 0.48  0.75, 1.35, 0.49
================  ================  ================
"""


def gain_text(gain: float) -> str:
    """Return the gain of several processes as a part of a sentence."""
    return f"predicted {gain:.1f} times as fast as one process{': slower' * (gain < 1)}"
