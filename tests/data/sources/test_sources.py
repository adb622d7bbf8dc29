from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.data.sources import balanced_subset, load_source
from tests.here import RefusedError, inspected


def test_importing_sources_is_cheap() -> None:
    check = (
        "import sys, asynckfold.data.sources; "
        "heavy = {'torch', 'torchvision', 'sklearn', 'pandas', 'PIL'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "must be a known source: received 'digit'.*Did you mean 'digits'"),
        ("digits:x", "must be a known source: received 'digits:x'"),
        ("glass.csv", "Did you mean 'csv:glass.csv'"),
        ("glass.NPZ", "Did you mean 'npz:glass.NPZ'"),
        ("csv:", "csv needs a path: received 'csv:'. Pass csv:PATH"),
        ("folder", "folder needs a path"),
        ("", "must be a known source: received ''"),
    ],
)
def test_unknown_sources_are_refused_with_the_remedy(spec: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        inspected(spec)


def test_a_folder_without_its_word_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=f"Did you mean 'folder:{tmp_path}'"):
        inspected(str(tmp_path))


@pytest.mark.parametrize("word", ["csv", "npz", "folder"])
def test_a_path_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path, word: str) -> None:
    (tmp_path / "glass.csv").write_text("1,a\n")
    with pytest.raises(
        RefusedError, match=r"must name an existing path: .*Did you mean 'glass\.csv'"
    ):
        inspected(f"{word}:{tmp_path / 'glas.csv'}")


def test_a_folder_is_no_csv_file(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"must be a readable text file.*Is a directory"):
        inspected(f"csv:{tmp_path}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "3"}, "--target applies to csv: only: received --target 3 with digits"),
        ({"header": "no"}, "--header applies to csv: only"),
        ({"limit": 0}, "limit must be at least 1: received 0"),
        ({"limit": 9}, "a sample of each of the 10 classes: received 9"),
    ],
)
def test_options_that_do_not_apply_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        inspected("digits", **options)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(RefusedError, match="2 problems"):
        inspected("digit", target="x")


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text("1,a\n2,b\n3,a\n4,b\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert inspected("csv:~/t.csv").samples == 4


def test_a_limit_leaves_a_balanced_part_that_a_seed_decides() -> None:
    source = load_source("digits", limit=105, random_state=3)
    assert np.bincount(source.targets).tolist().count(10) == 5
    assert np.bincount(source.targets).max() == 11
    again = load_source("digits", limit=105, random_state=3)
    other = load_source("digits", limit=105, random_state=4)
    assert again.dataset.indices == source.dataset.indices  # type: ignore[attr-defined]
    assert other.dataset.indices != source.dataset.indices  # type: ignore[attr-defined]
    assert "105 of 1797 samples, classes balanced, drawn with seed 3" in source.notes


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 70), st.integers(0, 9))
def test_a_balanced_subset(labels: list[int], limit: int, seed: int) -> None:
    targets = np.array(labels)
    chosen = balanced_subset(targets, limit, seed)
    assert len(chosen) == min(limit, len(labels))
    assert (np.diff(chosen) > 0).all()
    taken, there = np.bincount(targets[chosen], minlength=5), np.bincount(targets, minlength=5)
    assert (taken <= there).all()
    open_classes = taken[taken < there]
    assert not open_classes.size or taken.max() - open_classes.min() <= 1
