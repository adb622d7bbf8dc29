"""Runs that several tests look at, written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.results.report.summary import Summary, summarize
from tests.synthetic import Synthetic, write_run

Summarize = Callable[[Synthetic], Summary]


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete classification run with a measured baseline."""
    return write_run(tmp_path_factory.mktemp("complete") / "run")


@pytest.fixture
def summarized(root: Path) -> Summarize:
    """Write a synthetic run and summarize it."""

    def make(run: Synthetic) -> Summary:
        with RunStore.read(write_run(root, run)) as store:
            return summarize(store)

    return make
