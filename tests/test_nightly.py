"""The table of ``make nightly`` counts honestly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import nightly
from tests.nightly import Done


def test_every_part_is_counted_and_the_sum_is_told() -> None:
    told = nightly.table([Done("tests", 10, 1, 2.0), Done("chaos", 5, 0, 0.5)])
    assert "| tests | 10 | 9 | 1 | 2.0 |" in told
    assert told.endswith("| all | 15 | 14 | 1 | 2.5 |")


def test_a_part_that_failed_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly, "parts", lambda: {"a": lambda: (1, 1), "b": lambda: (2, 0)})
    assert nightly.main([]) == 1
    assert nightly.main(["b"]) == 0
    assert nightly.main(["c"]) == 2
    printed = capsys.readouterr().out
    assert "| all | 3 | 2 | 1 | 0.0 |" in printed
    assert "no part is called c: there are a, b" in printed


def test_files_that_need_the_machine_alone_are_not_run_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(nightly, "python", lambda *words: calls.append(words) or (1, ""))
    monkeypatch.setattr(nightly, "counted", lambda record, code: (1, 0))
    for name in ("tests", "clusters"):
        nightly.parts()[name]()
    beside, alone = calls
    assert beside[beside.index("--ignore-glob") + 1] == nightly.CLUSTERS
    assert alone[alone.index("-n") + 1] == "0"
    files = [word for word in alone if word.endswith(".py")]
    assert {Path(word).name for word in files} >= {"test_ray.py", "test_ray_plan.py"}


@pytest.mark.parametrize(
    ("code", "failures", "found"), [(0, 0, (4, 0)), (1, 2, (4, 2)), (3, 0, (4, 1))]
)
def test_failures_errors_and_a_bad_end_count(
    tmp_path: Path, code: int, failures: int, found: tuple[int, int]
) -> None:
    record = tmp_path / "junit.xml"
    suite = f'<testsuite tests="5" failures="{failures}" errors="0" skipped="1"/>'
    record.write_text(f"<testsuites>{suite}</testsuites>")
    assert nightly.counted(record, code) == found
    assert nightly.counted(tmp_path / "absent", 0) == (1, 1)


def test_an_environment_that_cannot_be_installed_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = "2 failed, 7 passed, 1 error in 3.0s\n"
    monkeypatch.setattr(nightly, "run", lambda *words: (1, printed))
    assert nightly.versions("lowest") == (10, 3)
    monkeypatch.setattr(nightly, "run", lambda *words: (2, "no such Python"))
    assert nightly.versions("lowest") == (1, 1)
