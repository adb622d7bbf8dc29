"""What a release is made of: one version, links that lead somewhere, one list of packages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
LINK = re.compile(r'\]\(([^)]+)\)|\b(?:src|srcset)="([^"]+)"')


def _links(text: str) -> list[str]:
    return [left or right for left, right in LINK.findall(text)]


def test_each_link_of_the_readme_leads_to_a_file() -> None:
    links = [link for link in _links(README) if not link.startswith("http")]
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_on_a_package_index_all_links_and_pictures_of_the_readme_are_absolute() -> None:
    absolute = runpy.run_path(str(ROOT / "docs" / "absolute_links.py"))["absolute"]
    links = _links(absolute(README, "https://example.org/a/b", "v1"))
    assert len(links) == len(_links(README))
    assert [link for link in links if not link.startswith("https://")] == []
    assert "https://example.org/a/b/blob/v1/docs/tutorial.md" in links
    assert "https://example.org/a/b/raw/v1/docs/pictures/verdict-dark.png" in links


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (.+)$"),
        ("CHANGELOG.md", r"^## \[(\d.+)\] - "),
        ("recipe/meta.yaml", r'set version = "(.+)"'),
    ],
)
def test_the_version_is_the_same_everywhere(file: str, pattern: str) -> None:
    (version,) = re.findall(r'^version = "(.+)"$', PROJECT, re.MULTILINE)
    assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)[0] == version


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    (needs,) = re.findall(r"^dependencies = \[(.+?)^\]", PROJECT, re.DOTALL | re.MULTILINE)
    conda = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    wanted = {(conda.get(name, name), low) for name, low in re.findall(r'"([\w-]+)>=(.+?)"', needs)}
    recipe = (ROOT / "recipe" / "meta.yaml").read_text().partition("  run:")[2]
    listed = re.findall(r"^ +- ([\w-]+) >=([\d.]+)$", recipe, re.MULTILINE)
    assert {*listed} == wanted
