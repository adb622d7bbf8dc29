"""A grid of parameters: the same bits as calls with the values written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from asynckfold import AsyncKFold, CVResults, InputError, PlanMismatchError, load_results
from asynckfold.cli import main
from tests.toy import samples

X, Y = samples()
CE = nn.CrossEntropyLoss()
GRID = {"lr": [1e-3, 1e-2], "width": [4, 16]}


class Net(nn.Sequential):
    """With dropout, so that random streams matter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


def linear() -> nn.Module:
    return nn.Linear(8, 3)


def falling(optimizer: torch.optim.Optimizer, gamma: float = 0.9) -> ExponentialLR:
    return ExponentialLR(optimizer, gamma)


def adam(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    settings = {
        "verbose": 0, "baseline": None, "parallelize": False, "threads_per_job": 1,
        "report": False, "fuse": False, **settings,
    }  # fmt: skip
    return AsyncKFold(2, (X, Y), root, CE, 10, **settings)


def called(root: Path, params: Any = None, n_iter: Any = None, **settings: Any) -> CVResults:
    models = {"net": Net, "linear": linear}
    return kfold(root, **settings)(
        models, ["cosine"], adam, {"epochs": 2}, params=params or GRID, n_iter=n_iter
    )


def bits(results: CVResults) -> dict[str, tuple[str, Any]]:
    return {
        name: (item.weights, None if item.outputs is None else item.outputs.tobytes())
        for name, item in results.results.items()
    }


def test_candidates_have_the_bits_of_calls_with_their_values(root: Path) -> None:
    params = {**GRID, "gamma": [0.5, 0.9]}
    schedulers = {"cosine": "cosine", "falling": falling}
    grid = kfold(root)({"net": Net}, schedulers, adam, {"epochs": 2}, params=params)
    found = bits(grid)
    assert len(found) == 2 * (4 + 8)
    for number, (lr, width) in enumerate((lr, width) for lr in GRID["lr"] for width in (4, 16)):
        alone = kfold(root.with_name(f"alone-{number}"))(
            {"net": lambda width=width: Net(width)},
            {"cosine": "cosine", **{
                f"falling {gamma}": lambda optimizer, gamma=gamma: falling(optimizer, gamma)
                for gamma in params["gamma"]
            }},
            lambda model, lr=lr: adam(model, lr),
            {"epochs": 2},
        )  # fmt: skip
        for name, own in bits(alone).items():
            _, schedule, fold = name.split("/")
            base, _, gamma = schedule.partition(" ")
            values = f"gamma={gamma},lr={lr},width={width}" if gamma else f"lr={lr},width={width}"
            assert found.pop(f"net/{base}/{values}/{fold}") == own
    assert not found


@pytest.fixture(scope="module")
def refitted(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    return called(tmp_path_factory.mktemp("refitted") / "run", refit=True)


def test_results_name_the_parameters(refitted: CVResults) -> None:
    results = refitted
    table = results.cv_results_
    assert table["params"][1] == {"model": "net", "scheduler": "cosine", "lr": 1e-3, "width": 16}
    assert table["params"][-1] == {"model": "linear", "scheduler": "cosine", "lr": 1e-2}
    assert list(table["param_width"]) == [4, 16, 4, 16, np.ma.masked, np.ma.masked]
    assert table["param_lr"].dtype == object
    frame = results.to_frame()
    assert set(frame["model"]) == {"net", "linear"}
    assert set(frame["param_lr"]) == set(GRID["lr"])
    assert set(results.to_frame("epoch").columns) > {"model", "param_lr", "param_width", "epoch"}
    text = str(results)
    assert "lr " in text.splitlines()[1]
    again = load_results(results.root_dir)
    assert again.best_params_ == results.best_params_
    assert again.cv_results_["params"] == table["params"]
    assert str(again) == text


def test_models_and_refits_are_rebuilt_with_their_values(refitted: CVResults) -> None:
    results = refitted
    for row in results.candidates:
        model = results.model(row.name)
        if row.params["model"] == "net":
            assert model[0].out_features == row.params["width"]
    name = "net/cosine/lr=0.01,width=16"
    assert results.ensemble(name).predict(X).shape == Y.shape
    best = results.best_params_
    alone = results.refitted
    assert alone is not None
    assert alone.best_params_ == best
    estimator = results.best_estimator_
    if best["model"] == "net":
        assert estimator[0].out_features == best["width"]
    with pytest.raises(InputError, match=r"candidate must be one of net/cosine/lr=0\.001,width=4"):
        results.model("net/cosine")


def test_the_verdict_compares_the_models_and_rates_of_a_grid(root: Path) -> None:
    results = kfold(root)({"net": Net}, ["cosine"], adam, {"epochs": 2}, params=GRID)
    scores = {row.name: row.mean("accuracy") for row in results.candidates}
    (models,), (rates,) = results.verdict.models, results.verdict.lr_schedules
    assert {models.first, models.second} == {"net/width=4", "net/width=16"}
    assert {rates.first, rates.second} == {"cosine/lr=0.001", "cosine/lr=0.01"}

    def mean(width: int) -> float:
        return float(
            np.mean([score for name, score in scores.items() if name.endswith(f"width={width}")])
        )

    assert abs(models.mean) == pytest.approx(abs(mean(4) - mean(16)))


def test_values_may_be_added_and_not_exchanged(root: Path) -> None:
    first = called(root)
    more = called(root, {**GRID, "lr": [0.1, *GRID["lr"]]})
    assert bits(first).items() <= bits(more).items()
    assert len(more.candidates) == 9
    assert len(called(root, {**GRID, "lr": [0.1]}).candidates) == 3
    with pytest.raises(PlanMismatchError, match=r"schedulers: .*lr=0.001.* there, .*lr=0.2 here"):
        called(root, {**GRID, "lr": [0.2]})
    with pytest.raises(PlanMismatchError, match=r"models: .*width=4.* there, .* here"):
        called(root, {"lr": [0.1, *GRID["lr"]]})


def test_what_a_named_object_holds_is_part_of_the_plan(root: Path) -> None:
    called(root, {"lr": {"small": 1e-3}, "width": {"narrow": 4}})
    called(root, {"lr": {"small": 1e-3}, "width": {"narrow": 4}}, resume="must")
    with pytest.raises(PlanMismatchError, match="width was 4, is 5"):
        called(root, {"lr": {"small": 1e-3}, "width": {"narrow": 5}})
    with pytest.raises(PlanMismatchError, match=r"scheduler 'cosine/lr=small'"):
        called(root, {"lr": {"small": 1e-2}, "width": {"narrow": 4}})


def test_problems_of_a_grid_come_with_all_others(root: Path) -> None:
    with pytest.raises(InputError) as refused:
        kfold(root)({"net": Net}, ["cosin"], adam, {"epochs": 0}, params={"rl": [1], "lr": []})
    text = str(refused.value)
    assert len(refused.value.problems) == 4
    assert "each name in params" in text
    assert not root.exists()


def test_a_bad_value_is_refused_or_fails_its_own_candidate_only(root: Path) -> None:
    with pytest.raises(InputError, match=r"Invalid learning rate.*keep_going=True"):
        called(root, {"lr": [-1.0, 1e-2]})
    with pytest.warns(UserWarning, match="Invalid learning rate"):
        results = called(root, {"lr": [-1.0, 1e-2]}, keep_going=True)
    failed = {item.job_id for item in results.results.values() if item.status != "done"}
    assert failed == {
        f"{model}/cosine/lr=-1.0/fold-{fold}" for model in ("net", "linear") for fold in (0, 1)
    }


def test_rates_are_fused_across_candidates(root: Path) -> None:
    separate = called(root)
    fused = called(root.with_name("fused"), fuse=True, n_jobs=1)
    assert {len(group) for group in fused.plan.groups} == {4}
    assert any("lr=0.01" in ids and "lr=0.001" in ids for ids in map(str, fused.plan.groups))
    for name, outputs in separate.oof.items():
        np.testing.assert_allclose(fused.oof[name], outputs, rtol=1e-3, atol=1e-4)
    first, second = (fused.oof[f"linear/cosine/lr={lr}"] for lr in GRID["lr"])
    assert np.abs(first - second).max() > 1e-2


# From the shell


def shell(*words: str) -> int:
    return main([*words, "--data", "digits", "--limit", "60"])


COMMON = ("--models", "mlp", "--folds", "2", "--epochs", "1", "--quiet", "--no-report")


def test_param_from_the_shell(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("run", "--root", str(root), *COMMON)
    assert shell(*line, "--param", "lr=1e-3,.01", "--param", "weight_decay=0") == 0
    table = capsys.readouterr().out
    assert "weight_decay" in table.splitlines()[0]
    names = [row.name for row in load_results(root).candidates]
    assert names == [f"mlp/constant/lr={lr},weight_decay=0" for lr in (0.001, 0.01)]
    assert main(["resume", str(root)]) == 0
    to = tmp_path / "found.csv"
    assert main(["predict", str(root), "--data", "digits", "--to", str(to)]) == 0
    assert len(to.read_text().splitlines()) == 1798


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--param", "1e-3"], "--param must be a name and values, such as lr=1e-3,1e-2"),
        (["--param", "lr=1,lr=2"], "--param must name lr once"),
        (["--param", "momentum=0.9"], "--momentum applies to sgd and rmsprop"),
        (["--param", "depth=3"], "each name in params must be a parameter"),
    ],
)
def test_a_bad_param_is_refused(
    words: list[str], told: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell("run", "--root", str(root), *COMMON, *words) == 2
    assert told in capsys.readouterr().err


def test_a_sweep_file_has_params(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.py"
    file.write_text(
        "from tests.api.test_grid import CE, X, Y, Net, adam\n"
        "dataset, criterion, models, schedulers, opt_fn = (X, Y), CE, [Net], ['cosine'], adam\n"
        "params = {'lr': [1e-3, 1e-2], 'width': [4]}\n"
        "trainer_params = {'epochs': 1}\n"
    )
    line = ["run", str(file), "--root", str(root), "--folds", "2", "--quiet", "--no-report"]
    assert main([*line, "--param", "lr=0.1"]) == 0
    found = [row.params for row in load_results(root).candidates]
    assert found == [{"model": "Net", "scheduler": "cosine", "lr": 0.1, "width": 4}]
