"""What do more processes bring for the full batch? RPROP on sums of gradients over parts.

One step an epoch: each process computes the gradient of its part of all samples, the sums are added
(``trainer="allreduce"``, ``batch_size="full"``), and `torch.optim.Rprop` steps. So the numbers of
several processes are those of one, but for the order of sums.
"""

from __future__ import annotations

import math
import tempfile
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median

import numpy as np
from loops import Table, arguments, cores, noisy_patterns
from torch import nn, optim

from asynckfold import AsyncKFold
from asynckfold.models import MLP

SIZES = {"MLP 64-128-10": (64, 128, 8_000), "MLP 784-256-10": (784, 256, 20_000)}


def trained(
    width: int, hidden: int, samples: int, epochs: int, processes: int
) -> tuple[float, float]:
    """Return the seconds of an iteration, and the last training loss."""
    data = noisy_patterns((width,), samples)
    fold = np.arange(samples * 4 // 5), np.arange(samples * 4 // 5, samples)
    model = partial(MLP, width, (hidden,))
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-benchmark-") as folder:
        kfold = AsyncKFold(
            [fold], data, Path(folder, "run"), nn.CrossEntropyLoss(), "full",
            verbose=0, report=False, threads_per_job=1, fuse=False, devices="cpu",
        )  # fmt: skip
        way = {"trainer": "allreduce", "processes": processes} if processes > 1 else {}
        params = {"epochs": epochs, "save_checkpoint_frequency": epochs, **way}
        results = kfold(
            {"model": model}, ["constant"], lambda made: optim.Rprop(made.parameters()), params
        )
    (job,) = results.results.values()
    # The first one warms up.
    ends = list(accumulate(epoch.seconds for epoch in job.epochs))
    return (ends[-1] - ends[0]) / (len(ends) - 1), job.epochs[-1].train_loss


def main() -> None:
    """Time each number of processes, in turns."""
    parsed = arguments(__doc__, 3)
    table = Table(
        "RPROP on the full batch", "model | processes | ms an iteration | speedup | training loss"
    )
    counts = sorted({1, *(2**power for power in range(1, 7) if 2**power <= cores()), cores()})
    for name, (width, hidden, samples) in SIZES.items():
        epochs, samples = (5, samples // 8) if parsed.quick else (40, samples)
        turns = [
            {count: trained(width, hidden, samples, epochs, count) for count in counts}
            for _ in range(parsed.turns)
        ]
        for count in counts:
            speedup = median(turn[1][0] / turn[count][0] for turn in turns)
            seconds, losses = zip(*(turn[count] for turn in turns), strict=True)
            assert math.isclose(min(losses), max(losses), rel_tol=1e-9)
            table.add(name, count, 1e3 * median(seconds), speedup, losses[0])
    table.print(
        f"Medians of {parsed.turns} turns; evaluation of a fifth of the samples included, "
        "by the first process."
    )


if __name__ == "__main__":
    main()
