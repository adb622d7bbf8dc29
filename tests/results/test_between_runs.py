"""Two runs are compared: their scores fold by fold, or all their bits."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AsyncKFold, CVResults, RunStore, TrainerParams, load_results
from asynckfold.cli import main
from tests.outcomes import NAN, divided, results_of, written
from tests.results.test_verdict import LENET, MLP, plus
from tests.toy import Tiny, adam, samples

Said = Callable[..., dict[str, Any]]
FOLDS = divided(20, 5)


@pytest.fixture
def said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Said:
    """Write two runs, called old and new, and return what the command says of them."""
    monkeypatch.chdir(tmp_path)

    def compare(*runs: CVResults | Path, bits: bool = False) -> dict[str, Any]:
        names = ("old", "new")
        roots = [
            written(tmp_path / name, run).relative_to(tmp_path)
            if isinstance(run, CVResults)
            else run
            for name, run in zip(names, runs, strict=True)
        ]
        capsys.readouterr()
        code = main(["compare", *map(str, roots), "--json", *["--bits"] * bits])
        words: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == (bits and not words["identical"])
        return words

    return compare


def run_of(scores: dict[str, list[float]], **changes: Any) -> CVResults:
    return results_of(scores, **{"folds": FOLDS, **changes})


# Scores


def test_a_candidate_of_both_is_compared_fold_by_fold(said: Said) -> None:
    found = said(run_of({"net/step": MLP}), run_of({"net/step": LENET}))
    sentence = "new beats old by 2.3 points, on 5 of 5 folds (95 % interval 1.9 to 2.7)."
    assert found["sentences"] == [sentence]
    assert [found["difference"][name] for name in ("first", "second")] == ["new", "old"]
    (row,) = found["candidates"]
    assert row["means"] == pytest.approx((np.mean(MLP), np.mean(LENET)))
    assert row["difference"] == found["difference"]


def test_runs_are_compared_over_the_candidates_of_both(said: Said) -> None:
    old = {"a/x": MLP, "b/x": LENET, "gone/x": LENET}
    new = {"a/x": plus(MLP, 0.02, 0.021), "b/x": plus(LENET, 0.001, -0.001), "made/x": MLP}
    found = said(run_of(old), run_of(new))
    assert found["sentences"][0].startswith(
        "Over the 2 candidates of both, new beats old by 1.0 points, on 5 of 5 folds"
    )
    assert found["sentences"][1:] == ["Only in old: gone/x.", "Only in new: made/x."]
    a, b, gone, made = found["candidates"]
    assert [row["name"] for row in (a, b, gone, made)] == ["a/x", "b/x", "gone/x", "made/x"]
    assert a["difference"]["p"] < 0.05 < b["difference"]["p"]
    assert (gone["difference"], made["difference"], gone["means"][1]) == (None, None, None)


def test_without_a_candidate_of_both_the_best_ones_are_compared(said: Said) -> None:
    found = said(run_of({"a/x": MLP, "b/x": plus(MLP, 0.001)}), run_of({"c/x": LENET}))
    first, second = found["sentences"]
    assert first == "old and new have no candidate in common."
    assert second.startswith("Their best candidates: c/x of new beats b/x of old by 2")


def test_other_folds_and_other_data_are_named_and_not_tested(said: Said) -> None:
    other = run_of({"a/x": LENET}, folds=divided(25, 5), random_state=1, dataset="other")
    found = said(run_of({"a/x": MLP}), other)
    assert found["difference"] is found["candidates"][0]["difference"] is None
    assert found["sentences"] == [
        "The runs have different folds (random_state 0 and 1): no test in pairs is possible, and "
        "a difference of means may come from the folds.",
        "The samples or transforms of the runs differ.",
    ]


@pytest.mark.parametrize("failed", [1, 5])
def test_failed_folds_are_left_out_and_named(said: Said, failed: int) -> None:
    found = said(run_of({"a/x": [NAN] * failed + MLP[failed:]}), run_of({"a/x": LENET}))
    assert found["sentences"][-1] == "Incomplete in old: a/x."
    if failed == 5:
        assert found["difference"] is None
        return
    assert found["difference"]["folds"] == 4
    assert found["sentences"][0].startswith("new beats old by 2.")
    assert "on 4 of the 4 folds that both have" in found["sentences"][0]


def test_the_command_prints_scores_and_whether_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("old"), run_of({"net/step": LENET}))
    written(Path("new"), run_of({"net/step": MLP}, params=TrainerParams(epochs=3)))
    written(Path("f1"), run_of({"net/step": LENET}, metric="f1"))
    assert main(["compare", "old", "new"]) == 0
    sentence, head, row, *rest = capsys.readouterr().out.splitlines()
    assert sentence.startswith("old beats new by 2.3 points, on 5 of 5 folds")
    assert head.split()[:2] == ["accuracy", "of"]
    cells = "0.9834 ± 0.0033  0.9606 ± 0.0037     -0.0228  -0.0268 … -0.0188  < 0.001"
    assert " ".join(row.split()) == " ".join(f"net/step {cells}".split())
    assert rest[0].startswith("plan: params.epochs: ")
    assert rest[1] == "bits: not identical, --bits says where"
    assert main(["compare", "old", "old"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bits: identical"
    assert main(["compare", "old", "f1"]) == main(["compare", "old", "nothing"]) == 2
    errors = capsys.readouterr().err
    assert "a score in common: received accuracy and f1. Pass" in errors
    assert "DIR must be the folder of a run" in errors


def test_html_writes_a_page_with_the_differences_of_each_fold_and_of_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("old"), run_of({"net/step": LENET, "gone/step": LENET}))
    written(Path("new"), run_of({"net/step": MLP}, params=TrainerParams(epochs=3)))
    assert main(["compare", "old", "new", "--html", "pages/both.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "page: pages/both.html"
    page = Path("pages/both.html").read_text("utf-8").replace("\u00a0", " ")
    assert re.search("<h1>old beats new by 2.3 points, on 5 of 5 folds", page)
    assert "<p>Only in old: gone/step.</p>" in page
    cells = [f"{after - before:+.4f}" for before, after in zip(LENET, MLP, strict=True)]
    assert _rows(page, "new - old in each fold") == [["net/step", *cells]]
    net, gone = _rows(page, "accuracy in both runs")
    assert net[3:] == ["-0.0228", "-0.0268 to -0.0188", "< 0.001", "old is better"]
    assert (gone[2], gone[3:]) == ("n/a", ["n/a", "n/a", "–", "not compared"])
    plans = {row[0]: row[1:] for row in _rows(page, "What differs in the plans")}
    assert plans["epochs"][1] == "3"
    assert not {"params.epochs", "plan_fingerprint", "random_state"} & {*plans}
    # Points of five folds, in the figure of the differences.
    (drawn,) = re.findall('<figure id="figure-differences">(.*?)</figure>', page, re.S)
    assert drawn.count("<circle") == 5
    assert main(["compare", "old", "new", "--html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == "comparison.html"


def _rows(page: str, label: str) -> list[list[str]]:
    """Return the cells of the body of a table of a page."""
    (body,) = re.findall(f'<table[^>]* aria-label="{label}">.*?<tbody>(.*?)</tbody>', page, re.S)
    cells = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in body.split("</tr>")]
    return [[html.unescape(cell).replace("<wbr>", "") for cell in row] for row in cells if row]


def test_html_goes_without_bits_and_names_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "old", "new", "--bits", "--html", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "--html shows scores, and goes without --bits" in errors
    assert "--html must name a file" in errors


# Bits


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ by their seed."""
    root = tmp_path_factory.mktemp("golden")
    for seed in (0, 1):
        kfold = AsyncKFold(
            3, samples(), root / f"seed-{seed}", nn.CrossEntropyLoss(), 10,
            random_state=seed, engine="serial", baseline=None, report=False, verbose=0,
        )  # fmt: skip
        kfold([Tiny], ["cosine"], adam, {"epochs": 2})
    return root


