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
    words = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False, **settings}
    return AsyncKFold(folds, samples(), root, nn.CrossEntropyLoss(), 30, **words)


# Names


def test_names_come_back_as_they_were_written(tmp_path: Path) -> None:
    names = ["mlp,p=0.1", "mlp,p=0.10"]
    schedules = {"lr=0.5": "constant"}
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
    call = ({"net": linear}, ["constant"], adam, {"epochs": 1})
    best = optimize(kfold(root, 3, **settings), study, *call, params={"width": [8, 4]}, n_trials=2)
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
    text = capfd.readouterr().err
    assert "features: size, colour=blue, colour=red, weight" in text
    assert "preprocess: StandardScaler" in text
    assert "classes: no, yes" in text
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == ["no", "yes"]
    assert json.loads(about["features"]) == ["size", "colour=blue", "colour=red", "weight"]
    scaler = json.loads(about["preprocess"])
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
    text = capfd.readouterr().err
    assert "unknown: transforms, and what preprocess fitted" in text
    assert "preprocess: StandardScaler()" in text
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["0", "1", "2"]


# Rows that belong together


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with six rows of each of twenty patients, whose class is drawn by coin."""
    random = np.random.default_rng(0)
    patient = np.repeat(np.arange(20), 6)
    rows = pd.DataFrame(random.normal(size=(20, 2))[patient], columns=["a", "b"])
    rows["a"] += random.normal(size=len(rows)) / 20
    rows.insert(0, "patient", [f"P{at:02d}" for at in patient])
    rows["part"] = np.array(["x", "y", "z"])[patient % 3]
    rows["kind"] = random.integers(0, 2, 20)[patient]
    path = tmp_path_factory.mktemp("patients") / "patients.csv"
    rows.to_csv(path, index=False)
    arrays = rows.assign(patient=patient, part=patient % 3).to_numpy(float)
    np.savez(path.with_suffix(".npz"), X=arrays[:, :4], y=arrays[:, 4].astype(int))
    return path


QUICK = ("--epochs", "1", "--engine", "serial", "--no-report", "-q")


@pytest.mark.parametrize(("source", "column"), [("csv", "patient"), ("npz", "0")])
def test_no_group_of_a_column_is_on_both_sides(
    patients: Path, tmp_path: Path, source: str, column: str
) -> None:
    data = ["--data", f"{source}:{patients.with_suffix('.' + source)}", "--groups", column]
    words = [*data, "--folds", "2", "--root", str(tmp_path), *QUICK]
    assert main(["run", *words]) == 0
    table = pd.read_csv(patients)
    for fold in load_results(tmp_path).folds:
        sides = set(table.patient[fold.train]), set(table.patient[fold.valid])
        assert not sides[0] & sides[1]
    alone = tmp_path / "alone"
    assert main(["train", *data, "--root", str(alone), *QUICK]) == 0
    (fold,) = load_results(alone).folds
    assert not set(table.patient[fold.train]) & set(table.patient[fold.valid])


@pytest.mark.parametrize(("source", "column"), [("csv", "part"), ("npz", "3")])
def test_each_value_of_a_column_is_a_fold(
    patients: Path, tmp_path: Path, source: str, column: str
) -> None:
    data = f"{source}:{patients.with_suffix('.' + source)}"
    words = ["--data", data, "--fold-column", column, "--root", str(tmp_path), *QUICK]
    assert main(["run", *words]) == 0
    table, results = pd.read_csv(patients), load_results(tmp_path)
    assert [sorted(set(table.part[fold.valid])) for fold in results.folds] == [["x"], ["y"], ["z"]]
    assert all(len(fold.train) + len(fold.valid) == len(table) for fold in results.folds)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--groups patent", "--groups must be a column of the file"),
        ("--groups kind", "--groups applies to features only"),
        ("--groups patient,part", "--groups must be one column"),
        ("--groups patient --keep patient", "a column is either a feature or none"),
        ("--fold-column part --folds 3 --repeats 2", "2 problems"),
        ("--fold-column patient --groups part", "a group must not be on both sides"),
        ("--groups gap", "--groups must have no missing values"),
    ],
)
def test_columns_that_cannot_divide_are_refused(
    patients: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, text: str
) -> None:
    table = pd.read_csv(patients)
    if "gap" in words:
        table["gap"] = table.patient.where(table.part != "x")
    table.to_csv(tmp_path / "table.csv", index=False)
    data = ["--data", f"csv:{tmp_path}/table.csv", "--target", "kind"]
    assert main(["run", *data, *words.split(), "--root", str(tmp_path / "run"), *QUICK]) == 2
    assert text in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_sources_have_no_columns_of_groups(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "digits", "--groups", "a", "--fold-column", "b"]) == 2
    text = capfd.readouterr().err
    assert "--groups applies to csv: and npz: only" in text
    assert "--fold-column applies to csv: and npz: only" in text


@pytest.mark.parametrize("drop", [[], ["--drop", "patient"]])
def test_a_likely_group_is_named(
    patients: Path, drop: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", f"csv:{patients}", *drop]) == 0
    text = capfd.readouterr().out
    assert "each of the 20 values of column 'patient' has one class" in text
    assert "pass --groups patient" in text
    assert "column 'part' has one class" not in text
    assert main(["data", f"csv:{patients}", "--groups", "patient"]) == 0
    text = capfd.readouterr().out
    assert "has one class" not in text
    assert "no value of column 'patient' is divided between folds: 20 groups" in text
    assert main(["data", f"npz:{patients.with_suffix('.npz')}"]) == 0
    assert "pass --groups 0" in capfd.readouterr().out


# Numbers that may be others


def test_numbers_that_may_be_others_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds = ("1E5", "1.037", "0.125", "1e-05"), ("2E3", "950", "1.250", "1.5")
    rows = [";".join([*kinds[at % 2], str(at * 7 % 11), "ab"[at % 2]]) for at in range(24)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["code;sales;share;rate;n;kind", *rows]))
    assert main(["data", f"csv:{path}"]) == 0
    text = capfd.readouterr().out
    assert "column 'code' such as 1E5, read as 100000; where these are codes, pass --cat" in text
    assert "column 'sales' such as 1.037, read as 1.037; where the point separates thous" in text
    for name in ("share", "rate", "n"):
        assert f"'{name}' such as" not in text
    assert main(["data", f"csv:{path}", "--category", "code", "--drop", "sales"]) == 0
    text = capfd.readouterr().out
    assert "exponent" not in text
    assert "thousands" not in text


def test_a_comma_in_numbers_has_two_remedies(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a,b,kind\n" + '"1,000",1,x\n"2,500",2,y\n' * 9)
    assert main(["data", f"csv:{path}"]) == 2
    text = capfd.readouterr().err
    assert "1000 for 1,000" in text
    assert "1.5 for 1,5" in text
    path.write_text(path.read_text().replace(",000", "000").replace(",500", "500"))
    assert main(["data", f"csv:{path}"]) == 0
    assert "1000 … 2500" in capfd.readouterr().out


@pytest.mark.parametrize(("greatest", "code"), [(1, 2), (16, 0), (255, 0)])
def test_dark_images_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], greatest: int, code: int
) -> None:
    images = np.random.default_rng(0).integers(0, greatest + 1, (30, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", X=images, y=np.arange(30) % 3)
    assert main(["data", f"npz:{tmp_path}/images.npz"]) == code
    text = "".join(capfd.readouterr())
    assert ("Multiply X by 255" in text) == (greatest == 1)
    assert ("if 16 is, multiply X by 255 / 16" in text) == (greatest == 16)
