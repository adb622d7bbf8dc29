"""More from the same folds: a blend, a threshold, calibrated probabilities, the simplest model.

``python examples/after_training.py --quick`` takes one epoch. Nothing but the refit trains again.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

from asynckfold import AsyncKFold


def net(width):
    return nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Linear(width, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch")
    parser.add_argument("--root-dir", default="runs/after-training", help="folder of the run")
    args = parser.parse_args()
    inputs, targets = load_breast_cancer(return_X_y=True)
    kfold = AsyncKFold(
        *(5, (inputs, targets), args.root_dir, nn.CrossEntropyLoss(), 32),
        preprocess=StandardScaler(), scoring=["neg_log_loss", "roc_auc"], refit="1se",
    )  # fmt: skip
    models = {"linear": lambda: nn.Linear(30, 2), "net": lambda: net(16), "wide": lambda: net(256)}
    params = {"epochs": 1 if args.quick else 10}
    results = kfold(models, ["cosine"], lambda m: torch.optim.Adam(m.parameters(), 3e-3), params)
    print(results.to_frame()[["model", "mean_neg_log_loss", "mean_roc_auc"]].to_string(index=False))
    print("trained on all samples, as the simplest within a standard error:", results.best_params_)

    blend = results.blend()
    weights = blend.weights.items()
    print(f"\nblend: {blend.score:.4f} of", {name: round(w, 2) for name, w in weights})
    threshold = results.threshold("f1")
    default = threshold.default_scores.mean()
    print(f"f1 {threshold.score:.3f} from p = {threshold.value:.2f} on, {default:.3f} from 0.5 on")
    calibrator = results.calibrate()
    before, after = calibrator.log_loss
    print(f"log loss {before:.4f}, at temperature {calibrator.temperature:.2f} {after:.4f}")
    pooled = results.pooled_scores()
    print("ROC AUC by fold and of all folds at once:")
    print(pooled[["mean_roc_auc", "pooled_roc_auc"]].round(4).to_string())
    sets = results.intervals(inputs[:5], alpha=0.01)
    print("classes that stay possible for five samples:", sets.sum(axis=1))
    print(results.report())


if __name__ == "__main__":
    main()
