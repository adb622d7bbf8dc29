"""Encode the raw labels of samples that are read again and again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asynckfold.data.labels import PARTS_RULE, Labels, label_array
from asynckfold.data.transforms.trees import Array
from asynckfold.errors import InputError
from asynckfold.jobs.schema import Schema, UnfitTree


@dataclass(frozen=True, eq=False)
class Encoding:
    """Brings a single raw label into the form of `Labels`."""

    # class index or code by raw label; None: labels are numbers
    indices: Mapping[Hashable, float] | None
    shape: tuple[int, ...]  # of one target
    dtype: str = "float32"
    schema: Schema | None = None  # of targets of several parts

    @classmethod
    def of(cls, values: Any, labels: Labels) -> Encoding:
        """Learn the encoding from raw labels and their targets."""
        shape, dtype = labels.targets.shape[1:], str(labels.targets.dtype)
        if labels.strata is None:
            return cls(None, shape, dtype, labels.objective.targets)
        array = label_array(values).reshape(len(labels.targets))
        targets = labels.targets.reshape(len(array)).tolist()
        indices = dict(zip(array.tolist(), targets, strict=True))
        if labels.classification and all(raw == index for raw, index in indices.items()):
            # Names of classes that no sample had this time.
            indices |= {index: index for index in range(len(labels.classes))}
        return cls(indices, shape, dtype)

    def numbered(self, before: Array, after: Array) -> Encoding:
        """Return this encoding with renumbered classes."""
        if self.indices is None:
            return self
        other = dict(zip(before.tolist(), after.tolist(), strict=True))
        kept = {raw: other[index] for raw, index in self.indices.items() if index in other}
        return replace(self, indices=kept)

    def __call__(self, label: Any, index: int) -> Array:
        """Return the target; raise `InputError` for a class that was not there before."""
        if self.schema is not None:
            return self._row(self.schema, label, index)
        array = label_array([label])[0]
        if self.indices is None:
            return np.asarray(array, self.dtype).reshape(self.shape)
        raw = np.reshape(array, ()).item()
        if raw not in self.indices:
            raise InputError.one(
                f"dataset[{index}] must give a target of one of the {len(self.indices)} classes "
                "that were found when all targets were read",
                repr(raw),
                "Name all classes in the dataset's attribute `classes`.",
            )
        return np.asarray(self.indices[raw], self.dtype).reshape(self.shape)

    def _row(self, schema: Schema, target: Any, index: int) -> Array:
        """Return the row of a target of several parts."""
        try:
            row = schema.row(target)
        except UnfitTree as error:
            received = f"dataset[{index}]: {error.args[0]}"
            raise InputError.one(PARTS_RULE, received, error.args[1]) from error
        if len(row) > self.shape[0]:
            raise InputError.one(
                "a target must not become larger than the largest when all of them were read",
                f"dataset[{index}]: {len(row)} numbers, of {self.shape[0]}",
                "Let no transform add parts, such as boxes.",
            )
        return np.pad(row, (0, self.shape[0] - len(row)))
