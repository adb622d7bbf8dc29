"""Take the models that the folds trained: one alone, and the mean of all, on samples set aside.

``python examples/fold_models.py --quick`` takes a few digits and one epoch.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

from asynckfold import AsyncKFold
from asynckfold.models import MLP

FOLDS = 5


def get_model():
    return MLP(64)


def get_optimizer(model):
    return torch.optim.Adam(model.parameters(), 1e-3)


def get_accuracy(found, targets):
    return (found.argmax(dim=1) == targets).float().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch")
    parser.add_argument("--root-dir", default="runs/fold-models", help="folder of the run")
    args = parser.parse_args()

    inputs, targets = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(targets)
    train, aside = slice(0, 400 if args.quick else 1500), slice(1500, None)
    kfold = AsyncKFold(
        FOLDS, (inputs[train], targets[train]), args.root_dir, torch.nn.CrossEntropyLoss(), 32
    )
    params = {"epochs": 1 if args.quick else 20}
    results = kfold({"MLP": get_model}, ["cosine", "step"], get_optimizer, params)

    models = [results.model(fold=fold) for fold in range(FOLDS)]
    alone = [get_accuracy(model(inputs[aside]), targets[aside]) for model in models]
    mean = results.ensemble().predict_proba(inputs[aside])
    together = get_accuracy(torch.from_numpy(mean), targets[aside])
    print(
        f"models of the folds of {results.best_params_}, each alone:", *map("{:.3f}".format, alone)
    )
    print(f"of the mean of their probabilities: {together:.3f}")
    print(results.report())


if __name__ == "__main__":
    main()
