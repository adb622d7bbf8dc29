"""Trees with a part for each sample, such as the outputs of several heads, as one array.

::

    {"kind": (n, 3), "mass": (n,)}     ── join ──►   (n, 4)
                                       ◄── split ──

Where the parts of samples differ in shape, such as the boxes of an image, a row begins with the
shapes of its parts, and zeros follow its numbers. Such rows are split into a list of trees.

Inputs are stored as records of bytes (`asynckfold.data.transforms.records`). These are numbers:
gradients pass through them, files and reports hold them without torch, and a plan says in JSON what
they are.
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
"""Keys of dicts, and places in tuples and lists."""

MOST_EXACT = 1 << 53
"""From here on, not every whole number has its own float64."""

_FORMATS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")


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

    @property
    def text(self) -> str:
        """``"['boxes'] float32 (any, 4)"``."""
        sizes = ", ".join("any" if size < 0 else str(size) for size in self.shape)
        comma = "," if len(self.shape) == 1 else ""
        return f"{path_text(self.path)} {self.dtype} ({sizes}{comma})".strip()

    def takes(self, array: Any) -> bool:
        """Whether an array of one sample has its shape, and no fractions where it has none."""
        fits = len(array.shape) == len(self.shape) and all(
            own in (-1, size) for own, size in zip(self.shape, array.shape, strict=True)
        )
        is_exact = self.dtype.startswith("float") or array.dtype.kind != "f" or not array.size
        return fits and is_exact


@dataclass(frozen=True)
class Columns:
    """Where the parts of a tree lie in a row.

    Parameters
    ----------
    parts : tuple of Part
        In the order of the columns. Dicts are compared without the order of their keys; lists come
        back as tuples.
    ragged : bool
        Whether the parts of samples differ in shape.

    Examples
    --------
    >>> import numpy as np
    >>> columns = Columns.of({"kind": np.zeros((2, 3), "float32"), "mass": np.ones(2, "float32")})
    >>> columns.width, columns.text
    (4, "['kind'] float32 (3,), ['mass'] float32 ()")
    >>> columns.split(np.arange(8.0).reshape(2, 4))["mass"]
    array([3., 7.], dtype=float32)
    """

    parts: tuple[Part, ...]
    ragged: bool = False

    @classmethod
    def of(cls, tree: Any) -> Columns:
        """Return the columns of a batch: arrays or tensors (n, ...), all of one length.

        Raises
        ------
        UnfitTree
            A part is something else, or has other rows.
        """
        parts, counts = [], set()
        for path, leaf in leaves_of(tree):
            if not hasattr(leaf, "dtype") or not getattr(leaf, "ndim", 0):
                raise UnfitTree(f"{path_text(path)} is {_what(leaf)}", _ROWS)
            parts.append(Part(path, tuple(leaf.shape[1:]), _format(path, leaf)))
            counts.add(len(leaf))
        if len(counts) != 1:
            shown = ", ".join(f"{path_text(path)} {len(leaf)}" for path, leaf in leaves_of(tree))
            raise UnfitTree(f"parts of different length: {shown}" if counts else "no array", _ROWS)
        return cls(tuple(parts))

    @classmethod
    def of_arrays(cls, tree: Any) -> tuple[Columns, Rows]:
        """Return the columns of a tree of arrays (n, ...), and their rows (n, width).

        Raises
        ------
        UnfitTree
            A part holds no numbers, or has other rows.
        """
        import numpy as np

        exact = tree_of([(path, _array(path, leaf)) for path, leaf in leaves_of(tree)])
        columns = cls.of(exact)
        return columns, columns.join(exact).astype(np.float64)

    @classmethod
    def of_samples(cls, samples: Sequence[Any]) -> tuple[Columns, Rows]:
        """Return the columns of trees of one sample each, and their rows (n, width).

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
        parts, ragged = [], False
        for path in arrays[0]:
            shapes = set()
            for at, found in enumerate(arrays):
                if found.keys() != arrays[0].keys():
                    received = ", ".join(map(path_text, found)) or "nothing"
                    wanted = ", ".join(map(path_text, arrays[0])) or "nothing"
                    raise UnfitTree(f"{received} of sample {at}, {wanted} of sample 0", _ALIKE)
                shapes.add(found[path].shape)
            if len(set(map(len, shapes))) > 1:
                received = f"{path_text(path)} of {' and '.join(map(str, sorted(shapes)[:2]))}"
                raise UnfitTree(received, "Give each part one number of dimensions.")
            first, *others = sorted(shapes)
            sizes = zip(first, *others, strict=True)
            shape = tuple(one[0] if len(set(one)) == 1 else -1 for one in sizes)
            ragged |= -1 in shape
            filled = [found[path].dtype for found in arrays if found[path].size]
            kind = np.result_type(*(filled or [arrays[0][path].dtype]))
            parts.append(Part(path, shape, "float32" if kind.kind == "f" else str(kind)))
        columns = cls(tuple(parts), ragged)
        if not ragged:
            stacked = [
                (part.path, np.stack([found[part.path] for found in arrays])) for part in parts
            ]
            return columns, columns.join(tree_of(stacked)).astype(np.float64)
        return columns, _padded([columns._row_of(found) for found in arrays])

    @classmethod
    def of_listed(cls, outputs: Sequence[Any]) -> Columns:
        """Return the columns of outputs that are a list with a tree for each sample of a batch.

        The shapes of some, such as the boxes of an image, tell nothing of those of others.
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

        In the widest of their formats, and at least in float32.

        Raises
        ------
        UnfitTree
            The tree has other parts, or parts of another shape.
        """
        if self.ragged:
            return self._joined_samples(tree)
        leaves = dict(leaves_of(tree))
        if leaves.keys() != {part.path for part in self.parts}:
            received = ", ".join(map(path_text, leaves)) or "nothing"
            raise UnfitTree(f"{received} in place of {self.text}", _ALIKE)
        flat = []
        for part in self.parts:
            leaf = leaves[part.path]
            if tuple(getattr(leaf, "shape", ())[1:]) != part.shape:
                found = f"{_what(leaf)} in place of {part.text}"
                raise UnfitTree(f"{path_text(part.path)} is {found}", _ALIKE)
            flat.append(leaf.reshape(len(leaf), -1))
        return _joined(flat)

    def _joined_samples(self, samples: Sequence[Any]) -> Any:
        """Return the rows of a list of trees of tensors, where these are, in float64."""
        import torch

        joined = torch.from_numpy(_padded([self.row(sample) for sample in samples]))
        _, first = next(leaves_of(samples))
        return joined.to(first.device)

    def split(self, array: Any, *, cast: bool = True, like: Any = None) -> Any:
        """Return the tree of arrays or tensors (..., n, width); of ragged rows, a list of trees.

        Without `cast`, parts stay in the format of `array`. It has the types of the tree `like`,
        such as an output class of transformers; without it, dicts and tuples.
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
        at, found = 0, []
        for part in self.parts:
            block = array[..., at : at + prod(part.shape)]
            at += prod(part.shape)
            shaped = block.reshape(*array.shape[:-1], *part.shape)
            found.append((part.path, _cast(shaped, part.dtype) if cast else shaped))
        return tree_of(found) if like is None else _in_form_of(like, found)

    def stack(self, parts: Iterable[Any]) -> Any:
        """Return rows of several batches, tensors (n, width), as one."""
        import torch

        rows = list(parts)
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
        leaves = leaves_of(with_arrays(sample))
        found = {path: _array(path, leaf) for path, leaf in leaves}
        parts = [Part(path, leaf.shape, str(leaf.dtype)) for path, leaf in found.items()]
        if found.keys() != {part.path for part in self.parts} or not all(
            part.takes(found[part.path]) for part in self.parts
        ):
            received = ", ".join(part.text for part in parts)
            raise UnfitTree(f"{received} in place of {self.text}", _ALIKE)
        return self._row_of(found)

    def _row_of(self, arrays: Mapping[Path, Any]) -> Rows:
        import numpy as np

        flat = [np.asarray(arrays[part.path], np.float64).reshape(-1) for part in self.parts]
        sizes = [size for part in self.parts for size in arrays[part.path].shape]
        return np.concatenate([np.array(sizes if self.ragged else [], np.float64), *flat])

    def _tree_of_row(self, sizes: Sequence[float], row: Any) -> Any:
        at, found = 0, []
        for part in self.parts:
            shape = tuple(int(size) for size in sizes[: len(part.shape)])
            sizes = sizes[len(part.shape) :]
            block = row[at : at + prod(shape)].reshape(shape)
            at += prod(shape)
            found.append((part.path, _cast(block, part.dtype)))
        return tree_of(found)


_ROWS = "Give each part a row for each sample, as an array or tensor."
_ALIKE = "Give all samples, and all batches, the same parts with the same shapes."


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
    found = {key: tree_of(inner) for key, inner in parts.items()}
    if isinstance(next(iter(found)), int):
        return tuple(found.values())
    return {str(key): part for key, part in found.items()}


def with_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of what a function makes of the leaves; values of dicts are attributes, too.

    >>> with_leaves(str, {"a": (1, [2])}).a
    ('1', ['2'])
    """
    if isinstance(tree, Mapping):
        return Named({key: with_leaves(function, part) for key, part in tree.items()})
    if isinstance(tree, (tuple, list)):
        return type(tree)([with_leaves(function, part) for part in tree])
    return function(tree)


