"""A study by ask and tell: the scores of ordinary runs, pruned by fold, and continued."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError, RunStore
from tests.toy import samples

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs the extra optuna"
)
pytestmark = [pytest.mark.nightly, needs_optuna]
GRID = {"lr": [0.1, 0.001], "width": [4, 8]}


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False, **settings}
    return AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **given)


def study(path: Path, should_prune: Callable[[Any], bool] = lambda trial: False) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return should_prune(trial)

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    made = optuna.create_study(
        study_name="study",
        direction="maximize",
        storage=storage,
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=Pruner(),
    )
    for lr, width in itertools.product(*GRID.values()) if not made.trials else ():
        made.enqueue_trial({"lr": lr, "width": width})
    return made


def optimized(
    root: Path, study: Any, n_trials: int = 4, n_parallel: int = 1, **settings: Any
) -> Any:
    from asynckfold.integrations.optuna import optimize

    given = ({"net": network}, ["constant"], sgd, {"epochs": 2})
    words = {"n_trials": n_trials, "n_parallel": n_parallel}
    return optimize(kfold(root, **settings), study, *given, params=GRID, **words)


def stored(root: Path) -> dict[str, Any]:
    """The results of all jobs in the runs below a folder."""
    found = {}
    for path in sorted(root.glob("*/run.db")):
        with RunStore.read(path.parent) as store:
            found |= store.results()
    return found


def weights(root: Path) -> dict[str, str]:
    return {name: item.weights for name, item in stored(root).items()}


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_trials_have_the_scores_of_a_grid_and_are_trained_once(
    tmp_path: Path, n_parallel: int
) -> None:
    made = study(tmp_path / "journal")
    best = optimized(tmp_path / "study", made, n_parallel=n_parallel, refit=True)
    together = [
        item.number for item in made.trials if item.user_attrs["asynckfold_run"] == "trials-0"
    ]
    assert together == ([0, 1, 2] if n_parallel == 3 else [])
    grid = kfold(tmp_path / "grid")({"net": network}, ["constant"], sgd, {"epochs": 2}, params=GRID)
    expected = {
        (row.params["lr"], row.params["width"]): [
            grid.results[job.id].scores["accuracy"]
            for job in grid.plan.jobs
            if job.candidate == row.name
        ]
        for row in grid.candidates
    }
    assert len(made.trials) == 4
    for trial in made.trials:
        scores = expected[trial.params["lr"], trial.params["width"]]
        means = [sum(scores[: step + 1]) / (step + 1) for step in range(3)]
        assert list(trial.intermediate_values.values()) == pytest.approx(means)
        assert trial.value == pytest.approx(means[-1])
    assert best.best_score_ == pytest.approx(grid.best_score_)
    assert best.refitted.results
    assert weights(tmp_path / "study") == {
        name: item.weights for name, item in grid.results.items()
    }
    # A new study asks for the same parameters: their runs are there.
    before = {name: item.started for name, item in stored(tmp_path / "study").items()}
    again = study(tmp_path / "other")
    optimized(tmp_path / "study", again, n_parallel=n_parallel)
    assert [item.value for item in again.trials] == [item.value for item in made.trials]
    after = stored(tmp_path / "study")
    assert before == {name: item.started for name, item in after.items()}


@pytest.mark.parametrize(("engine", "n_parallel"), [("serial", 1), ("process", 1), ("serial", 4)])
def test_a_trial_is_pruned_between_folds(tmp_path: Path, engine: str, n_parallel: int) -> None:
    def slow_ones(trial: Any) -> bool:
        return bool(trial.params["lr"] == 0.001 and trial.last_step == 1)

    made = study(tmp_path / "journal", slow_ones)
    best = optimized(tmp_path / "study", made, n_parallel=n_parallel, engine=engine, n_jobs=2)
    for trial in made.trials:
        pruned = trial.params["lr"] == 0.001
        assert trial.state.name == ("PRUNED" if pruned else "COMPLETE")
        assert len(trial.intermediate_values) == (2 if pruned else 3)
        with RunStore.read(tmp_path / "study" / trial.user_attrs["asynckfold_run"]) as store:
            # Elsewhere, the last fold may have ended before the others.
            if engine != "serial":
                continue
            if n_parallel > 1:
                assert (store.counts()["done"], store.counts()["cancelled"]) == (10, 2)
                continue
            assert len(store.results()) == 3 - pruned
            told = [event.text for event in store.events() if event.kind == "interrupted"]
            assert told == ["pruned after 2 of 3 folds"] * pruned
    assert best.best_params_["lr"] == 0.1


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_a_killed_study_continues_with_the_same_bits(tmp_path: Path, n_parallel: int) -> None:
    class Killed(BaseException):
        pass

    def dies(trial: Any) -> bool:
        if trial.number == 1 and trial.last_step == 1:
            raise Killed
        return False

    with pytest.raises(Killed):
        optimized(tmp_path / "killed", study(tmp_path / "journal", dies), n_parallel=n_parallel)
    made = study(tmp_path / "journal")
    states = ["COMPLETE", "RUNNING", "WAITING", "WAITING"] if n_parallel == 1 else ["RUNNING"] * 4
    assert [item.state.name for item in made.trials] == states
    optimized(tmp_path / "killed", made, n_parallel=n_parallel)
    assert [item.state.name for item in made.trials] == ["COMPLETE"] * 4
    whole = study(tmp_path / "other")
    optimized(tmp_path / "whole", whole, n_parallel=n_parallel)
    assert {str(item.params): item.value for item in made.trials} == {
        str(item.params): item.value for item in whole.trials
    }
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_the_time_budget_is_that_of_all_trials(tmp_path: Path) -> None:
    made = study(tmp_path / "journal")
    found = optimized(tmp_path / "study", made, n_trials=400, time_budget_s=6.0)
    complete = [item for item in made.trials if item.value is not None]
    assert (found is None) == (not complete)
    assert len(made.trials) < 400


def test_what_cannot_be_a_study_is_refused_before_anything_starts(tmp_path: Path) -> None:
    import optuna

    from asynckfold.integrations.optuna import optimize

    made = optuna.create_study(direction="maximize")
    call = ({"net": network}, ["constant"], sgd)

    def refused(message: str, call: Any = call, **given: Any) -> None:
        words = {"params": GRID, "n_trials": 1, **given}
        with pytest.raises(InputError, match=message):
            optimize(kfold(tmp_path / "run"), made, *call, **words)

    refused("n_parallel must be a whole number of at least 1", n_parallel=0)
    refused("each name in params must be a parameter .* 'rate'", params={"rate": [1], **GRID})
    two = ({"net": network, "other": network}, ["constant"], sgd)
    refused("a trial is one candidate", call=two)
    assert not made.trials
    assert not (tmp_path / "run").exists()
