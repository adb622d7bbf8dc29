"""Trees as the columns of one array: split undoes join, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asynckfold.jobs.schema import Schema, UnfitTree, leaves_of, tree_of

FORMATS = st.sampled_from(["bool", "uint8", "int32", "int64", "float32"])
NAMES = st.text("abc", min_size=1, max_size=2)


def values(dtype: str) -> st.SearchStrategy[Any]:
    if dtype == "float32":
        return st.floats(-1e6, 1e6, width=32)
    if dtype == "bool":
        return st.booleans()
    return st.integers(0, 255) if dtype == "uint8" else st.integers(-(2**31), 2**31 - 1)


@st.composite
def array_of(draw: Any, shape: tuple[int, ...]) -> Any:
    dtype = draw(FORMATS)
    return draw(arrays.arrays(dtype, shape, elements=values(dtype)))


@st.composite
def trees(draw: Any, leaf: Any) -> Any:
    deeper = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(NAMES, inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
        ),
        max_leaves=5,
    )
    return draw(deeper)


def same(one: Any, other: Any) -> bool:
    mine, theirs = list(leaves_of(one)), list(leaves_of(other))
    return [path for path, _ in mine] == [path for path, _ in theirs] and all(
        a.shape == b.shape and str(a.dtype) == str(b.dtype) and (a == b).all()
        for (_, a), (_, b) in zip(mine, theirs, strict=True)
    )


BATCHES = st.integers(1, 4).flatmap(
    lambda n: trees(st.lists(st.integers(0, 3), max_size=2).flatmap(lambda s: array_of((n, *s))))
)


@given(BATCHES)
def test_split_undoes_join(tree: Any) -> None:
    columns = Schema.of(tree)
    rows = columns.join(tree)
    assert rows.shape == (len(next(iter(leaves_of(tree)))[1]), columns.width)
    assert same(columns.split(rows.astype(np.float64)), tree)
    tensors = tree_of([(path, torch.from_numpy(leaf)) for path, leaf in leaves_of(tree)])
    again = Schema.of(tensors).split(columns.join(tensors))
    assert same(tree_of([(path, leaf.numpy()) for path, leaf in leaves_of(again)]), tree)


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (Schema.of, {}, "no array"),
        (Schema.of, {"a": 1}, r"\['a'\] is a int"),
        (
            Schema.of,
            {"a": np.zeros(2), "b": np.zeros(3)},
            r"different length: \['a'\] 2, \['b'\] 3",
        ),
        (Schema.of, {"a": np.zeros(2, complex)}, r"\['a'\] is complex128"),
        (Schema.of, {3: np.zeros(2)}, "a key 3"),
        (Schema.of, (np.zeros(2), "text"), r"\[1\] is a str"),
        (Schema.of_samples, [{"a": 1}, {"b": 1}], r"\['b'\] of sample 1, \['a'\] of sample 0"),
        (Schema.of_samples, [{"a": "x"}], r"\['a'\] of sample 0, which is a str"),
        (
            Schema.of_samples,
            [{"a": np.zeros(2)}, {"a": np.zeros((2, 2))}],
            r"\['a'\] of \(2,\) and \(2, 2\)",
        ),
        (Schema.of_samples, [{"a": 2**60 + 1}], str(2**60 + 1)),
    ],
)
def test_what_has_no_columns_or_rows_is_refused(make: Any, given: Any, text: str) -> None:
    with pytest.raises(UnfitTree, match=text):
        make(given)


def test_a_batch_of_other_parts_or_shapes_is_refused() -> None:
    columns = Schema.of({"a": torch.zeros(2, 3)})
    for other in ({"b": torch.zeros(2, 3)}, {"a": torch.zeros(2, 4)}, torch.zeros(2, 3)):
        with pytest.raises(UnfitTree, match="in place of"):
            columns.join(other)
    ragged, _ = Schema.of_samples([{"n": [1]}, {"n": [1, 2]}])
    for sample in ({"n": [0.5]}, {"n": [[1]]}, {"m": [1]}):
        with pytest.raises(UnfitTree, match="in place of"):
            ragged.row(sample)
