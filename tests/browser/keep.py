"""The structure of the page: what stands below what, and how wide.

``python -m tests.browser.keep`` writes it anew, after a change that you have looked at.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

RUN, WIDTHS = "sweep", (390, 1440)
TABS = ("Results", "Run details")
FILE = Path(__file__).with_name("structure.json")

OUTLINE = """() => [...document.querySelectorAll(
    "h1, h2, h3, .card, figure, .panels > div, .legend, table, details, .tools")]
    .filter((item) => item.getBoundingClientRect().width)
    .map((item) => {
        const box = item.getBoundingClientRect();
        const tenth = (share) => Math.round(10 * share / innerWidth);
        const name = item.getAttribute("aria-label") ?? item.id;
        // Tables are as wide as their words.
        const end = item.tagName === "TABLE" ? "" : tenth(box.right);
        const words = /H[123]/.test(item.tagName) && !item.closest("#verdict")
            ? item.textContent : name;
        return `${tenth(box.left)}-${end} ${item.tagName.toLowerCase()}${
            item.className && "." + item.className} ${words}`.trim();
    })"""


def outline(page: Any) -> list[str]:
    """Return what can be seen, in order: left and right edge in tenths of the width, and name.

    Widths of fonts differ from machine to machine, and heights follow them.
    """
    return list(page.evaluate(OUTLINE))


def kept() -> dict[str, list[str]]:
    """Return the kept outlines by tab and width."""
    return dict(json.loads(FILE.read_text("utf-8")))


def write() -> None:
    """Keep the structure as it is now."""
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import CHROMIUM, WORDS
    from tests.browser.runs import write_page

    found = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = write_page(RUN, Path(folder))
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=WORDS.split())
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(file.as_uri())
            for tab in TABS:
                page.get_by_role("tab", name=tab).click()
                found[f"{tab}, {width}"] = outline(page)
        browser.close()
    FILE.write_text(f"{json.dumps(found, indent=1, ensure_ascii=False)}\n", "utf-8")


if __name__ == "__main__":
    write()
