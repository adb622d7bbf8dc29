"""Folds from a file and to a file: positions, names of samples, and the task of OpenML."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset
from torchvision.datasets import DatasetFolder

from asynckfold import AsyncKFold, InputError
from tests.toy import Tiny, samples

CALL: tuple[Any, ...] = ([Tiny], ["constant"], lambda model: torch.optim.SGD(model.parameters()))


def kfold(root: Path, kfolds: Any, data: Any, **settings: Any) -> AsyncKFold:
    given = {"verbose": 0, "engine": "serial", "report": False, **settings}
    return AsyncKFold(kfolds, data, root, nn.CrossEntropyLoss(), 4, **given)


def planned(root: Path, kfolds: Any, data: Any = None) -> list[tuple[list[int], list[int]]]:
    if not isinstance(kfolds, SimpleNamespace):
        (root / "splits.json").write_text(json.dumps(kfolds))
        kfolds = root / "splits.json"
    folds = kfold(root / "run", kfolds, samples(4, 2) if data is None else data).plan(*CALL)[1]
    return [(fold.train.tolist(), fold.valid.tolist()) for fold in folds]


def files(root: Path) -> DatasetFolder:
    for name in ("cat/case.0", "cat/case.1", "dog/case.2", "dog/case.3"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / f"{name}.nii.gz").touch()
    return DatasetFolder(str(root), lambda path: torch.zeros(8), (".gz",))


def test_saved_folds_give_the_same_results(tmp_path: Path) -> None:
    first = kfold(tmp_path / "first", 2, samples(24, 2), n_repeats=2, inner_valid=0.34)(*CALL)
    first.save_splits(tmp_path / "splits.json")
    again = kfold(tmp_path / "again", tmp_path / "splits.json", samples(24, 2))(*CALL)
    assert (again.fingerprint, again.plan.folds) == (first.fingerprint, first.plan.folds)


@pytest.mark.parametrize("held_out", ["valid", "val", "test"])
def test_a_file_lists_positions_or_names(tmp_path: Path, held_out: str) -> None:
    swapped, data = [([0, 1], [2, 3]), ([3, 2], [1, 0])], files(tmp_path)
    folds: list[Any] = [{"train": one, held_out: two} for one, two in swapped]
    assert planned(tmp_path, folds) == swapped
    named = [{key: [f"case.{at}" for at in part] for key, part in fold.items()} for fold in folds]
    assert planned(tmp_path, named, data) == swapped
    assert planned(tmp_path, named[:1], Subset(data, [3, 2, 1, 0])) == [([3, 2], [1, 0])]


def test_a_task_of_openml_brings_its_folds(tmp_path: Path) -> None:
    def indices(fold: int, repeat: int) -> Any:
        return torch.tensor([repeat]).numpy(), torch.tensor([2 + repeat]).numpy()

    task = SimpleNamespace(split=None, get_split_dimensions=lambda: (2, 1, 1))
    task.get_train_test_split_indices = indices
    assert planned(tmp_path, task) == [([0], [2]), ([1], [3])]


@pytest.mark.parametrize(
    ("folds", "message"),
    [
        ({"train": []}, "a list of {train: .*received {'train'"),
        ([{"train": [0]}], "train and one of valid, .*received fold 0 with train"),
        ([{"train": [0], "val": [1], "test": [2]}], "one of valid"),
        ([{"train": [0], "val": [4]}], "fold 0: valid must hold positions from 0 to 3"),
        ([{"train": [0, 1], "val": [2], "inner_valid": [3]}], "must be a part of train"),
        ([{"train": ["case.0"], "val": ["b"]}], "'b', and names of samples such as 'case.0'"),
    ],
)
def test_a_file_that_lists_no_folds_is_refused(tmp_path: Path, folds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(tmp_path, folds, files(tmp_path))


def test_names_are_those_of_the_data_set_each_of_one_sample(tmp_path: Path) -> None:
    data, folds = files(tmp_path), [{"train": ["a"], "val": ["b"]}]
    with pytest.raises(InputError, match="'a', and a data set without names"):
        planned(tmp_path, folds)
    data.names = ["a", "a", "b", "b"]
    with pytest.raises(InputError, match="two samples 'a'"):
        planned(tmp_path, folds, data)
