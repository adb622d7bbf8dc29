"""The catalogue of faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "FAULTS.md").read_text("utf-8"))))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda value: str(value))
def test_a_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in found


def test_the_catalogue_is_read() -> None:
    rows = [line for line in (TESTS / "FAULTS.md").read_text("utf-8").splitlines() if "`" in line]
    assert len(NAMED) > len(rows) / 2 > 20
