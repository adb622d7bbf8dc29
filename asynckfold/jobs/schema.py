"""Schemas of trees of arrays: path, shape and type of each part; trees as rows of numbers.

::

    {"kind": (n, 3), "mass": (n,)}     ── join ──►   (n, 4)
                                       ◄── split ──

If the parts of samples differ in shape, such as the boxes of an image, a row starts with the shapes
of its parts and ends with zeros; such rows are split into a list of trees. The rows hold outputs
and targets: gradients pass through them, and files and reports hold them without torch. Inputs are
records of bytes with the same parts (`asynckfold.data.transforms.trees`).

Trees are taken apart here, without torch. Where torch is loaded, its pytree does so: it keeps None
and the order of keys, too, and the types of containers, such as named tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import isnan, prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.float64]

Path = tuple[str | int, ...]
"""Keys of dicts, and positions in tuples and lists."""

MOST_EXACT = 1 << 53
"""From here on, not every whole number has a float64 of its own."""

_FORMATS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
_ROWS = "Give each part a row for each sample, as an array or tensor."
_ALIKE = "Give all samples, and all batches, the same parts with the same shapes."


class UnfitTree(Exception):  # noqa: N818
    """A tree has no such rows; the arguments are (received, remedy)."""

    def __str__(self) -> str:
        received, remedy = self.args
        return f"received {received}. {remedy}"


@dataclass(frozen=True)
class Part:
    """One array of a tree."""

    path: Path
    shape: tuple[int, ...]  # of one sample; -1 where samples differ
    dtype: str  # NumPy's name
    form: str = ""  # what it is in a sample, such as "image" or "list", if not an array

    @property
    def text(self) -> str:
        """``"['boxes'] float32 (any, 4)"``."""
        return f"{path_text(self.path)} {self.kind}".strip()

    @property
    def kind(self) -> str:
        """``"float32 (any, 4)"``."""
        sizes = ", ".join("any" if size < 0 else str(size) for size in self.shape)
        comma = "," if len(self.shape) == 1 else ""
        return f"{self.form} {self.dtype} ({sizes}{comma})".strip()

    def takes(self, array: Any) -> bool:
        """Whether an array of one sample has its shape, and no fractions where it has none."""
        fits = len(array.shape) == len(self.shape) and all(
            wanted in (-1, size) for wanted, size in zip(self.shape, array.shape, strict=True)
        )
        return fits and (self.dtype[0] == "f" or array.dtype.kind != "f" or not array.size)


@dataclass(frozen=True)
class Schema:
    """The parts of a tree, and where they lie in a row of numbers.

    Parameters
    ----------
    parts : tuple of Part
        In the order of the columns. The order of keys does not matter when trees are compared;
        lists come back as tuples.
    ragged : bool
        Whether the parts of samples differ in shape.

    Examples
    --------
    >>> import numpy as np
    >>> schema = Schema.of({"kind": np.zeros((2, 3), "float32"), "mass": np.ones(2, "float32")})
    >>> schema.width, schema.text
    (4, "['kind'] float32 (3,), ['mass'] float32 ()")
    >>> schema.split(np.arange(8.0).reshape(2, 4))["mass"]
    array([3., 7.], dtype=float32)
    """

    parts: tuple[Part, ...]
    ragged: bool = False

    @classmethod
    def of(cls, tree: Any) -> Schema:
        """Return the schema of a batch: arrays or tensors (n, ...), all of one length.

        Raises
        ------
        UnfitTree
            A part is something else, or has other rows.
        """
        leaves = list(leaves_of(tree))
        wrong = [(path, leaf) for path, leaf in leaves if not getattr(leaf, "ndim", 0)]
        counts = {f"{path_text(path)} {len(leaf)}": len(leaf) for path, leaf in leaves if not wrong}
        if wrong or len({*counts.values()}) != 1:
            received = ", ".join(counts) or _paths_and_kinds(wrong) or "no array"
            raise UnfitTree(f"parts of different length: {received}" if counts else received, _ROWS)
        return cls(
            tuple(Part(path, tuple(leaf.shape[1:]), _format(path, leaf)) for path, leaf in leaves)
        )

    @classmethod
    def of_arrays(cls, tree: Any) -> tuple[Schema, Rows]:
        """Return the schema of a tree of arrays (n, ...), and their rows (n, width).

        Raises
        ------
        UnfitTree
            A part holds no numbers, or has other rows.
        """
        import numpy as np

        exact = tree_of([(path, _array(path, leaf)) for path, leaf in leaves_of(tree)])
        schema = cls.of(exact)
        return schema, schema.join(exact).astype(np.float64)

    @classmethod
    def of_samples(cls, samples: Sequence[Any]) -> tuple[Schema, Rows]:
        """Return the schema of trees of one sample each, and their rows (n, width).

        Raises
        ------
        UnfitTree
            A sample has other parts than the first, or parts that are no numbers.
        """
        import numpy as np

        arrays = [
            {
                path: _array(path, leaf, f" of sample {at}")
                for path, leaf in leaves_of(with_arrays(sample))
            }
            for at, sample in enumerate(samples)
        ]
        first = arrays[0]
        for at, by_path in enumerate(arrays):
            if by_path.keys() != first.keys():
                one, other = (", ".join(map(path_text, item)) for item in (by_path, first))
                raise UnfitTree(f"{one} of sample {at}, {other} of sample 0", _ALIKE)
        parts = []
        for path in first:
            shapes = sorted({by_path[path].shape for by_path in arrays})
            if len(set(map(len, shapes))) > 1:
                received = f"{path_text(path)} of {' and '.join(map(str, shapes[:2]))}"
                raise UnfitTree(received, "Give each part one number of dimensions.")
            sizes = zip(*shapes, strict=True)
            shape = tuple(one[0] if len(set(one)) == 1 else -1 for one in sizes)
            filled = [by_path[path].dtype for by_path in arrays if by_path[path].size]
            kind = np.result_type(*(filled or [first[path].dtype]))
            parts.append(Part(path, shape, "float32" if kind.kind == "f" else str(kind)))
        schema = cls(tuple(parts), any(-1 in part.shape for part in parts))
        return schema, _padded([schema._row_of(by_path) for by_path in arrays])

    @classmethod
    def of_listed(cls, outputs: Sequence[Any]) -> Schema:
        """Return the schema of outputs that are a list with a tree for each sample of a batch.

        Any shape may follow: those of a few, such as the boxes of an image, do not tell.
        """
        parts = cls.of_samples(outputs)[0].parts
        return cls(
            tuple(replace(part, shape=(-1,) * len(part.shape)) for part in parts), ragged=True
        )

    @property
    def width(self) -> int:
        """Numbers in a row, where all samples have the same shapes."""
        return sum(prod(part.shape) for part in self.parts)

    @property
    def text(self) -> str:
        """Paths, types and shapes."""
        return ", ".join(part.text for part in self.parts)

    def join(self, tree: Any) -> Any:
        """Return a batch of arrays or tensors (n, ...) as one (n, width).

        In the widest of their formats, and at least in float32. A list of trees of tensors, for
        samples that differ in shape, becomes float64.

        Raises
        ------
        UnfitTree
            The tree has other parts, or parts of another shape.
        """
        if self.ragged:
            import torch

            rows = torch.from_numpy(_padded([self.row(sample) for sample in tree]))
            return rows.to(next(leaves_of(tree))[1].device)
        leaves = dict(leaves_of(tree))
        shapes = {path: tuple(getattr(leaf, "shape", ())[1:]) for path, leaf in leaves.items()}
        if shapes != {part.path: part.shape for part in self.parts}:
            received = _paths_and_kinds(leaves.items())
            raise UnfitTree(f"{received} in place of {self.text}, for each sample", _ALIKE)
        return _joined(
            [leaves[part.path].reshape(len(leaves[part.path]), -1) for part in self.parts]
        )

    def split(self, array: Any, *, cast: bool = True, like: Any = None) -> Any:
        """Return the tree of arrays or tensors (..., n, width); of ragged rows, a list of trees.

        Without `cast`, parts stay in the format of `array`. The tree has the types of the tree
        `like`, such as an output class of transformers; without it, dicts and tuples.
        """
        if self.ragged and array.ndim > 2:
            return [self.split(layer) for layer in array]
        if self.ragged:
            count = sum(len(part.shape) for part in self.parts)
            pairs = zip(array[:, :count].tolist(), array, strict=True)
            # Rows of NaN are those of samples without outputs.
            return [
                None if sizes and isnan(sizes[0]) else self._tree_of_row(sizes, row[count:])
                for sizes, row in pairs
            ]
        at, leaves = 0, []
        for part in self.parts:
            block = array[..., at : at + prod(part.shape)]
            at += prod(part.shape)
            shaped = block.reshape(*array.shape[:-1], *part.shape)
            leaves.append((part.path, _cast(shaped, part.dtype) if cast else shaped))
        return tree_of(leaves) if like is None else _in_form_of(like, leaves)

    def stack(self, batches: Iterable[Any]) -> Any:
        """Return rows of several batches, tensors (n, width), as one."""
        import torch

        rows = list(batches)
        width = max(part.shape[1] for part in rows)
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, width - part.shape[1])) for part in rows])

    def row(self, sample: Any) -> Rows:
        """Return the row of one sample, without the zeros behind it.

        Raises
        ------
        UnfitTree
            It has other parts.
        """
        arrays = {path: _array(path, leaf) for path, leaf in leaves_of(with_arrays(sample))}
        if arrays.keys() != {part.path for part in self.parts} or not all(
            part.takes(arrays[part.path]) for part in self.parts
        ):
            received = _paths_and_kinds(arrays.items())
            raise UnfitTree(f"{received} in place of {self.text}", _ALIKE)
        return self._row_of(arrays)

    def _row_of(self, arrays: Mapping[Path, Any]) -> Rows:
        import numpy as np

        flat = [np.asarray(arrays[part.path], np.float64).reshape(-1) for part in self.parts]
        sizes = [size for part in self.parts for size in arrays[part.path].shape]
        return np.concatenate([np.array(sizes if self.ragged else [], np.float64), *flat])

    def _tree_of_row(self, sizes: Sequence[float], row: Any) -> Any:
        at, leaves = 0, []
        for part in self.parts:
            shape = tuple(int(size) for size in sizes[: len(part.shape)])
            sizes = sizes[len(part.shape) :]
            block = row[at : at + prod(shape)].reshape(shape)
            at += prod(shape)
            leaves.append((part.path, _cast(block, part.dtype)))
        return tree_of(leaves)


# Trees


def leaves_of(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what the dicts, tuples and lists of a tree hold.

    >>> list(leaves_of({"a": 1, "b": (2, [3])}))
    [(('a',), 1), (('b', 0), 2), (('b', 1, 0), 3)]
    """
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            if not isinstance(key, str):
                raise UnfitTree(f"a key {key!r:.40}", "Use strings as keys.")
            yield from leaves_of(part, (*path, key))
    elif isinstance(tree, (tuple, list)):
        for place, part in enumerate(tree):
            yield from leaves_of(part, (*path, place))
    else:
        yield path, tree


