"""Arrays and tables from the user as plain arrays; what float32 loses of them."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten
from torch.utils.data import TensorDataset

from asynckfold.data.table_codes import TableCodes, coded
from asynckfold.data.transforms.trees import Array, TreeArrays, is_tree, leaves_by_path, native
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.schema import UnfitTree, leaves_of, path_text, tree_of, with_arrays

LOST = 1e-6
"""Rounding error of a column in float32, as a share of its spread, from which the column is named.

Values whose mean is 30 times their interquartile range have such an error.
"""

NOT_FINITE = "hold NaN or infinite features"
"""How a note about such samples ends."""

LOOKED_AT = 1000
"""Samples in which such errors are looked for."""

_EXACT_IN_FLOAT32 = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
)
_HALVES = (torch.float16, torch.bfloat16, np.dtype(np.float16))
_EXACT_IN_FLOAT64 = (torch.int32, torch.uint32)


class ExactArrays(tuple[Any, ...]):
    """A pair (X, y) whose X stays float64 until it has been transformed or preprocessed."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class DataArguments:
    """A dataset and its transforms, with arrays in one form."""

    dataset: Any
    train_transform: Any
    eval_transform: Any
    notes: tuple[str, ...] = ()
    last_is_target: bool = False  # taken to be so, of more than two tensors
    codes: TableCodes | None = None  # of a table whose columns are not all numbers, or are named

    @property
    def exact(self) -> bool:
        """Whether X stays float64 until transforms or a preprocessor were applied."""
        return isinstance(self.dataset, ExactArrays)


def as_given(
    dataset: Any,
    train_transform: Any,
    eval_transform: Any,
    *,
    preprocessed: bool,
    by_name: bool = False,
) -> DataArguments:
    """Convert a pair (X, y) to what models get: float64 becomes float32, as late as possible.

    That is after the transforms, or after `preprocess` if the run has one (`preprocessed`), which
    gets a table of pandas where it chooses columns `by_name`, or where they are not all numbers. A
    dataset that is no pair of arrays stays as it is; inputs in a dict or tuple become `TreeArrays`.
    Raises `InputError` where X is sparse, masked, or not numeric.
    """
    views = train_transform, eval_transform
    last_is_target = type(dataset) is TensorDataset and len(dataset.tensors) > 2
    if last_is_target:
        dataset = (dataset.tensors[:-1], dataset.tensors[-1])
    pair = dataset.tensors if type(dataset) is TensorDataset else dataset
    if not isinstance(pair, tuple) or len(pair) != 2:
        return DataArguments(dataset, *views)
    labels = targets_as_trees(pair[1], pair[0])
    trees, notes = converted(pair[0], labels)
    labels = by_position(labels, "y")
    if isinstance(trees, TreeArrays):
        return DataArguments((trees, labels), *views, notes, last_is_target)
    transformed = any(transform is not None for transform in views)
    if preprocessed and not transformed and is_table(pair[0]) and (by_name or unusable(pair[0])):
        codes, rows = coded(pair[0])
        return DataArguments(ExactArrays((rows, labels)), *views, codes=codes)
    samples = plain(pair[0], "X")
    columns = getattr(pair[0], "columns", None)
    noted: list[str] = []
    if samples.dtype in _HALVES and not transformed:
        samples = _narrow(samples, "X", columns, noted)
        return DataArguments((samples, labels), *views, tuple(noted))
    if not (preprocessed or transformed):
        notes = _conversion_notes(samples)
    if pair is not dataset:
        return DataArguments(dataset, *views, notes)
    if not transformed and not isinstance(samples, Tensor):
        refuse(_number_problems("X", pair[0], samples))
    if samples.dtype != np.float64 or isinstance(samples, Tensor):
        return DataArguments((samples, labels), *views, notes)
    if preprocessed:
        return DataArguments(ExactArrays((samples, labels)), *views)
    if transformed:
        lost = rounded(samples, "X", columns)
        train, evaluation = (
            None if transform is None else [transform, as_float32] for transform in views
        )
        unless = (f"{lost}, unless its transforms shift or scale it",) if lost else ()
        return DataArguments(ExactArrays((samples, labels)), train, evaluation, unless)
    more = ", or pass preprocess=StandardScaler(), which gets it exactly"
    samples = _narrow(samples, "X", columns, noted, more)
    return DataArguments((samples, labels), *views, tuple(noted))


def _conversion_notes(samples: Any) -> tuple[str, ...]:
    """Note what integers lose in a model that converts them to float32."""
    if samples.dtype not in (torch.int64, np.dtype(np.int64), np.dtype(np.uint64)):
        return ()
    lost = rounded(samples.numpy() if isinstance(samples, Tensor) else samples)
    return (f"{lost}, if the model converts it",) if lost else ()


