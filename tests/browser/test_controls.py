"""What the script of the page adds: each control does what it says, by pointer and by keyboard."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.conftest import Open

pytestmark = pytest.mark.nightly


def column(page: Any, table: str, place: int) -> list[str]:
    rows = page.get_by_role("table", name=table, exact=True).locator("tbody tr:visible")
    return [row.locator("th, td").nth(place).inner_text() for row in rows.all()]


def test_a_table_sorts_by_each_column_in_both_directions(opened: Open) -> None:
    with opened("sweep") as seen:
        page = seen.page
        head = page.get_by_role("table", name="Ranking", exact=True).locator("thead th")
        before = column(page, "Ranking", 1)
        sort = head.nth(1).get_by_role("button")
        sort.click()
        assert head.nth(1).get_attribute("aria-sort") == "ascending"
        assert column(page, "Ranking", 1) == sorted(before)
        sort.press("Enter")
        assert head.nth(1).get_attribute("aria-sort") == "descending"
        assert column(page, "Ranking", 1) == sorted(before, reverse=True)
        seconds = head.get_by_role("button", name="fit seconds")
        seconds.click()
        numbers = [float(text) for text in column(page, "Ranking", 7)]
        assert numbers == sorted(numbers)
        assert head.nth(1).get_attribute("aria-sort") is None


def test_the_ranking_is_cards_on_a_phone_and_sorted_by_a_tap(opened: Open) -> None:
    with opened("sweep", width=390) as seen:
        table = seen.page.get_by_role("table", name="Ranking", exact=True)
        boxes = [
            cell.bounding_box() for cell in table.locator("tbody tr").first.locator("td").all()
        ]
        assert len({box["y"] for box in boxes}) == len(boxes) > 5
        before = table.locator("tbody th").all_inner_texts()
        table.get_by_role("button", name="candidate", exact=True).tap()
        after = table.locator("tbody th").all_inner_texts()
        assert after == sorted(before) != before


def test_a_long_table_is_filtered_by_words(opened: Open) -> None:
    with opened("thousand jobs") as seen:
        page = seen.page
        page.locator("#ranking ~ .tools input").first.fill("netb cos")
        assert column(page, "Ranking", 1) == ["NetB/cosine"]
        assert page.locator("#ranking ~ .tools [role=status]").first.inner_text().strip() == (
            "1 of 50 rows"
        )


def test_a_pointer_at_a_point_is_told_fold_and_value(opened: Open) -> None:
    with opened("sweep") as seen:
        page = seen.page
        numbers = seen.numbers
        first = numbers["candidates"][0]
        # One that the mean does not cover.
        scores = first["scores"]["accuracy"]
        fold = scores.index(min(scores))
        page.locator("#figure-forest circle").nth(fold).hover(force=True)
        said = page.locator(".tip").inner_text()
        assert said == f"{first['name']}, fold {fold}: {scores[fold]:.4f}"
        page.mouse.move(2, 2)
        assert page.locator(".tip").is_hidden()


def test_a_finger_gets_the_same(opened: Open) -> None:
    with opened("sweep", width=390) as seen:
        page = seen.page
        page.locator("#figure-curves circle").first.tap(force=True)
        assert "epoch" in page.locator("#figure-curves > [role=status]").inner_text()
        seen.fits()


def test_the_arrow_keys_go_from_mark_to_mark(opened: Open) -> None:
    with opened("sweep") as seen:
        page = seen.page
        figure, said = (
            page.locator("#figure-forest"),
            page.locator("#figure-forest > [role=status]"),
        )
        figure.focus()
        page.keyboard.press("ArrowRight")
        one = said.inner_text()
        page.keyboard.press("ArrowRight")
        other = said.inner_text()
        assert one != other
        assert page.locator("#figure-forest .at").count() == 1
        page.keyboard.press("ArrowLeft")
        assert said.inner_text() == one


def test_a_bar_opens_the_facts_of_its_job(opened: Open) -> None:
    with opened("sweep") as seen:
        seen.show("Run details")
        page = seen.page
        page.locator("#figure-timeline rect").first.click()
        facts = page.locator("#figure-timeline > [role=status]").inner_text().splitlines()
        assert re.fullmatch(r"LeNet5/constant/fold-0: accuracy 0\.\d{4}", facts[0])
        assert re.fullmatch(r"[\d.]+ s on core 0; ok, attempt 1", facts[1])
        assert facts[2].startswith("predicted 2.0 s; peak memory 200 MiB")


def test_a_legend_hides_a_candidate_and_shows_it_again(opened: Open) -> None:
    with opened("sweep") as seen:
        page = seen.page
        entry = page.locator("#figure-curves .legend button").first
        drawn = page.locator('#figure-curves [data-series="0"]')
        assert drawn.count() == 4
        entry.click()
        assert entry.get_attribute("aria-pressed") == "false"
        assert [each.is_visible() for each in drawn.all()] == [False] * 4
        entry.press("Space")
        assert [each.is_visible() for each in drawn.all()] == [True] * 4


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_switched(opened: Open, theme: str) -> None:
    other = {"light": "dark", "dark": "light"}
    papers = {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 29)"}
    with opened("one fold", theme=theme) as seen:
        page = seen.page
        paper = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(paper) == papers[theme]
        page.get_by_role("button", name=f"{other[theme].capitalize()} theme").click()
        assert page.evaluate(paper) == papers[other[theme]]
        page.reload()
        assert page.evaluate(paper) == papers[other[theme]]
        page.get_by_role("button", name=f"{theme.capitalize()} theme").click()
        assert page.evaluate(paper) == papers[theme]


def test_tabs_go_by_click_by_arrow_and_by_address(opened: Open) -> None:
    with opened("sweep") as seen:
        page = seen.page
        results, details = page.locator("#results"), page.locator("#details")
        assert (results.is_visible(), details.is_visible()) == (True, False)
        page.get_by_role("tab", name="Results").press("ArrowRight")
        assert (results.is_visible(), details.is_visible()) == (False, True)
        assert page.evaluate("document.activeElement.id") == "tab-details"
        seen.show("Results")
        assert results.is_visible()
        page.evaluate("location.hash = 'waits'")
        page.locator("#waits").wait_for(state="visible")
        assert results.is_hidden()


def test_the_verdict_is_copied_as_text(opened: Open) -> None:
    with opened("sweep") as seen:
        page = seen.page
        numbers = seen.numbers
        page.get_by_role("button", name="Copy verdict").click()
        page.get_by_text("Copied").wait_for()
        page.evaluate(
            "document.querySelector('main').insertAdjacentHTML('afterbegin',"
            "'<textarea id=pasted></textarea>')"
        )
        page.locator("#pasted").press("Control+V")
        pasted = page.locator("#pasted").input_value()
        for sentence in numbers["verdict"]["sentences"]:
            assert sentence.removesuffix(".") in pasted
        assert "Wall time: " in pasted
        assert "30 of 30 jobs finished" in pasted


def test_every_control_is_reached_by_the_tab_key(opened: Open) -> None:
    with opened("sweep") as seen:
        page = seen.page
        reached = set()
        for _ in range(200):
            page.keyboard.press("Tab")
            here = page.evaluate(
                "[document.activeElement.tagName, document.activeElement.id, "
                "document.activeElement.textContent.trim().slice(0, 30), "
                "getComputedStyle(document.activeElement).outlineStyle]"
            )
            if here[0] == "BODY":
                break
            assert here[3] != "none", here
            reached.add(here[1] or here[2])
        assert {"tab-results", "Dark theme", "Copy verdict", "figure-forest"} <= reached
        assert {"candidate", "fit seconds", "LeNet5/constant"} <= reached
