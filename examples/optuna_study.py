"""A grid of 16 candidates beside an Optuna study of 16 trials, on few digits.

``python examples/optuna_study.py --quick`` takes one epoch and four trials.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from optuna.distributions import FloatDistribution, IntDistribution
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.integrations.optuna import optimize


def network(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def get_optimizer(model, lr):
    return torch.optim.Adam(model.parameters(), lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch, four trials")
    parser.add_argument("--root-dir", default="runs/optuna", help="folder of the runs")
    args = parser.parse_args()
    X, y = load_digits(return_X_y=True)
    samples = (X.astype("float32") / 16, y)
    call = ({"net": network}, ["cosine"], get_optimizer, {"epochs": 1 if args.quick else 10})

    grid = AsyncKFold(3, samples, f"{args.root_dir}/grid", nn.CrossEntropyLoss(), 32)
    values = {"lr": [1e-3, 3e-3, 1e-2, 3e-2], "width": [8, 16, 32, 64]}
    in_grid = grid(*call, params=values)

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
    )
    kfold = AsyncKFold(3, samples, f"{args.root_dir}/study", nn.CrossEntropyLoss(), 32)
    ranges = {"lr": FloatDistribution(1e-3, 3e-2, log=True), "width": IntDistribution(8, 64)}
    # Four trials at once: their folds share one queue, so that no core waits for a trial to end.
    trials = {"n_trials": 4 if args.quick else 16, "n_parallel": 4}
    found = optimize(kfold, study, *call, params=ranges, **trials)

    print(f"grid: {in_grid.best_score_:.4f} by {in_grid.best_params_}")
    print(f"study: {found.best_score_:.4f} by {found.best_params_}")
    print(in_grid.report())
