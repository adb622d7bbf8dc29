"""Train a run in parts, as many machines would, and merge them: the bits of one machine.

``python examples/parts.py --quick`` takes one epoch. All parts are trained here, one after another;
on a cluster, an array job of Slurm trains and merges them: ``asynckfold slurm --help``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold, load_results
from asynckfold.models import MLP

PARTS = 3


def train(root, epochs, **settings):
    inputs, targets = load_digits(return_X_y=True)
    data = inputs.astype("float32") / 16, targets
    # One plan on all machines, whatever cores they have.
    settings |= {"threads_per_job": 1, "fuse": False, "verbose": 0}
    kfold = AsyncKFold(3, data, root, nn.CrossEntropyLoss(), 32, **settings)
    models = {"linear": lambda: nn.Linear(64, 10), "mlp": lambda: MLP(64)}
    adam = torch.optim.Adam
    return kfold(models, ["cosine"], lambda m: adam(m.parameters(), 1e-3), {"epochs": epochs})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch")
    parser.add_argument("--root-dir", default="runs/parts", help="folder of the runs")
    args = parser.parse_args()
    root, epochs = Path(args.root_dir), 1 if args.quick else 5
    for part in range(1, PARTS + 1):
        folder = root / "merged" / "parts" / f"{part}-of-{PARTS}"
        results = train(folder, epochs, part=(part, PARTS))
        print(f"part {part} of {PARTS}:", *results.results)
    subprocess.run(
        [sys.executable, "-m", "asynckfold", "slurm", "merge", root / "merged"], check=True
    )
    merged, alone = load_results(root / "merged"), train(root / "alone", epochs)
    print("fingerprint of the parts", merged.fingerprint[:12])
    print("   and of one machine   ", alone.fingerprint[:12])
    print(merged.verdict)
    print(merged.report())


if __name__ == "__main__":
    main()
