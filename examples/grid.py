"""Search learning rates and widths: a grid, or random draws.

``python examples/grid.py --quick`` takes a few digits and one epoch.
"""

from __future__ import annotations

import argparse

from scipy.stats import loguniform
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import Adam

from asynckfold import AsyncKFold


class Net(nn.Sequential):
    def __init__(self, width=32, dropout=0.0):
        layers = nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10)
        super().__init__(*layers)


def get_linear():
    return nn.Linear(64, 10)


def get_optimizer(model, lr):
    return Adam(model.parameters(), lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch")
    parser.add_argument("--draws", type=int, help="draw this often instead of all combinations")
    parser.add_argument("--root-dir", default="runs/grid", help="folder of the run")
    args = parser.parse_args()

    inputs, targets = load_digits(return_X_y=True)
    count = 300 if args.quick else 1797
    data = (inputs[:count] / 16).astype("float32"), targets[:count]
    params = {"lr": [1e-3, 1e-2], "width": [16, 64]}
    if args.draws:
        params = {"lr": loguniform(1e-4, 1e-1), "width": [16, 32, 64], "dropout": [0.0, 0.2]}
    kfold = AsyncKFold(3, data, args.root_dir, nn.CrossEntropyLoss(), 32)
    results = kfold(
        {"Net": Net, "linear": get_linear},
        ["cosine"],
        get_optimizer,
        {"epochs": 1 if args.quick else 10},
        params=params,
        n_iter=args.draws,
    )
    print(results)
    print(results.best_params_)
    print(results.report())


if __name__ == "__main__":
    main()
