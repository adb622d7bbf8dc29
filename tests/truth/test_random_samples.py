"""Random datasets and random steps: pairs of one read, and no draw in the evaluation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset
from torchvision import datasets as tv
from torchvision import transforms as v1
from torchvision.transforms import v2

from asynckfold import AsyncKFold, InputError
from asynckfold.data.prepare import prepare
from asynckfold.data.transforms.random_numbers import (
    Draw,
    generators_kept,
    seed_generators,
)
from tests.truth.test_samples import COUNT, RANDOM, Rows, opened, without_files

# ---- random datasets: input and target of one read ----


class Joint(Dataset):  # type: ignore[type-arg]
    """Each read draws a class and gives its number as input, too."""

    def __init__(self, draw: Any = None, often: int = 1, count: int = COUNT) -> None:
        self.draw = draw or (lambda: random.randrange(3))
        self.often = often
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        target = self.draw() if index % self.often == self.often - 1 else index % 3
        return torch.tensor([float(target), float(index)]), target


DRAWS = {
    "random": lambda: random.randrange(3),
    "numpy": lambda: np.random.randint(3),  # noqa: NPY002
    "torch": lambda: int(torch.randint(3, ())),
    "normal": lambda: int(np.random.randn() > 0),  # noqa: NPY002
}


@settings(max_examples=4)
@given(
    name=st.sampled_from(sorted(DRAWS)),
    often=st.sampled_from([1, 2, COUNT - 1, COUNT]),
    rows=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=10),
    seed=st.integers(0, 2**63),
)
def test_input_and_target_are_of_one_read(
    name: str, often: int, rows: list[int], seed: int
) -> None:
    prepared = prepare(Joint(DRAWS[name], often), task="multiclass")
    assert any(RANDOM in note for note in prepared.notes)
    batches = opened(prepared)
    for epoch in range(2):
        inputs, targets = batches.train(np.array(rows), seed, epoch)
        assert inputs[:, 0].tolist() == targets.tolist()
        assert inputs[:, 1].tolist() == rows
    inputs, targets = batches.eval(np.array(rows))
    assert inputs[:, 0].tolist() == targets.tolist() == prepared.targets[rows].tolist()
    assert batches.targets_of(np.array(rows)).tolist() == targets.tolist()
    prepared.close()


def test_pairs_of_a_job_are_those_of_a_loop_by_hand() -> None:
    dataset = Joint()
    batches = opened(prepare(dataset, task="multiclass"))
    seen = set()
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(COUNT)
        ours = batches.train(order, 11, epoch)
        theirs = []
        with generators_kept():
            for index, seed in zip(order, Draw(11, epoch, order).bits().tolist(), strict=True):
                seed_generators(seed)
                theirs.append(dataset[int(index)])
        assert torch.equal(ours[0], torch.stack([x for x, _ in theirs]))
        assert ours[1].tolist() == [y for _, y in theirs]
        seen.add(tuple(ours[1][np.argsort(order)].tolist()))
    assert len(seen) == 3
    for view in prepare(dataset, task="multiclass").ordinary():
        read = [view[index] for index in range(COUNT)]
        assert [x[0].item() for x, _ in read] == [y.item() for _, y in read]
        assert {y.dtype for _, y in read} == {torch.int64}


def test_a_class_that_was_not_there_before_is_an_error() -> None:
    dataset = Joint(lambda: random.randrange(3) if random.random() < 0.5 else random.randrange(99))
    batches = opened(prepare(dataset, task="multiclass"))
    with pytest.raises(InputError, match=r"must give a target of one of the .* classes"):
        _ = [batches.train(np.arange(COUNT), 0, epoch) for epoch in range(20)]


def test_a_random_target_transform_makes_a_random_dataset() -> None:
    dataset = without_files(
        tv.CIFAR10, v1.ToTensor(), lambda y: y if random.random() < 0.5 else (y + 1) % 10
    )
    prepared = prepare(dataset, task="multiclass")
    assert any(RANDOM in note for note in prepared.notes)
    batches = opened(prepared)
    rows = np.arange(20)
    epochs = [batches.train(rows, 0, epoch)[1].tolist() for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert batches.eval(rows)[1].tolist() == prepared.targets.tolist()


def test_a_declared_random_dataset_is_never_held() -> None:
    declared = prepare(Rows([0, 1] * 10), random_samples=True)
    assert not declared.held
    assert any(RANDOM in note for note in declared.notes)
    assert prepare(Rows([0, 1] * 10)).held


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_pair_that_no_seed_gives_again_is_refused(make: Any) -> None:
    own = make(0)
    with pytest.raises(InputError, match=r"must give the same pair .* under the same seed"):
        prepare(Joint(lambda: int(own.random() * 1e6)), task="regression")


# ---- transforms that are random for some samples only ----


@settings(max_examples=4)
@given(
    lucky=st.sets(st.integers(0, COUNT - 1), min_size=1, max_size=3),
    name=st.sampled_from(sorted(DRAWS)),
    before=st.booleans(),
    budget=st.sampled_from([None, 1]),
)
def test_a_step_that_draws_for_some_samples_is_left_out_of_evaluation(
    lucky: set[int], name: str, before: bool, budget: int | None
) -> None:
    firsts = {float(index * 3) for index in lucky}

    def jitter(row: torch.Tensor) -> torch.Tensor:
        return row + 100 + DRAWS[name]() if row[0].item() in firsts else row

    def shift(row: torch.Tensor) -> torch.Tensor:
        return row * 2

    steps = [jitter] if before else [jitter, shift]
    dataset = Rows([0, 1] * (COUNT // 2), v1.Compose(steps))
    prepared = prepare(dataset, memory_budget=budget, task="multiclass")
    plain = torch.from_numpy(dataset.data) * (1 if before else 2)
    batches = opened(prepared)
    assert torch.equal(batches.eval(np.arange(COUNT))[0], plain)
    assert any("leaves out the random steps jitter" in note for note in prepared.notes)
    at = np.array(sorted(lucky))
    assert not torch.equal(batches.train(at, 0, 0)[0], plain[at])
    prepared.close()


@pytest.mark.parametrize("inside", ["step", "dataset"])
@pytest.mark.parametrize("budget", [None, 1])
def test_a_generator_of_its_own_is_seen_where_it_is_used_once(
    inside: str, budget: int | None
) -> None:
    own = np.random.default_rng(0)

    def jitter(row: torch.Tensor) -> torch.Tensor:
        return row + 1 + float(own.random()) if row[0].item() == 3 * 27 else row

    class Jittered(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            row, target = super().__getitem__(index)
            return jitter(row), target

    dataset = Jittered([0, 1] * 20) if inside == "dataset" else Rows([0, 1] * 20, jitter)
    prepared = prepare(dataset, memory_budget=budget)
    assert any("cannot be seeded" in note for note in prepared.notes)
    if inside == "dataset":
        assert any(RANDOM in note for note in prepared.notes)
    else:
        rows = torch.from_numpy(dataset.data)
        assert torch.equal(opened(prepared).eval(np.arange(40))[0], rows)


def test_an_ensemble_has_the_evaluation_of_its_run(tmp_path: Path) -> None:
    def jitter(row: torch.Tensor) -> torch.Tensor:
        return row + 50 * random.random() if row[0].item() == 3 * 27 else row

    dataset = Rows([0, 1] * 20, jitter)
    kfold = AsyncKFold(
        2,
        dataset,
        tmp_path / "run",
        torch.nn.CrossEntropyLoss(),
        8,
        verbose=0,
        parallelize=False,
        baseline=None,
        refit=True,
    )
    results = kfold(
        {"linear": lambda: torch.nn.Linear(3, 2)},
        ["constant"],
        lambda model: torch.optim.SGD(model.parameters(), 1e-4),
        {"epochs": 1},
    )
    plain = torch.from_numpy(dataset.data)
    for made in (results, results.on_all_samples()):
        ensemble = made.ensemble()
        found = ensemble.predict_proba(dataset)
        assert np.array_equal(found, ensemble.predict_proba(plain))
        assert np.array_equal(found, ensemble.predict_proba(dataset))


@pytest.mark.parametrize("budget", [None, 1])
def test_an_eval_transform_that_draws_for_one_sample_is_refused(budget: int | None) -> None:
    def jitter(row: torch.Tensor) -> torch.Tensor:
        return row + random.random() if row[0].item() == 3 * 27 else row

    with pytest.raises(InputError, match="random steps: jitter"):
        prepare(Rows([0, 1] * 20), eval_transform=jitter, memory_budget=budget)


def test_a_step_is_random_for_what_comes_to_it_without_the_steps_before() -> None:
    def marked(row: torch.Tensor) -> torch.Tensor:
        return row.clone().fill_(random.random() + 1)

    def jitter(row: torch.Tensor) -> torch.Tensor:
        return row + random.random() if row[0].item() == 0 else row

    prepared = prepare(Rows([0, 1] * 20, v1.Compose([marked, jitter])))
    rows = torch.from_numpy(Rows([0, 1] * 20).data)
    assert torch.equal(opened(prepared).eval(np.arange(40))[0], rows)


@pytest.mark.parametrize(
    "transform",
    [
        v1.Lambda(lambda row: row / 2),
        lambda row: row.mean(0, keepdim=True),
        torch.nn.Flatten(0),
        v2.Identity(),
    ],
)
def test_what_is_not_random_is_held_and_nothing_is_said(transform: Any) -> None:
    prepared = prepare(Rows([0, 1] * 20, transform), task="multiclass")
    assert prepared.held
    assert prepared.notes == ()
