"""Shared arrays hold what they were filled with, whatever its layout and wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.data import shared_arrays
from asynckfold.data.shared_arrays import ArraySpec, SharedArray

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda array: array,
    "columns": lambda array: np.asfortranarray(array),
    "every second": lambda array: np.repeat(array, 2, axis=0)[::2],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
}


@given(
    st.integers(0, 40),
    st.sampled_from([(), (3,), (2, 5), (0,)]),
    st.sampled_from(["float32", "float16", "int64", "uint8", "bool", "complex64"]),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 200),
    st.booleans(),
)
def test_an_array_holds_what_it_was_filled_with(
    count: int, shape: tuple[int, ...], kind: str, layout: str, piece: int, some: bool
) -> None:
    samples = np.random.default_rng(0).integers(0, 100, (count, *shape)).astype(kind)
    rows = np.arange(count)[::-2] if some else None
    expected = samples if rows is None else samples[rows]
    shared = SharedArray(ArraySpec(expected.shape, kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_arrays, "PIECE_BYTES", piece)
        shared.fill(LAYOUTS[layout](samples), rows)
    assert np.array_equal(shared.readable(), expected)
    shared.close()


def test_samples_of_another_type_are_converted() -> None:
    shared = SharedArray(ArraySpec((3,), "float32"))
    shared.fill(np.array([1, 2, 3]))
    assert shared.readable().tolist() == [1.0, 2.0, 3.0]


def test_a_file_is_filled_as_memory_is(tmp_path: Path) -> None:
    samples = np.arange(3000, dtype=np.float64).reshape(100, 30)
    shared = SharedArray(ArraySpec(samples.shape, "float64"), tmp_path)
    shared.fill(samples)
    assert np.array_equal(shared.readable(), samples)
    assert not [*tmp_path.iterdir()]