def test_bits_of_a_run_are_identical_to_themselves_and_differ_by_the_seed(
    golden: Path, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = golden / "seed-0", golden / "seed-1"
    found = said(one, one, bits=True)
    assert (found["identical"], found["equal_jobs"], found["jobs"]) == (True, 3, 3)
    assert found["fingerprints"] == [load_results(one).fingerprint] * 2
    found = said(one, other, bits=True)
    assert (found["identical"], found["equal_jobs"]) == (False, 0)
    assert found["plan"] == "random_state: 0 there, 1 here"
    assert found["results"].startswith("Tiny/cosine/fold-0: epoch 1, ")
    assert main(["compare", str(one), str(one), "--bits"]) == 0
    assert capsys.readouterr().out.startswith("identical: 3 jobs, fingerprint ")


def test_one_changed_output_and_an_incomplete_run_are_reported(golden: Path, said: Said) -> None:
    results = load_results(golden / "seed-0")
    name = results.plan.jobs[1].id
    result = results.results[name]
    assert result.outputs is not None
    outputs = result.outputs.copy()
    outputs[7, 0] = np.nextafter(outputs[7, 0], np.float32(9))
    changed = {**results.results, name: replace(result, outputs=outputs)}
    found = said(golden / "seed-0", replace(results, results=changed), bits=True)
    assert (found["identical"], found["plan"], found["equal_jobs"]) == (False, "", 2)
    assert found["results"] == f"{name}: out-of-fold outputs of 1 samples, first in row 7"
    with RunStore.hold(Path("none")) as store:
        store.begin(results.plan, results.folds, np.zeros(60))
    assert not said(Path("none"), Path("none"), bits=True)["identical"]
    found = said(golden / "seed-0", Path("none"), bits=True)
    assert found["results"] == "Tiny/cosine/fold-0: done there, pending here"
