"""Ordinary uses of the shell, of names and of studies whose numbers must be right."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AsyncKFold, InputError
from tests.toy import adam, samples

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs the extra optuna"
)


def linear(width: int = 8) -> nn.Module:
    return (
        nn.Linear(8, 3) if width == 8 else nn.Sequential(nn.Linear(8, width), nn.Linear(width, 3))
    )


def kfold(root: Path, folds: int = 2, **settings: Any) -> AsyncKFold:
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False, **settings}
    return AsyncKFold(folds, samples(), root, nn.CrossEntropyLoss(), 30, **given)


# Names


def test_names_come_back_as_they_were_written(tmp_path: Path) -> None:
    names = ["mlp,dropout=0.5", "p=0.1", "p=0.10"]
    schedules = {"lr=0.5": "constant", "lr=0.50": "cosine"}
    models = dict.fromkeys(names, linear)
    results = kfold(tmp_path)(models, schedules, adam, {"epochs": 1})
    pairs = [{"model": name, "scheduler": one} for name in names for one in schedules]
    assert results.cv_results_["params"] == pairs
    assert [row.params for row in results.candidates] == pairs
    frame = results.to_frame("fold")
    assert sorted(set(frame.model)) == sorted(names)
    assert sorted(set(frame.scheduler)) == sorted(schedules)
    assert not [name for name in frame.columns if name.startswith("param_")]
    for pair in pairs:
        assert results.model(f"{pair['model']}/{pair['scheduler']}", fold=0) is not None
    page = results.report()
    with (page.parent / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    written = [{name: row[name] for name in ("model", "scheduler")} for row in rows]
    assert sorted(map(str, written)) == sorted(map(str, pairs))


def test_a_grid_leaves_a_name_with_an_equals_sign_alone(tmp_path: Path) -> None:
    results = kfold(tmp_path)(
        {"width=4": linear}, ["constant"], adam, {"epochs": 1}, params={"width": [8, 4]}
    )
    assert results.cv_results_["params"] == [
        {"model": "width=4", "scheduler": "constant", "width": width} for width in (8, 4)
    ]


def test_a_name_that_no_file_can_hold_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Choose a plain name"):
        kfold(tmp_path)({"a\ud800": linear}, ["constant"], adam, {"epochs": 1})


# Studies


def studied(root: Path, direction: str, pruner: Any, **settings: Any) -> tuple[Any, Any]:
    import optuna

    from asynckfold.integrations.optuna import optimize

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction=direction, pruner=pruner)
    for width in (8, 4):
        study.enqueue_trial({"width": width})
    given = ({"net": linear}, ["constant"], adam, {"epochs": 1})
    best = optimize(kfold(root, 3, **settings), study, *given, params={"width": [8, 4]}, n_trials=2)
    return study, best


@needs_optuna
@pytest.mark.filterwarnings("ignore:.* is experimental")
@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("patient", [False, True])
def test_a_pruner_that_compares_folds_gets_their_scores(
    tmp_path: Path, direction: str, patient: bool
) -> None:
    from optuna.pruners import NopPruner, PatientPruner, WilcoxonPruner

    wilcoxon = WilcoxonPruner(p_threshold=0.0)
    pruner = PatientPruner(wilcoxon, patience=9) if patient else wilcoxon
    study, best = studied(tmp_path / "folds", direction, pruner)
    means, _ = studied(tmp_path / "folds", direction, NopPruner())
    sign = 1 if direction == "maximize" else -1
    for trial, other in zip(study.trials, means.trials, strict=True):
        scores = np.array(list(trial.intermediate_values.values()))
        running = np.cumsum(scores) / [1, 2, 3]
        assert list(other.intermediate_values.values()) == pytest.approx(running)
        assert trial.value == pytest.approx(scores.mean())
        assert not np.allclose(scores, running)
    assert best.best_score_ == pytest.approx(sign * study.best_value)
    assert best.best_params_["width"] == study.best_params["width"]
