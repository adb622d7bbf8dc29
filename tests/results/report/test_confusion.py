"""Which class was taken for which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from asynckfold import RunStore
from asynckfold.results.cv_results import read_results
from asynckfold.results.report.predictions import class_accuracy, count_classes
from tests.synthetic import Synthetic, write_run


def test_outputs_beyond_the_classes_extend_the_matrix(root: Path) -> None:
    write_run(root, Synthetic(classes=tuple("abcdefghij")))
    with RunStore.read(root) as store:
        found = replace(read_results(store), plan=replace(store.plan, classes=("a", "b")))
        _, targets = store.splits()
    counts = count_classes(found, targets % 2)
    (size,) = {len(table) for table in counts.values()}
    assert 2 < size <= 10
    assert all(table.shape == (size, size) for table in counts.values())
    assert all(table[2:].sum() == 0 and table.sum() == 300 for table in counts.values())


def test_two_dimensional_targets_are_not_counted(root: Path) -> None:
    write_run(root)
    with RunStore.read(root) as store:
        found = read_results(store)
        _, targets = store.splits()
    assert count_classes(found, targets[:, None]) == {}


def test_a_class_without_samples_has_no_accuracy() -> None:
    shares = class_accuracy(np.array([[0, 0], [1, 3]]), 2)
    assert np.isnan(shares[0])
    assert shares[1] == 0.75
