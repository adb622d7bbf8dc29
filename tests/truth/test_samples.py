"""What a job trains on and is scored on is what the dataset gives, in pairs of one read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, Subset
from torchvision import datasets as tv
from torchvision import transforms as v1
from torchvision.transforms import v2

from asynckfold.data.dataset import open_source
from asynckfold.data.prepare import PreparedData, prepare
from asynckfold.data.transforms.random_numbers import Draw, generators_kept, seed_generators

COUNT = 40
RANDOM = "the dataset itself is random"


def opened(prepared: PreparedData) -> Any:
    handle = prepared.handle()
    return handle.open(handle.fds)


def pairs(batches: Any, rows: Any) -> list[tuple[list[float], Any]]:
    inputs, targets = batches.eval(np.asarray(rows))
    return [(x.flatten().tolist(), y.tolist()) for x, y in zip(inputs, targets, strict=True)]


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows of numbers with the attributes of torchvision's datasets, which need not be true."""

    def __init__(self, targets: Any, transform: Any = None, flipped: Any = ()) -> None:
        self.targets = list(targets)
        self.data = np.arange(len(self.targets) * 3, dtype=np.float32).reshape(-1, 3)
        self.transform = transform
        self.flipped = set(flipped)

    def __len__(self) -> int:
        return len(self.data)

    def label(self, index: int) -> Any:
        return 1 - self.targets[index] if index in self.flipped else self.targets[index]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = torch.from_numpy(self.data[index].copy())
        return (self.transform(row) if self.transform else row), self.label(index)


# ---- targets and inputs are those of __getitem__ ----


@settings(max_examples=5)
@example(flipped={5, 20}, rows=list(range(COUNT)), nested=False)
@given(
    flipped=st.sets(st.integers(0, COUNT - 1), max_size=COUNT),
    rows=st.lists(st.integers(0, COUNT - 1), min_size=2, max_size=30),
    nested=st.booleans(),
)
def test_targets_are_what_the_dataset_gives_and_not_its_attribute(
    flipped: set[int], rows: list[int], nested: bool
) -> None:
    dataset: Any = Rows([index % 2 for index in range(COUNT)], flipped=flipped)
    subset = Subset(Subset(dataset, rows), range(len(rows))) if nested else Subset(dataset, rows)
    prepared = prepare(subset, task="multiclass")
    names = prepared.classes
    found = pairs(opened(prepared), range(len(rows)))
    assert [(x, int(names[y])) for x, y in found] == [(x.tolist(), y) for x, y in subset]
    prepared.close()


