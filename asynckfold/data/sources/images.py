"""Images: scikit-learn's digits, torchvision's collections, and what makes them fit a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from asynckfold.data.sources.source import IMAGE, Source
from asynckfold.errors import InputError, Problem, refuse

TORCHVISION = MappingProxyType(
    {"cifar10": "CIFAR10", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST", "mnist": "MNIST"}
)

# (mean, standard deviation) of each channel over the training images, values from 0 to 1, as they
# are usually given for CIFAR-10 and MNIST, and computed for the other two.
_STATISTICS = MappingProxyType(
    {
        "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "fashion-mnist": ((0.2860,), (0.3530,)),
        "kmnist": ((0.1918,), (0.3483,)),
        "mnist": ((0.1307,), (0.3081,)),
    }
)

# ITU-R BT.601, by which PIL turns RGB into grey.
_LUMA = (0.299, 0.587, 0.114)

# Of images with more than 8 bits a channel, which PIL turns into white where they exceed 255.
_DEEP_MODES = ("I", "F")


def digits() -> Source:
    """Return scikit-learn's digits as 1,797 grey images of 8×8.

    The values 0 to 16 become 0 to 255: ``round(v * 255 / 16)``.
    """
    from sklearn.datasets import load_digits

    from asynckfold.data.sources.datasets import ImageArrays

    bunch = load_digits()
    images = np.rint(bunch.images * 255 / 16).astype(np.uint8)
    classes = tuple(str(name) for name in bunch.target_names)
    dataset = ImageArrays(images, bunch.target.astype(np.int64), classes=classes)
    return Source("digits", dataset, classes, (1, 8, 8), IMAGE)


def torchvision_source(name: str, data_root: Path, download: bool) -> Source:
    """Return the training part of a torchvision dataset, without a transform."""
    from torchvision import datasets

    collection = getattr(datasets, TORCHVISION[name])
    try:
        dataset = collection(data_root, train=True, download=download)
    except RuntimeError as error:
        raise InputError([_not_found(name, data_root, download, error)]) from error
    except (OSError, ValueError, KeyError, EOFError, AssertionError) as error:
        raise InputError([_damaged(name, data_root, error)]) from error
    cifar = name == "cifar10"
    # "7 - seven" is too long for a table's head.
    dataset.classes = [str(label).split(" - ")[0] for label in dataset.classes]
    height, width = dataset.data.shape[1:3]
    mean, std = _STATISTICS[name]
    return Source(
        name,
        dataset,
        tuple(dataset.classes),
        (3 if cifar else 1, height, width),
        IMAGE,
        notes=(f"the training part of {name}: {len(dataset)} images",),
        photographs=cifar,
        mean=mean,
        std=std,
    )


def _not_found(name: str, data_root: Path, download: bool, error: Exception) -> Problem:
    if download:
        remedy = "Check the network, or put the files there by hand."
    else:
        remedy = "Pass --download to fetch them, or --data-root with the folder that holds them."
    first = str(error).splitlines()[0]
    return Problem(f"the files of {name} must be under {data_root}", repr(first), remedy)


def _damaged(name: str, data_root: Path, error: Exception) -> Problem:
    return Problem(
        f"the files of {name} under {data_root} must be readable and whole",
        f"{type(error).__name__} {error}".strip(),
        "Check the folder's permissions, or remove the files and pass --download.",
    )


def open_rgb(path: str) -> Any:
    """Read an image file as a PIL image in RGB, rotated by its EXIF orientation."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            refuse(depth_problems(path, image.mode))
            return ImageOps.exif_transpose(image).convert("RGB")
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError.one(
            f"{path} must be a readable image", str(error), "Replace it or take it out."
        ) from error


@dataclass(frozen=True)
class ImageFacts:
    """Size and content of an image file."""

    size: tuple[int, int]  # (width, height), rotated by EXIF
    mode: str  # PIL's
    frames: int
    digest: bytes  # equal for equal pixels


def check_image(path: str) -> ImageFacts:
    """Read an image file completely and describe it."""
    from PIL import Image

    image = open_rgb(path)
    with Image.open(path) as original:
        mode, frames = original.mode, int(getattr(original, "n_frames", 1))
    pixels = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
    pixels.update(image.tobytes())
    return ImageFacts(image.size, mode, frames, pixels.digest())


