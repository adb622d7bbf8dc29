"""Images: scikit-learn's digits, torchvision's collections, folders of files; their transforms."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from asynckfold.data.sources.source import IMAGE, Inspection, Samples, Source
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
_PART = re.compile(r"(?<![a-z])(train|test|val)(ing|id|idation)?(?![a-z])")
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
    except (RuntimeError, OSError, ValueError, KeyError, EOFError, AssertionError) as error:
        raise InputError.one(
            f"the files of {name} must be under {data_root}, readable and whole",
            f"{type(error).__name__}: {error}".splitlines()[0],
            "Pass --download to fetch them (remove what is damaged first), or --data-root with the "
            "folder that holds them.",
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

    rule, remedy = f"{path} must be a readable image", "Replace it or take it out."
    try:
        with Image.open(path) as image:
            mode = image.mode.split(";")[0]
            rgb = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError.one(rule, str(error), remedy) from error
    if mode in _DEEP_MODES:
        rule, remedy = f"{path} must have 8 bits a channel", "Save it so, or pass npz:PATH."
        raise InputError.one(rule, f"an image of mode {mode}", remedy)
    return rgb


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
        A cropped or flipped image would be of another class.

    Examples
    --------
    >>> image_transform(digits(), (1, 32, 32), augment=False)
    Compose(
        Resize(size=(32, 32), interpolation=bilinear, max_size=None, antialias=True)
        ToTensor()
    )
    """
    from torchvision import transforms

    if augment:
        _refuse_flips(source)
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


def _refuse_flips(source: Source) -> None:
    """Refuse augmentation by which an image may become one of another class."""
    names = {name.lower() for name in source.classes}
    mirrored = [name for name in names if "left" in name and name.replace("left", "right") in names]
    if mirrored or not source.photographs:
        received = f"augmentation of {source.name}"
        if mirrored:
            received += f", whose class {mirrored[0]} becomes another"
        rule = "crops and flips must keep the class"
        raise InputError.one(rule, received, "Augment cifar10 or folder: only, or leave it out.")


# Folders


def _read_folder(name: str, path: Path) -> tuple[Inspection, list[Path]]:
    """Return what a folder of images is, without reading any, and the images class by class.

    Each subfolder is a class; all images below it are its samples. Hidden files and files without
    an image extension are left out. Symlinks are followed for classes only: deeper ones may form a
    cycle.
    """
    if not path.is_dir():
        rule, remedy = "folder: must name an existing folder", "It holds one folder per class."
        raise InputError.one(rule, str(path), remedy)
    everything = sorted(path.iterdir())
    items = [item for item in everything if not _is_hidden(item.name)]
    folders = [item for item in items if item.is_dir()]
    files = [item for item in items if not item.is_dir()]
    beside = [item for item in files if _is_image(item.name)]
    others = [item for item in files if not _is_image(item.name)]
    paths: list[Path] = []
    counts: list[int] = []
    for folder in folders:
        images, rest = _below(folder)
        paths += images
        others += rest
        counts.append(len(images))
    hidden = [item for item in everything if _is_hidden(item.name) and item.is_dir()]
    notes = [
        f"{len(paths)} images in {len(folders)} classes, all read as RGB",
        *_left_out(path, beside, "images outside the class folders"),
        *_left_out(path, others, _OTHERS),
        *_left_out(path, hidden, "hidden folders"),
    ]
    names = tuple(folder.name for folder in folders)
    targets = np.repeat(np.arange(len(names)), counts).astype(np.int64)
    problems = tuple(_folder_problems(path, names, counts, paths))
    count, shape = len(paths), (3, 0, 0)
    return Inspection(name, IMAGE, count, shape, names, targets, tuple(notes), problems), paths


_OTHERS = "files (no image extension, or a link to a folder)"


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


