"""Data sets without targets: the input is the target. Imports no torch."""

from __future__ import annotations

from typing import Any


class InputAsTarget:
    """A map-style data set whose samples are their own targets; other targets are left out."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = self.dataset[index]
        sample = item[0] if isinstance(item, (tuple, list)) else item
        return sample, sample


def lacks_targets(dataset: Any) -> bool:
    """Whether a data set is one array or table, or tensors without targets."""
    tensors = getattr(dataset, "tensors", None)
    is_alone = isinstance(tensors, tuple) and len(tensors) == 1
    return is_alone or (hasattr(dataset, "__array__") and not isinstance(dataset, tuple))


def with_input_as_target(dataset: Any) -> Any:
    """Return a data set whose targets are its inputs."""
    if isinstance(dataset, InputAsTarget):
        return dataset
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple):
        return tensors[0], tensors[0]
    if isinstance(dataset, tuple):
        return dataset[0], dataset[0]
    return (dataset, dataset) if lacks_targets(dataset) else InputAsTarget(dataset)
