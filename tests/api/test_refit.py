"""`refit`: the best candidate on all samples, as reliable as the folds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import Dataset

from asynckfold import (
    AsyncKFold,
    CVResults,
    InputError,
    JobsFailedWarning,
    RefitFailedError,
    RunStore,
    StoreCorruptError,
    fit,
    load_results,
)
from asynckfold.cli import main
from tests.api.test_fold_models import same
from tests.started import Nursery, training
from tests.toy import Failing, Tiny, adam, samples

X, Y = samples()


def called(
    root: Path, model: Any = Tiny, params: Any = None, data: Any = (X, Y), **settings: Any
) -> CVResults:
    settings = {"verbose": 0, "baseline": None, "parallelize": False, "refit": True, **settings}
    kfold = AsyncKFold(3, data, root, nn.CrossEntropyLoss(), 10, **settings)
    models = model if isinstance(model, dict) else {"Tiny": model}
    return kfold(models, ["step", "cosine"], adam, {"epochs": 2, **(params or {})})


def told(root: Path) -> list[str]:
    with RunStore.read(root) as store:
        return [event.text for event in store.events() if event.kind == "refit"]


def test_it_is_what_fit_trains_on_all_samples(root: Path) -> None:
    results = called(root, parallelize=True)
    best = results.best_params_
    alone = fit(
        Tiny, (X, Y), adam, nn.CrossEntropyLoss(), root.with_name("alone"), 10,
        scheduler=best["scheduler"], epochs=2, verbose=0, parallelize=False,
    )  # fmt: skip
    assert results.refitted is not None
    assert results.refitted.fingerprint == alone.results.fingerprint
    state = results.state_dict(fold="all")
    assert same(state, alone.model.state_dict())
    again = results.best_estimator_
    assert isinstance(again, Tiny)
    assert not again.training
    assert same(again.state_dict(), state)
    assert results.refitted.ensemble().predict(X).shape == Y.shape
    place = f"refit/Tiny/{best['scheduler']}"
    assert results.refitted.root_dir == root / place
    (text,) = told(root)
    assert text.startswith(f"Tiny/{best['scheduler']} was trained on all 60 samples in ")
    assert text.endswith(place)
    page = results.report().read_text()
    assert text in page
    seen = "Scored on training samples"
    assert seen not in page
    assert seen in results.refitted.report().read_text()
    assert seen in alone.results.report().read_text()


@pytest.mark.damages("of what is broken, hasattr says that it is not there")
def test_to_ask_for_the_best_estimator_never_raises(root: Path) -> None:
    results = called(root)
    for weights in (root / "refit").rglob("*.safetensors"):
        weights.write_bytes(b"damaged")
    assert not hasattr(results, "best_estimator_")
    with pytest.raises(StoreCorruptError):
        results.model(fold="all")


def test_a_candidate_is_refitted_by_name_and_the_best_by_that_word(root: Path) -> None:
    best = called(root, refit="best").candidates
    results = called(root)
    name = f"Tiny/{results.best_params_['scheduler']}"
    (other,) = {row.name for row in best} - {name}
    assert len(told(root)) == 1  # "best" is True: nothing was trained again
    named = called(root.with_name("named"), refit=other)
    assert named.refitted is None  # that of the best
    assert named.plan.fingerprint == results.plan.fingerprint
    alone = fit(
        Tiny, (X, Y), adam, nn.CrossEntropyLoss(), root.with_name("alone"), 10,
        scheduler=other.partition("/")[2], epochs=2, verbose=0, parallelize=False,
    )  # fmt: skip
    found = named.on_all_samples(other)
    assert found.fingerprint == alone.results.fingerprint
    assert isinstance(named.model(other, "all"), Tiny)
    with pytest.raises(InputError, match=f"refit='{name}'"):
        named.on_all_samples(name)


@pytest.mark.parametrize("refit", ["Tiny/cosin", "second", "", 1, ["Tiny/step"]])
def test_a_refit_of_no_candidate_is_refused_before_the_start(root: Path, refit: Any) -> None:
    with pytest.raises(InputError, match="or the name of a candidate: received ") as refused:
        called(root, refit=refit)
    assert "The candidates are Tiny/step, Tiny/cosine." in str(refused.value)
    assert ("Did you mean 'Tiny/cosine'?" in str(refused.value)) == (refit == "Tiny/cosin")
    assert not root.exists()


def height(labels: Any, outputs: Any) -> float:
    """A score of the number of outputs, on top of what differs by fold."""
    return float(labels[:7].mean()) - {3: 0.0, 4: 0.01, 5: 9.0}[outputs.shape[1]]


def test_refit_selects_by_one_standard_error_or_by_a_function(root: Path) -> None:
    models = {
        "top": lambda: nn.Linear(8, 3),
        "near": lambda: nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 4)),
        "far": lambda: nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 5, bias=False)),
    }
    simple = called(root, models, scoring=height, refit="1se")
    error = simple.candidates[0].scores["height"].std(ddof=1) / 3**0.5
    assert 0.01 < error < 9
    assert simple.best_params_ == {"model": "near", "scheduler": "step"}
    lowest = called(root, models, scoring=height, refit=lambda it: it["mean_test_height"].argmin())
    assert lowest.best_index_ == 4
    assert not hasattr(lowest, "best_score_")
    for results, name in ((simple, "near"), (lowest, "far")):
        assert results.refitted is not None
        assert {job.model for job in results.refitted.plan.jobs} == {name}
        assert "top" in str(results.verdict)
    for wrong in (6, -1, True, 0.0):
        with pytest.raises(InputError, match="refit must return the index of a candidate"):
            called(root, models, scoring=height, refit=lambda _, wrong=wrong: wrong)


def test_the_folds_are_as_without_it_and_nothing_is_trained_twice(root: Path) -> None:
    without = called(root, refit=False)
    assert without.refitted is None
    assert not (root / "refit").exists()
    results = called(root)
    assert results.fingerprint == without.fingerprint
    assert results.plan.fingerprint == without.plan.fingerprint
    first = results.refitted
    again = called(root).refitted
    assert first is not None
    assert again is not None
    assert [item.attempt for item in again.results.values()] == [1]
    assert again.seconds == first.seconds
    assert len(told(root)) == 1
    with RunStore.read(root) as store:
        stored = load_results(store).state_dict(fold="all")
    assert same(stored, results.state_dict(fold="all"))


class Named(Dataset[tuple[Any, int]]):
    """Samples that are read one by one, with labels that are no numbers of classes."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return X[number], 10 * int(Y[number])