def _left_out(path: Path, items: Sequence[Path], what: str) -> Iterator[str]:
    if items:
        shown = ", ".join(str(item.relative_to(path)) for item in items[:_SHOWN])
        yield f"left out: {len(items)} {what}: {shown}{', …' * (len(items) > _SHOWN)}"


def _folder_problems(
    path: Path, names: Sequence[str], counts: Sequence[int], paths: Sequence[Path]
) -> Iterator[Problem]:
    if len(names) < 2:
        yield Problem(
            f"{path} must hold two folders or more, one per class",
            ", ".join(names) or "none",
            "Put the images of each class into a folder of its own.",
        )
    alike = Counter(name.lower() for name in names)
    if twice := [name for name in names if alike[name.lower()] > 1]:
        yield Problem(
            f"the folders in {path} must differ by more than upper and lower case",
            ", ".join(twice),
            "Put the images of a class into one folder.",
        )
    parts = {name: match[1] for name in names if (match := _PART.search(name.lower()))}
    numbered = len(names) > 1 and all(_NUMBERED_PART.fullmatch(name.lower()) for name in names)
    if numbered or len(set(parts.values())) > 1:
        first = max(names, key=lambda name: parts.get(name) == "train")
        yield Problem(
            f"the folders in {path} must be classes, not parts of a data set",
            ", ".join(names if numbered else parts),
            f"Cross-validation divides the data itself: pass one, such as folder:{path / first}",
        )
    if empty := [name for name, count in zip(names, counts, strict=True) if not count]:
        yield Problem(
            f"each folder in {path} must hold the images of a class",
            f"no image in {', '.join(empty)}",
            f"Remove folders that are not classes; images end in {', '.join(sorted(EXTENSIONS))}.",
        )
    # A file with two names could be both trained on and scored.
    names_of: dict[tuple[int, int], list[str]] = {}
    for item in paths:
        facts = item.stat()
        names_of.setdefault((facts.st_dev, facts.st_ino), []).append(str(item.relative_to(path)))
    if linked := [several for several in names_of.values() if len(several) > 1]:
        yield Problem(
            f"each image below {path} must be there once",
            f"{len(linked)} under several names, such as {' and '.join(linked[0][:2])}",
            "Remove the links: an image may not be on both sides of a fold.",
        )


def inspect_folder(name: str, path: Path) -> Inspection:
    """Inspect a folder of images; reads every image."""
    from PIL import Image

    folder, paths = _read_folder(name, path)
    problems, pixels = list(folder.problems), []
    sizes: Counter[tuple[int, int]] = Counter()
    modes: Counter[str] = Counter()
    for item in () if problems else paths:
        try:
            image = open_rgb(str(item))
        except InputError as error:
            problems += error.problems
            continue
        sizes[image.size] += 1
        with Image.open(item) as original:
            modes[original.mode] += 1
        pixels.append(hashlib.blake2b(repr(image.size).encode() + image.tobytes()).digest())
    width, height = next(iter(sizes), (0, 0))
    notes = list(folder.notes)
    if len(modes) > 1:
        shown = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
        notes.append(f"images differ in colour mode, which may reveal a class: {shown}")
    shape = (3, height, width)
    folder = replace(folder, sample_shape=shape, notes=tuple(notes), problems=tuple(problems))
    return folder.with_repeats(pixels)


def folder_source(name: str, path: Path) -> Source:
    """Return the images under `path` as RGB, where each folder is a class."""
    from asynckfold.data.sources.datasets import ImageFiles

    folder, paths = _read_folder(name, path)
    refuse(folder.problems)
    width, height = open_rgb(str(paths[0])).size
    return Source(
        name,
        ImageFiles(paths, open_rgb, folder.targets, folder.class_names),
        folder.class_names,
        (3, height, width),
        IMAGE,
        notes=folder.notes,
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
    notes = tuple(_left_out(path, others, _OTHERS))
    nothing = np.zeros(len(images), np.int64)
    return Samples(ImageFiles(images, open_rgb, nothing), labels, tuple(map(str, names)), notes)