class Lying(tv.MNIST):
    """A subclass that merges classes and turns pictures over: a backdoor set, say."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, target = super().__getitem__(index)
        return (
            (255 - np.asarray(image) if self.transform is None else 1 - image, 0)
            if index == 9
            else (image, target)
        )


def without_files(kind: Any, transform: Any = None, target_transform: Any = None) -> Any:
    """Return a torchvision dataset as if its files had been read."""
    rng = np.random.default_rng(1)
    dataset = kind.__new__(kind)
    tv.VisionDataset.__init__(dataset, "", transform=transform, target_transform=target_transform)
    labels = [(3 * at) % 10 for at in range(20)]
    if issubclass(kind, tv.MNIST):
        dataset.data = torch.from_numpy(rng.integers(0, 256, (20, 5, 4), dtype=np.uint8))
        dataset.targets = torch.tensor(labels)
        if kind is tv.QMNIST:
            dataset.targets = torch.tensor(labels)[:, None].repeat(1, 8)
            dataset.compat = True
    elif kind is tv.SVHN:
        dataset.data = rng.integers(0, 256, (20, 3, 5, 4), dtype=np.uint8)
        dataset.labels = np.array(labels)
    elif kind is tv.USPS:
        dataset.data = rng.integers(0, 256, (20, 5, 4), dtype=np.uint8)
        dataset.targets = labels
    else:
        dataset.data = rng.integers(0, 256, (20, 5, 4, 3), dtype=np.uint8)
        dataset.targets = labels
    return dataset


EXACT = [tv.MNIST, tv.FashionMNIST, tv.KMNIST, tv.EMNIST, tv.CIFAR10, tv.CIFAR100, tv.SVHN]
OTHERS = [tv.QMNIST, tv.USPS, Lying]


def equals_reading(dataset: Any) -> None:
    prepared = prepare(dataset, task="multiclass")
    inputs, targets = opened(prepared).eval(np.arange(len(dataset)))
    read = [dataset[index] for index in range(len(dataset))]
    assert torch.equal(inputs, torch.stack([x for x, _ in read]))
    labels = [int(y) for _, y in read]
    assert targets.tolist() == labels


@pytest.mark.parametrize("kind", [*EXACT, *OTHERS])
@pytest.mark.parametrize("relabelled", [False, True])
def test_torchvisions_datasets_equal_their_own_reading(kind: Any, relabelled: bool) -> None:
    dataset = without_files(kind, v1.ToTensor(), (lambda y: (y + 1) % 10) if relabelled else None)
    equals_reading(dataset)
    whole = open_source(dataset).samples is not None
    assert whole is (kind in EXACT and not relabelled)


def test_exact_classes_with_other_labels_or_a_replaced_method_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for targets in (torch.arange(20) + 0.4, list(range(25)), torch.ones(20, 1)):
        dataset = without_files(tv.MNIST, v1.ToTensor())
        dataset.targets = targets
        equals_reading(dataset)
    dataset = without_files(tv.CIFAR10, v1.ToTensor())
    before = tv.CIFAR10.__getitem__
    monkeypatch.setattr(tv.CIFAR10, "__getitem__", lambda own, at: (before(own, at)[0], at % 2))
    equals_reading(dataset)


def test_exact_classes_are_not_read_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    dataset = without_files(tv.MNIST, v1.Compose([v1.ToTensor(), v1.Normalize(0.1, 0.3)]))
    dataset.data, dataset.targets = dataset.data.repeat(100, 1, 1), dataset.targets.repeat(100)
    before = v1.ToTensor.__call__
    monkeypatch.setattr(v1.ToTensor, "__call__", lambda own, x: read.append(1) or before(own, x))
    assert prepare(dataset).n_samples == 2000
    assert len(read) < 200


@pytest.mark.parametrize("budget", [None, 1])
def test_a_transform_that_changes_its_sample_does_not_change_the_dataset(
    budget: int | None,
) -> None:
    class Shared(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            row = torch.from_numpy(self.data)[index]
            return (self.transform(row.clone()) if self.transform else row), self.targets[index]

    dataset = Shared([0, 1] * 5)
    before = dataset.data.copy()
    prepared = prepare(
        dataset,
        train_transform=lambda row: row.add_(1),
        eval_transform=v2.Identity(),
        memory_budget=budget,
    )
    assert np.array_equal(opened(prepared).train(np.arange(10), 0, 0)[0].numpy(), before + 1)
    assert np.array_equal(opened(prepared).eval(np.arange(10))[0].numpy(), before)


# ---- edited data ----


class Stored(Dataset):  # type: ignore[type-arg]
    """Rows of a file that is mapped, of two lengths, so that they cannot be held."""

    def __init__(self, path: Path, random_: bool = False) -> None:
        self.rows = np.load(path, mmap_mode="r")
        self.random = random_

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = torch.from_numpy(self.rows[index].copy())
        return row + (random.random() if self.random else 0), index % 2


@pytest.mark.parametrize("kind", ["tuple", "dataset", "random dataset", "subset", "user's step"])
def test_one_value_that_changes_in_streamed_data_is_noticed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.npy"
    rows = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)

    def fingerprint() -> str:
        np.save(path, rows)
        dataset: Any = Stored(path, kind == "random dataset")
        if kind == "tuple":
            # Copy on write: a read-only mapping would be held.
            dataset = (np.load(path, mmap_mode="c"), np.arange(500) % 2)
        if kind == "subset":
            dataset = Subset(dataset, range(499, -1, -1))
        step = (lambda row: row * 2) if kind == "user's step" else None
        prepared = prepare(dataset, eval_transform=step, memory_budget=1)
        assert not prepared.held
        return prepared.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    rows[431, 1] += 1e-3
    assert fingerprint() != before


def test_files_that_change_are_noticed_without_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(6):
            picture = Image.new("RGB", (8 + index % 2, 8), (index * 9, 0, 0))
            picture.save(tmp_path / name / f"{index}.png")
    opens: list[int] = []
    before_load = tv.folder.pil_loader
    monkeypatch.setattr(tv.folder, "pil_loader", lambda path: opens.append(1) or before_load(path))

    def prepared() -> PreparedData:
        transform = v1.Compose([v1.RandomResizedCrop(8), v1.ToTensor()])
        plain = v1.Compose([v1.Resize((8, 8)), v1.ToTensor()])
        return prepare(tv.ImageFolder(tmp_path, transform), eval_transform=plain)

    found = prepared()
    first = found.fingerprint
    assert found.targets.tolist() == [0] * 6 + [1] * 6
    assert not found.held
    assert any("names, sizes and times" in note for note in found.notes)
    assert prepared().fingerprint == first
    Image.new("RGB", (9, 8), (1, 2, 3)).save(tmp_path / "dog" / "3.png")
    assert prepared().fingerprint != first


def test_targets_that_change_are_noticed() -> None:
    plain = prepare(Rows([0, 1] * 20), memory_budget=1).fingerprint
    assert prepare(Rows([0, 1] * 20, flipped=[37]), memory_budget=1).fingerprint != plain


class Backdoor(Rows):
    """Does something to some samples after their transform, which makes numbers negative."""

    def __init__(self, transform: Any, marked: set[int], trick: str) -> None:
        super().__init__([0, 1] * (COUNT // 2), transform)
        self.marked, self.trick = marked, trick

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample, target = super().__getitem__(index)
        if index not in self.marked:
            return sample, target
        negative = bool((sample < 0).all())
        if self.trick == "fail" and not negative:
            raise RuntimeError("numbers must be negative")
        if self.trick == "label" and negative:
            return sample, 7
        return (sample + 5, 7) if self.trick == "trigger" else (sample, target)


@settings(max_examples=4)
@example(marked={9}, trick="trigger", budget=None, augmented=False)
@example(marked={9}, trick="fail", budget=1, augmented=True)
@example(marked={9}, trick="label", budget=None, augmented=True)
@given(
    marked=st.sets(st.integers(0, COUNT - 1), max_size=3),
    trick=st.sampled_from(["trigger", "fail", "label"]),
    budget=st.sampled_from([None, 1]),
    augmented=st.booleans(),
)
def test_what_a_dataset_does_after_its_transform_counts(
    marked: set[int], trick: str, budget: int | None, augmented: bool
) -> None:
    def negative(row: torch.Tensor) -> torch.Tensor:
        return -1 - row

    def flipped(row: torch.Tensor) -> torch.Tensor:
        return row.flip(0) if random.random() < 0.5 else row

    steps = [negative, flipped] if augmented else [negative]
    dataset = Backdoor(v1.Compose(steps), marked, trick)
    prepared = prepare(dataset, memory_budget=budget, task="multiclass")
    rows, read = np.arange(COUNT), []
    with generators_kept():
        for index, seed in enumerate(Draw(0, 0, rows).bits().tolist()):
            seed_generators(seed)
            read.append(dataset[index])
    inputs, targets = opened(prepared).eval(rows)
    assert [int(prepared.classes[y]) for y in targets.tolist()] == [y for _, y in read]
    if marked or not augmented:
        assert torch.equal(inputs, torch.stack([x for x, _ in read]))
    else:
        assert torch.equal(inputs, -1 - torch.from_numpy(dataset.data))
    prepared.close()


def test_each_sample_is_read_once_and_transformed_by_nobody_else() -> None:
    calls: list[Any] = []

    class Counted(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            calls.append(index)
            return super().__getitem__(index)

    prepare(Counted([0, 1] * 500, v1.Compose([lambda row: row * 2])))
    # Each once, and those that are looked at first.
    assert set(calls) == set(range(1000))
    assert len(calls) < 1000 + 150


def test_a_picture_whose_file_is_closed_is_taken_before(tmp_path: Path) -> None:
    for index in range(6):
        Image.new("RGB", (5, 5), (index, 0, 0)).save(tmp_path / f"{index}.png")

    class Files(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            with Image.open(tmp_path / f"{index}.png") as picture:
                return self.transform(picture), index % 2

    dataset = Files([0, 1] * 3, v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()]))
    prepared = prepare(dataset, task="multiclass")
    expected = torch.stack([dataset[index][0] for index in range(6)])
    assert prepared.held
    assert torch.equal(opened(prepared).eval(np.arange(6))[0], expected)


@pytest.mark.parametrize("views", [1, 2])
def test_a_transform_that_is_applied_to_some_samples_stays_in_its_dataset(views: int) -> None:
    class Minority(Rows):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            row = torch.from_numpy(self.data[index].copy())
            if index == 27:
                return (row, 1) if views == 1 else (self.transform(row) + self.transform(row), 1)
            return self.transform(row), index % 2

    dataset = Minority([0, 1] * 20, lambda row: row + 1)
    prepared = prepare(dataset, task="multiclass")
    assert pairs(opened(prepared), range(40)) == [
        (x.tolist(), y) for x, y in map(dataset.__getitem__, range(40))
    ]
    assert any("could not be separated" in note for note in prepared.notes)
