from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import InputError
from asynckfold.data.sources import Source, load_samples, load_source
from tests.here import RefusedError, inspected


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
    ("labels", "classes"),
    [
        (["b", "a"] * 2, ("a", "b")),
        ([True, False] * 2, ("False", "True")),
        ([2.0, 1.0] * 2, ("1", "2")),
    ],
)
def test_labels_of_any_plain_type(tmp_path: Path, labels: list[Any], classes: Any) -> None:
    source = inspected(save(tmp_path, X=np.ones((4, 2)), y=np.array(labels)))
    assert source.counts == dict.fromkeys(classes, 2)


@pytest.mark.parametrize(
    ("shape", "sample_shape", "mode"),
    [((4, 6, 5), (1, 6, 5), "L"), ((4, 6, 5, 1), (1, 6, 5), "L"), ((4, 6, 5, 3), (3, 6, 5), "RGB")],
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
        (np.ones((4, 2)), [0, 1, 0], r"per sample: received shape \(3,\), and 4 samples in X"),
        (np.ones((4, 2)), [[0], [1], [0], [1]], r"one label per sample: received shape \(4, 1\)"),
        (np.ones((4, 2)), [0, 1, np.nan, 1], "missing labels: received 1 .* first in row 2"),
        (np.ones((4, 2)), [0j, 1, 0, 1], "y must hold class labels: received dtype complex"),
        (np.ones((4, 2)), [1, 1, 1, 1], "y must hold two classes or more"),
        (
            np.ones((4, 2)),
            np.array(["a", None] * 2, object),
            "plain arrays: received Object arrays",
        ),
        (np.ones((4, 0)), [0, 1, 0, 1], "X must hold a feature"),
        (np.ones(4), [0, 1, 0, 1], r"must be a table .*received float64 of shape \(4,\)"),
        ([["a"], ["b"]] * 2, [0, 1, 0, 1], "X must hold numbers: received dtype <U1"),
        ([[1, np.inf], [2, 3]] * 2, [0, 1, 0, 1], r"column 1 \(2 cells, first in row 1, 'inf'\)"),
        ([[1, np.nan], [2, 3]] * 2, [0, 1, 0, 1], r"missing values: received column 1 \(2 cells"),
        ([[1e39], [2]] * 2, [0, 1, 0, 1], "fit float32: received column 0"),
        (np.ones((4, 8, 8)), [0, 1, 0, 1], "uint8, 0 to 255.*received float64"),
        (np.ones((4, 8, 8, 2), np.uint8), [0, 1, 0, 1], "with 1 or 3 channels"),
        (np.ones((4, 3, 8, 8), np.uint8), [0, 1, 0, 1], "in the last axis: .*X.transpose"),
    ],
)
def test_arrays_that_are_no_samples_and_labels(
    tmp_path: Path, X: Any, y: Any, message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        inspected(save(tmp_path, X=np.asarray(X), y=np.asarray(y)))


def test_rows_to_predict_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    spec = save(tmp_path, X=np.array([[1.0], [np.nan]]))
    with pytest.raises(InputError, match=r"finite numbers that fit float32: .* first row 2"):
        load_samples(spec)


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"an array X: received x, y\..*Did you mean 'x'"):
        inspected(save(tmp_path, x=np.ones((4, 2)), y=np.ones(4)))


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 torn", None])
def test_what_is_no_npz_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "data.npz"
    with path.open("wb") as file:
        np.save(file, np.ones(3)) if content is None else file.write(content)
    with pytest.raises(RefusedError, match=r"must be an \.npz file of plain arrays"):
        inspected(f"npz:{path}")
