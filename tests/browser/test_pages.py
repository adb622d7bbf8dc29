"""Every run has a page that can be opened, read and printed, in each width, theme and tab."""

from __future__ import annotations

import io
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.runs import RUNS, jobs_of

TABS = ("Results", "Run details")
PRINTED = 718
"""Pixels between the margins of an A4 page."""


def test_a_page_opens_quietly(opened: Open) -> None:
    with opened("one fold") as seen:
        assert seen.page.locator("h1").first.inner_text()
        seen.fits()


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (820, "dark"), (1440, "light")])
def test_nothing_is_cut_off_and_axe_finds_no_serious_fault(
    opened: Open, name: str, width: int, theme: str
) -> None:
    with opened(name, width=width, theme=theme) as seen:
        for tab in TABS:
            seen.show(tab)
            seen.fits()
            seen.charts_can_be_read()
            seen.is_accessible()


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [390, 1440])
def test_without_script_everything_can_be_read(opened: Open, name: str, width: int) -> None:
    with opened(name, width=width, script=False) as seen:
        page = seen.page
        for heading in ("Ranking", "Failures", "Timeline", "Forecast", "Environment", "Log"):
            assert page.get_by_role("heading", name=heading, exact=True).is_visible()
        assert page.get_by_role("button").count() == 0
        seen.fits()
        seen.charts_can_be_read()
    with opened(name, width=width, bare=True) as seen:
        seen.is_accessible()


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_the_first_screen_answers(opened: Open, name: str) -> None:
    with opened(name) as seen:
        page = seen.page
        numbers = seen.numbers
        first = page.evaluate(ON_FIRST_SCREEN)
        counts = numbers["counts"]
        # Which model, by how much, is it real.
        answers = numbers["verdict"]["sentences"][:2]
        if numbers["grid"] is not None and numbers["highest"] is not None:
            answers = [f": highest {numbers['metric']}, ", "It beats "]
        for sentence in answers:
            assert " ".join(sentence.removesuffix(".").split()) in first
        # How long, and what failed.
        assert "Wall time" in first
        assert f"{counts['done']} of {jobs_of(name)} job" in first
        words = {"failed": "failed", "diverged": "diverged", "cancelled": "left out"}
        for state, word in {**words, "pending": "pending"}.items():
            assert (f"{counts[state]} {word}" in first) == bool(counts[state])
        if numbers["verdict"]["best"] is None:
            assert " is best" not in first.replace("none is best", "")


ON_FIRST_SCREEN = """() => [...document.querySelectorAll("#results :is(h1, h2, p)")]
    .filter((item) => item.getBoundingClientRect().bottom <= innerHeight)
    .map((item) => item.innerText.split(/\\s+/).join(" ")).join(" ")"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_paper_has_every_column_and_no_heading_alone(opened: Open, name: str) -> None:
    pypdf = pytest.importorskip("pypdf")
    with opened(name, width=PRINTED) as seen:
        page = seen.page
        margin = dict.fromkeys(("top", "right", "bottom", "left"), "1cm")
        printed = page.pdf(format="A4", margin=margin)
        page.emulate_media(media="print")
        headings = [
            " ".join(words.split()) for words in page.locator("h1, h2, h3").all_inner_texts()
        ]
        assert page.evaluate(PAST_THE_EDGE, PRINTED) == []
        assert page.get_by_role("button", name="Copy verdict").count() == 0
    sheets = pypdf.PdfReader(io.BytesIO(printed)).pages
    assert all(abs(float(sheet.mediabox.width) - 595) < 2 for sheet in sheets)
    for sheet in sheets[:-1]:
        lines = [line for line in sheet.extract_text().splitlines() if line.strip()]
        assert " ".join(lines[-1].split()) not in headings


PAST_THE_EDGE = """(edge) => [...document.querySelectorAll("main :is(th, td, svg, pre, p)")]
    .filter((item) => item.getBoundingClientRect().right > edge + 1)
    .map((item) => item.outerHTML.slice(0, 80))"""


@pytest.mark.nightly
def test_pages_are_small(page_of: Any) -> None:
    sizes = {name: page_of(name).stat().st_size for name in RUNS}
    allowed = {name: 400_000 if jobs_of(name) <= 50 else 3_000_000 for name in RUNS}
    assert {name: size for name, size in sizes.items() if size > allowed[name]} == {}


@pytest.mark.nightly
def test_the_page_of_a_thousand_candidates_is_short_and_opens(opened: Open, page_of: Any) -> None:
    assert page_of("thousand candidates").stat().st_size < 3_000_000
    with opened("thousand candidates") as seen:
        page = seen.page
        assert page.evaluate("document.documentElement.scrollHeight") <= 3_000
        seen.fits()
        seen.is_accessible()
        curves = page.locator("#figure-curves")
        assert curves.is_hidden()
        # A section opens by its address and by its heading.
        page.evaluate("location.hash = 'curves'")
        curves.wait_for(state="visible")
        page.get_by_role("heading", name="Folds", exact=True).click()
        assert page.get_by_role("table", name="Scores of each fold", exact=True).is_visible()
