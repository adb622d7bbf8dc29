"""Cross-validate a deep belief network on MNIST, with its pretraining and without.

``python examples/dbn.py --data-root data`` downloads MNIST when it is not there.
``python examples/dbn.py --quick`` takes scikit-learn's digits instead: no download, seconds.
"""

from __future__ import annotations

import argparse
from functools import partial

from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

from asynckfold import AsyncKFold
from asynckfold.data.sources import load_source
from asynckfold.data.sources.datasets import ImageArrays
from asynckfold.models import DBN, Pretraining


def get_optimizer(model):
    return Adam(model.parameters(), 1e-3)


def get_dataset(args):
    if args.quick:
        digits = load_source("digits").dataset
        return ImageArrays(digits.data[:400], digits.targets[:400], ToTensor())
    return MNIST(root=args.data_root, train=True, download=True, transform=ToTensor())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch, no download")
    parser.add_argument("--data-root", default="data", help="folder of the downloaded files")
    parser.add_argument("--root-dir", default="runs/dbn", help="folder of the run")
    args = parser.parse_args()

    net = partial(DBN, *((64, (50, 50)) if args.quick else (784, (500, 500))), 10)
    models = {
        "DBN": partial(net, pretraining=Pretraining(epochs=1 if args.quick else 10)),
        "plain": partial(net, pretraining=Pretraining(epochs=0)),
    }
    kfold = AsyncKFold(2, get_dataset(args), args.root_dir, CrossEntropyLoss(), 32)
    results = kfold(models, ["cosine"], get_optimizer, {"epochs": 1 if args.quick else 5})
    epochs = results.to_frame("epoch").dropna(subset="free_energy_gap")
    print(epochs.groupby(["stage", "epoch"])[["reconstruction_error", "free_energy_gap"]].mean())
    print(results)
    print(results.report())


if __name__ == "__main__":
    main()
