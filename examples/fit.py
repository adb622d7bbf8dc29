"""Train one model alone, on all cores, and test it on samples that it has not seen.

``python examples/fit.py --quick`` takes a few digits, one process and one epoch.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from asynckfold import DistributedTester, fit
from asynckfold.models import MLP


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one process")
    parser.add_argument("--root-dir", default="runs/fit", help="folder of the run")
    parser.add_argument(
        "--trainer",
        default="hogwild",
        choices=["hogwild", "allreduce", "averaging", "parameter_server"],
        help="what the processes do together",
    )
    args = parser.parse_args()

    inputs, targets = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(targets)
    train, test = slice(0, 400 if args.quick else 1500), slice(1500, None)
    processes = 1 if args.quick else len(os.sched_getaffinity(0))
    # The same first weights each time, so that the same command continues the run.
    torch.manual_seed(0)
    found = fit(
        MLP(64),
        (inputs[train], targets[train]),
        lambda model: torch.optim.Adam(model.parameters(), 1e-3),
        torch.nn.CrossEntropyLoss(),
        args.root_dir,
        32,
        scheduler="cosine",
        valid=(inputs[test], targets[test]),
        epochs=1 if args.quick else 20,
        trainer=args.trainer,
        processes=processes,
    )
    loader = DataLoader(TensorDataset(inputs[test], targets[test]), batch_size=256)
    print(DistributedTester(loader, args.root_dir)(found.model))
    print(found.results.report())


if __name__ == "__main__":
    main()
