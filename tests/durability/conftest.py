"""One nursery for all tests of this folder, and what an undisturbed run ends with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.durability.tracing import Nursery, nursery, refused
from tests.durability.work import work


@pytest.fixture(scope="session")
def traced() -> Iterator[Nursery]:
    reason = refused()
    if reason:
        pytest.skip(reason)
    with nursery() as made:
        yield made


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of a run that nothing happened to; made twice, and the same twice."""
    folder = tmp_path_factory.mktemp("golden")
    with Path(os.devnull).open("wb") as nowhere:
        first, second = (work(folder / name, nowhere.fileno()) for name in "ab")
    assert first == second
    return first
