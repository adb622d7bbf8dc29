"""The weight of the package, room by room: ``python -m tests.house`` fails above the limits.

Limits stand in ``pyproject.toml`` under ``[tool.house]``. Lines are all lines of a file; statements
are those of `ast`, docstrings included; a docstring's lines are those it spans.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import asynckfold

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOME = Path(__file__).resolve().parents[1]
PACKAGE = HOME / "asynckfold"
VAGUE = re.compile(r"\b(found|own|told)\b")
OPEN = ("asynckfold.models", "asynckfold.integrations", "asynckfold.cli")
"""Modules whose names a test may import and still go through the public door."""


@dataclass(frozen=True)
class Weight:
    """What a room weighs.

    Parameters
    ----------
    modules, lines, statements, docstring_lines : int
        Files, lines of them, statements of `ast`, and lines of docstrings.
    vague : int
        Lines with a word that names nothing: found, own, told.
    """

    modules: int = 0
    lines: int = 0
    statements: int = 0
    docstring_lines: int = 0
    vague: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


def weight_of(path: Path) -> Weight:
    """Weigh one file."""
    text = path.read_text()
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    ]
    return Weight(
        modules=1,
        lines=len(text.splitlines()),
        statements=sum(isinstance(node, ast.stmt) for node in ast.walk(tree)),
        docstring_lines=sum((item.end_lineno or 0) - item.lineno + 1 for item in docstrings),
        vague=sum(bool(VAGUE.search(line)) for line in text.splitlines()),
    )


def total(paths: Iterator[Path]) -> Weight:
    """Weigh many files."""
    return sum((weight_of(path) for path in paths), Weight())


def rooms() -> dict[str, Weight]:
    """Weigh each folder of the package; ``rest`` is the files beside them."""
    folders = sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
    weights = {folder.name: total(folder.rglob("*.py")) for folder in folders}
    return {**weights, "rest": total(PACKAGE.glob("*.py"))}


@dataclass(frozen=True)
class Names:
    """What the names of a file use.

    Parameters
    ----------
    internal : frozenset of str
        Imported names that are none of the public door's.
    uses : dict of str to set of str
        Names that each function, class or variable of the file mentions.
    """

    internal: frozenset[str]
    uses: dict[str, set[str]]

    def reach_inside(self, name: str) -> bool:
        """Whether a name leads to an internal one, through others of the file."""
        reached, waiting = {name}, [name]
        while waiting:
            for other in self.uses.get(waiting.pop(), set()) - reached:
                reached.add(other)
                waiting.append(other)
        return bool(reached & self.internal)


@cache
def names_of(path: Path) -> Names:
    """Read a file of the tests."""
    tree = ast.parse(path.read_text())
    internal = {name for node in ast.walk(tree) for name in _internal_names(node)}
    uses: dict[str, set[str]] = {}
    for node in tree.body:
        inner = list(ast.walk(node))
        names = {item.id for item in inner if isinstance(item, ast.Name)}
        names |= {item.arg for item in inner if isinstance(item, ast.arg)}
        names |= {name for item in inner for name in _internal_names(item)}
        for name in _defined(node):
            uses.setdefault(name, set()).update(names)
    return Names(frozenset(internal), uses)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for item in (item for target in targets for item in ast.walk(target)):
            if isinstance(item, ast.Name):
                yield item.id


def _internal_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "asynckfold" and alias.name not in ("asynckfold", *OPEN):
                yield alias.asname or alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            if _is_internal(node.module, alias.name):
                yield alias.asname or alias.name


def _is_internal(module: str, name: str) -> bool:
    if module == "asynckfold":
        return name not in asynckfold.__all__
    if module.startswith("asynckfold."):
        return not module.startswith(OPEN)
    if module.split(".")[0] != "tests":
        return False
    path = HOME.joinpath(*module.split(".")).with_suffix(".py")
    if path.exists():
        return names_of(path).reach_inside(name)
    path = HOME.joinpath(*module.split("."), name).with_suffix(".py")
    return path.exists() and bool(names_of(path).internal)


def public_tests() -> tuple[int, int]:
    """Return how many test functions use public names alone, and how many there are."""
    answers = [
        not names.reach_inside(name)
        for path in (HOME / "tests").rglob("test_*.py")
        for names in [names_of(path)]
        for name in names.uses
        if name.startswith("test_")
    ]
    return sum(answers), len(answers)


def main() -> int:
    """Print the table; return 1 if a limit is exceeded."""
    limits = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["house"]
    over = []

    def check(name: str, value: float, limit: float, *, least: bool = False) -> str:
        bad = value < limit if least else value > limit
        if bad:
            over.append(f"{name}: {value:,} where {'at least' if least else 'at most'} {limit:,}")
        return "<" if bad and least else ">" if bad else " "

    by_room = rooms()
    print(f"{'room':14}{'modules':>8}{'lines':>8}  {'limit':>7}{'statements':>12}{'vague':>7}")
    for name, weight in by_room.items():
        limit = limits["lines"][name]
        sign = check(f"lines of {name}", weight.lines, limit)
        print(
            f"{name:14}{weight.modules:8}{weight.lines:8,} {sign}{limit:7,}"
            f"{weight.statements:12,}{weight.vague:7}"
        )
    package = sum(by_room.values(), Weight())
    tests = total((HOME / "tests").rglob("*.py"))
    share = round(100 * package.docstring_lines / package.lines, 1)
    public, functions = public_tests()
    print(f"{'package':14}{package.modules:8}{package.lines:8,}", end="")
    print(f"{'':9}{package.statements:12,}{package.vague:7}")
    print(f"tests: {tests.lines:,} lines, {functions:,} functions, {public:,} of them through the")
    print(f"public door; docstrings are {share} % of the package's lines")
    check("lines of the package", package.lines, limits["package_lines"])
    check("statements", package.statements, limits["statements"])
    check("modules", package.modules, limits["modules"])
    check("docstrings, percent of the lines", share, limits["docstring_percent"], least=True)
    check("lines of tests", tests.lines, limits["test_lines"])
    check("lines with found, own, told", package.vague, limits["vague_lines"])
    check("tests through the public door", public, limits["public_tests"], least=True)
    for line in over:
        print(line)
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
