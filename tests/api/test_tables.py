"""Tables as people have them: files, columns of any type, targets in their own units."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    PowerTransformer,
    StandardScaler,
    TargetEncoder,
)
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, PlanMismatchError, load_model
from asynckfold import load_results as read
from asynckfold.cli import main
from asynckfold.models import MLP
from tests.interrupted import interrupted

DRAWS, ROWS = np.random.default_rng(0), np.arange(60)
TABLE = pd.DataFrame(
    {
        "age": np.where(ROWS % 7, DRAWS.normal(50, 9, 60), np.nan),
        "town": np.where(ROWS % 11, np.array([*"xyz"])[DRAWS.integers(0, 3, 60)], None),
        "size": pd.Categorical(np.array([*"SML"])[DRAWS.integers(0, 3, 60)], [*"SML"]),
        "day": pd.Timestamp("2026-01-01") + pd.to_timedelta(DRAWS.integers(0, 99, 60), "D"),
        "visits": 2**60 + DRAWS.integers(0, 9, 60),
    }
)
Y = (2e5 + 3e4 * (TABLE.town.eq("x") + DRAWS.normal(size=60))).to_numpy(np.float32)
FOLDS = [(np.flatnonzero((ROWS - at) % 3), np.arange(at, 60, 3)) for at in range(3)]
SCALED = (Y - 2e5) / 3e4
ONE, POWER, SCALE = SCALED[:, None], PowerTransformer(), "target_transform"
PARTS = (
    (make_pipeline(SimpleImputer(), StandardScaler()), ["age"]),
    (TargetEncoder(), ["town"]),
    (OneHotEncoder(handle_unknown="ignore"), ["size"]),
)
ENCODED = make_column_transformer(*PARTS)


def days(table: pd.DataFrame) -> Any:
    assert [str(kind)[:10] for kind in table.dtypes] == ["datetime64", "int64"]
    return np.column_stack([(table.day - pd.Timestamp("2026")).dt.days, table.visits - 2**60])


DATED = make_column_transformer(
    *PARTS, (make_pipeline(FunctionTransformer(days), StandardScaler()), ["day", "visits"])
)


def linear(size: int, count: int = 1) -> Any:
    one = [nn.Flatten(0)] if count == 1 else []
    return lambda: nn.Sequential(nn.Linear(size, count), *one)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def swept(root: Path, X: Any, y: Any, model: Any, **settings: Any) -> CVResults:
    settings = {"engine": "serial", "fuse": False, "threads_per_job": 1, **settings}
    folds, criterion = settings.pop("folds", FOLDS), settings.pop("criterion", nn.MSELoss())
    data = X if isinstance(X, str) else (X, y)
    kfold = AsyncKFold(folds, data, root, criterion, 8, verbose=0, report=False, **settings)
    return kfold({"mlp": model}, ["constant"], adam, {"epochs": 2})


def outputs(results: CVResults) -> Any:
    return results.oof["mlp/constant"]


def written(path: Path, target: Any) -> tuple[str, Any]:
    """Write a table of numbers and names; return its address, and its features by hand."""
    rows = pd.DataFrame(DRAWS.normal(size=(60, 2)), columns=["a", "b"]).round(3)
    kinds = [TABLE["size"] == kind for kind in "LMS"]
    rows.assign(kind=TABLE["size"], rings=target).to_csv(path, index=False)
    return f"csv:{path}", np.column_stack([rows, *kinds])


# A column of text, of dates, with gaps


def test_each_fold_is_fitted_on_its_training_part_as_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(name: str, X: Any = TABLE, **settings: Any) -> CVResults:
        return swept(tmp_path / name, X, SCALED, linear(7), **{"preprocess": DATED, **settings})

    results, (train, valid) = of("table"), FOLDS[0]
    fit, by_hand = clone(DATED), np.empty((60, 7), np.float32)
    np.random.seed(0)  # noqa: NPY002
    by_hand[train] = fit.fit_transform(TABLE.iloc[train], SCALED[train])
    by_hand[valid] = fit.transform(TABLE.iloc[valid])
    alone = of("hand", by_hand, preprocess=None, folds=FOLDS[:1])
    assert outputs(results)[valid] == pytest.approx(outputs(alone)[valid], abs=1e-6)
    assert outputs(of("fused", fuse=3)) == pytest.approx(outputs(results), abs=1e-5)
    with interrupted(monkeypatch, "training.training_run.Training", "end_epoch", 4):
        of("cut")
    assert of("cut").fingerprint == results.fingerprint
    with pytest.raises(PlanMismatchError, match="data"):
        of("table", TABLE.assign(town=TABLE.town.where(ROWS != 5, "w")))


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.CrossEntropyLoss()])
def test_a_file_is_a_table_for_a_preprocess_by_names(tmp_path: Path, criterion: Any) -> None:
    path, columns = tmp_path / "homes.csv", make_column_transformer(*PARTS)
    count = 1 if isinstance(criterion, nn.MSELoss) else 3
    y = SCALED if count == 1 else TABLE["size"].to_numpy()
    TABLE.drop(columns="day").round(3).assign(y=y).to_csv(path, index=False)
    table, settings = pd.read_csv(path).drop(columns="y"), {"preprocess": columns}
    net = linear(columns.fit_transform(table, y).shape[1], count)
    both = [
        swept(tmp_path / str(type(X)), X, y, net, criterion=criterion, **settings)
        for X in (f"csv:{path}", table)
    ]
    assert len({results.fingerprint for results in both}) == 1
    assert len({str(results.ensemble().predict(table)) for results in both}) == 1
    for text, message in (
        ("1,2\n3,4\n", "needs a file whose first row names them: received .*without a header"),
        ("a,b\n007,2\n11,3\n", "leading zeros may be codes: received '007' in 'a'"),
        ("a,b\n1,2\n3,\n", "target column 'b' must have no missing labels: received 1 missing"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            swept(tmp_path / "run", f"csv:{path}", None, net, **settings)


def test_predictions_take_a_table_by_the_names_of_its_columns(tmp_path: Path) -> None:
    results = swept(tmp_path / "run", TABLE, SCALED, linear(5), preprocess=ENCODED)
    results.ensemble().save(tmp_path / "net.safetensors")
    every = results.ensemble(), load_model(tmp_path / "net.safetensors", linear(5))
    new = TABLE.head(9).assign(more=1)[["more", *TABLE.columns[::-1]]]
    new.loc[3, "town"] = "a town that is new"
    wanted = []
    for fold, (train, _) in enumerate(FOLDS):
        seen = clone(ENCODED).fit(TABLE.iloc[train], SCALED[train]).transform(new[TABLE.columns])
        wanted.append(results.model(fold=fold)(torch.from_numpy(seen).float()).detach().numpy())
    for models in every:
        assert models.predict(new) == pytest.approx(np.mean(wanted, 0), abs=1e-6)
    for inputs, message in (
        (new.drop(columns="size"), "must have the columns of the data set.*'size' is missing"),
        (new.assign(age="old"), r"'age' of inputs must hold numbers.*received names"),
        (new.to_numpy(), "inputs must be a DataFrame with the columns of the data set"),
    ):
        for models in every:
            with pytest.raises(InputError, match=message):
                models.predict(inputs)
    with pytest.raises(InputError, match="factory must build the model"):
        load_model(tmp_path / "net.safetensors", lambda: linear(5)().append(nn.ReLU()))


def test_a_table_of_numbers_stays_one_where_columns_are_chosen(tmp_path: Path) -> None:
    numbers = TABLE[["age"]].assign(code=TABLE["size"].cat.codes)
    by_type = (OneHotEncoder(), make_column_selector(dtype_include=np.int8))
    chosen = make_column_transformer(by_type, (SimpleImputer(), ["age"]), sparse_threshold=0)
    results = swept(tmp_path / "run", numbers, SCALED, linear(4), preprocess=chosen)
    assert results.ensemble().predict(numbers).shape == (60,)


# Targets in their own units


def test_targets_are_transformed_on_each_training_part_as_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(name: str, y: Any = Y, scale: Any = "standardize", **settings: Any) -> CVResults:
        X = np.stack([ROWS, SCALED], 1)
        return swept(tmp_path / name, X, y, linear(2), target_transform=scale, **settings)

    results, (train, valid) = of("run"), FOLDS[0]
    mean, deviation = Y[train].mean(dtype=float), Y[train].std(dtype=float)
    by_hand = of("hand", (Y - mean) / deviation, None, folds=FOLDS[:1])
    wanted = outputs(by_hand)[valid] * deviation + mean
    assert outputs(results)[valid] == pytest.approx(wanted, rel=1e-5)
    r2 = [r2_score(Y[valid], outputs(results)[valid]) for _, valid in FOLDS]
    assert results.to_frame("fold").r2.tolist() == pytest.approx(r2, rel=1e-4)
    assert outputs(of("fused", fuse=3)) == pytest.approx(outputs(results), rel=1e-4)
    with interrupted(monkeypatch, "training.training_run.Training", "end_epoch", 4):
        of("cut")
    assert of("cut").fingerprint == results.fingerprint
    with pytest.raises(PlanMismatchError, match="target_transform"):
        of("run", scale=POWER)
    metric = {"r2": pytest.importorskip("torchmetrics").R2Score()}
    by_batch = of("batch", scoring=metric, keep_outputs_gib=0)
    assert by_batch.to_frame("fold").r2.tolist() == pytest.approx(r2, rel=1e-4)


def test_saved_models_predict_in_the_units_of_the_targets(tmp_path: Path) -> None:
    y = np.stack([Y, np.exp(Y / 1e5)], 1)
    results = swept(tmp_path / "run", ONE, y, linear(1, 2), target_transform=POWER)
    ensemble, each = results.ensemble(), []
    for fold, (train, _) in enumerate(FOLDS):
        fit, model = clone(POWER).fit(y[train].astype(float)), results.model(fold=fold)
        each.append(fit.inverse_transform(model(torch.from_numpy(ONE)).detach().double().numpy()))
    assert ensemble.predict(ONE) == pytest.approx(np.mean(each, 0), rel=1e-4)
    ensemble.save(tmp_path / "net.safetensors")
    loaded = load_model(tmp_path / "net.safetensors", linear(1, 2))
    assert np.array_equal(loaded.predict(ONE), ensemble.predict(ONE))
    assert "lambdas_" in ensemble.expects()["target_transform"]


# A file


def test_shell_and_python_and_arrays_give_the_same_numbers(tmp_path: Path) -> None:
    data, rows = written(tmp_path / "rows.csv", Y)
    flags = "--task regression --target-transform standardize --epochs 2 --folds 2 --lr .01"
    words = f"run --data {data} {flags} --root {tmp_path}/shell --batch-size 8 --no-report -q"
    assert main(shlex.split(f"{words} --threads-per-job 1 --engine serial --fuse no")) == 0
    scores = [list(read(tmp_path / "shell").candidates[0].scores["r2"])]
    model = lambda: MLP(5, num_classes=1).append(nn.Flatten(0))  # noqa: E731
    for name, X in {"csv": data, "arrays": rows}.items():
        scaler = {"preprocess": StandardScaler()} if name == "arrays" else {}
        settings = {"folds": 2, "target_transform": "standardize", **scaler}
        results = swept(tmp_path / name, X, Y, model, **settings)
        scores.append(list(results.candidates[0].scores["r2"]))
    assert scores[0] == scores[1] == scores[2]
    line = f"predict {tmp_path}/shell --data {data} --to {tmp_path}/new.csv"
    assert main(shlex.split(line)) == 0
    predicted = pd.read_csv(tmp_path / "new.csv").prediction.to_numpy()
    assert predicted == pytest.approx(results.ensemble().predict(rows), rel=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task regression --target kind", "column 'kind' must hold different, finite numbers"),
        ("--criterion mean", "--criterion must name a loss for the built-in models: received"),
        ("--criterion huber --task multiclass", "--criterion and --task must both be for numbers"),
        ("--task regression --data digits", "--task regression applies to csv: and npz: only"),
    ],
)
def test_what_is_no_regression_is_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, _ = written(tmp_path / "rows.csv", Y)
    assert main(shlex.split(f"run --data {data} --root {tmp_path}/run {words}")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("X", "settings", "message"),
    [
        ("digits", {}, "dataset must be a table in a file"),
        (TABLE, {}, r"X must hold numbers.*'town' \(.*preprocess=make_column_transformer"),
        (TABLE, {"preprocess": StandardScaler()}, "must work on the training.*gets a DataFrame"),
        (TABLE.rename(columns={"day": "age"}), {"preprocess": ENCODED}, "must have different name"),
        (TABLE.assign(town=[[1]] * 60), {"preprocess": ENCODED}, "must hold numbers, text.*'town'"),
        (ONE, {SCALE: "standard"}, "must be 'standardize', or a transformer with an inverse"),
        (ONE, {SCALE: StandardScaler}, "or a transformer with an inverse"),
        (ONE, {SCALE: POWER, "criterion": nn.PoissonNLLLoss()}, "outputs that are log-rate"),
        (ONE, {SCALE: FunctionTransformer(np.square)}, "must give the targets back"),
        (ONE, {SCALE: POWER, "model": linear(1, 2)}, "as many numbers as"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    X: Any, settings: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        swept(tmp_path / "run", X, Y, **{"model": linear(1), **settings})
    assert not (tmp_path / "run").exists()
