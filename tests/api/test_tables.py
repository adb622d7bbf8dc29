"""Tables with text, categories, dates and gaps: `preprocess` gets them by their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler, TargetEncoder
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, PlanMismatchError, load_model
from tests.interrupted import interrupted

DRAWS = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {
        "age": np.where(np.arange(60) % 7, DRAWS.normal(50, 9, 60), np.nan),
        "town": np.where(np.arange(60) % 11, np.array([*"xyz"])[DRAWS.integers(0, 3, 60)], None),
        "size": pd.Categorical(np.array([*"SML"])[DRAWS.integers(0, 3, 60)], [*"SML"]),
        "day": pd.Timestamp("2026-01-01") + pd.to_timedelta(DRAWS.integers(0, 99, 60), "D"),
        "visits": 2**60 + DRAWS.integers(0, 9, 60),
    }
)
Y = (TABLE.town == "x").to_numpy() ^ (TABLE["size"] == "S").to_numpy()
FOLDS = [(np.flatnonzero(np.arange(60) % 3 != at), np.arange(at, 60, 3)) for at in range(3)]
ENCODED = make_column_transformer(
    (make_pipeline(SimpleImputer(), StandardScaler()), ["age"]),
    (TargetEncoder(), ["town"]),
    (OneHotEncoder(handle_unknown="ignore"), ["size"]),
)


def days(table: pd.DataFrame) -> Any:
    assert [str(kind)[:10] for kind in table.dtypes] == ["datetime64", "int64"]
    return np.column_stack([(table.day - pd.Timestamp("2026")).dt.days, table.visits - 2**60])


DATED = make_column_transformer(
    *[(part, names) for _, part, names in ENCODED.transformers],
    (make_pipeline(FunctionTransformer(days), StandardScaler()), ["day", "visits"]),
)


def swept(root: Path, X: Any, preprocess: Any, folds: Any = FOLDS, **settings: Any) -> CVResults:
    settings = {"engine": "serial", "fuse": False, "threads_per_job": 1, **settings}
    model = settings.pop("model", None) or (lambda: nn.Linear(5, 2))
    kfold = AsyncKFold(
        *(folds, (X, Y), root, nn.CrossEntropyLoss(), 8),
        **{"preprocess": preprocess, "verbose": 0, "report": False, **settings},
    )
    adam = lambda model: torch.optim.Adam(model.parameters(), 1e-2)  # noqa: E731
    return kfold({"net": model}, ["constant"], adam, {"epochs": 2})


def losses(results: CVResults) -> list[float]:
    epochs = results.to_frame("epoch")
    return epochs[epochs.epoch == 2].valid_loss.tolist()


def test_each_fold_is_fitted_on_its_training_part_as_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(7, 2)}
    results = swept(tmp_path / "table", TABLE, DATED, **settings)
    train, valid = FOLDS[0]
    fit, by_hand = clone(DATED), np.empty((60, 7), np.float32)
    np.random.seed(0)  # noqa: NPY002
    by_hand[train] = fit.fit_transform(TABLE.iloc[train], Y[train])
    by_hand[valid] = fit.transform(TABLE.iloc[valid])
    alone = swept(tmp_path / "hand", by_hand, None, FOLDS[:1], **settings)
    assert losses(results)[0] == pytest.approx(losses(alone)[0], abs=1e-6)
    fused = swept(tmp_path / "fused", TABLE, DATED, **settings, fuse=3)
    assert losses(fused) == pytest.approx(losses(results), abs=1e-5)
    with interrupted(monkeypatch, "training.training_run.Training", "end_epoch", 4):
        swept(tmp_path / "cut", TABLE, DATED, **settings)
    assert swept(tmp_path / "cut", TABLE, DATED, **settings).fingerprint == results.fingerprint
    other = TABLE.assign(town=TABLE.town.where(np.arange(60) != 5, "w"))
    with pytest.raises(PlanMismatchError, match="data"):
        swept(tmp_path / "table", other, DATED, **settings)


def test_predictions_take_a_table_by_the_names_of_its_columns(tmp_path: Path) -> None:
    results = swept(tmp_path / "run", TABLE, ENCODED)
    ensemble = results.ensemble()
    ensemble.save(tmp_path / "net.safetensors")
    loaded = load_model(tmp_path / "net.safetensors", lambda: nn.Linear(5, 2))
    new = TABLE.head(9).assign(more=1)[["more", *TABLE.columns[::-1]]]
    new.loc[3, "town"] = "a town that is new"
    wanted = []
    for fold in range(3):
        rows, model = FOLDS[fold][0], results.model(fold=fold)
        seen = clone(ENCODED).fit(TABLE.iloc[rows], Y[rows]).transform(new[TABLE.columns])
        wanted.append(model(torch.from_numpy(seen).float()).softmax(1).detach().numpy())
    for models in (ensemble, loaded):
        assert models.predict_proba(new) == pytest.approx(np.mean(wanted, 0), abs=1e-6)
    for inputs, message in (
        (new.drop(columns="size"), "must have the columns of the data set.*'size' is missing"),
        (new.assign(age="old"), r"'age' of inputs must hold numbers.*received names"),
        (new.to_numpy(), "inputs must be a DataFrame with the columns of the data set"),
        (new.head(0), "inputs must hold a sample"),
    ):
        for models in (ensemble, loaded):
            with pytest.raises(InputError, match=message):
                models.predict(inputs)
    with pytest.raises(InputError, match="factory must build the model"):
        load_model(tmp_path / "net.safetensors", lambda: nn.Sequential(nn.Linear(5, 2), nn.ReLU()))


def test_a_table_of_numbers_is_one_where_columns_are_named(tmp_path: Path) -> None:
    numbers = TABLE[["age"]].assign(code=TABLE["size"].cat.codes)
    by_type = make_column_selector(dtype_include=np.int8)
    named = make_column_transformer(
        (OneHotEncoder(), by_type), (SimpleImputer(), ["age"]), sparse_threshold=0
    )
    results = swept(tmp_path / "run", numbers, named, model=lambda: nn.Linear(4, 2))
    assert results.ensemble().predict(numbers).shape == (60,)


@pytest.mark.parametrize(
    ("X", "preprocess", "message"),
    [
        (TABLE, None, r"X must hold numbers.*'town' \(.*preprocess=make_column_transformer"),
        (TABLE, StandardScaler(), "preprocess must work on the training part.*It gets a DataFrame"),
        (TABLE.rename(columns={"day": "age"}), ENCODED, "must have different names: received age"),
        (TABLE.assign(town=[[1]] * 60), ENCODED, "must hold numbers, text.*received 'town': unhas"),
    ],
)
def test_what_no_model_can_take_is_refused(
    X: Any, preprocess: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        swept(tmp_path / "run", X, preprocess)
    assert not (tmp_path / "run").exists()
