"""What a job sets aside to watch its training: nothing is fitted on it, and a refit follows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.feature_selection import SelectKBest
from sklearn.model_selection import KFold, TimeSeriesSplit
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.optim import lr_scheduler

from asynckfold import (
    AsyncKFold,
    BestWeights,
    CVResults,
    EarlyStopping,
    InputError,
    RunStore,
    WeightAverage,
    fit,
    load_results,
)
from asynckfold.cli import main

COUNT = 90
X = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
X[:, 0] = np.arange(COUNT)  # the number of the sample
Y = np.arange(COUNT) % 2

Samples = frozenset[int]


class Note(TransformerMixin, BaseEstimator):
    """Notes on which samples it is fitted, and divides by their number."""

    fits: ClassVar[list[Samples]] = []

    def fit(self, rows: Any, targets: Any = None) -> Note:
        self.fits.append(frozenset(rows[:, 0].astype(int).tolist()))
        self.size_ = len(rows)
        return self

    def transform(self, rows: Any) -> Any:
        return np.c_[rows[:, :1], rows[:, 1:] / self.size_]


class Net(nn.Module):
    """Linear in all but the number of a sample; each instance notes what it trains on."""

    trained: ClassVar[list[set[int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), set[int]()
        self.trained.append(self.seen)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.update(inputs[:, 0].int().tolist())
        return self.layer(inputs[:, 1:])


class Plain(nn.Module):
    """The same, without notes, so that its jobs can be fused and continued."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs[:, 1:])


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    Note.fits.clear()
    Net.trained.clear()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def called(root: Path, schedulers: Any, model: Any = Net, **settings: Any) -> CVResults:
    params = {"epochs": settings.pop("epochs", 2), **settings.pop("params", {})}
    settings = {"engine": "serial", "verbose": 0, "report": False, "baseline": None, **settings}
    cv, data = settings.pop("cv", 3), settings.pop("data", (X, Y))
    kfold = AsyncKFold(cv, data, root, nn.CrossEntropyLoss(), 16, **settings)
    return kfold({"m": model}, schedulers, sgd, params)


def trained_on() -> set[Samples]:
    """The samples of each job; a dry run takes a batch only."""
    return {frozenset(seen) for seen in Net.trained if len(seen) > 16}


def fitted(results: CVResults) -> set[Samples]:
    return {frozenset(fold.fitted.tolist()) for fold in results.folds}


def epochs(results: CVResults, column: str) -> list[list[float]]:
    """A column of the table of epochs, by job."""
    frame = results.to_frame("epoch")
    return [rows[column].tolist() for _, rows in frame.groupby(["scheduler", "fold"])]


# What is fitted


def test_best_weights_see_chance_where_there_is_nothing_to_learn(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=(200, 3000)).astype(np.float32)
    results = called(
        tmp_path, ["constant"], lambda: nn.Linear(20, 2), epochs=10, inner_valid=0.3,
        data=(noise, np.arange(200) % 2), preprocess=SelectKBest(k=20),
        callbacks=[BestWeights("inner_accuracy")],
    )  # fmt: skip
    assert max(column[-1] for column in epochs(results, "inner_accuracy")) < 0.7


