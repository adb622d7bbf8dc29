"""Train a model of two inputs: the picture of a digit, and where its ink lies.

``python examples/two_inputs.py --quick`` takes a few digits and one epoch.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold


class TwoInputs(nn.Module):
    """A small network for the picture, another for the centre of its ink."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten())
        self.centre = nn.Sequential(nn.Linear(2, 8), nn.ReLU())
        self.out = nn.Linear(8 * 6 * 6 + 8, 10)

    def forward(self, picture, centre):
        return self.out(torch.cat([self.picture(picture), self.centre(centre)], dim=1))


def get_optimizer(model):
    return torch.optim.Adam(model.parameters(), 1e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch")
    parser.add_argument("--root-dir", default="runs/two-inputs", help="folder of the run")
    args = parser.parse_args()

    pictures, targets = load_digits(return_X_y=True)
    pictures = pictures.reshape(-1, 1, 8, 8).astype("float32") / 16
    ink, places = pictures[:, 0], np.arange(8, dtype="float32") / 8
    weights = ink.sum((1, 2))
    centres = np.stack([ink.sum(2) @ places, ink.sum(1) @ places], 1) / weights[:, None]

    train = slice(0, 400 if args.quick else 1500)
    inputs = {"picture": pictures[train], "centre": centres[train]}
    kfold = AsyncKFold(5, (inputs, targets[train]), args.root_dir, nn.CrossEntropyLoss(), 32)
    params = {"epochs": 1 if args.quick else 20}
    results = kfold([TwoInputs], ["cosine"], get_optimizer, params)
    aside = {"picture": pictures[1500:], "centre": centres[1500:]}
    found = results.ensemble().predict(aside)
    print(f"accuracy of the ensemble: {np.mean(found == targets[1500:]):.3f}")
    print(results.report())


if __name__ == "__main__":
    main()
