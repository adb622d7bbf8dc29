"""What makes cross-validation lie has a code, and what could not be checked is not passed."""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler
from torch import nn

from asynckfold import AsyncKFold, CVResults, Epoch, Fold, InputError, load_results
from asynckfold.cli import main
from tests.outcomes import results_of, written
from tests.toy import adam, samples

X, Y = samples()
NOISE = {f"m{at}/step": each for at, each in enumerate(np.random.default_rng(0).random((9, 5)))}
CLEAR = {"A/step": [0.9, 0.7, 0.8], "B/step": [0.6, 0.5, 0.6]}
ONE_FOLD = {"A/step": [1.0, 0.5, 0.5], "B/step": [0.6, 0.6, 0.6]}


def called(root: Path, data: Any, **settings: Any) -> CVResults:
    settings = {"verbose": 0, "parallelize": False, "report": False, "baseline": None, **settings}
    kfold = AsyncKFold(3, data, root, nn.CrossEntropyLoss(), 20, **settings)
    return kfold({"net": lambda: nn.Linear(8, 3)}, ["cosine"], adam, {"epochs": 8})


def test_what_samples_say_is_recorded_at_the_call(tmp_path: Path) -> None:
    table = np.concatenate([X, X[:12]]).astype(float)
    data = (table - table.mean(axis=0)) / table.std(axis=0, ddof=1), np.concatenate([Y, Y[:12]])
    leaking = called(tmp_path / "leaking", data)
    audit = load_results(tmp_path / "leaking").audit()
    assert audit == leaking.audit()
    assert audit.codes == ("duplicates", "standardized")
    copies, standardized = audit
    fold_of = {row: fold.index for fold in leaking.folds for row in fold.valid.tolist()}
    apart = [row for row in range(12) if fold_of[row] != fold_of[60 + row]]
    assert copies.evidence["samples"] == sorted([*apart, *(60 + row for row in apart)])
    assert standardized.evidence["columns"] == [*range(8)]
    assert [*audit.not_checked] == ["groups"]
    groups = np.arange(72) % 60
    shared = {item.code: item.evidence for item in leaking.audit(groups=groups)}
    assert shared == {**{item.code: item.evidence for item in audit}, "groups": copies.evidence}
    with pytest.raises(InputError, match="one label for each of the 72 samples"):
        leaking.audit(groups=groups[:3])
    sound = called(tmp_path / "sound", data, groups=groups, preprocess=StandardScaler()).audit()
    assert (sound.codes, sound.not_checked, sound.summary) == ((), {}, "no findings")


def test_a_choice_is_scored_by_other_folds_and_a_fold_that_decides_is_named() -> None:
    (finding,) = (item for item in results_of(NOISE).audit() if item.code == "chosen")
    table = np.array([*NOISE.values()])
    chosen = [table[np.delete(table, at, axis=1).mean(axis=1).argmax(), at] for at in range(5)]
    assert finding.evidence["score"] == pytest.approx(table.mean(axis=1).max())
    assert finding.evidence["score_of_choice"] == pytest.approx(np.mean(chosen))
    assert not {"chosen", "one-fold"} & {*results_of(CLEAR).audit().codes}
    alone = results_of({name: scores[:1] for name, scores in CLEAR.items()}).audit()
    assert {"chosen", "one-fold"} <= {*alone.not_checked}
    (finding,) = (item for item in results_of(ONE_FOLD).audit() if item.code == "one-fold")
    assert finding.evidence == {"first": "A/step", "first_without": {"fold 0": "B/step"}}


def test_a_class_that_a_part_of_a_fold_lacks(tmp_path: Path) -> None:
    rows = np.arange(6)
    folds = [Fold(0, 0, rows[:3], rows[3:]), Fold(0, 1, rows[::2], rows[1:4])]
    lacking = results_of({"A/step": [0.9, 0.9]}, folds=folds, classes=("even", "odd"))
    (finding,) = load_results(written(tmp_path / "run", lacking)).audit()
    expected = {"training part of fold 1": ["odd"]}
    assert (finding.code, finding.evidence) == ("class-missing", expected)


def test_a_candidate_no_better_than_a_constant(tmp_path: Path) -> None:
    for metric, low, high in [
        ("accuracy", 0.52, 0.53),
        ("neg_log_loss", -0.7, -0.6),
        ("r2", -1, 1),
    ]:
        scores = {"A/step": [low - 0.01, low + 0.01], "B/step": [high, high]}
        classes = () if metric == "r2" else ("even", "odd")
        root = written(tmp_path / metric, results_of(scores, metric, classes=classes))
        (finding,) = load_results(root).audit()
        assert (finding.code, [*finding.evidence["scores"]]) == ("worse-than-constant", ["A/step"])


@pytest.mark.parametrize(
    ("length", "left"), [(5, 0.0), (10, None), (11, None), (100, (1 + cos(pi / 10)) / 2)]
)
def test_a_schedule_that_ends_early_or_never(length: int, left: float | None) -> None:
    results, rates = results_of(CLEAR), [(1 + cos(pi * at / length)) / 2 for at in range(10)]
    epochs = tuple(Epoch(at, 1.0, 1.0, None, rate, 0.0) for at, rate in enumerate(rates, 1))
    plan = replace(results.plan, params=replace(results.plan.params, epochs=10))
    ended = {name: replace(item, epochs=epochs) for name, item in results.results.items()}
    facts = {
        item.code: item.evidence for item in replace(results, plan=plan, results=ended).audit()
    }
    each = dict.fromkeys(CLEAR, pytest.approx(left))
    assert facts.get("schedule") == (None if left is None else {"rate_left": each})


def test_the_command_fails_on_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = written(tmp_path / "run", results_of(ONE_FOLD, classes=("even", "odd")))
    for codes, code in [("one-fold", 1), ("any", 1), ("class-missing", 0), ("duplicates", 1)]:
        assert main(["report", str(root), "--fail-on", codes]) == code
        assert "\none-fold: A/step has the highest mean, but " in capsys.readouterr().out
    assert "one-fold" in (root / "report" / "index.html").read_text()
    assert main(["report", str(tmp_path), "--fail-on", "one-fold,two-fold"]) == 2
    assert "must name codes of the audit" in capsys.readouterr().err