def not_half(samples: Any) -> Any:
    """Convert half precision to float32; return anything else as it is."""
    if samples.dtype not in _HALVES:
        return samples
    return samples.float() if isinstance(samples, Tensor) else samples.astype(np.float32)


def plain(values: Any, name: str) -> Any:
    """Return a tensor as it is, anything else as a NumPy array, by position.

    Tables of pandas lose their index; numeric, boolean and nullable columns become one array,
    missing values NaN. Numbers held as objects are converted. Raises `InputError` for sparse,
    masked and ragged values; `name` is "X" or "y".

    >>> plain([[1, 2.5], [3, 4]], "X").tolist()
    [[1.0, 2.5], [3.0, 4.0]]
    """
    if isinstance(values, Tensor) and values.layout is torch.strided:
        return values
    if is_table(values):
        return _of_table(values)
    values = by_position(values, name)
    try:
        array = np.asarray(values)
    except ValueError as error:
        remedy = (
            "Bring its items into one shape, or pass a torch Dataset; if they differ in length, "
            "list(zip(X, y)) and collate_fn=."
        )
        raise InputError.one(
            f"{name} must be an array", f"{type(values).__name__}: {error}", remedy
        ) from error
    return _numbers(array) if array.dtype == object else native(array)


def by_position(values: Any, name: str) -> Any:
    """Return a pandas object as a NumPy array, without its index; anything else as it is.

    Raises `InputError` for sparse matrices and masked values.
    """
    if is_sparse(values):
        received = str(getattr(values, "layout", type(values).__name__))
        remedy = f"Pass {name}.toarray(), or to_dense() of a tensor, if it fits the memory."
        raise InputError.one(f"{name} must be a dense array", received, remedy)
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        received = f"an array with {int(np.ma.getmaskarray(values).sum())} masked values"
        remedy = f"Pass {name}.filled(numpy.nan), or leave these samples out."
        raise InputError.one(f"{name} must not be masked", received, remedy)
    return np.asarray(values) if _is_of_pandas(values) else values


def is_sparse(values: Any) -> bool:
    """Return whether this is a sparse matrix of SciPy, or a sparse tensor."""
    if isinstance(values, Tensor):
        return values.layout is not torch.strided
    return hasattr(values, "toarray") and type(values).__module__.startswith("scipy.sparse")


def _is_of_pandas(values: Any) -> bool:
    return any(kind.__module__.startswith("pandas.") for kind in type(values).__mro__)


def is_table(values: Any) -> bool:
    """Return whether this is a table of pandas."""
    return _is_of_pandas(values) and getattr(values, "ndim", 0) == 2


def _of_table(table: Any) -> Array:
    columns = [_numbers(np.asarray(table.iloc[:, at])) for at in range(table.shape[1])]
    if not columns or unusable(table):
        return np.asarray(table)
    kind = np.result_type(*{column.dtype for column in columns})
    return np.stack([column.astype(kind) for column in columns], axis=1)


def _numbers(array: Array) -> Array:
    """Convert numbers held as objects to float64, None to NaN; return anything else as it is."""
    if array.dtype != object:
        return array
    kinds = set(map(type, array.ravel().tolist()))
    missing = {kind for kind in kinds if kind is type(None) or kind.__name__ == "NAType"}
    real = {kind for kind in kinds if issubclass(kind, (numbers.Real, np.bool_))}
    if not real or kinds - real - missing:
        return array
    as_floats = [np.nan if type(item) in missing else item for item in array.ravel().tolist()]
    return np.array(as_floats, dtype=np.float64).reshape(array.shape)


def unusable(table: Any) -> str:
    """Name the columns of a table that are not numeric, or ``""``.

    >>> unusable(np.zeros((2, 2)))
    ''
    """
    if not is_table(table):
        return ""
    pairs = [(name, table.iloc[:, at]) for at, name in enumerate(table.columns)]
    others = [
        f"{name!r} ({column.dtype})"
        for name, column in pairs
        if column.dtype.name == "category" or _numbers(np.asarray(column)).dtype.kind not in "biuf"
    ]
    return ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")


def as_float32(sample: Any) -> Any:
    """Return a sample of float64 in float32; any other as it is.

    >>> as_float32(np.zeros(2)).dtype, as_float32(np.arange(2)).dtype
    (dtype('float32'), dtype('int64'))
    """
    if isinstance(sample, Tensor):
        return sample.float() if sample.dtype == torch.float64 else sample
    if isinstance(sample, (np.ndarray, np.float64)) and sample.dtype == np.float64:
        return sample.astype(np.float32)
    return np.float32(sample) if type(sample) is float else sample


