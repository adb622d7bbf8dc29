"""A run that grows: more models, repeats, epochs and scores, and nothing is trained twice.

``python examples/growing.py --quick`` takes a few digits. Its folds go to a file, and come back.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.models import MLP

MODELS = {"linear": lambda: nn.Linear(64, 10), "mlp": lambda: MLP(64)}


def get_optimizer(model):
    return torch.optim.Adam(model.parameters(), 1e-3)


def train(folds, data, folder, names, epochs, **settings):
    kfold = AsyncKFold(folds, data, folder, nn.CrossEntropyLoss(), 32, verbose=0, **settings)
    models = {name: MODELS[name] for name in names}
    return kfold(models, ["constant"], get_optimizer, {"epochs": epochs})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits")
    parser.add_argument("--root-dir", default="runs/growing", help="folder of the runs")
    args = parser.parse_args()
    inputs, targets = load_digits(return_X_y=True)
    count = 300 if args.quick else 1797
    data, first = (inputs[:count].astype("float32") / 16, targets[:count]), f"{args.root_dir}/run"
    splits = f"{args.root_dir}/splits.json"
    train(3, data, first, ["linear"], 2).save_splits(splits)
    again = train(splits, data, f"{args.root_dir}/again", ["linear"], 2)
    print(f"the folds of a file: {len(again.results)} jobs, {again.best_score_:.4f}")
    steps = {
        "folds made here": (["linear"], 2, {}),
        "another model": (["linear", "mlp"], 2, {}),
        "a repeat, on other folds": (["linear", "mlp"], 2, {"n_repeats": 2}),
        "more epochs": (["linear", "mlp"], 4, {"n_repeats": 2}),
    }
    for change, (names, epochs, settings) in steps.items():
        results = train(3, data, first, names, epochs, **settings)
        print(f"{change}: {len(results.results)} jobs, the best {results.best_score_:.4f}")
    scores = ["accuracy", "f1_macro"]
    results = train(3, data, first, ["linear", "mlp"], 4, n_repeats=2, scoring=scores)
    print("another score, without training:")
    print(results.to_frame()[["model", "mean_accuracy", "mean_f1_macro"]].round(4).to_string())
    print(results.report())


if __name__ == "__main__":
    main()
