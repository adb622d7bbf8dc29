"""The scores of two runs, in pairs of folds where that is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import CVResults, Fold, InputError, Plan, Result, RunStore, TrainerParams
from asynckfold.cli import main
from asynckfold.jobs.plan import folds_fingerprint, make_jobs
from asynckfold.jobs.reproducibility import Reproducibility
from asynckfold.jobs.result import DONE, FAILED
from asynckfold.results.compare import ScoreComparison, compare_scores
from tests.results.test_verdict import LENET, MLP, NAN, plus

TARGETS = np.array([0, 1] * 10)
FOLDS = tuple(
    Fold(0, index, np.flatnonzero(np.arange(20) % 5 != index), np.arange(index, 20, 5))
    for index in range(5)
)


def run_of(scores: Mapping[str, Sequence[float]], **plan: Any) -> CVResults:
    """A run of these candidates on five folds; a NaN is a failed job."""
    names = [tuple(name.split("/")) for name in scores]
    models, lr_schedules = ([*dict.fromkeys(part)] for part in zip(*names, strict=True))
    jobs = [job for job in make_jobs(models, lr_schedules, FOLDS, 0) if job.candidate in scores]
    made = Plan(
        tuple(jobs), TrainerParams(), 4, 1, 0, "cpu", ("accuracy",), "data",
        folds_fingerprint(FOLDS),
    )  # fmt: skip
    results = {
        job.id: Result(job.id, 1, FAILED if math.isnan(score) else DONE, {"accuracy": score})
        for job in jobs
        for score in [scores[job.candidate][int(job.fold)]]
    }
    made = replace(made, **plan)
    return CVResults(
        made, FOLDS, 20, results, 1.0, None, Path(), error_score=NAN,
        bit_identity=Reproducibility(True),
    )  # fmt: skip


def compare(one: CVResults, other: CVResults) -> ScoreComparison:
    return compare_scores(one, other, ("old", "new"))


def test_a_candidate_of_both_is_compared_fold_by_fold() -> None:
    found = compare(run_of({"net/step": MLP}), run_of({"net/step": LENET}))
    assert found.sentences == (
        "new beats old by 2.3 points, on 5 of 5 folds (95 % interval 1.9 to 2.7).",
    )
    assert found.difference
    assert (found.difference.first, found.difference.second) == ("new", "old")
    (row,) = found.candidates
    assert row.means == pytest.approx((np.mean(MLP), np.mean(LENET)))
    assert row.difference == found.difference


def test_runs_are_compared_over_the_candidates_of_both() -> None:
    old = {"a/x": MLP, "b/x": LENET, "gone/x": LENET}
    new = {"a/x": plus(MLP, 0.02, 0.021), "b/x": plus(LENET, 0.001, -0.001), "made/x": MLP}
    found = compare(run_of(old), run_of(new))
    assert found.sentences[0].startswith(
        "Over the 2 candidates of both, new beats old by 1.0 points, on 5 of 5 folds"
    )
    assert found.sentences[1:] == ("Only in old: gone/x.", "Only in new: made/x.")
    by_name = {row.name: row for row in found.candidates}
    assert list(by_name) == ["a/x", "b/x", "gone/x", "made/x"]
    conclusions = [row.difference and row.difference.conclusion for row in found.candidates]
    assert conclusions == ["beats", "undecided", None, None]
    assert math.isnan(by_name["gone/x"].means[1])
    alone = compare(run_of({"a/x": MLP}), run_of({"a/x": new["a/x"]})).difference
    a = by_name["a/x"].difference
    assert a
    assert alone
    assert a.p == pytest.approx(2 * alone.p), "corrected for two candidates"


def test_without_a_candidate_of_both_the_best_ones_are_compared() -> None:
    found = compare(run_of({"a/x": MLP, "b/x": plus(MLP, 0.001)}), run_of({"c/x": LENET}))
    assert found.sentences[0] == "old and new have no candidate in common."
    assert found.sentences[1].startswith("Their best candidates: c/x of new beats b/x of old by 2")
    assert len(found.sentences) == 2


def test_other_folds_and_other_data_are_told_and_not_tested() -> None:
    found = compare(
        run_of({"a/x": MLP}),
        run_of({"a/x": LENET}, folds="others", random_state=1, dataset="other"),
    )
    assert found.difference is None
    assert found.candidates[0].difference is None
    assert found.sentences == (
        "The runs have different folds (random_state 0 and 1): no test in pairs is possible, and "
        "a difference of means may come from the folds.",
        "The samples or transforms of the runs differ.",
    )


def test_failed_folds_are_left_out_and_named() -> None:
    found = compare(run_of({"a/x": [NAN, *MLP[1:]]}), run_of({"a/x": LENET}))
    assert found.difference
    assert found.difference.folds == 4
    assert found.sentences[0].startswith("new beats old by 2.")
    assert "on 4 of the 4 folds that both have" in found.sentences[0]
    assert found.sentences[1] == "Incomplete in old: a/x."
    nothing = compare(run_of({"a/x": [NAN] * 5}), run_of({"a/x": LENET}))
    assert nothing.difference is None


def test_runs_without_a_score_in_common_are_refused() -> None:
    with pytest.raises(InputError, match=r"a score in common: received accuracy and f1.*--bits"):
        compare(run_of({"a/x": MLP}), run_of({"a/x": LENET}, scoring=("f1",)))


def write(root: Path, found: CVResults) -> None:
    with RunStore.hold(root) as store:
        store.begin(found.plan, FOLDS, TARGETS)
        for result in found.results.values():
            store.start_attempt(result.job_id, (), 1, "cpu", 0.0)
            store.record(result)


def test_the_command_prints_scores_and_says_whether_the_bits_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, run_of({"net/step": LENET}))
    write(new, run_of({"net/step": MLP}, params=TrainerParams(epochs=3)))
    assert main(["compare", str(old), str(new)]) == 0
    sentence, head, row, *rest = capsys.readouterr().out.splitlines()
    assert sentence.startswith(f"{old} beats {new} by 2.3 points, on 5 of 5 folds")
    assert head.split()[:2] == ["accuracy", "of"]
    cells = "0.9834 ± 0.0033  0.9606 ± 0.0037     -0.0228  -0.0268 … -0.0188  < 0.001"
    assert " ".join(row.split()) == " ".join(f"net/step {cells}".split())
    assert rest[0].startswith("plan: params.epochs: ")
    assert rest[1] == "bits: not identical, --bits says where"
    assert main(["compare", str(old), str(old)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bits: identical"
