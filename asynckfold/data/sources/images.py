"""Images: scikit-learn's digits, torchvision's collections, folders of files; their transforms."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.source import IMAGE, Samples, Source
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

# Of files that PIL reads, and torchvision's ImageFolder takes.
EXTENSIONS = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_SHOWN = 3
_PARTS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "valid",
    "valid": "valid",
    "validation": "valid",
}
_NUMBERED_PART = re.compile(r"(fold|part|split)[ _-]?\d+")


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
        raise InputError.one(
            f"the files of {name} must be under {data_root}",
            repr(str(error).splitlines()[0]),
            "Check the network, or put the files there by hand."
            if download
            else "Pass --download to fetch them, or --data-root with the folder that holds them.",
        ) from error
    except (OSError, ValueError, KeyError, EOFError, AssertionError) as error:
        raise InputError.one(
            f"the files of {name} under {data_root} must be readable and whole",
            f"{type(error).__name__} {error}".strip(),
            "Check the folder's permissions, or remove the files and pass --download.",
        ) from error
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


def open_rgb(path: str) -> Any:
    """Read an image file as a PIL image in RGB, rotated by its EXIF orientation."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.mode.split(";")[0] in _DEEP_MODES:
                raise InputError.one(
                    f"{path} must have 8 bits a channel",
                    f"an image of mode {image.mode}",
                    "Scale its values to 0 to 255 and save it with 8 bits, or pass its numbers as "
                    "npz:PATH.",
                )
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
    from torchvision import transforms

    refuse(_transform_problems(source, input_shape, augment))
    channels, height, width = input_shape
    steps: list[Any] = []
    if channels != source.sample_shape[0]:
        steps.append(transforms.Grayscale(channels))
    # A folder's images may differ in size; resizing to the size that is there changes nothing.
    if source.photographs or (height, width) != source.sample_shape[1:]:
        steps.append(transforms.Resize((height, width)))
    if augment:
        steps.append(transforms.RandomCrop((height, width), padding=max(1, height // 8)))
        steps.append(transforms.RandomHorizontalFlip())
    steps.append(transforms.ToTensor())
    if source.mean:
        mean, std = source.mean, source.std
        if channels != len(mean):
            # Exact for the mean; for the standard deviation as if the channels rose and fell
            # together, as those of photographs nearly do.
            mean, std = (float(np.dot(_LUMA, mean)),), (float(np.dot(_LUMA, std)),)
        steps.append(transforms.Normalize(mean, std))
    return transforms.Compose(steps)


def _transform_problems(
    source: Source, input_shape: tuple[int, ...], augment: bool
) -> Iterator[Problem]:
    lowered = {name.lower(): name for name in source.classes}
    mirrored = {name.replace("left", "right"): name for name in lowered if "left" in name}
    if source.kind != IMAGE:
        yield Problem("image_transform takes images", source.name, "Tables need no transform.")
    elif augment and not source.photographs:
        yield Problem(
            "crops and flips must keep the class",
            f"augmentation of {source.name}",
            "Augment cifar10 or folder: only.",
        )
    elif augment and (pairs := [pair for pair in mirrored.items() if pair[0] in lowered]):
        right, left = (lowered[name] for name in pairs[0])
        yield Problem(
            "crops and flips must keep the class",
            f"the classes {left} and {right}, one of which becomes the other",
            "Leave augmentation out.",
        )
    if len(input_shape) != 3 or input_shape[0] not in (1, 3) or min(input_shape) < 1:
        yield Problem(
            "input_shape must be (channels, height, width) with 1 or 3 channels",
            str(input_shape),
            "Pass (1, 32, 32) or (3, 32, 32).",
        )


# Folders


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """The images below a folder, class by class, sorted."""

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    targets: npt.NDArray[np.int64]
    notes: tuple[str, ...]  # on nested folders, and on files that are not samples
    problems: tuple[Problem, ...]


def find_images(path: Path) -> ImageFolder:
    """Return the images of all classes below a folder; problems are collected, not raised.

    Each subfolder is a class; all images below it are its samples. Hidden files and files without
    an image extension are left out. Symlinks are followed for classes only: deeper ones may form a
    cycle.
    """
    if not path.is_dir():
        rule = "folder: must name an existing folder"
        problem = Problem(rule, str(path), "It holds one folder per class.")
        return ImageFolder((), (), np.zeros(0, np.int64), (), (problem,))
    everything = sorted(path.iterdir())
    items = [item for item in everything if not _is_hidden(item.name)]
    folders = [item for item in items if item.is_dir()]
    paths: list[Path] = []
    others: list[str] = []
    counts: list[int] = []
    for folder in folders:
        images, rest = _below(folder)
        paths += images
        counts.append(len(images))
        others += [str(item.relative_to(path)) for item in rest]
    files = [item.name for item in items if not item.is_dir()]
    beside = [name for name in files if _is_image(name)]
    others += [name for name in files if not _is_image(name)]
    hidden = [item.name for item in everything if _is_hidden(item.name) and item.is_dir()]
    notes = [
        *_deeper(path, paths),
        *_left_out(beside, "image", "outside the class folders"),
        *_left_out(others, "file", "no image extension, or a link to a folder"),
        *_left_out(hidden, "hidden folder", ""),
    ]
    names = tuple(folder.name for folder in folders)
    targets = np.repeat(np.arange(len(names)), counts).astype(np.int64)
    problems = tuple(_folder_problems(path, names, counts, paths, len(beside)))
    return ImageFolder(names, tuple(paths), targets, tuple(notes), problems)


def _is_hidden(name: str) -> bool:
    # What macOS puts into archives: ._cat.jpg is no image, and __MACOSX no class.
    return name.startswith(".") or name == "__MACOSX"


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in EXTENSIONS


def _below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the images below a folder, sorted, and the other files."""
    images: list[Path] = []
    others: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        here = Path(place)
        others += [here / name for name in folders if (here / name).is_symlink()]
        for name in sorted(files):
            if not _is_hidden(name):
                (images if _is_image(name) else others).append(here / name)
    return images, others


def _deeper(path: Path, paths: Sequence[Path]) -> Iterator[str]:
    deeper = [item for item in paths if len(item.relative_to(path).parts) > 2]
    if deeper:
        place = deeper[0].parent.relative_to(path)
        word = "image lies" if len(deeper) == 1 else "images lie"
        yield f"{len(deeper)} {word} in folders within a class, such as {place}, as part of it"


def _left_out(names: Sequence[str], what: str, why: str) -> Iterator[str]:
    if names:
        count = f"{len(names)} {what}{'s' * (len(names) > 1)}"
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        yield f"left out: {count}{f' ({why})' if why else ''}: {shown}"


def _folder_problems(
    path: Path, names: Sequence[str], counts: Sequence[int], paths: Sequence[Path], beside: int
) -> Iterator[Problem]:
    if len(names) < 2:
        received = ", ".join(names) or "none"
        if beside:
            received += f", and {beside} image{'s' * (beside > 1)} in no folder"
        yield Problem(
            f"{path} must hold two folders or more, one per class",
            received,
            "Put the images of each class into a folder of its own.",
        )
    alike = Counter(name.lower() for name in names)
    if twice := [name for name in names if alike[name.lower()] > 1]:
        yield Problem(
            f"the folders in {path} must differ by more than upper and lower case",
            ", ".join(twice),
            "Put the images of a class into one folder.",
        )
    if parts := _parts(names):
        yield Problem(
            f"the folders in {path} must be classes",
            ", ".join(sorted(parts)),
            f"Cross-validation divides the data itself: pass folder:{path / parts[0]} or another.",
        )
    if empty := [name for name, count in zip(names, counts, strict=True) if not count]:
        yield Problem(
            f"each folder in {path} must hold the images of a class",
            f"no image in {', '.join(empty)}",
            f"Remove folders that are not classes; images end in {', '.join(sorted(EXTENSIONS))}.",
        )
    # A file with two names could be both trained on and scored.
    real: dict[str, list[str]] = {}
    if any(item.is_symlink() for item in (*paths, *(path / name for name in names))):
        for item in paths:
            real.setdefault(os.path.realpath(item), []).append(str(item.relative_to(path)))
    if linked := [several for several in real.values() if len(several) > 1]:
        yield Problem(
            f"each image below {path} must be there once",
            f"{len(linked)} under several names, such as {' and '.join(linked[0][:2])}",
            "Remove the links: an image may not be on both sides of a fold.",
        )


def _parts(names: Sequence[str]) -> list[str]:
    """Return folders that are parts of a data set, train first: train and test, fold1 and fold2."""
    parts = {
        name: next((word for word in re.split(r"[^a-z]+", name.lower()) if word in _PARTS), "")
        for name in names
    }
    if len({_PARTS[word] for word in parts.values() if word}) > 1:
        return sorted(
            (name for name in names if parts[name]), key=lambda n: "train" not in parts[n]
        )
    is_numbered = all(_NUMBERED_PART.fullmatch(name.lower()) for name in names)
    return list(names) if is_numbered and len(names) > 1 else []


def folder_source(name: str, path: Path) -> Source:
    """Return the images under `path` as RGB, where each folder is a class."""
    from asynckfold.data.sources.datasets import ImageFiles

    folder = find_images(path)
    refuse(folder.problems)
    width, height = open_rgb(str(folder.paths[0])).size
    dataset = ImageFiles(folder.paths, open_rgb, folder.targets, folder.classes)
    note = f"{len(folder.paths)} images in {len(folder.classes)} classes, all read as RGB"
    return Source(
        name,
        dataset,
        folder.classes,
        (3, height, width),
        IMAGE,
        notes=(note, *folder.notes),
        photographs=True,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def folder_samples(path: Path) -> Samples:
    """Return all images under `path`, sorted by name; top-level folders are labels."""
    from asynckfold.data.sources.datasets import ImageFiles

    images, others = _below(path) if path.is_dir() else ([], [])
    images.sort()
    if not images:
        known = ", ".join(sorted(EXTENSIONS))
        refuse([Problem("folder: must name a folder with images", str(path), f"Known: {known}.")])
    names = [item.relative_to(path) for item in images]
    in_folders = all(len(name.parts) > 1 for name in names)
    labels = tuple(name.parts[0] for name in names) if in_folders else None
    shown = [str(item.relative_to(path)) for item in others]
    notes = tuple(_left_out(shown, "file", "no image extension, or a link to a folder"))
    nothing = np.zeros(len(images), np.int64)
    return Samples(ImageFiles(images, open_rgb, nothing), labels, tuple(map(str, names)), notes)
