"""Ordinary uses of the shell, of names and of studies whose numbers must be right."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.preprocessing import StandardScaler
from torch import nn

from asynckfold import AsyncKFold, InputError, load_model, load_results
from asynckfold.cli import main
from asynckfold.models import MLP
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


# Weights of a table


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a table with columns of other scales, and one of names."""
    root = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    rows = random.normal(size=(90, 2)) * [100, 0.01] + [1000, 5]
    names = np.array(["blue", "red"])[random.integers(0, 2, 90)]
    kinds = np.where((rows[:, 0] > 1000) ^ (names == "red"), "yes", "no")
    lines = [
        f"{a},{name},{b},{kind}" for (a, b), name, kind in zip(rows, names, kinds, strict=True)
    ]
    (root / "table.csv").write_text("\n".join(["size,colour,weight,kind", *lines]))
    words = ["--epochs", "2", "--folds", "2", "--engine", "serial", "--no-report", "-q"]
    assert (
        main(["run", "--data", f"csv:{root}/table.csv", "--root", str(root / "run"), *words]) == 0
    )
    return root


def test_exported_weights_say_what_they_take(
    table_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, results = table_run / "bare.safetensors", load_results(table_run / "run")
    assert main(["export", str(table_run / "run"), "--fold", "1", "--to", str(path)]) == 0
    told = capfd.readouterr().err
    assert "size, colour=blue, colour=red, weight" in told
    assert "StandardScaler, as fitted in this fold" in told
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == ["no", "yes"]
    assert json.loads(about["features"]) == ["size", "colour=blue", "colour=red", "weight"]
    scaler = json.loads(about["preprocess"])["fitted"]
    table = pd.read_csv(table_run / "table.csv")
    columns = [table["size"], table.colour == "blue", table.colour == "red", table.weight]
    rows = (np.stack(columns, axis=1).astype(float) - scaler["mean_"]) / scaler["scale_"]
    model = built_in_mlp()
    model.load_state_dict(load_file(path))
    valid = results.folds[1].valid
    with torch.no_grad():
        outputs = model.eval()(torch.tensor(rows[valid], dtype=torch.float32)).numpy()
    recorded = results.results["mlp/constant/fold-1"].outputs
    assert recorded is not None
    np.testing.assert_allclose(outputs, recorded, rtol=1e-4, atol=1e-5)


def test_an_exported_model_predicts_as_the_run_does(table_run: Path) -> None:
    path, predictions = table_run / "model.safetensors", table_run / "predictions.csv"
    run, data = str(table_run / "run"), f"csv:{table_run}/table.csv"
    assert main(["export", run, "--model", "--to", str(path)]) == 0
    assert main(["predict", run, "--data", data, "--to", str(predictions)]) == 0
    table = pd.read_csv(table_run / "table.csv")
    columns = [table["size"], table.colour == "blue", table.colour == "red", table.weight]
    model = load_model(path, built_in_mlp)
    assert (model.size, model.classes) == (2, ("no", "yes"))
    probabilities = model.predict_proba(np.stack(columns, axis=1).astype(float))
    expected = pd.read_csv(predictions)[["p_no", "p_yes"]]
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5)
    one = table_run / "one.safetensors"
    assert main(["export", run, "--model", "--fold", "1", "--to", str(one)]) == 0
    assert load_model(one, built_in_mlp).size == 1


def built_in_mlp() -> nn.Module:
    model: nn.Module = MLP(4, num_classes=2)
    return model


def test_weights_of_a_script_say_what_their_file_lacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kfold(tmp_path / "run", preprocess=StandardScaler())({"net": linear}, ["constant"], adam)
    path = tmp_path / "weights.safetensors"
    assert main(["export", str(tmp_path / "run"), "--to", str(path)]) == 0
    told = capfd.readouterr().err
    assert "what preprocess fitted are not in the file" in told
    assert "inputs after: StandardScaler()" in told
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["0", "1", "2"]