def depth_problems(path: str, mode: str) -> Iterator[Problem]:
    """Yield that an image has more than 8 bits a channel, by its PIL mode."""
    if mode.split(";")[0] in _DEEP_MODES:
        yield Problem(
            f"{path} must have 8 bits a channel",
            f"an image of mode {mode}",
            "Scale its values to 0 to 255 and save it with 8 bits, or pass its numbers as "
            "npz:PATH.",
        )


def image_transform(source: Source, input_shape: tuple[int, ...], *, augment: bool) -> Any:
    """Return what turns a source's images into tensors that a model takes.

    In this order, each only where it is needed: grey or RGB, by the channels asked for; resizing;
    random crops (after padding by an eighth of the height: 4 pixels for 32) and horizontal flips;
    scaling to 0 to 1; normalisation. CIFAR-10 is normalised by its usual statistics. A folder's
    images are normalised by mean and standard deviation 0.5, to -1 to 1, because statistics taken
    from all images would let the held-out ones influence training. Other sources stay at 0 to 1.

    Parameters
    ----------
    source : Source
        Of kind ``"image"``.
    input_shape : tuple of int
        (channels, height, width), with 1 or 3 channels.
    augment : bool
        Whether to crop and flip at random. For training only.

    Returns
    -------
    torchvision.transforms.Compose
        From PIL image to float32 tensor of `input_shape`.

    Raises
    ------
    InputError
        The source holds no images, the shape is no image's, or a flipped image would be of another
        class.

    Examples
    --------
    >>> image_transform(digits(), (1, 32, 32), augment=False)
    Compose(
        Resize(size=(32, 32), interpolation=bilinear, max_size=None, antialias=True)
        ToTensor()
    )
    """
    from torchvision.transforms import Compose

    refuse(_transform_problems(source, input_shape, augment))
    return Compose(list(_steps(source, input_shape, augment)))


def _transform_problems(
    source: Source, input_shape: tuple[int, ...], augment: bool
) -> Iterator[Problem]:
    if source.kind != IMAGE:
        yield Problem("image_transform takes images", source.name, "Tables need no transform.")
    elif augment and not source.photographs:
        yield Problem(
            "crops and flips must keep the class",
            f"augmentation of {source.name}",
            "Augment cifar10 or folder: only.",
        )
    elif augment and (mirrored := _mirror_images(source.classes)):
        yield Problem(
            "crops and flips must keep the class",
            f"the classes {' and '.join(mirrored)}, one of which becomes the other",
            "Leave augmentation out.",
        )
    if len(input_shape) != 3 or input_shape[0] not in (1, 3) or min(input_shape) < 1:
        yield Problem(
            "input_shape must be (channels, height, width) with 1 or 3 channels",
            str(input_shape),
            "Pass (1, 32, 32) or (3, 32, 32).",
        )


def _mirror_images(classes: Sequence[str]) -> tuple[str, ...]:
    """Return two classes that differ in left and right only."""
    known = {name.lower(): name for name in classes}
    for lower, name in known.items():
        other = lower.replace("left", "right")
        if other != lower and other in known:
            return name, known[other]
    return ()


def _steps(source: Source, input_shape: tuple[int, ...], augment: bool) -> Iterator[Any]:
    from torchvision import transforms

    channels, height, width = input_shape
    if channels != source.sample_shape[0]:
        yield transforms.Grayscale(channels)
    # A folder's images may differ in size; resizing to the size that is there changes nothing.
    if source.photographs or (height, width) != source.sample_shape[1:]:
        yield transforms.Resize((height, width))
    if augment:
        yield transforms.RandomCrop((height, width), padding=max(1, height // 8))
        yield transforms.RandomHorizontalFlip()
    yield transforms.ToTensor()
    if source.mean:
        yield transforms.Normalize(*_statistics(source, channels))


def _statistics(source: Source, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if channels == len(source.mean):
        return source.mean, source.std
    # Exact for the mean; for the standard deviation as if the channels rose and fell together,
    # as those of photographs nearly do.
    mean = float(np.dot(_LUMA, source.mean))
    return (mean,), (float(np.dot(_LUMA, source.std)),)
