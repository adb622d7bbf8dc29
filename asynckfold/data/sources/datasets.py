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
    """Images in one uint8 array, (n, height, width) or (n, height, width, 3), as PIL images."""

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
    """Images in files; `loader` turns a path into a PIL image."""

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
    """Rows of float numbers (n, n_features) and their class indices."""

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
    """Some samples of a dataset, with their classes known beforehand."""

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
