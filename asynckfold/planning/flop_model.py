"""The rule: seconds of a training step from its floating-point operations, by threads.

Seconds with one thread are interpolated between measured models, `POINTS`. Their speed-up with two
threads gives the share of a step that threads divide, by Amdahl's law (Amdahl 1967).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from asynckfold.jobs.cost import Cost


@dataclass(frozen=True)
class MeasuredModel:
    """One measured model.

    Parameters
    ----------
    flops : float
        Operations of a step.
    seconds : float
        Duration of a step with one thread.
    two_threads : float
        Speed-up with two threads.
    products : int
        Number of convolutions and matrix products in a step.
    """

    flops: float
    seconds: float
    two_threads: float
    products: int


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

    Parameters
    ----------
    flops : int
        Floating-point operations of a training step.
    cores : int
        Allotted cores: the largest number of threads.
    eval_ratio : float
        Evaluation batch size / training batch size.
    products : int, optional
        Number of products in a training step; by default like the measured models.

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