class Named(dict[str, Any]):
    """A dict whose values are attributes, too, as in the output classes of libraries."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no {name!r}: there are {', '.join(self)}")


def _in_form_of(tree: Any, leaves: Sequence[tuple[Path, Any]]) -> Any:
    """Return a tree of the same types with other leaves."""
    from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

    by_path = dict(leaves)
    ordered = [by_path[path] for path, _ in leaves_of(tree)]
    if len(tree_leaves(tree)) != len(ordered):
        return tree_of(leaves)  # of a class that torch cannot take apart
    return tree_unflatten(ordered, tree_structure(tree))


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
            found = np.asarray(sample)
        except ValueError:
            return sample
        return sample if found.dtype.kind not in "biuf" else found
    return sample


def _padded(rows: Sequence[Rows]) -> Rows:
    """Return rows of any length as one array (n, width), with zeros behind the shorter ones."""
    import numpy as np

    found = np.zeros((len(rows), max(map(len, rows))))
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


def _array(path: Path, leaf: Any, whose: str = "") -> Any:
    """Return a part as an array in a format that rows hold exactly."""
    import numpy as np

    array = leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else np.asarray(leaf)
    if array.dtype.kind not in "biuf":
        received = f"{path_text(path)}{whose}, which is {_what(leaf)}"
        raise UnfitTree(received, "Turn it into numbers.")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "f":
        # As targets that are single numbers.
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


def _what(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    if shape is None or not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(shape)}"


def _joined(flat: Sequence[Any]) -> Any:
    import numpy as np

    if isinstance(flat[0], np.ndarray):
        kind = np.result_type(np.float32, *flat)
        return np.concatenate([block.astype(kind) for block in flat], axis=1)
    import torch

    # As numpy: float32 does not hold all numbers of the larger formats of integers.
    large = (torch.int32, torch.int64)
    kinds = (torch.float64 if block.dtype in large else block.dtype for block in flat)
    wide = reduce(torch.promote_types, kinds, torch.float32)
    return torch.cat([block.to(wide) for block in flat], dim=1)


def _cast(block: Any, name: str) -> Any:
    import numpy as np

    if isinstance(block, np.ndarray):
        return block.astype(name)
    import torch

    return block.to(getattr(torch, name))
