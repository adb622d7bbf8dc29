from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from asynckfold.results.report.sanitize import clean


@given(st.text(), st.integers(1, 50))
def test_clean_text_can_be_encoded_and_is_capped(text: str, limit: int) -> None:
    shown = clean(text, limit)
    shown.encode("utf-8")
    assert not set(shown) & {chr(code) for code in (*range(9), *range(11, 32), 127)}
    assert len(shown) <= limit + 30


def test_clean_replaces_surrogates_escapes_and_the_home_folder() -> None:
    assert clean("a\ud800b") == "a\ufffdb"
    assert clean("\x1b[1;31mred\x1b[0m") == "red"
    assert clean(f"{Path.home()}/runs") == "~/runs"
    assert clean(f"{Path.home()}less") == f"{Path.home()}less"