@pytest.mark.nightly(but=["data0-settings0", "data3-settings3"])
@pytest.mark.parametrize(
    ("data", "settings"),
    [
        ((X, Y), {"preprocess": StandardScaler(), "groups": np.arange(60) // 2}),
        ((X, Y), {"targets": np.array(list("abc"))[Y]}),
        (Named(), {"targets": Y}),
        (Named(), {"n_repeats": 2, "train_transform": lambda inputs: inputs + 0.5}),
    ],
)
def test_all_that_belongs_to_samples_goes_with_them(
    root: Path, data: Any, settings: dict[str, Any]
) -> None:
    found = called(root, data=data, **settings).refitted
    assert found is not None
    ((train, valid),) = [(fold.train, fold.valid) for fold in found.folds]
    with RunStore.read(found.root_dir) as store:
        _, targets = store.splits()
    assert (len(train), len(valid)) == (60, 60)
    np.testing.assert_array_equal(targets[train], targets[valid])
    np.testing.assert_array_equal(targets[train], Y)


class Balks(Tiny):
    """Cannot be trained on a sample of each fold."""

    CULPRITS: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.met: set[int] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            rows = torch.from_numpy(X[self.CULPRITS])
            self.met |= {n for n, row in enumerate(rows) if (inputs == row).all(dim=1).any()}
            if len(self.met) == len(rows):
                raise RuntimeError("all of them")
        return super().forward(inputs)


def test_where_it_fails_the_folds_keep_their_results(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds = called(root.with_name("folds"), refit=False).folds
    monkeypatch.setattr(Balks, "CULPRITS", [int(fold.valid[0]) for fold in folds])
    with pytest.raises(RefitFailedError, match=r"(?s)on all samples; the results.*all of them"):
        called(root, Balks)
    with RunStore.read(root) as store:
        results = load_results(store)
    assert results.counts["done"] == results.counts["planned"]
    assert results.refitted is None
    assert told(root) == [
        f"{results.candidates[results.best_index_].name} failed on all samples; the results of "
        "the folds stay"
    ]
    with pytest.raises(InputError, match=r"fold='all' needs a candidate.*refit=True \(--refit\)"):
        results.state_dict(fold="all")
    with pytest.raises(InputError, match="a run's folder holds none"):
        _ = results.best_estimator_


def test_where_none_is_best_none_is_refitted(root: Path) -> None:
    with pytest.warns(JobsFailedWarning):
        results = called(root, Failing)
    assert results.refitted is None
    assert told(root) == ["nothing was refitted: no candidate has a score on every fold"]
    with pytest.warns(JobsFailedWarning):
        called(root, Failing, refit="Tiny/step")
    assert told(root)[1:] == ["nothing was refitted: Tiny/step does not have a score on every fold"]


SWEEP = """
import time
from pathlib import Path
from torch.nn import CrossEntropyLoss as criterion
from tests.toy import Tiny, adam as opt_fn, samples

class Tiny(Tiny):
    def forward(self, inputs):
        if self.training and Path("SLOW").exists():
            time.sleep(0.1)
        return super().forward(inputs)

dataset, criterion, models, schedulers = samples(), criterion(), [Tiny], ["cosine"]
settings = {"kfolds": 3, "batch_size": 10, "baseline": None, "refit": True}
trainer_params = {"epochs": 6}
"""


@pytest.mark.nightly
def test_killed_in_the_middle_the_same_command_continues_it(
    tmp_path: Path,
    warm: Nursery,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.py").write_text(SWEEP)
    golden, root = tmp_path / "golden", tmp_path / "run"
    line = ["run", "sweep.py", "--quiet", "--no-report", "--root"]
    assert main([*line, str(golden)]) == 0
    Path("SLOW").touch()
    run = warm.start(["-m", "asynckfold", *line, str(root)], tmp_path / "printed")
    place = root / "refit" / "Tiny" / "cosine"
    deadline = time.monotonic() + 200
    while not training(place):
        assert time.monotonic() < deadline, run.printed()
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGKILL)
    run.wait(60)
    assert told(root) == []
    capsys.readouterr()
    assert main(["status", str(root)]) == 0
    assert (
        "Tiny/cosine on all samples: pending, killed while 1 job was running; continue with: "
        f"asynckfold {' '.join(line)} {root}"
    ) in capsys.readouterr().out
    Path("SLOW").unlink()
    assert main([*line, str(root)]) == 0
    whole = load_results(golden / "refit" / "Tiny" / "cosine")
    assert load_results(place).fingerprint == whole.fingerprint
    assert len(told(root)) == 1
    assert main(["status", str(root)]) == 0
    assert "Tiny/cosine on all samples: done" in capsys.readouterr().out
    with RunStore.read(place) as store:
        assert [item.attempt for item in store.results().values()] == [2]