def tree_of(leaves: Sequence[tuple[Path, Any]]) -> Any:
    """Return the tree with these leaves; lists are tuples.

    >>> tree_of([(("a",), 1), (("b", 0), 2), (("b", 1, 0), 3)])
    {'a': 1, 'b': (2, (3,))}
    """
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    parts: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, leaf in leaves:
        parts.setdefault(path[0], []).append((path[1:], leaf))
    trees = {key: tree_of(inner) for key, inner in parts.items()}
    return tuple(trees.values()) if isinstance(next(iter(trees)), int) else trees


def with_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of a tree; values of dicts become attributes, too.

    >>> with_leaves(str, {"a": (1, [2])}).a
    ('1', ['2'])
    """
    if isinstance(tree, Mapping):
        return NamedTree({key: with_leaves(function, part) for key, part in tree.items()})
    if isinstance(tree, (tuple, list)):
        return type(tree)([with_leaves(function, part) for part in tree])
    return function(tree)


class NamedTree(dict[str, Any]):
    """A dict whose values are attributes, too, as in the output classes of libraries."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no {name!r}: there are {', '.join(self)}")


def path_text(path: Path) -> str:
    """Return ``"['boxes'][0]"``."""
    return "".join(f"[{key!r}]" for key in path)


def with_arrays(sample: Any) -> Any:
    """Return a tree with its lists of numbers, or of equal lists of these, as arrays."""
    import numpy as np

    if isinstance(sample, Mapping):
        return {key: with_arrays(part) for key, part in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(with_arrays, sample))
    if isinstance(sample, list) and not any(hasattr(part, "dtype") for part in sample):
        try:
            array = np.asarray(sample)
        except ValueError:
            return sample
        return array if array.dtype.kind in "biuf" else sample
    return sample


