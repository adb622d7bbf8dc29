"""What may one expect of the best of many? Nested folds say it, and an audit looks for leaks.

``python examples/honest_choice.py --quick`` takes few candidates and one epoch.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn

from asynckfold import AsyncKFold


def get_optimizer(model, lr):
    return torch.optim.Adam(model.parameters(), lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few candidates, one epoch")
    parser.add_argument("--root-dir", default="runs/honest-choice", help="folder of the run")
    args = parser.parse_args()
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(120, 20)).astype("float32")
    # Labels by chance: no model can be right more often than every second time.
    targets = draw.integers(0, 2, 120)
    # A mistake on purpose: six samples are there twice.
    inputs[:6], targets[:6] = inputs[-6:], targets[-6:]
    kfold = AsyncKFold(5, (inputs, targets), args.root_dir, nn.CrossEntropyLoss(), 16, nested=3)
    models = {
        "linear": lambda: nn.Linear(20, 2),
        "net": lambda: nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2)),
    }
    rates = [1e-3, 1e-1] if args.quick else [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
    params = {"epochs": 1 if args.quick else 8}
    results = kfold(models, ["constant"], get_optimizer, params, params={"lr": rates})
    print(f"the best candidate seems to reach {results.best_score_:.3f} with chance alone")
    print(results.nested, "\n")
    print(results.audit())
    print(results.report())


if __name__ == "__main__":
    main()
