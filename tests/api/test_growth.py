"""A run that grows: the same folder, nothing trained twice, and the bits of a run begun so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, EarlyStopping, InputError, RunStore, load_results
from asynckfold.results.compare import compare_runs
from asynckfold.store import splits
from asynckfold.training import checkpoint
from tests.toy import Tiny, adam, samples

LINEAR = {"linear": lambda: nn.Linear(8, 3)}
MODELS, BOTH = {"Tiny": Tiny, **LINEAR}, ["constant", "cosine"]


def call(
    root: Path, models: Any = LINEAR, schedulers: Any = ("constant",), epochs: int = 2, **given: Any
) -> CVResults:
    """A quick run in this process, of jobs that are trained one by one."""
    settings = {"verbose": 0, "report": False, "threads_per_job": 1, "fuse": False, **given}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, False, **settings)
    return kfold(models, list(schedulers), adam, {"epochs": epochs})


def assert_equal_bits(one: Path, other: Path) -> None:
    with RunStore.read(one) as first, RunStore.read(other) as second:
        compared = compare_runs(first, second)
    assert (compared.plan, compared.results, compared.identical) == ("", "", True)


def trained(root: Path) -> list[str]:
    """The job of each attempt, in their order."""
    with RunStore.read(root) as store:
        return [attempt.job_id for attempt in store.attempts()]


def forget(root: Path) -> None:
    """Forget some jobs, as if the run had been killed before them."""
    with RunStore.hold(root) as store, store.file.transaction():
        for table in ("attempts", "results", "checkpoints"):
            store.file.execute(f"DELETE FROM {table} WHERE job_id LIKE '%/constant/%'")


def test_repeats_are_added(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, write = call(root, {"Tiny": Tiny}), splits.write

    def killed(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(splits, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        call(root, {"Tiny": Tiny}, n_repeats=2)
    monkeypatch.setattr(splits, "write", write)
    assert load_results(root).fingerprint == begun.fingerprint
    for place in (root, tmp_path / "whole"):
        call(place, {"Tiny": Tiny}, n_repeats=2)
    assert_equal_bits(root, tmp_path / "whole")
    again = call(root, {"Tiny": Tiny}, BOTH, n_repeats=2)
    assert len(trained(root)) == len({*trained(root)}) == len(again.plan.jobs) == 12
    assert np.load(root / "oof/Tiny-constant.npz")["outputs"].shape == (2, 60, 3)


def test_a_call_of_fewer_candidates_sees_these_alone(root: Path) -> None:
    whole, view = call(root, MODELS, BOTH), call(root)
    assert [row.name for row in view.candidates] == ["linear/constant"]
    assert view.model().weight.shape == (3, 8)
    assert load_results(root).fingerprint == whole.fingerprint
    forget(root)
    assert call(root).fingerprint == view.fingerprint
    assert {*trained(root)[6:]} == {*view.results}
    assert call(root, MODELS, BOTH).fingerprint == whole.fingerprint
    assert len(trained(root)) == 12


def test_a_fusion_group_is_trained_whole(root: Path) -> None:
    whole = call(root, schedulers=BOTH, fuse=6)
    assert [len(group) for group in whole.plan.groups] == [6]
    assert call(root).counts["done"] == 3
    forget(root)
    with pytest.raises(InputError, match="the others of their fusion group"):
        call(root)
    assert call(root, schedulers=BOTH).fingerprint == whole.fingerprint


def negative(targets: Any, outputs: Any) -> float:
    return -float(np.mean(targets))


def test_scores_are_added_without_training(root: Path, tmp_path: Path) -> None:
    begun = call(root)
    grown = call(root, scoring={"f1_macro": "f1_macro", "negative": negative})
    assert grown.plan.scoring == ("f1_macro", "negative", "accuracy")
    assert call(root, scoring=["accuracy"]).plan.scoring[0] == "accuracy"
    assert len(trained(root)) == 3
    for name, result in begun.results.items():
        assert grown.results[name].scores.items() > result.scores.items()
        summary = json.loads((root / f"{name}/summary.json").read_text())
        assert summary["scores"].keys() == grown.results[name].scores.keys()
    # What is trained has all scores of the run.
    with pytest.raises(InputError, match="scoring without f1_macro, negative"):
        call(root, n_repeats=2)
    every = {"accuracy": "accuracy", "f1_macro": "f1_macro", "negative": negative}
    for place in (root, tmp_path / "whole"):
        call(place, n_repeats=2, scoring=every)
    assert_equal_bits(root, tmp_path / "whole")
    with pytest.raises(InputError, match="scorer 'negative': one there, none here"):
        call(root, n_repeats=2, scoring={**every, "negative": "neg_log_loss"})


def test_scores_need_outputs_that_were_kept(root: Path) -> None:
    begun = call(root, keep_outputs_gib=0)
    with pytest.raises(InputError, match=r"no outputs were kept.*keep_outputs_gib"):
        call(root, scoring=["accuracy", "f1_macro"], keep_outputs_gib=0)
    assert load_results(root).fingerprint == begun.fingerprint


def test_more_epochs_go_on_where_the_lr_schedule_allows_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", math.inf)
    for place, epochs in ((root, 3), (root, 5), (tmp_path / "whole", 5)):
        call(place, schedulers=BOTH, epochs=epochs)
    assert_equal_bits(root, tmp_path / "whole")
    with RunStore.read(root) as store:
        (text,) = (event.text for event in store.events() if event.text.startswith("epochs"))
    assert text.endswith("jobs: 3 continued from a checkpoint, 3 trained anew")
    assert "continues after epoch 2" in (root / "linear/constant/fold-0/log.txt").read_text()


def layered(width: int = 4, layers: int = 1, **others: Any) -> nn.Module:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), *hidden, nn.Linear(width, 3))


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum)


def searched(root: Path, refit: bool | str = False, **params: list[Any]) -> CVResults:
    settings = {"verbose": 0, "report": False, "threads_per_job": 1, "fuse": False}
    kfold = AsyncKFold(
        3, samples(), root, nn.CrossEntropyLoss(), 10, False, refit=refit, **settings
    )
    return kfold({"net": layered}, ["constant"], sgd, {"epochs": 1}, params=params)


def test_a_parameter_is_added_whose_default_is_what_was_run(root: Path) -> None:
    searched(root, lr=[0.1, 0.01])
    both = searched(root, lr=[0.1, 0.01], momentum=[0.0, 0.9], width=[4, 8])
    assert len(trained(root)) == len({*trained(root)}) == 3 * 8
    assert {"net/constant/lr=0.1", "net/constant/lr=0.1,momentum=0.9,width=8"} <= {
        row.name for row in both.candidates
    }
    with RunStore.read(root) as store:
        (text,) = {event.text for event in store.events() if "defaults" in event.text}
    assert "net/width=4 is net" in text
    assert "constant/lr=0.1,momentum=0.0 is constant/lr=0.1" in text
    # The same call again, and a subset of it, find everything.
    assert searched(root, lr=[0.1, 0.01], momentum=[0.0, 0.9], width=[4, 8]).counts["done"] == 24
    assert searched(root, lr=[0.1], width=[4]).counts["done"] == 3
    assert len(trained(root)) == 24


@pytest.mark.parametrize("params", [{"width": [8]}, {"momentum": [False]}, {"depth": [1]}])
def test_what_is_no_default_is_another_candidate(root: Path, params: dict[str, list[Any]]) -> None:
    """Another value, one of another type, and of a parameter that no factory names."""
    searched(root, lr=[0.1])
    with pytest.raises(InputError, match="another plan"):
        searched(root, lr=[0.1], **params)


def test_jobs_that_stopped_early_stay(root: Path, tmp_path: Path) -> None:
    stops = {"callbacks": [EarlyStopping(patience=1, min_delta=10.0)], "inner_valid": 0.2}
    for place, epochs in ((root, 4), (root, 6), (tmp_path / "whole", 6)):
        call(place, epochs=epochs, **stops)
    assert len(trained(root)) == 3
    assert_equal_bits(root, tmp_path / "whole")


def test_stored_weights_predict_without_the_data(root: Path) -> None:
    made = call(root, MODELS, refit="linear/constant")
    results, rows = load_results(root, models=LINEAR), torch.from_numpy(samples()[0][:5])
    for fold in (2, "all"):
        one, other = (each.model("linear/constant", fold)(rows) for each in (made, results))
        assert torch.equal(one, other)
    with pytest.raises(InputError, match=r"received linear\. Pass Tiny, too"):
        results.model("Tiny/constant")
    with pytest.raises(InputError, match=r"received 'other'\. They are Tiny, linear"):
        load_results(root, models={"other": Tiny})


def test_stored_weights_of_a_grid_go_into_models_of_its_values(root: Path) -> None:
    made, rows = searched(root, True, width=[4, 8]), torch.from_numpy(samples()[0][:5])
    results = load_results(root, models={"net": layered})
    for name, fold in [*((row.name, 0) for row in made.candidates), (None, "all")]:
        assert torch.equal(*(each.model(name, fold)(rows) for each in (made, results)))
