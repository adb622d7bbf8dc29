"""Targets of samples that are read again and again: raw labels in the form that jobs use."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asynckfold.data.labels import Labels, label_array
from asynckfold.errors import InputError, Problem
from asynckfold.transforms import Array


@dataclass(frozen=True, eq=False)
class Encoding:
    """Brings a single label into the form of `Labels`.

    Parameters
    ----------
    indices : Mapping or None
        Class index by raw label; None: labels are numbers.
    shape : tuple of int
        Of one target.
    """

    indices: Mapping[Hashable, int] | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: Any, labels: Labels) -> Encoding:
        """Learn from raw labels and what became of them."""
        shape = labels.targets.shape[1:]
        if not labels.classification:
            return cls(None, shape)
        array = label_array(values).reshape(len(labels.targets))
        indices = dict(zip(array.tolist(), labels.targets.tolist(), strict=True))
        if all(raw == index for raw, index in indices.items()):
            # Names of classes that no sample had this time.
            indices |= {index: index for index in range(len(labels.classes))}
        return cls(indices, shape)

    def __call__(self, label: Any, index: int) -> Array:
        """Return the target, int64 or float32.

        Raises
        ------
        InputError
            It is of no class that was there when the targets were read.
        """
        array = label_array([label])[0]
        if self.indices is None:
            return np.asarray(array, np.float32).reshape(self.shape)
        raw = np.reshape(array, ()).item()
        if raw not in self.indices:
            problem = Problem(
                f"dataset[{index}] must give a target of one of the {len(self.indices)} classes "
                "that were found when all targets were read",
                repr(raw),
                "Name all classes in the dataset's attribute `classes`.",
            )
            raise InputError([problem])
        return np.asarray(self.indices[raw], np.int64)
