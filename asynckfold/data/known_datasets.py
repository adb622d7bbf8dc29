"""Datasets whose code is known: whole arrays, or a list of files, instead of reading each sample.

``data`` and ``targets`` are used only where the class is exactly one of these; for a subclass or
any other class, ``__getitem__`` is the truth.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from asynckfold.data.transforms.samples import to_array
from asynckfold.data.transforms.trees import Array
from asynckfold.errors import InputError
from asynckfold.jobs.folds import Indices

_MNIST, _CIFAR, _SVHN = (f"torchvision.datasets.{name}" for name in ("mnist", "cifar", "svhn"))
_OWN = "asynckfold.data.sources.datasets"

_ARRAYS = {
    **{
        (_MNIST, name): ("targets", "NHW") for name in ("MNIST", "FashionMNIST", "KMNIST", "EMNIST")
    },
    (_CIFAR, "CIFAR10"): ("targets", "NHWC"),
    (_CIFAR, "CIFAR100"): ("targets", "NHWC"),
    (_SVHN, "SVHN"): ("labels", "NCHW"),
    (_OWN, "ImageArrays"): ("targets", ""),
}
"""By class: the attribute of the labels, and the axes of ``data``, which holds pixels of a byte."""

_FOLDER = "torchvision.datasets.folder"
_FOLDERS = ((_FOLDER, "DatasetFolder"), (_FOLDER, "ImageFolder"))
_LOADERS = (
    (_FOLDER, "default_loader"),
    (_FOLDER, "pil_loader"),
    ("asynckfold.data.sources.images", "open_rgb"),
)


def _is_exactly(dataset: Any, known: Any) -> bool:
    """Whether the class is one of these, with its original methods."""
    kind = type(dataset)
    place = kind.__module__, kind.__qualname__
    if place not in known or getattr(sys.modules.get(place[0]), place[1], None) is not kind:
        return False
    methods = (getattr(kind, name, None) for name in ("__getitem__", "__len__"))
    return all(getattr(method, "__module__", None) == place[0] for method in methods)


def subset_of(dataset: Any) -> bool:
    """Return whether a dataset only selects samples of another."""
    return type(dataset) is Subset or _is_exactly_subclass(dataset, "Selection")


def tensors_of(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """Return X and y of a dataset of two tensors."""
    plain = type(dataset) is TensorDataset or _is_exactly_subclass(dataset, "TableRows")
    return tuple(dataset.tensors) if plain and len(dataset.tensors) == 2 else None


def _is_exactly_subclass(dataset: Any, name: str) -> bool:
    return getattr(sys.modules.get(_OWN), name, ()) is type(dataset)


def whole_arrays(dataset: Any) -> tuple[Array, Any] | None:
    """Return pixels (n, C, H, W) and n labels of a dataset of images in one array.

    None where the class is not exactly a known one, or was modified.
    """
    if not _is_exactly(dataset, _ARRAYS) or getattr(dataset, "target_transform", None) is not None:
        return None
    name, axes = _ARRAYS[type(dataset).__module__, type(dataset).__qualname__]
    data, labels = getattr(dataset, "data", None), getattr(dataset, name, None)
    if isinstance(data, Tensor) and axes == "NHW":
        data = to_array(data)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        return None
    axes = axes or {3: "NHW", 4: "NHWC"}.get(data.ndim, "")
    if data.ndim != len(axes) or not isinstance(labels, (list, tuple, np.ndarray, Tensor)):
        return None
    if axes != "NHW" and data.shape[axes.index("C")] != 3:
        return None
    if axes == "NHW":
        data = data[:, None]
    elif axes == "NHWC":
        data = data.transpose(0, 3, 1, 2)
    indices = np.asarray(to_array(labels) if isinstance(labels, Tensor) else labels)
    # The class gives int(label), and int() of anything else would change it.
    fits = indices.ndim == 1 and indices.dtype.kind in "iu" and len(indices) == len(data)
    return (data, indices) if fits else None


def file_labels(dataset: Any) -> list[int] | None:
    """Return the labels of torchvision's image folder without reading images."""
    if not _is_exactly(dataset, _FOLDERS) or dataset.target_transform is not None:
        return None
    loader = dataset.loader
    if (getattr(loader, "__module__", ""), getattr(loader, "__qualname__", "")) not in _LOADERS:
        return None
    return [target for _, target in dataset.samples]


def listing(dataset: Any, rows: Indices | None) -> bytes:
    """Return a digest of the folder's files: relative names, sizes, modification times."""
    digest = hashlib.sha256()
    for row in range(len(dataset.samples)) if rows is None else rows.tolist():
        path, target = dataset.samples[row]
        try:
            facts = Path(path).stat()
        except OSError as error:
            remedy = "Create the data set again."
            raise InputError.one("each file must be there", str(error), remedy) from error
        name = os.path.relpath(path, dataset.root)
        digest.update(repr((name, target, facts.st_size, facts.st_mtime_ns)).encode())
    return digest.digest()
