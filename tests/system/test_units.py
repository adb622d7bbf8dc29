from __future__ import annotations

from typing import Any

import pytest

from asynckfold.system.units import in_bytes


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (0.5, 500),
        (1, 1000),
        (1.0, 1000),
        (2, 2),
        (3000, 3000),
        ("0.5", 500),
        ("50%", 500),
        ("100 %", 1000),
        ("7", 7),
        ("1B", 1),
        ("2kb", 2000),
        ("2 KiB", 2048),
        ("1.5MiB", 3 << 19),
        ("8GiB", 8 << 30),
        ("1TB", 10**12),
    ],
)
def test_a_size_is_a_share_or_bytes(value: Any, size: int) -> None:
    assert in_bytes(value, 1000) == size


@pytest.mark.parametrize(
    "value",
    ["", "x", "GiB", "-1", "1e9", "101%", "8 gigs", "nan", -1, -0.5, float("nan"), float("inf"),
     True, None, [1]],
)  # fmt: skip
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(ValueError, match="no s"):
        in_bytes(value, 1000)
