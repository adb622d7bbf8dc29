"""A page in a browser: what it asked for, what it said, and what can be seen on it."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SMALLEST = 11.0
"""Pixels of the smallest text that may stand in a chart."""

WIDE = """() => [...document.querySelectorAll("body *")].filter((item) => {
    const box = item.getBoundingClientRect();
    if (!box.width || item.closest(".scroll") || item.closest("svg svg")) return false;
    return box.right > innerWidth + 1 || box.left < -1;
}).map((item) => `${item.tagName} ${item.className.baseVal ?? item.className} "${
    item.textContent.trim().slice(0, 40)}" ${item.getBoundingClientRect().left} to ${
    item.getBoundingClientRect().right}`)"""

TEXTS = """() => [...document.querySelectorAll("figure > svg, .panels svg, figure svg")]
    .filter((svg) => svg.getBoundingClientRect().width && !svg.parentElement.closest("svg"))
    .map((svg) => {
        const outer = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll("text")].map((text) => {
            const box = text.getBoundingClientRect();
            return [text.textContent, box.left, box.right, box.top, box.bottom,
                parseFloat(getComputedStyle(text).fontSize)];
        });
        return [svg.closest("figure").id, outer.left, outer.right, texts];
    })"""

CLIPPED = """() => [...document.querySelectorAll("main :not(thead)")].filter((item) => {
    const style = getComputedStyle(item);
    return style.overflowX === "hidden" && item.scrollWidth > item.clientWidth + 1;
}).map((item) => item.outerHTML.slice(0, 80))"""

FAULTS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .map((found) => [found.impact, found.id, found.nodes.slice(0, 3).map(
        (node) => `${node.target} ${node.failureSummary}`)])"""


class Opened:
    """An open page; `page` is playwright's."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page, self._address, self._file = page, file.as_uri(), file
        self.requests: list[str] = []
        self.said: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        page.goto(self._address)

    def was_quiet(self) -> None:
        """Assert that the page fetched nothing but itself, and that the console is empty."""
        assert self.requests == [self._address] * len(self.requests)
        assert not self.said

    @property
    def numbers(self) -> Any:
        """What ``results.json`` says."""
        return json.loads(self._file.with_name("results.json").read_text("utf-8"))

    def show(self, tab: str) -> None:
        """Open ``"Results"`` or ``"Run details"``."""
        self.page.get_by_role("tab", name=tab).click()

    def fits(self) -> None:
        """Assert that nothing is cut off and nothing makes the page scroll sideways."""
        page = self.page
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.evaluate(WIDE) == []
        assert page.evaluate(CLIPPED) == []

    def charts_can_be_read(self) -> None:
        """Assert that text in charts is large enough, inside its chart, and on no other text."""
        wrong = []
        for name, left, right, texts in self.page.evaluate(TEXTS):
            for words, start, end, _, _, size in texts:
                if size < SMALLEST:
                    wrong.append(f"{name}: {words!r} has {size} px")
                if start < left - 2 or end > right + 2:
                    wrong.append(f"{name}: {words!r} is at {start} to {end} of {left} to {right}")
            wrong += [f"{name}: {a!r} lies on {b!r}" for a, b in _overlaps(texts)]
        assert wrong == []

    def is_accessible(self) -> None:
        """Assert that axe-core finds no serious or critical fault."""
        self.page.evaluate(axe_source())
        found = self.page.evaluate(FAULTS)
        grave = [fault for fault in found if fault[0] in ("serious", "critical")]
        assert grave == [], json.dumps(grave, indent=1)


def _overlaps(texts: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
    found = []
    for place, (words, left, right, top, bottom, _) in enumerate(texts):
        for other, start, end, upper, lower, _ in texts[place + 1 :]:
            wide = min(right, end) - max(left, start)
            high = min(bottom, lower) - max(top, upper)
            if wide > 1 and high > 4:
                found.append((words, other))
    return found


@functools.cache
def axe_source() -> str:
    """Return the source of axe-core, which a package brings along."""
    for package in ("axe_playwright_python", "axe_core_python"):
        found = importlib.util.find_spec(package)
        for place in (found.submodule_search_locations or ()) if found else ():
            for file in Path(place).rglob("axe.min.js"):
                return file.read_text("utf-8")
    pytest.skip("axe-core is not installed: pip install 'asynckfold[browser]'")
