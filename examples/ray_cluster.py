"""Cross-validate models on a Ray cluster, or on a Ray that starts for this run alone.

``python examples/ray_cluster.py --quick`` takes seconds and this machine.

On several machines, once: ``ray start --head`` on one, ``ray start --address=HOST:6379`` on each
other. Then, on any of them:

    python examples/ray_cluster.py --address HOST:6379
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

from asynckfold import AsyncKFold
from asynckfold.models import MLP


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two folds, one epoch")
    parser.add_argument("--root-dir", default="runs/ray", help="folder of the run")
    parser.add_argument("--address", help="HOST:PORT of a running cluster, or auto")
    args = parser.parse_args()

    inputs, targets = load_digits(return_X_y=True)
    kfold = AsyncKFold(
        2 if args.quick else 10,
        (inputs.astype("float32") / 16, targets),
        args.root_dir,
        torch.nn.CrossEntropyLoss(),
        32,
        engine="ray",
        ray_address=args.address,
    )
    results = kfold(
        # Classes and functions of this script reach the nodes by value.
        {"narrow": lambda: MLP(64, (32,)), "wide": lambda: MLP(64, (256,))},
        ["cosine", "step"],
        lambda model: torch.optim.Adam(model.parameters(), 1e-3),
        {"epochs": 1 if args.quick else 20},
    )
    print(results.to_frame())
    print(results.report())


if __name__ == "__main__":
    main()
