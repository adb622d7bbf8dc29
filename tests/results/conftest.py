"""A report that several tests look at, written once."""

from __future__ import annotations

import pytest

from tests.results.report.reports import Report, report_of


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a complete classification run with a measured baseline, without PNG files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynckfold.results.report.page.update_figures", lambda *_, **__: None)
        return report_of(tmp_path_factory.mktemp("complete") / "run")


@pytest.fixture(autouse=True)
def without_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no PNG files, which takes seconds and which few tests look at."""
    monkeypatch.setattr("asynckfold.results.report.page.update_figures", lambda *_, **__: None)
