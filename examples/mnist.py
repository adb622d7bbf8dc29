"""Cross-validate LeNet5 and AlexNet on MNIST.

``python examples/mnist.py --data-root data`` downloads MNIST when it is not there.
``python examples/mnist.py --quick`` takes scikit-learn's digits instead: no download, seconds.
"""

from __future__ import annotations

import argparse

from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Resize, ToTensor

from asynckfold import AsyncKFold
from asynckfold.data.sources import load_source
from asynckfold.data.sources.datasets import ImageArrays
from asynckfold.models import AlexNet, LeNet5


def get_optimizer(model):
    return Adam(model.parameters(), 1e-3)


def get_dataset(args):
    transform = Compose([Resize((32, 32)), ToTensor()])
    if args.quick:
        digits = load_source("digits").dataset
        return ImageArrays(digits.data[:400], digits.targets[:400], transform)
    return MNIST(root=args.data_root, train=True, download=True, transform=transform)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch, no download")
    parser.add_argument("--data-root", default="data", help="folder of the downloaded files")
    parser.add_argument("--root-dir", default="runs/mnist", help="folder of the run")
    args = parser.parse_args()

    params = {"epochs": 1 if args.quick else 2, "save_checkpoint_frequency": 20}
    kfold = AsyncKFold(2, get_dataset(args), args.root_dir, CrossEntropyLoss(), 32)
    results = kfold([LeNet5, AlexNet], ["cosine"], get_optimizer, params)
    print(results)
    print(results.report())


if __name__ == "__main__":
    main()
