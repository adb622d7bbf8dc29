"""Arrays that are read-only mappings of files reach workers as the same mappings, not as copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.data.shared_arrays import mapped_file
from tests.toy import adam, samples


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    path = tmp_path / "X.joblib"
    joblib.dump(samples(600)[0], path)
    return path


class Looks(nn.Linear):
    """Writes down which mappings its process has."""

    def __init__(self, told: Path) -> None:
        super().__init__(8, 3)
        self.told = told

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.told.write_text(Path("/proc/self/maps").read_text())
        return super().forward(inputs)


def test_workers_map_the_file_that_joblib_dumped(dumped: Path, root: Path, tmp_path: Path) -> None:
    labels = samples(600)[1]
    prints = []
    for folder, inputs, engine in (
        ("mapped", joblib.load(dumped, mmap_mode="r"), "process"),
        ("copied", joblib.load(dumped), "serial"),
    ):
        told = tmp_path / f"{folder}.maps"
        kfold = AsyncKFold(
            2, (inputs, labels), root / folder, nn.CrossEntropyLoss(), 200, verbose=0,
            baseline=None, fuse=False, threads_per_job=1, n_jobs=1, engine=engine,
        )  # fmt: skip
        results = kfold({"net": lambda told=told: Looks(told)}, ["constant"], adam, {"epochs": 1})
        prints.append((results.plan.dataset, results.fingerprint))
        assert folder == "copied" or str(dumped) in told.read_text()
    # The path of the log is a part of the models; their results are equal all the same.
    assert prints[0] == prints[1]


@pytest.mark.parametrize("part", [slice(None), slice(7, None)])
def test_the_place_in_the_file_is_found(dumped: Path, part: slice) -> None:
    array = joblib.load(dumped, mmap_mode="r")[part]
    found = mapped_file(array)
    assert found is not None
    assert np.array_equal(found.readable(), array)
    assert np.array_equal(found.spec.map(found.fd).numpy(), array)
    with pytest.raises(PermissionError):
        found.writable()
    found.close()


@pytest.mark.parametrize("mode", ["c", "r+", None])
def test_what_may_change_is_copied(dumped: Path, mode: Any) -> None:
    assert mapped_file(joblib.load(dumped, mmap_mode=mode)) is None


def test_a_file_that_was_replaced_is_not_taken_for_the_one_that_is_mapped(dumped: Path) -> None:
    array = joblib.load(dumped, mmap_mode="r")
    other = dumped.with_suffix(".new")
    joblib.dump(np.zeros((600, 8), np.float32), other)
    other.replace(dumped)
    assert mapped_file(array) is None
