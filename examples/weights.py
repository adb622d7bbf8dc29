"""A rare class that matters: plain, drawn more often, and weighed more in losses and scores.

``python examples/weights.py --quick`` takes few samples and one epoch.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import make_classification
from torch import nn

from asynckfold import AsyncKFold


def net():
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples, one epoch")
    parser.add_argument("--root-dir", default="runs/weights", help="folder of the runs")
    args = parser.parse_args()
    inputs, targets = make_classification(
        300 if args.quick else 3000, 10, weights=[0.95], class_sep=0.8, random_state=0
    )
    ways = {
        "plain": {},
        "drawn": {"sampler": "balanced"},
        "weighed": {"sample_weight": np.where(targets == 1, 19.0, 1.0)},
    }
    for way, settings in ways.items():
        kfold = AsyncKFold(
            *(5, (inputs.astype("float32"), targets)),
            *(f"{args.root_dir}/{way}", nn.CrossEntropyLoss(), 32),
            **{"scoring": ["accuracy", "balanced_accuracy"], "verbose": 0, **settings},
        )
        params = {"epochs": 1 if args.quick else 10}
        results = kfold([net], ["cosine"], lambda m: torch.optim.Adam(m.parameters(), 3e-3), params)
        # The same score for all: a score of a weighed run counts the weights, too.
        decided = results.oof["net/cosine"].argmax(1)
        rare = (decided[targets == 1] == 1).mean()
        print(f"{way:8} {rare:4.0%} of the rare class, {(decided == targets).mean():4.0%} of all")
    print(results.report())


if __name__ == "__main__":
    main()
