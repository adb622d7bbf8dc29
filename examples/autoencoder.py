"""Compare autoencoders of digits by how well they reconstruct digits that they have not seen.

``python examples/autoencoder.py --quick`` takes a few digits and one epoch.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold


def autoencoder(code):
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, code), nn.Linear(code, 32), nn.ReLU(),
        nn.Linear(32, 64),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch")
    parser.add_argument("--root-dir", default="runs/autoencoder", help="folder of the run")
    args = parser.parse_args()
    digits = load_digits().data.astype("float32") / 16
    # One array without targets: the input is the target, scored by the mean squared error.
    kfold = AsyncKFold(3, digits[: 200 if args.quick else None], args.root_dir, nn.MSELoss(), 32)
    models = {"code of 2": lambda: autoencoder(2), "code of 8": lambda: autoencoder(8)}
    params = {"epochs": 1 if args.quick else 20}
    results = kfold(models, ["cosine"], lambda m: torch.optim.Adam(m.parameters(), 1e-3), params)
    print(results.verdict)
    print(results.report())


if __name__ == "__main__":
    main()
