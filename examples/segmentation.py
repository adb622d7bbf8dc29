"""Segment drawn shapes by small U-Nets of two widths, scored by Dice over all pixels of a fold.

``python examples/segmentation.py --quick`` takes a few pictures and one epoch.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from torch import nn

from asynckfold import AsyncKFold


def shapes(count, size=32):
    """Return noisy pictures (n, 1, size, size) and classes (n, size, size): disk, square, rest."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:size, :size]
    classes = np.zeros((count, size, size), np.int64)
    for picture in classes:
        (y, x), (top, left) = random.integers(8, size - 8, (2, 2))
        picture[top - 4 : top + 4, left - 4 : left + 4] = 2
        picture[(rows - y) ** 2 + (columns - x) ** 2 < 36] = 1
    noise = random.normal(0, 0.3, (count, 1, size, size))
    return (classes[:, None] / 2 + noise).astype(np.float32), classes


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, inputs):
        high = self.down(inputs)
        return self.last(torch.cat([high, self.up(self.low(high))], dim=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few pictures, one epoch")
    parser.add_argument("--root-dir", default="runs/segmentation", help="folder of the run")
    args = parser.parse_args()
    data = shapes(60 if args.quick else 600)
    kfold = AsyncKFold(3, data, args.root_dir, nn.CrossEntropyLoss(), 16, rank_by="dice")
    models = {"narrow": partial(UNet, 4), "wide": partial(UNet, 16)}
    params = {"epochs": 1 if args.quick else 10}
    results = kfold(models, ["cosine"], lambda m: torch.optim.Adam(m.parameters(), 1e-2), params)
    print(results.verdict)
    print(results.report())


if __name__ == "__main__":
    main()
