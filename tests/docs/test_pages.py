"""Every snippet of README.md and docs/ does what its page says."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import asynckfold
from tests.docs.snippets import snippets

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_ten_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (lines,) = (part for part in snippets(ROOT / "README.md") if part.language == "python")
    lines.run({"__name__": "__main__"}, {})


@pytest.mark.nightly
@pytest.mark.crashes("the pages show what a kill leaves")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if any(not snippet.not_run for snippet in snippets(page))
    ],
)
def test_the_snippets_of_a_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = str(Path(sys.executable).parent)
    environ = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }
    names = {"__name__": "__main__"}
    for snippet in snippets(page):
        if not snippet.not_run:
            snippet.run(names, environ)


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = set(re.findall(r"^::: asynckfold\.(\w+)$", text, re.MULTILINE))
    assert named == set(asynckfold.__all__)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.nightly
def test_the_page_of_flags_has_all_verbs() -> None:
    flags = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["flags"]()
    verbs = re.findall(r"^## (\w+)$", flags, re.MULTILINE)
    assert {"run", "train", "status"} <= set(verbs)
    assert len(re.findall(r"^usage: asynckfold \w+", flags, re.MULTILINE)) == len(verbs)
    assert "--allow-different-software" in flags
