"""Cross-validate MobileNet, LeNet and VGG on CIFAR-10, with random crops and flips.

``python examples/cifar10.py --data-root data`` downloads CIFAR-10 when it is not there.
``python examples/cifar10.py --quick`` takes scikit-learn's digits instead: no download, seconds.
"""

from __future__ import annotations

import argparse

from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torchvision import transforms
from torchvision.datasets import CIFAR10

from asynckfold import AsyncKFold
from asynckfold.data.sources import load_source
from asynckfold.data.sources.datasets import ImageArrays
from asynckfold.models import VGG, LeNet, MobileNet

CROP_AND_FLIP = (
    transforms.RandomCrop(32, padding=4),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
    transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)


def get_optimizer(model):
    return Adam(model.parameters(), 1e-3)


def get_dataset(args):
    if args.quick:
        digits = load_source("digits").dataset
        transform = transforms.Compose(
            [transforms.Grayscale(3), transforms.Resize((32, 32)), *CROP_AND_FLIP]
        )
        return ImageArrays(digits.data[:80], digits.targets[:80], transform)
    transform = transforms.Compose(CROP_AND_FLIP)
    return CIFAR10(root=args.data_root, train=True, download=True, transform=transform)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few digits, one epoch, no download")
    parser.add_argument("--data-root", default="data", help="folder of the downloaded files")
    parser.add_argument("--root-dir", default="runs/cifar10", help="folder of the run")
    args = parser.parse_args()

    params = {"epochs": 1 if args.quick else 2, "save_checkpoint_frequency": 20}
    kfold = AsyncKFold(2, get_dataset(args), args.root_dir, CrossEntropyLoss(), 32)
    results = kfold([MobileNet, LeNet, VGG], ["cosine", "warm"], get_optimizer, params)
    print(results)
    print(results.report())


if __name__ == "__main__":
    main()
