"""Images in folders: which files are samples, and of which class.

Each subfolder is a class; all images below it are its samples. Hidden files and files without an
image extension are left out. Symlinks are followed for classes only: deeper ones may form a cycle.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.images import open_rgb
from asynckfold.data.sources.source import IMAGE, Samples, Source
from asynckfold.errors import Problem, refuse

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


@dataclass(frozen=True, eq=False)
class Found:
    """The images below a folder, class by class, sorted."""

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    targets: npt.NDArray[np.int64]
    notes: tuple[str, ...]  # on nested folders, and on files that are not samples
    problems: tuple[Problem, ...]


def find_images(path: Path) -> Found:
    """Return the images of all classes below a folder; problems are collected, not raised."""
    if not path.is_dir():
        rule = "folder: must name an existing folder"
        problem = Problem(rule, str(path), "It holds one folder per class.")
        return Found((), (), np.zeros(0, np.int64), (), (problem,))
    items = sorted(item for item in path.iterdir() if not _is_hidden(item.name))
    folders = [item for item in items if item.is_dir()]
    paths: list[Path] = []
    targets: list[int] = []
    others: list[str] = []
    for index, folder in enumerate(folders):
        images, rest = _below(folder)
        paths += images
        targets += [index] * len(images)
        others += [str(item.relative_to(path)) for item in rest]
    beside = [item.name for item in items if not item.is_dir() and _is_image(item.name)]
    others += [item.name for item in items if not item.is_dir() and not _is_image(item.name)]
    hidden = sorted(item.name for item in path.iterdir() if _is_hidden(item.name))
    notes = [
        *_deeper(path, paths),
        *_listed(beside, "image", "outside the class folders"),
        *_listed(others, "file", "no image extension, or a link to a folder"),
        *_listed([name for name in hidden if (path / name).is_dir()], "hidden folder", ""),
    ]
    names = tuple(folder.name for folder in folders)
    counts = np.bincount(np.array(targets, np.int64), minlength=len(names))
    problems = [
        *_class_problems(path, folders, len(beside)),
        *_part_problems(path, folders),
        *_empty_problems(path, [name for name, n in zip(names, counts, strict=True) if not n]),
        *_twice_problems(path, paths),
    ]
    return Found(names, tuple(paths), np.array(targets, np.int64), tuple(notes), tuple(problems))


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


def _listed(names: Sequence[str], what: str, why: str) -> Iterator[str]:
    if names:
        count = f"{len(names)} {what}{'s' * (len(names) > 1)}"
        more = ", …" if len(names) > _SHOWN else ""
        shown = f"{', '.join(names[:_SHOWN])}{more}"
        yield f"left out: {count}{f' ({why})' if why else ''}: {shown}"


def _class_problems(path: Path, folders: Sequence[Path], beside: int) -> Iterator[Problem]:
    if len(folders) < 2:
        received = ", ".join(item.name for item in folders) or "none"
        if beside:
            received += f", and {beside} image{'s' * (beside > 1)} in no folder"
        yield Problem(
            f"{path} must hold two folders or more, one per class",
            received,
            "Put the images of each class into a folder of its own.",
        )
    alike = Counter(item.name.lower() for item in folders)
    twice = [item.name for item in folders if alike[item.name.lower()] > 1]
    if twice:
        yield Problem(
            f"the folders in {path} must differ by more than upper and lower case",
            ", ".join(twice),
            "Put the images of a class into one folder.",
        )


def _part_problems(path: Path, folders: Sequence[Path]) -> Iterator[Problem]:
    """Yield that folders are parts of a data set: train and test, or fold1 and fold2."""
    parts = {item.name: _part(item.name) for item in folders}
    numbered = [name for name in parts if _NUMBERED_PART.fullmatch(name.lower())]
    found = [name for name, part in parts.items() if part]
    if len({parts[name] for name in found}) < 2:
        found = numbered if len(numbered) == len(folders) else []
    if found and len(folders) > 1:
        first = next((name for name in found if parts[name] == "train"), found[0])
        yield Problem(
            f"the folders in {path} must be classes",
            ", ".join(sorted(found)),
            f"Cross-validation divides the data itself: pass folder:{path / first} or another.",
        )


def _part(name: str) -> str:
    words = re.split(r"[^a-z]+", name.lower())
    return next((_PARTS[word] for word in words if word in _PARTS), "")


def _empty_problems(path: Path, names: Sequence[str]) -> Iterator[Problem]:
    if names:
        yield Problem(
            f"each folder in {path} must hold the images of a class",
            f"no image in {', '.join(names)}",
            f"Remove folders that are not classes; images end in {', '.join(sorted(EXTENSIONS))}.",
        )


def _twice_problems(path: Path, paths: Sequence[Path]) -> Iterator[Problem]:
    """Yield that one file has two names: it could be both trained on and scored."""
    links = any(item.is_symlink() for item in paths) or any(
        item.is_symlink() for item in path.iterdir()
    )
    if not links:
        return
    names: dict[str, list[str]] = {}
    for item in paths:
        names.setdefault(os.path.realpath(item), []).append(str(item.relative_to(path)))
    twice = [found for found in names.values() if len(found) > 1]
    if twice:
        yield Problem(
            f"each image below {path} must be there once",
            f"{len(twice)} under several names, such as {' and '.join(twice[0][:2])}",
            "Remove the links: an image may not be on both sides of a fold.",
        )


def folder_source(name: str, path: Path) -> Source:
    """Return the images under `path` as RGB, where each folder is a class."""
    from asynckfold.data.sources.datasets import ImageFiles

    found = find_images(path)
    refuse(found.problems)
    width, height = open_rgb(str(found.paths[0])).size
    dataset = ImageFiles(found.paths, open_rgb, found.targets, found.classes)
    note = f"{len(found.paths)} images in {len(found.classes)} classes, all read as RGB"
    return Source(
        name,
        dataset,
        found.classes,
        (3, height, width),
        IMAGE,
        notes=(note, *found.notes),
        photographs=True,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def folder_samples(path: Path) -> Samples:
    """Return all images under `path`, sorted by name; top-level folders are labels."""
    from asynckfold.data.sources.datasets import ImageFiles

    found, others = _below(path) if path.is_dir() else ([], [])
    found.sort()
    if not found:
        known = ", ".join(sorted(EXTENSIONS))
        refuse([Problem("folder: must name a folder with images", str(path), f"Known: {known}.")])
    names = [item.relative_to(path) for item in found]
    in_folders = all(len(name.parts) > 1 for name in names)
    labels = tuple(name.parts[0] for name in names) if in_folders else None
    shown = [str(item.relative_to(path)) for item in others]
    notes = tuple(_listed(shown, "file", "no image extension, or a link to a folder"))
    nothing = np.zeros(len(found), np.int64)
    return Samples(ImageFiles(found, open_rgb, nothing), labels, tuple(map(str, names)), notes)