def exact(inputs: Tensor) -> Array:
    """Return inputs for scikit-learn in a type that holds the given one exactly.

    Narrow types become float32 (half precision and small integers overflow in arithmetic), int32
    becomes float64; float32, float64 and int64 stay. Raises `InputError` for complex numbers.

    >>> exact(torch.tensor([200], dtype=torch.uint8)).dtype, exact(torch.tensor([2**60])).dtype
    (dtype('float32'), dtype('int64'))
    """
    if inputs.is_complex():
        remedy = "Pass their real and imaginary parts as features."
        raise InputError.one("preprocess needs real numbers", str(inputs.dtype), remedy)
    if inputs.dtype in _EXACT_IN_FLOAT32:
        inputs = inputs.float()
    elif inputs.dtype in _EXACT_IN_FLOAT64:
        inputs = inputs.double()
    array: Array = inputs.cpu().numpy()
    return array


def rounded(array: Array, what: str = "X", names: Any = None) -> str:
    """Say what an array loses in float32; ``""`` where that is little.

    The loss of a column is the median rounding error of its values that float32 cannot hold
    exactly, relative to their interquartile range. So neither exact values, such as missing-value
    markers, nor single huge values hide it. Estimated on `LOOKED_AT` samples, evenly spread. More
    than two axes, such as images, count as one column.

    >>> rounded(np.linspace(0, 1, 9)[:, None])
    ''
    >>> rounded(1e9 + np.linspace(0, 1, 9)[:, None])
    'column 0 of X loses up to 100 % of its spread in float32'
    """
    if array.dtype not in (np.float64, np.int64, np.uint64) or not array.size:
        return ""
    some = array[np.linspace(0, len(array) - 1, min(len(array), LOOKED_AT)).round().astype(int)]
    some = some.reshape(len(some), -1) if array.ndim < 3 else some.reshape(-1, 1)
    # Whole numbers beyond 2**53 are not exact in float64, either.
    some = some if some.dtype == np.float64 else some.astype(np.longdouble)
    ordered = np.sort(some, axis=0)
    with np.errstate(all="ignore"):
        error = np.abs(some - some.astype(np.float32)).max(axis=0)
        # NaN, which are sorted to the end, compare as False.
        kept = error <= LOST * (ordered[(3 * len(some)) // 4] - ordered[len(some) // 4])
    losses = {int(at): _loss(some[:, at]) for at in np.flatnonzero(~kept)}
    lossy = {at: loss for at, loss in losses.items() if loss > LOST}
    if not lossy:
        return ""
    most = min(1.0, max(lossy.values()))
    share = f"{100 * most:.0f} %" if most >= 0.01 else f"{100 * most:.0g} %"
    if array.ndim != 2:
        return f"{what} loses up to {share} of its spread in float32"
    columns = [str(at) if names is None else repr(str(names[at])) for at in lossy]
    more = f" and {len(columns) - 5} more" if len(columns) > 5 else ""
    shown = ", ".join(columns[:5]) + more
    return f"column {shown} of {what} loses up to {share} of its spread in float32"


def _loss(column: Array) -> float:
    with np.errstate(all="ignore"):
        narrow = column.astype(np.float32)
        error = np.abs(column - narrow)
    finite = np.isfinite(column)
    if not np.isfinite(narrow[finite]).all():
        return 1.0
    inexact = finite & (error > 0)
    if not inexact.any():
        return 0.0
    values = np.sort(column[inexact])
    low, middle, high = (values[(len(values) * part) // 4] for part in (1, 2, 3))
    spread = high - low or (values - middle).std()
    # Of a column that is constant but for the last digits of float64, nothing can be lost.
    noise = 1e-14 * abs(middle) if column.dtype == np.float64 else 0
    return float(np.median(error[inexact]) / spread) if spread > noise else 0.0


# Inputs that are a dict or a tuple of arrays: ({"image": X, "age": A}, y)


def as_trees(samples: Any, labels: Any) -> Any:
    """Return a dict or tuple of arrays as `TreeArrays`, anything else as it is.

    A tuple is one of several inputs if its items are arrays and it has not one item a label: then
    they are rows. float64 and half precision become float32, as in a single array. Raises
    `InputError` where lengths differ, or an array holds no numbers.
    """
    return samples if isinstance(samples, TreeArrays) else converted(samples, labels)[0]


def converted(samples: Any, labels: Any) -> tuple[Any, tuple[str, ...]]:
    """Return what `as_trees` returns, and notes on what the conversion loses."""
    if isinstance(samples, TreeArrays) or not _holds_arrays(samples, labels):
        return samples, ()
    by_path, spec = leaves_by_path(samples, stops=lambda item: isinstance(item, list))
    leaves = {path_text(path): leaf for path, leaf in by_path.items()}
    arrays = {
        path: plain(leaf, f"X{path}") if hasattr(leaf, "__array__") and np.ndim(leaf) else None
        for path, leaf in leaves.items()
    }
    sizes: dict[str, Any] = {
        f"X{path}": type(leaves[path]).__name__ if array is None else len(array)
        for path, array in arrays.items()
    }
    if hasattr(labels, "__len__"):
        sizes["y"] = len(labels)
    if any(array is None for array in arrays.values()) or len(set(sizes.values())) != 1:
        raise InputError.one(
            "all inputs and y must have one length, as arrays with a row for each sample",
            ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "an empty dict",
            "Pass {'name': array of shape (n_samples, ...), ...}, and one label for each sample.",
        )
    refuse(
        problem
        for path, array in arrays.items()
        for problem in _number_problems(f"X{path}", leaves[path], array)
    )
    notes: list[str] = []
    narrowed = [
        _narrow(array, f"X{path}", getattr(leaves[path], "columns", None), notes)
        for path, array in arrays.items()
    ]
    return TreeArrays(tree_unflatten(narrowed, spec)), tuple(notes)


def _holds_arrays(samples: Any, labels: Any) -> bool:
    if not is_tree(samples) or isinstance(samples, list):
        return False
    if isinstance(samples, dict):
        return True
    is_of_rows = hasattr(labels, "__len__") and len(samples) == len(labels)
    return bool(samples) and not is_of_rows and all(map(_is_array_or_tree, samples))


def _is_array_or_tree(item: Any) -> bool:
    if is_tree(item) and not isinstance(item, list):
        leaves, _ = leaves_by_path(item)
        return bool(leaves) and all(map(_is_array_or_tree, leaves.values()))
    return bool(hasattr(item, "__array__") and np.ndim(item))


def _number_problems(name: str, values: Any, array: Any) -> Iterator[Problem]:
    columns = "" if isinstance(array, Tensor) else unusable(values)
    if columns or not (isinstance(array, Tensor) or array.dtype.kind in "biufc"):
        yield Problem(
            f"{name} must hold numbers",
            f"columns {columns}" if columns else f"an array of {array.dtype}",
            "Encode other columns: pass preprocess=make_column_transformer((OneHotEncoder(), "
            "['name']), …), which gets a DataFrame; leave them out, or pass a train_transform that "
            "returns tensors.",
        )


def _narrow(array: Any, name: str, columns: Any, notes: list[str], more: str = "") -> Any:
    """Return an array as models take it; note what that loses."""
    short = not_half(array)
    if short is not array:
        before = str(array.dtype).removeprefix("torch.")
        notes.append(f"{name} was converted from {before} to float32")
    if isinstance(short, Tensor) or short.dtype != np.float64:
        return short
    notes.append(f"{name} was converted from float64 to float32")
    if lost := rounded(short, name, columns):
        notes.append(f"{lost}: scale it first{more}")
    with np.errstate(over="ignore"):
        return short.astype(np.float32)


def targets_as_trees(targets: Any, samples: Any) -> Any:
    """Return a dict or tuple of arrays, one row a sample, as `TreeArrays`; else what is given.

    Raises `InputError` where the arrays are of different length.
    """
    # As many as the samples are one of each, and may be too many to be looked at.
    count = len(samples) if hasattr(samples, "__len__") and not is_sparse(samples) else -1
    is_tuple = isinstance(targets, (tuple, list)) and 1 < len(targets) != count
    if isinstance(targets, TreeArrays) or not (isinstance(targets, Mapping) or is_tuple):
        return targets
    rule = "all parts of the targets must be arrays with a row for each sample"
    try:
        tree = with_arrays(targets) if isinstance(targets, Mapping) else targets
        pairs = list(leaves_of(tree))
    except UnfitTree as error:
        raise InputError.one(rule, *error.args) from error
    leaves = [(path, by_position(leaf, f"y{path_text(path)}")) for path, leaf in pairs]
    shapes = [np.shape(leaf) if hasattr(leaf, "__array__") else () for _, leaf in leaves]
    counts = {shape[0] if shape else None for shape in shapes}
    if is_tuple and counts != {count}:
        return targets
    if len(counts) != 1 or None in counts:
        received = [
            f"{path_text(path)} {shape or type(leaf).__name__}"
            for (path, leaf), shape in zip(leaves[:4], shapes, strict=False)
        ]
        remedy = "Pass (X, {'name': array of shape (n, ...), ...})."
        raise InputError.one(rule, ", ".join(received) or "an empty dict", remedy)
    return TreeArrays(tree_of(leaves))
