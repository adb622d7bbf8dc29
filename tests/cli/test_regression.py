"""A table whose target is a number: from the shell, in Python, and by hand the same."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler
from torch import nn

from asynckfold import AsyncKFold, InputError, load_results
from asynckfold.cli import main
from asynckfold.models import MLP

SHORT = "--models mlp --epochs 2 --folds 2 --n-jobs 1 --no-report --quiet --lr .01"


def written(path: Path) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.normal(size=(60, 2)), columns=["a", "b"]).round(3)
    table["kind"] = np.array(["u", "v"])[draw.integers(0, 2, 60)]
    table["rings"] = (2 * table.a + (table.kind == "u") + draw.normal(size=60)).round(1)
    table.to_csv(path, index=False)
    return table


def mlp(columns: int = 4) -> nn.Module:
    return MLP(columns, num_classes=1).append(nn.Flatten(0))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def test_shell_and_python_and_arrays_give_the_same_numbers(tmp_path: Path) -> None:
    table = written(tmp_path / "rows.csv")
    data = f"csv:{tmp_path}/rows.csv"
    line = f"run --data {data} --task regression --root {tmp_path}/shell {SHORT}"
    assert main(shlex.split(line)) == 0
    shell = load_results(tmp_path / "shell")
    assert list(shell.to_frame("fold").filter(["r2", "accuracy"])) == ["r2"]
    kinds = [table.kind == kind for kind in "uv"]
    rows = np.column_stack([table.a, table.b, *kinds])
    arrays = {"csv": data, "arrays": (rows, table.rings.to_numpy())}
    for name, dataset in arrays.items():
        kfold = AsyncKFold(
            *(2, dataset, tmp_path / name, nn.MSELoss(), 32),
            preprocess=None if name == "csv" else StandardScaler(),
            **{"report": False, "verbose": 0, "engine": "serial"},
        )
        results = kfold({"mlp": mlp}, ["constant"], adam, {"epochs": 2})
        for fold in results.folds:
            r2 = r2_score(table.rings[fold.valid], results.oof["mlp/constant"][fold.valid])
            assert results.candidates[0].scores["r2"][fold.index] == pytest.approx(r2, abs=1e-6)
        assert list(results.candidates[0].scores["r2"]) == list(shell.candidates[0].scores["r2"])
    to = f"--to {tmp_path}/new.csv"
    assert main(shlex.split(f"predict {tmp_path}/shell --data {data} {to}")) == 0
    new = pd.read_csv(tmp_path / "new.csv")
    assert new.prediction.to_numpy() == pytest.approx(results.ensemble().predict(rows), abs=1e-5)


@pytest.mark.parametrize("word", ["huber", "SmoothL1Loss", "poisson-nll"])
def test_a_criterion_for_numbers_is_a_regression(word: str, tmp_path: Path) -> None:
    written(tmp_path / "rows.csv")
    line = f"train --data csv:{tmp_path}/rows.csv --criterion {word} --root {tmp_path}/run {SHORT}"
    assert main(shlex.split(line.replace("--folds 2 ", ""))) == 0
    assert load_results(tmp_path / "run").plan.objective_of("mlp").kind == "regression"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task regression --target kind", "column 'kind' must hold different, finite numbers"),
        ("--criterion mean", "--criterion must name a loss for the built-in models: received"),
        ("--criterion mse --task multiclass", "--criterion and --task must both be for numbers"),
        ("--task regression --data digits", "--task regression applies to csv: and npz: only"),
    ],
)
def test_what_is_no_regression_is_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "rows.csv")
    line = f"run --data csv:{tmp_path}/rows.csv --root {tmp_path}/run {SHORT} {words}"
    assert main(shlex.split(line)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_only_a_table_can_be_named_in_python(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dataset must be a table in a file"):
        AsyncKFold(2, "digits", tmp_path / "run", nn.MSELoss(), 8)
