"""Samples of the benchmarks: images on this machine, or generated ones of the same shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.data.sources import load_source
from asynckfold.errors import InputError


def images_of(name: str, data: Path, samples: int) -> tuple[Any, Any] | None:
    """Return random images as uint8 and their classes, or None where there are none.

    ``data`` has torchvision's layout; CIFAR-10 (``name`` "cifar10") may also be images, one folder
    per class, in its folder ``train``.
    """
    try:
        source = load_source(name, data_root=data)
    except InputError:
        if name != "cifar10" or not (data / "train").is_dir():
            return None
        source = load_source(f"folder:{data / 'train'}")
    dataset: Any = source.dataset
    pairs = [dataset[index] for index in chosen(len(dataset), samples)]
    images = np.stack([np.asarray(image) for image, _ in pairs])
    return images, np.array([target for _, target in pairs], np.int64)


def chosen(count: int, samples: int) -> Any:
    """Return random sample numbers, the same on every call."""
    return np.random.default_rng(0).permutation(count)[:samples]


def digits() -> tuple[Any, Any]:
    """Return the images and classes of scikit-learn's digits."""
    dataset: Any = load_source("digits").dataset
    return dataset.data, dataset.targets


def normalised_images(
    size: int, samples: int, data: Path | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], str]:
    """Return MNIST or enlarged digits and their origin.

    Images are (n, 1, size, size), with mean 0 and deviation 1; classes are int64.
    """
    found = None if data is None else images_of("mnist", data, samples)
    images, targets = found or digits()
    origin = "MNIST" if found else "Digits of scikit-learn, enlarged"
    order = chosen(len(images), samples)
    pixels = torch.as_tensor(np.asarray(images)[order]).float()
    pixels = pixels.reshape(len(order), 1, *pixels.shape[-2:])
    large = nn.functional.interpolate(pixels, (size, size), mode="bilinear")
    return ((large - large.mean()) / large.std(), torch.as_tensor(targets)[order].long()), origin


def noisy_patterns(shape: tuple[int, ...], samples: int) -> tuple[Any, Any]:
    """Return samples (float64, deviation about 3) and int64 targets of ten noisy patterns."""
    random = np.random.default_rng(0)
    patterns = random.normal(size=(10, *shape))
    targets = random.integers(0, 10, samples)
    return patterns[targets] + random.normal(scale=3.0, size=(samples, *shape)), targets
