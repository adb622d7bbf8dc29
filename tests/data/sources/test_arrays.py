from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import InputError
from asynckfold.data.sources import Source, load_source


def save(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "data.npz", **arrays)
    return f"npz:{folder / 'data.npz'}"


def load(folder: Path, X: Any, y: Any) -> Source:
    return load_source(save(folder, X=np.asarray(X), y=np.asarray(y)))


def test_rows_of_numbers_are_a_table(tmp_path: Path) -> None:
    source = load(tmp_path, np.arange(8.0).reshape(4, 2), [3, 5, 3, 5])
    assert source.dataset[1][0].tolist() == [2.0, 3.0]
    assert source.targets.tolist() == [0, 1, 0, 1]
    assert source.classes == ("3", "5")
    assert (source.kind, source.sample_shape, source.standardize) == ("table", (2,), True)


@pytest.mark.parametrize(
    "labels", [["b", "a", "b", "a"], [True, False, True, False], [2.0, 1.0] * 2]
)
def test_labels_of_any_plain_type(tmp_path: Path, labels: list[Any]) -> None:
    source = load(tmp_path, np.ones((4, 2)), labels)
    assert source.targets.tolist() == [1, 0, 1, 0]


def test_whole_float_labels_lose_their_point(tmp_path: Path) -> None:
    assert load(tmp_path, np.ones((4, 2)), [2.0, 1.0, 2.0, 1.0]).classes == ("1", "2")


@pytest.mark.parametrize(
    ("shape", "sample_shape", "mode"),
    [
        ((4, 6, 5), (1, 6, 5), "L"),
        ((4, 6, 5, 1), (1, 6, 5), "L"),
        ((4, 6, 5, 3), (3, 6, 5), "RGB"),
    ],
)
def test_bytes_of_three_or_four_axes_are_images(
    tmp_path: Path, shape: tuple[int, ...], sample_shape: tuple[int, ...], mode: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    source = load(tmp_path, pixels, [0, 1, 0, 1])
    image, target = source.dataset[3]
    assert (source.kind, source.sample_shape, source.standardize) == ("image", sample_shape, False)
    assert (image.mode, image.size, target) == (mode, (5, 6), 1)
    np.testing.assert_array_equal(np.asarray(image), pixels[3].squeeze())


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (np.ones((4, 2)), [0, 1, 0], "one row per sample: received 4 rows in X, 3 in y"),
        (np.ones((4, 2)), [[0], [1], [0], [1]], r"one label per sample: received shape \(4, 1\)"),
        (np.ones((4, 2)), [0, 1, np.nan, 1], "missing labels: received 1 .* first in row 2"),
        (np.ones((4, 2)), [0j, 1, 0, 1], "y must hold class labels: received dtype complex"),
        (np.ones((4, 2)), [1, 1, 1, 1], "y must hold two classes or more"),
        (np.ones((4, 0)), [0, 1, 0, 1], "X must have a feature"),
        (np.ones(4), [0, 1, 0, 1], r"a table or images: received shape \(4,\)"),
        ([["a"], ["b"]] * 2, [0, 1, 0, 1], "X must hold numbers: received dtype <U1"),
        (
            [[1, np.inf], [2, 3]] * 2,
            [0, 1, 0, 1],
            "received 2 .* in 1 columns, first in row 0, col",
        ),
        ([[1e39], [2]] * 2, [0, 1, 0, 1], "fit float32: received 2"),
        (np.ones((4, 8, 8)), [0, 1, 0, 1], "must be uint8, 0 to 255: received dtype float64"),
        (np.ones((4, 8, 8, 2), np.uint8), [0, 1, 0, 1], "must have 1 or 3 channels"),
        (np.ones((4, 3, 8, 8), np.uint8), [0, 1, 0, 1], "in the last axis: .*X.transpose"),
    ],
)
def test_arrays_that_are_no_samples_and_labels(
    tmp_path: Path, X: Any, y: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load(tmp_path, X, y)


def test_problems_of_both_arrays_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, [[np.nan]] * 4, [0, 1, np.nan])
    assert len(caught.value.problems) == 3


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"an array X: received x, y\..*Did you mean 'x'"):
        load_source(save(tmp_path, x=np.ones((4, 2)), y=np.ones(4)))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    labels = np.array(["a", None, "a", None], object)
    with pytest.raises(InputError, match="plain arrays: received Object arrays cannot be loaded"):
        load(tmp_path, np.ones((4, 2)), labels)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 torn"])
def test_what_is_no_npz_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"must be an \.npz file of plain arrays"):
        load_source(f"npz:{tmp_path / 'data.npz'}")


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(InputError, match=r"a single array, not an \.npz file"):
        load_source(f"npz:{tmp_path / 'data.npz'}")
