"""Stop each job when a part of its training fold says so, and score its best weights.

``python examples/early_stopping.py --quick`` takes a part of the digits and few epochs.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold, BestWeights, EarlyStopping
from asynckfold.models import MLP


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of the digits, few epochs")
    parser.add_argument("--root-dir", default="runs/early-stopping", help="folder of the run")
    args = parser.parse_args()
    inputs, targets = load_digits(return_X_y=True)
    count = 300 if args.quick else len(targets)
    kfold = AsyncKFold(
        3,
        (inputs[:count].astype("float32") / 16, targets[:count]),
        args.root_dir,
        nn.CrossEntropyLoss(),
        32,
        callbacks=[EarlyStopping(patience=2 if args.quick else 5), BestWeights()],
        inner_valid=0.1,
        refit=True,
    )
    models = {"narrow": partial(MLP, 64, (16,)), "wide": partial(MLP, 64, (256,))}
    epochs = 8 if args.quick else 100
    results = kfold(
        models, ["constant"], lambda m: torch.optim.Adam(m.parameters(), 1e-2), {"epochs": epochs}
    )
    last = results.to_frame("epoch").groupby(["model", "fold"]).last()
    print(last[["epoch", "best_epoch", "inner_loss"]])
    print(f"{results.refitted.plan.params.epochs} epochs on all samples")
    print(results.verdict)
    print(results.report())


if __name__ == "__main__":
    main()
