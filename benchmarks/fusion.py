"""How much faster are jobs that train as one stacked model?

The same jobs are trained one after another and fused, on one core with one thread, or with
``--device cuda`` on a GPU. A step's milliseconds are a job's seconds / its steps, evaluations and
one checkpoint included.
"""

from __future__ import annotations

import math
from statistics import median

from loops import BATCH, Table, arguments, digits_mlp, folds_of, noisy_patterns, small_vgg, sweep

from asynckfold.models import MLP, LeNet, LeNet5

CASES = (
    ("MLP 64-128-10", digits_mlp, (64,), 4_000),
    ("MLP 784-128-10", MLP, (784,), 4_000),
    ("LeNet5", LeNet5, (1, 32, 32), 2_000),
    ("LeNet CIFAR", LeNet, (3, 32, 32), 1_000),
    ("VGG11, quarter width", small_vgg, (3, 32, 32), 500),
)


def main() -> None:
    """Time both ways for each model, by 5, 10 and 20 jobs."""
    parsed = arguments(__doc__, 3, "--device")
    device, epochs = parsed.device, 2 if parsed.quick else 5
    table = Table(f"What fusing brings: {device}", "model | jobs | plain ms | fused ms | ratio")
    for name, model, shape, samples in CASES:
        data = noisy_patterns(shape, samples // (2 if parsed.quick else 1))
        folds, params = folds_of(data[1]), {"epochs": epochs, "save_checkpoint_frequency": epochs}
        steps = epochs * len(folds[0][0]) / BATCH
        for count in (1, 2, 4):
            rules = {f"rate {number}": "constant" for number in range(count)}
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(parsed.turns):
                for fuse, ms in times.items():
                    settings = {"fuse": fuse, "n_jobs": 1, "threads_per_job": 1, "devices": device}
                    found = sweep(folds, data, {"model": model}, rules, params, **settings).results
                    # Jobs of a group have equal parts of its seconds.
                    seconds = math.fsum(job.fit_seconds for job in found.values()) / len(found)
                    ms.append(1e3 * seconds / steps)
            plain, fused = median(times[False]), median(times[True])
            table.add(name, 5 * len(rules), plain, fused, plain / fused)
    table.print(f"Medians of {parsed.turns} turns; float32, Adam, batches of {BATCH}.")


if __name__ == "__main__":
    main()
