"""Find all the shapes in a picture: several labels for each sample.

``python examples/multi_label.py --quick`` takes a few pictures and one epoch.
"""

from __future__ import annotations

import argparse

import numpy as np
from torch import nn, optim

from asynckfold import AsyncKFold

SIZE = 16
SHAPES = ["line", "column", "square", "cross", "ring"]
SHARES = [0.5, 0.4, 0.3, 0.1, 0.05]  # of the pictures that have the shape


def draw(count, seed=0):
    """Return pictures of shapes at random places, in noise, and a row of 0 and 1 for each."""
    random = np.random.default_rng(seed)
    stamps = np.zeros((len(SHAPES), 5, 5), dtype="float32")
    stamps[0, 2] = stamps[1, :, 2] = stamps[2] = stamps[4] = 1
    stamps[3] = np.maximum(np.eye(5), np.eye(5)[::-1])
    stamps[4, 1:4, 1:4] = 0
    pictures = random.normal(0, 0.3, (count, 1, SIZE, SIZE)).astype("float32")
    labels = (random.random((count, len(SHAPES))) < SHARES).astype("float32")
    for sample, shape in np.argwhere(labels):
        top, left = random.integers(0, SIZE - 5, 2)
        pictures[sample, 0, top : top + 5, left : left + 5] += stamps[shape]
    return pictures, labels


def network(width):
    return nn.Sequential(
        *(nn.Conv2d(1, width, 5), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, len(SHAPES))),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few pictures, one epoch")
    parser.add_argument("--root-dir", default="runs/multi-label", help="folder of the run")
    args = parser.parse_args()

    # Each fold has its share of every label, the rare ones too.
    words = {"scoring": ["average_precision", "f1_macro"]}
    data, criterion = draw(200 if args.quick else 2000), nn.BCEWithLogitsLoss()
    kfold = AsyncKFold(5, data, args.root_dir, criterion, 32, **words)
    models = {"narrow": lambda: network(8), "wide": lambda: network(32)}
    params = {"epochs": 1 if args.quick else 20}
    results = kfold(models, ["cosine"], lambda m: optim.Adam(m.parameters(), 3e-3), params)
    print(results)
    print(results.report())


if __name__ == "__main__":
    main()
