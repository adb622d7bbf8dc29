"""The package keeps its limits, and the counter of tests through public names counts rightly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import house


def test_a_file_is_weighed_by_lines_statements_and_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text('"""One.\n\nTwo.\n"""\n\nfound = 1\n\n\ndef f():\n    """Three."""\n')
    assert house.weight_of(path) == house.Weight(1, 10, 4, 5, 1)


def test_a_test_is_internal_by_what_it_reaches(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "from asynckfold import Plan\nfrom asynckfold.jobs.grid import Grid\n"
        "def helper(): return Grid\n"
        "def test_public(): Plan\n"
        "def test_internal(): helper()\n"
    )
    names = house.names_of(path)
    assert not names.reach_inside("test_public")
    assert names.reach_inside("test_internal")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    paths = set(re.findall(r"`([a-z_]+/[a-z_/.]+\.(?:py|jinja))`", (house.HOME / page).read_text()))
    assert paths
    roots = (house.PACKAGE, house.HOME)
    assert not [path for path in paths if not any((root / path).exists() for root in roots)]
