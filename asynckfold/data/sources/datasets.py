"""Map-style torch datasets over arrays; at module level, so that a worker can unpickle them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset


class ImageArrays(Dataset[tuple[Any, int]]):
    """Images of one size in one array, given out as PIL images.

    Parameters
    ----------
    data : ndarray of uint8, shape (n, height, width) or (n, height, width, 3)
        Grey or RGB.
    targets : ndarray of int64, shape (n,)
        Class indices.
    transform : callable, optional
        PIL image to sample.
    classes : sequence of str
        Class names by index, if they have any.
    """

    def __init__(
        self,
        data: npt.NDArray[np.uint8],
        targets: npt.NDArray[np.int64],
        transform: Callable[[Any], Any] | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.targets = targets
        self.transform = transform
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = Image.fromarray(self.data[index])
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.targets[index])


class ImageFiles(Dataset[tuple[Any, int]]):
    """Images in files.

    Parameters
    ----------
    paths : sequence of Path
        The files.
    loader : callable
        Path to PIL image.
    targets : ndarray of int64, shape (n,)
        Class indices.
    classes : sequence of str
        Class names by index, if they have any.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        loader: Callable[[str], Any],
        targets: npt.NDArray[np.int64],
        classes: Sequence[str] = (),
    ) -> None:
        self.paths = tuple(paths)
        self.loader = loader
        self.targets = targets
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.loader(str(self.paths[index])), int(self.targets[index])


class TableRows(TensorDataset):
    """Rows of numbers and their classes.

    Parameters
    ----------
    features : ndarray of float64 or float32, shape (n, n_features)
        The rows.
    targets : ndarray of int64, shape (n,)
        Class indices.
    classes : sequence of str
        Class names by index.
    """

    def __init__(
        self,
        features: npt.NDArray[np.float64] | npt.NDArray[np.float32],
        targets: npt.NDArray[np.int64],
        classes: Sequence[str],
    ) -> None:
        super().__init__(torch.from_numpy(features), torch.from_numpy(targets))
        self.classes = tuple(classes)

    @property
    def targets(self) -> torch.Tensor:
        """Class index of every row."""
        return self.tensors[1]


class Selection(Subset[Any]):
    """Some samples of a dataset, with their classes known beforehand.

    Parameters
    ----------
    dataset : torch Dataset
        Where the samples are.
    indices : ndarray of int64, shape (n,)
        Which samples.
    targets : ndarray of int64, shape (n,)
        Class indices of these samples.
    classes : sequence of str
        Class names by index.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        indices: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        classes: Sequence[str],
    ) -> None:
        super().__init__(dataset, indices.tolist())
        self.targets = targets
        self.classes = tuple(classes)