def _in_form_of(tree: Any, leaves: Sequence[tuple[Path, Any]]) -> Any:
    """Return a tree of the same types with other leaves."""
    from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

    by_path = dict(leaves)
    ordered = [by_path[path] for path, _ in leaves_of(tree)]
    if len(tree_leaves(tree)) != len(ordered):
        return tree_of(leaves)  # of a class that torch cannot take apart
    return tree_unflatten(ordered, tree_structure(tree))


# Arrays, of numpy or torch


def _padded(rows: Sequence[Rows]) -> Rows:
    """Return rows of any length as one array (n, width), with zeros behind the shorter ones."""
    import numpy as np

    width = max(map(len, rows))
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def _array(path: Path, leaf: Any, whose: str = "") -> Any:
    """Return a part as an array in a format that rows hold exactly."""
    import numpy as np

    array = leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else np.asarray(leaf)
    if array.dtype.kind not in "biuf":
        received = f"{path_text(path)}{whose}, which is {_what(leaf)}"
        raise UnfitTree(received, "Turn it into numbers.")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "f":
        # Like targets that are single numbers.
        return array.astype(np.float32)
    is_long = array.dtype.kind in "iu" and array.dtype.itemsize == 8 and array.size
    if is_long and max(abs(int(array.max())), abs(int(array.min()))) >= MOST_EXACT:
        raise UnfitTree(f"{path_text(path)}{whose}, of {array.max()}", "Number it from 0.")
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def _format(path: Path, leaf: Any) -> str:
    name = str(leaf.dtype).removeprefix("torch.")
    if name in ("float16", "bfloat16"):
        return "float32"
    if name not in _FORMATS:
        raise UnfitTree(f"{path_text(path)} is {_what(leaf)}", "Give it real numbers.")
    return name


def _paths_and_kinds(leaves: Iterable[tuple[Path, Any]]) -> str:
    return ", ".join(f"{path_text(path)} is {_what(leaf)}" for path, leaf in leaves)


def _what(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"


def _joined(blocks: Sequence[Any]) -> Any:
    import numpy as np

    if isinstance(blocks[0], np.ndarray):
        kind = np.result_type(np.float32, *blocks)
        return np.concatenate([block.astype(kind) for block in blocks], axis=1)
    import torch

    # As numpy does: float32 does not hold all numbers of the larger formats of integers.
    large = (torch.int32, torch.int64)
    kinds = (torch.float64 if block.dtype in large else block.dtype for block in blocks)
    wide = reduce(torch.promote_types, kinds, torch.float32)
    return torch.cat([block.to(wide) for block in blocks], dim=1)


def _cast(block: Any, name: str) -> Any:
    import numpy as np

    if isinstance(block, np.ndarray):
        return block.astype(name)
    import torch

    return block.to(getattr(torch, name))
