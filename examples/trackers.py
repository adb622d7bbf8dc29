"""Curves, scores and parameters of a run in TensorBoard, MLflow, Weights & Biases or ClearML.

``python examples/trackers.py --quick`` takes one epoch. Without an account: all stays on this disk.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.integrations import clearml, mlflow, tensorboard, wandb


def get_optimizer(model, lr):
    return torch.optim.Adam(model.parameters(), lr)


def write(results, tracker, folder):
    """Write a run, finished or not, from this process or another: `load_results` reads it."""
    if tracker == "tensorboard":
        return tensorboard.write(results, folder)
    if tracker == "mlflow":
        return mlflow.write(results, tracking_uri=f"sqlite:///{folder}.db")
    if tracker == "wandb":
        return wandb.write(results, mode="offline", dir=folder.parent)
    from clearml import Task

    Task.set_offline(offline_mode=True)
    return clearml.write(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch")
    parser.add_argument("--to", default="tensorboard", help="or mlflow, wandb, clearml")
    parser.add_argument("--root-dir", default="runs/trackers", help="folder of the run")
    args = parser.parse_args()
    inputs, targets = load_digits(return_X_y=True)
    data = inputs.astype("float32") / 16, targets
    kfold = AsyncKFold(3, data, args.root_dir, nn.CrossEntropyLoss(), 32)
    models, params = {"linear": lambda: nn.Linear(64, 10)}, {"epochs": 1 if args.quick else 10}
    results = kfold(models, ["cosine"], get_optimizer, params, params={"lr": [1e-3, 1e-2]})
    folder = Path(args.root_dir) / args.to
    print(f"{args.to}: {write(results, args.to, folder)} entries in {folder}")
    print(results.report())


if __name__ == "__main__":
    main()
