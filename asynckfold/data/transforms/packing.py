"""Pack trees of tensors into records: sample by sample, or whole arrays at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from asynckfold.data.transforms.records import Layout, leaves_by_path
from asynckfold.data.transforms.samples import Array, kind_of, misfit, to_array


class Misfit(Exception):  # noqa: N818
    """A sample has not the structure of the first one."""


@dataclass(frozen=True)
class Pack:
    """The last step of a pipeline that gives trees: each becomes a record.

    Leaves become what `default_collate` makes of them; PIL images what ``ToTensor`` makes.
    """

    layout: Layout

    def __call__(self, tree: Any) -> Array:
        """Return the record of a sample, uint8 (size,)."""
        found = misfit(tree, self.layout)
        if found:
            raise Misfit(found)
        record, places = np.zeros(self.layout.offsets[-1], np.uint8), self.layout.places
        for path, leaf in leaves_by_path(tree)[0].items():
            record[places[path]] = np.frombuffer(_plain(leaf).tobytes(), np.uint8)
        return record

    def rows(self, arrays: TreeArrays, rows: Any = None) -> Array:
        """Return the records of all samples, or of some, uint8 (n, size)."""
        leaves, places = leaves_by_path(arrays.tree)[0], self.layout.places
        count = len(arrays) if rows is None else len(rows)
        records = np.zeros((count, self.layout.offsets[-1]), np.uint8)
        for path, leaf in leaves.items():
            array = to_array(leaf) if rows is None else to_array(leaf)[rows]
            plain = np.ascontiguousarray(array).reshape(count, -1)
            records[:, places[path]] = plain.view(np.uint8).reshape(count, -1)
        return records


def layout_in(steps: Any) -> Layout | None:
    """Return the layout of the records that a pipeline gives; None where it gives none."""
    return steps[-1].layout if steps and isinstance(steps[-1], Pack) else None


def _plain(leaf: Any) -> Array:
    if kind_of(leaf).form == "image":
        from torchvision.transforms import ToTensor

        return to_array(ToTensor()(leaf))
    return to_array(leaf)


@dataclass(frozen=True, eq=False)
class TreeArrays:
    """A tree of arrays of equal length; an index gives the tree of their rows."""

    tree: Any

    def __len__(self) -> int:
        return len(tree_leaves(self.tree)[0])

    def __getitem__(self, index: Any) -> Any:
        return tree_map(lambda array: array[index], self.tree)

    @property
    def storable(self) -> bool:
        """Whether all of them can be packed."""
        return all(isinstance(leaf, (Tensor, np.ndarray)) for leaf in tree_leaves(self.tree))
