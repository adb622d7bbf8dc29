"""A small synthetic CIFAR-10, in the files that torchvision reads.

``python tests/cifar.py SCRIPT ARGUMENT ...`` runs a script that finds it in ``./data``.
"""

from __future__ import annotations

import hashlib
import pickle
import runpy
import sys
from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10


def write(root: Path, count: int = 20) -> None:
    """Write `count` images into each of the six files."""
    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)
    random, labels = np.random.default_rng(0), np.arange(count) % 10
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        pixels = random.integers(0, 60, (count, 3072)) + 18 * labels[:, None]
        found = {"data": pixels.astype(np.uint8), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(found))
    names = {"label_names": [f"class {label}" for label in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))


def accept(root: Path) -> None:
    """Let torchvision take the files for the real ones."""

    def digest(name: str) -> str:
        return hashlib.md5((root / CIFAR10.base_folder / name).read_bytes()).hexdigest()

    CIFAR10.train_list = [[name, digest(name)] for name, _ in CIFAR10.train_list]
    CIFAR10.test_list = [[name, digest(name)] for name, _ in CIFAR10.test_list]
    CIFAR10.meta = {**CIFAR10.meta, "md5": digest("batches.meta")}


if __name__ == "__main__":
    accept(Path("data"))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
