"""A model of two outputs, and a criterion that learns how much each of its two losses counts.

``python examples/two_outputs.py --quick`` takes a few digits and one epoch.
The weights are those of Kendall, Gal and Cipolla (2018).
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from asynckfold import AsyncKFold


class TwoHeads(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.digit, self.ink = nn.Linear(width, 10), nn.Linear(width, 1)

    def forward(self, images):
        seen = self.body(images)
        return {"digit": self.digit(seen), "ink": self.ink(seen)[:, 0]}


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, outputs, targets):
        losses = torch.stack([cross_entropy(outputs["digit"], targets["digit"]),
                              mse_loss(outputs["ink"], targets["ink"])])  # fmt: skip
        return (losses * torch.exp(-self.log_variance) + self.log_variance).sum()


def get_optimizer(model, criterion):
    return torch.optim.Adam([*model.parameters(), *criterion.parameters()], 1e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch")
    parser.add_argument("--root-dir", default="runs/two-outputs", help="folder of the run")
    args = parser.parse_args()
    images, digits = load_digits(return_X_y=True)
    images, digits = [part[: 300 if args.quick else None] for part in (images / 16, digits)]
    data = images.astype("float32"), {"digit": digits, "ink": images.mean(1)}
    scores = {"accuracy": lambda y, outputs: (outputs["digit"].argmax(1) == y["digit"]).mean(),
              "ink": lambda y, outputs: -abs(outputs["ink"] - y["ink"]).mean()}  # fmt: skip
    kfold = AsyncKFold(3, data, args.root_dir, Weighted(), 32, scoring=scores)
    results = kfold([TwoHeads], ["cosine"], get_optimizer, {"epochs": 1 if args.quick else 20})
    print(results.to_frame()[["model", "mean_accuracy", "mean_ink"]])
    weights = torch.exp(-results.state_dict(fold=0, of="criterion")["log_variance"])
    print(f"learned weights: digit {weights[0]:.2f}, ink {weights[1]:.2f}")
    print(results.report())
