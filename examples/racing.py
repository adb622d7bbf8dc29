"""Race twelve candidates over ten folds: those that can no longer win are left out.

``python examples/racing.py --quick`` takes a few digits, folds and epochs.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold


def net(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def get_optimizer(model, lr):
    return torch.optim.Adam(model.parameters(), lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, folds and epochs")
    parser.add_argument("--root-dir", default="runs/racing", help="folder of the run")
    args = parser.parse_args()
    inputs, targets = load_digits(return_X_y=True)
    count = 300 if args.quick else None
    data = inputs[:count].astype("float32") / 16, targets[:count]
    folds = 3 if args.quick else 10
    kfold = AsyncKFold(folds, data, args.root_dir, nn.CrossEntropyLoss(), 32, race=True)
    params = {"lr": [1e-5, 1e-4, 1e-3, 1e-2], "width": [8, 32, 128]}
    epochs = {"epochs": 1 if args.quick else 5}
    results = kfold({"net": net}, ["cosine"], get_optimizer, epochs, params=params)
    print(results.verdict)
    table = results.to_frame()
    print(table[["param_lr", "param_width", "mean_accuracy", "folds_done", "status"]].to_string())
    print(f"{table.folds_done.sum()} of {folds * len(table)} jobs decided it")
    print(results.report())


if __name__ == "__main__":
    main()
