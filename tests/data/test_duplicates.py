"""Equal samples have equal digests, wherever the others differ."""

from __future__ import annotations

import numpy as np
import pytest

from asynckfold.data.duplicates import PLACES, _mixed, digests


@pytest.mark.parametrize("shape", [(1,), (3,), (PLACES,), (PLACES + 1,), (2, 5, 40), (1000,)])
@pytest.mark.parametrize("kind", ["float32", "int64", "uint8"])
def test_digests_are_equal_for_equal_samples_only(shape: tuple[int, ...], kind: str) -> None:
    draw = np.random.default_rng(0)
    samples = draw.integers(0, 200, (60, *shape)).astype(kind)
    samples[10:20] = samples[:10]
    # Like the first in all but one place, one place after the other.
    flat = samples.reshape(60, -1)
    for at in range(20, 60):
        flat[at] = flat[0]
        flat[at, at % flat.shape[1]] += at - 19
    found = digests(samples)
    mirrored = kind == "uint8" and len(shape) > 1

    def number(sample: np.ndarray) -> bytes:
        pair = sample.tobytes(), sample[..., ::-1].tobytes()
        return min(pair) if mirrored else pair[0]

    expected = np.unique([number(sample) for sample in samples], return_inverse=True)[1]
    same = found[:, None] == found
    assert np.array_equal(same, expected[:, None] == expected)


def test_rows_that_differ_in_two_signs_only_differ() -> None:
    # Both change the highest bit of a word, which cancel in a sum of products.
    samples = np.ones((3, 4))
    samples[1, :2] = -1
    assert _mixed(samples)[0] == _mixed(samples)[1]
    found = digests(samples)
    assert found[0] == found[2] != found[1]


def test_no_samples_have_no_digests() -> None:
    assert digests(np.empty((0, 3), np.float32)).shape == (0,)
