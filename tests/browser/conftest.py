"""A browser that opens the pages of synthetic runs.

The tests need the extra ``browser`` and a Chromium on the path, and are skipped with a reason
without them. A browser keeps processes for later, so nothing is said of what a single test leaves;
the end of the session looks at all of it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.opened import Opened
from tests.browser.runs import write_page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
WORDS = "--no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking"
WORDS += " --disable-sync --no-first-run"

Open = Callable[..., AbstractContextManager[Opened]]


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Let the browser keep its processes from one test to the next."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="playwright is not installed: pip install 'asynckfold[browser]'",
    )
    if not CHROMIUM:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=WORDS.split())
        yield running
        running.close()


@pytest.fixture(scope="session")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the page of a run when it is first asked for."""
    folder, written = tmp_path_factory.mktemp("pages"), {}

    def find(name: str) -> Path:
        if name not in written:
            with pytest.MonkeyPatch.context() as patch:
                # PNG files take seconds.
                place = "asynckfold.results.report.page.update_figures"
                patch.setattr(place, lambda *_, **__: None)
                written[name] = write_page(name, folder)
        return written[name]

    return find


@pytest.fixture
def opened(browser: Any, page_of: Callable[[str], Path]) -> Open:
    """Open the page of a run: `width` in pixels, `theme` of the system, with or without script.

    `bare`: the page has lost its script, in a browser that runs that of the tests.
    """

    @contextmanager
    def look(
        name: str,
        *,
        width: int = 1440,
        theme: str = "light",
        script: bool = True,
        bare: bool = False,
    ) -> Iterator[Opened]:
        file = page_of(name)
        if bare:
            text = re.sub("<script>.*?</script>", "", file.read_text("utf-8"), flags=re.DOTALL)
            file = file.with_name("bare.html")
            file.write_text(text, "utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            java_script_enabled=script,
            has_touch=width < 500,
        )
        try:
            seen = Opened(context.new_page(), file)
            yield seen
            seen.was_quiet()
        finally:
            context.close()

    return look