@pytest.mark.parametrize("settings", [{"inner_valid": 0.2}, {"inner_valid": 0.2, "groups": Y}, {}])
def test_preprocess_is_fitted_on_what_each_job_trains_on(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    groups = {"groups": np.arange(COUNT) // 5} if "groups" in settings else {}
    settings = {**settings, **groups, "preprocess": Note(), "refit": True, "baseline": "measure"}
    results = called(tmp_path, {"up": "constant", "down": "reduce"}, **settings)
    assert set(Note.fits) == trained_on()
    sizes = sorted({len(fold.fitted) for fold in results.folds})
    if "inner_valid" in settings:
        assert set(Note.fits) == fitted(results) | {frozenset(range(COUNT))}
    else:  # the refit of one candidate, too
        assert {60, 54} < {len(found) for found in Note.fits}
        assert sizes == [60]
    # The serial loop of the baseline has the same samples.
    assert results.baseline is not None
    for name, measured in results.baseline.epochs.items():
        mine = [epoch.train_loss for epoch in results.results[name].epochs]
        assert mine == pytest.approx([loss for _, loss in measured], rel=1e-4)


def test_fused_jobs_of_one_fold_are_fitted_apart_where_one_sets_samples_aside(
    tmp_path: Path,
) -> None:
    schedules = {"down": "reduce", "wave": "cosine"}
    given: dict[str, Any] = {"preprocess": StandardScaler(), "threads_per_job": 1}
    fused = called(tmp_path / "fused", schedules, Plain, fuse=6, **given)
    assert [len(group) for group in fused.plan.groups] == [6]
    alone = called(tmp_path / "alone", schedules, Plain, fuse=False, **given)
    for column in ("train_loss", "valid_loss"):
        np.testing.assert_allclose(epochs(fused, column), epochs(alone, column), rtol=1e-4)
    called(tmp_path / "noted", schedules, Plain, fuse=6, **{**given, "preprocess": Note()})
    assert sorted(len(found) for found in set(Note.fits)) == [54, 54, 54, 60, 60, 60]


def test_pretraining_criterion_and_sampler_do_not_see_what_is_set_aside(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {"criterion": [], "sampler": [], "pretrain": []}

    class Pretrained(Plain):
        def pretrain(self, inputs: Any, generator: Any, report: Any) -> None:
            seen["pretrain"].append(len(inputs))

    def criterion(train_targets: Any) -> Any:
        seen["criterion"].append(len(train_targets))
        return nn.CrossEntropyLoss()

    def sampler(train_targets: Any) -> Any:
        seen["sampler"].append(len(train_targets))
        return torch.ones(len(train_targets))

    kfold = AsyncKFold(
        3, (X, Y), tmp_path, criterion, 16, engine="serial", verbose=0, report=False,
        sampler=sampler,
    )  # fmt: skip
    kfold({"m": Pretrained}, ["reduce"], sgd, {"epochs": 1})
    assert set(seen["pretrain"]) == {54}
    # The last three are those of the jobs.
    assert seen["criterion"][-3:] == [54, 54, 54]
    assert seen["sampler"][-3:] == [54, 54, 54]


@pytest.mark.parametrize("settings", [{"inner_valid": 0.2}, {}])
def test_models_of_the_run_predict_by_the_same_fit(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    results = called(tmp_path / "run", ["reduce"], preprocess=Note(), **settings)
    jobs, before = set(Note.fits), len(Note.fits)
    said = results.ensemble().outputs(X)
    assert set(Note.fits[before:]) == jobs
    models = [results.model("m/reduce", fold.index) for fold in results.folds]
    size = {len(found) for found in jobs}.pop()
    inputs = torch.from_numpy(np.c_[X[:, :1], X[:, 1:] / size])
    with torch.no_grad():
        expected = np.mean([model(inputs).numpy() for model in models], axis=0)
    np.testing.assert_allclose(said, expected, rtol=1e-4, atol=1e-6)


def test_fit_does_so_too(tmp_path: Path) -> None:
    rows = np.arange(60)
    fit(
        Net, (X[rows], Y[rows]), sgd, nn.CrossEntropyLoss(), tmp_path, 16, valid=(X[60:], Y[60:]),
        scheduler="constant", epochs=1, verbose=0, engine="serial", preprocess=Note(),
        inner_valid=0.25,
    )  # fmt: skip
    assert set(Note.fits) == trained_on()
    assert [len(found) for found in trained_on()] == [45]


SWEEP = """
import numpy as np
from sklearn.preprocessing import StandardScaler
from torch.nn import CrossEntropyLoss as criterion
from tests.strangers.test_inner_validation import Plain, X, Y, sgd as opt_fn

dataset, criterion, models, schedulers = (X, Y), criterion(), {"m": Plain}, ["reduce"]
settings = {"kfolds": 3, "batch_size": 16, "preprocess": StandardScaler(), "engine": "serial"}
trainer_params = {"epochs": 1}
"""


def test_the_shell_predicts_by_the_same_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.py").write_text(SWEEP)
    assert main(["run", "sweep.py", "--root", "run", "--quiet", "--no-report"]) == 0
    np.savez("new.npz", X=X)
    # It compares its outputs for held-out samples with those that the run recorded.
    assert (
        main(["predict", "run", "--sweep", "sweep.py", "--data", "npz:new.npz", "--to", "said.npz"])
        == 0
    )
    results = called(tmp_path / "again", ["reduce"], Plain, epochs=1, preprocess=StandardScaler())
    said = np.load("said.npz")["probabilities"]
    np.testing.assert_allclose(said, results.ensemble().predict_proba(X), atol=1e-5)


def test_a_run_that_gains_such_a_candidate_is_as_one_that_began_with_it(tmp_path: Path) -> None:
    given: dict[str, Any] = {"preprocess": StandardScaler(), "model": Plain}
    whole = called(tmp_path / "whole", ["cosine", "reduce"], **given)
    called(tmp_path / "grown", ["cosine"], **given)
    grown = called(tmp_path / "grown", ["cosine", "reduce"], **given)
    assert grown.fingerprint == whole.fingerprint
    assert load_results(tmp_path / "grown").plan.reacting == ("m/reduce",)


# Where samples are in the order of time


class Past(KFold):
    """Folds that train on all before them."""

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[Any]:
        for start in (40, 60, 70):
            yield np.random.default_rng(0).permutation(start), np.arange(start + 5, start + 15)


FORWARD = {
    "splitter": TimeSeriesSplit(2, gap=2),
    "window": TimeSeriesSplit(3, max_train_size=30),
    "of one's own": Past(3),
    "pairs": [(np.arange(n), np.arange(n, n + 10)) for n in (40, 60, 80)],
}


@pytest.mark.parametrize("cv", FORWARD.values(), ids=FORWARD)
def test_the_last_part_of_ordered_folds_is_set_aside(tmp_path: Path, cv: Any) -> None:
    results = called(tmp_path, ["constant"], cv=cv, inner_valid=0.25, epochs=1)
    for fold in results.folds:
        assert len(fold.inner_valid) == round(len(fold.train) / 4)
        assert fold.fitted.max() < fold.inner_valid.min()
    assert trained_on() == fitted(results)


def test_so_does_an_lr_schedule_that_reacts(tmp_path: Path) -> None:
    results = called(tmp_path, ["reduce"], cv=TimeSeriesSplit(3), epochs=1)
    expected = {frozenset(range(round(len(fold.train) * 0.9))) for fold in results.folds}
    assert trained_on() == expected


def test_groups_stay_whole_and_the_latest_are_set_aside(tmp_path: Path) -> None:
    groups = np.arange(COUNT) // 6
    pairs = [(np.arange(n), np.arange(n, n + 12)) for n in (48, 72)]
    for fold in called(tmp_path, ["constant"], cv=pairs, groups=groups, inner_valid=0.3).folds:
        sides = [set(groups[rows]) for rows in (fold.fitted, fold.inner_valid)]
        assert max(sides[0]) < min(sides[1])
        assert len(sides[1]) == round(0.3 * len(set(groups[fold.train])))
    with pytest.raises(InputError, match=r"inner_valid=0\.3 must leave .*fold 0, 40 samples"):
        called(
            tmp_path / "one", ["constant"], inner_valid=0.3, groups=np.arange(COUNT) // 40,
            cv=[(np.arange(40), np.arange(40, 60)), (np.arange(40), np.arange(80, 90))],
        )  # fmt: skip


HELD_OUT = [np.arange(60, 75), np.arange(75, 90)]


@pytest.mark.parametrize("cv", [3, KFold(3), [(np.arange(60), rows) for rows in HELD_OUT]])
def test_other_folds_draw_what_they_set_aside(tmp_path: Path, cv: Any) -> None:
    for fold in called(tmp_path, ["constant"], cv=cv, inner_valid=0.25, epochs=1).folds:
        assert fold.inner_valid.min() < np.median(fold.train)


def test_it_is_said_that_a_reacting_schedule_divides_groups(tmp_path: Path) -> None:
    def notes(name: str, **settings: Any) -> list[str]:
        groups = np.arange(COUNT) // 5
        called(tmp_path / name, ["reduce", "cosine"], groups=groups, epochs=1, **settings)
        with RunStore.read(tmp_path / name) as store:
            return [event.text for event in store.events() if "groups" in event.text]

    (note,) = notes("single")
    assert note.startswith("m/reduce: the LR schedule reacts to a loss on single samples")
    assert not notes("whole", inner_valid=0.1)  # what it says


# Refits


WATCH = [EarlyStopping(patience=2), BestWeights()]


def cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=21)


@pytest.mark.parametrize("schedulers", [["cosine"], ["onecycle"], {"cycle": cycle}])
def test_a_refit_has_the_lr_schedule_of_the_folds_cut_at_the_chosen_epoch(
    tmp_path: Path, schedulers: Any
) -> None:
    given: dict[str, Any] = {"inner_valid": 0.25, "epochs": 20, "callbacks": WATCH, "refit": True}
    results = called(tmp_path, schedulers, Plain, **given)
    chosen = round(np.mean([best[-1] for best in epochs(results, "best_epoch")]))
    rates = max(epochs(results, "lr"), key=len)
    assert chosen < len(rates)
    assert results.refitted is not None
    assert epochs(results.refitted, "lr") == [rates[:chosen]]
    again = called(tmp_path, schedulers, Plain, **given).refitted
    assert again is not None
    assert again.seconds == results.refitted.seconds  # nothing was trained again


def test_a_refit_averages_from_the_epoch_from_which_the_folds_would(tmp_path: Path) -> None:
    """The last half of 40 epochs would count, which early stopping does not reach."""
    given: dict[str, Any] = {"inner_valid": 0.25, "epochs": 40, "refit": True}
    watch = [EarlyStopping(patience=1), BestWeights()]
    average = WeightAverage(None, start=0.5)
    results = called(tmp_path / "with", ["constant"], callbacks=[*watch, average], **given)
    without = called(tmp_path / "without", ["constant"], callbacks=watch, **given)
    assert max(len(column) for column in epochs(results, "lr")) < 20
    mine, theirs = (found.state_dict(fold="all") for found in (results, without))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("refit", [True, "m/own"])
def test_a_schedule_that_does_not_fit_a_refit_is_refused_before_the_folds(
    tmp_path: Path, refit: Any
) -> None:
    def schedules(steps: int) -> dict[str, Any]:
        return {"own": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, steps)}

    given: dict[str, Any] = {"params": {"lr_step": "batch"}, "refit": refit}
    told = r"must fit 12 steps, one each batch: .*Pass total_steps=12"
    with pytest.raises(InputError, match=told):
        called(tmp_path / "short", schedules(8), **given)
    assert not (tmp_path / "short" / "run.db").exists()
    refitted = called(tmp_path / "long", schedules(12), **given).refitted
    assert refitted is not None
    assert refitted.counts["done"] == 1
    # No refit of this candidate: its own steps are enough.
    called(tmp_path / "other", {**schedules(8), "b": "step"}, **{**given, "refit": "m/b"})


def test_a_callback_that_needs_what_a_refit_leaves_out_is_refused_before_the_folds(
    tmp_path: Path,
) -> None:
    class Needs:
        def on_epoch_end(self, state: Any) -> None:
            state.metrics["inner_loss"]

    class Reads:
        def on_epoch_end(self, state: Any) -> None:
            state.metrics.get("inner_loss")

    class Watches(Needs):
        monitor = "inner_loss"

    given: dict[str, Any] = {"inner_valid": 0.25, "epochs": 1}
    told = r"without inner_valid, which refit leaves out: received KeyError: 'inner_loss'"
    with pytest.raises(InputError, match=told):
        called(tmp_path / "needs", ["step"], callbacks=[Needs()], refit=True, **given)
    called(tmp_path / "alone", ["step"], callbacks=[Needs()], **given)
    for name, callback in (("reads", Reads()), ("watches", Watches())):
        found = called(tmp_path / name, ["step"], callbacks=[callback], refit=True, **given)
        assert found.refitted is not None
