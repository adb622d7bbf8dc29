"""A dataset is read once, equals the user's own reading, and leaves nothing behind."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision import transforms as v1
from torchvision.datasets import VisionDataset

from asynckfold import InputError
from asynckfold.data.labels import resolve_labels
from asynckfold.data.prepare import PreparedData, prepare

AUGMENT = [v1.RandomCrop(10, 2), v1.RandomHorizontalFlip()]
SCALE = [v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))]


class Images(Dataset):  # type: ignore[type-arg]
    """Pictures in memory, as torchvision's datasets hold them."""

    def __init__(self, transform: Any = None, n: int = 20, mixed: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.data = rng.integers(0, 256, (n, 10, 10, 3), dtype=np.uint8)
        self.targets = [index % 4 for index in range(n)]
        self.transform = transform
        self.mixed = mixed
        self.reads = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.reads += 1
        image = Image.fromarray(self.data[index])
        if self.mixed and index % 2:
            image = image.resize((14, 12))
        return (self.transform(image) if self.transform else image), self.targets[index]


def opened(prepared: PreparedData) -> Any:
    handle = prepared.handle()
    return handle.open(handle.fds)


def test_the_eval_view_is_never_augmented() -> None:
    dataset = Images(v1.Compose([*AUGMENT, *SCALE]))
    prepared = prepare(dataset)
    batches = opened(prepared)
    plain = Images(v1.Compose(SCALE))
    rows = np.arange(20)
    expected = torch.stack([plain[i][0] for i in rows])
    assert torch.equal(batches.eval(rows)[0], expected)
    assert not torch.equal(batches.train(rows, 0, 0)[0], expected)
    assert torch.equal(batches.eval(rows)[0], expected)
    said = [note for note in prepared.notes if "RandomCrop, RandomHorizontalFlip" in note]
    assert len(said) == 1


@settings(max_examples=6, deadline=None)
@given(rows=st.lists(st.integers(0, 19), min_size=1, max_size=8), held=st.booleans())
def test_a_sample_is_the_same_in_any_batch(rows: list[int], held: bool) -> None:
    batches = opened(prepare(_augmented(), memory_budget=None if held else 1))
    together = batches.train(np.array(rows), 3, 1)[0]
    alone = torch.cat([batches.train(torch.tensor([row]), 3, 1)[0] for row in rows])
    assert torch.equal(together, alone)


@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 19), min_size=3, max_size=3), min_size=1, max_size=4),
    held=st.booleans(),
)
def test_batches_gathered_together_are_those_gathered_one_by_one(
    rows: list[list[int]], held: bool
) -> None:
    batches = opened(prepare(_augmented(), memory_budget=None if held else 1))
    orders, seeds = torch.tensor(rows), range(5, 5 + len(rows))
    together = batches.train_together(orders, seeds, 2)
    alone = [batches.train(order, seed, 2) for order, seed in zip(orders, seeds, strict=True)]
    for joined, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(joined, torch.stack(parts))


def _augmented() -> Images:
    return Images(v1.Compose([*AUGMENT, v1.ColorJitter(0.3), *SCALE]))


def test_the_users_dataset_and_generators_are_untouched() -> None:
    dataset = Images(v1.Compose([*AUGMENT, v1.ColorJitter(0.3), *SCALE]))
    attributes = copy.copy({k: v for k, v in vars(dataset).items() if k != "reads"})
    random.seed(5)
    torch.manual_seed(5)
    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy())  # noqa: NPY002
    opened(prepare(dataset)).train(np.arange(4), 0, 0)
    after = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1])  # noqa: NPY002
    assert all(vars(dataset)[name] is value for name, value in attributes.items())
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert np.array_equal(before[2], after[2])


class ByJoint(VisionDataset):
    """Applies ``transforms`` to sample and label at once."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = Image.new("RGB", (10, 10), (index * 20, 0, 9))
        return self.transforms(image, index % 2) if self.transforms else (image, index % 2)


def test_the_joint_attribute_of_vision_datasets_is_divided() -> None:
    dataset = ByJoint(
        None, transform=v1.Compose([v1.ColorJitter(0.9), v1.ToTensor()]), target_transform=str
    )
    prepared = prepare(dataset)
    plain = v1.ToTensor()(Image.new("RGB", (10, 10), (40, 0, 9)))
    assert torch.equal(opened(prepared).eval(np.array([2]))[0][0], plain)
    assert prepared.classes == ("0", "1")


# ---- what cannot be held, or not in memory ----


def test_samples_of_several_shapes_are_read_one_by_one() -> None:
    transform = v1.Compose([v1.RandomResizedCrop(8), *SCALE])
    evaluate = v1.Compose([v1.Resize((8, 8)), *SCALE])
    dataset = Images(transform, mixed=True)
    prepared = prepare(dataset, eval_transform=evaluate)
    batches = opened(prepared)
    plain = Images(evaluate, mixed=True)
    rows = np.arange(6)
    assert not prepared.held
    assert any("one by one" in note for note in prepared.notes)
    assert torch.equal(batches.eval(rows)[0], torch.stack([plain[i][0] for i in rows]))
    assert torch.equal(batches.train(rows, 1, 2)[0], batches.train(rows, 1, 2)[0])
    assert not torch.equal(batches.train(rows, 1, 2)[0], batches.train(rows, 1, 3)[0])


def test_the_first_sample_of_another_shape_is_named() -> None:
    x = [torch.zeros(3)] * 20
    x[12] = torch.zeros(4)
    dataset = list(zip(x, [0, 1] * 10, strict=True))
    with pytest.raises(InputError, match=r"sample 12 is float32 \(4,\)"):
        prepare(dataset)


def test_beyond_the_memory_budget_a_nameless_file_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    prepared = prepare(Images(v1.Compose(SCALE)), memory_budget=100, folder=folder)
    assert prepared.held
    assert any(str(folder) in note and "100" in note for note in prepared.notes)
    assert list(folder.iterdir()) == []
    inputs = opened(prepared).eval(np.array([3]))[0]
    assert torch.equal(inputs[0], Images(v1.Compose(SCALE))[3][0])


# ---- sharing ----


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {entry.name for entry in Path("/dev/shm").iterdir()}

    before, shm = open_descriptors(), names()
    prepared = prepare(Images(v1.Compose(SCALE)), memory_budget=1, folder=tmp_path)
    batches = opened(prepared)
    prepared.close()
    prepared.close()
    assert batches.eval(np.array([1]))[0].shape == (1, 3, 10, 10)
    del batches, prepared
    assert open_descriptors() == before
    assert names() <= shm
    assert list(tmp_path.iterdir()) == []


# ---- labels ----


@pytest.mark.parametrize(
    ("values", "task", "targets", "classes", "note"),
    [
        ([0, 1, 2, 1], None, [0, 1, 2, 1], ("0", "1", "2"), ""),
        (torch.tensor([0, 1], dtype=torch.uint8), "multiclass", [0, 1], ("0", "1"), ""),
        (np.array([0, 1], np.int32), "multiclass", [0, 1], ("0", "1"), ""),
        ([np.int64(1), np.int64(0)], "multiclass", [1, 0], ("0", "1"), ""),
        ([torch.tensor(1), torch.tensor(0)], "multiclass", [1, 0], ("0", "1"), ""),
        ([True, False], "multiclass", [1, 0], ("False", "True"), ""),
        ([3, 1, 3], "multiclass", [3, 1, 3], ("0", "1", "2", "3"), ""),
        ([-1, 1, -1], "multiclass", [0, 1, 0], ("-1", "1"), "-1 = 0, 1 = 1"),
        ([1 << 30, 3], "multiclass", [1, 0], ("3", "1073741824"), "3 = 0, 1073741824 = 1"),
        (["b", "a", "b"], None, [1, 0, 1], ("a", "b"), "a = 0, b = 1"),
        ([[1], [0]], "multiclass", [1, 0], ("0", "1"), "squeezed"),
        ([0, 0, 0], "multiclass", [0, 0, 0], ("0",), "one class"),
        ([0.5, 1.5], None, [0.5, 1.5], (), ""),
        ([1, 2], "regression", [1.0, 2.0], (), ""),
        ([[1.0, 2.0], [3.0, 4.0]], None, [[1.0, 2.0], [3.0, 4.0]], (), ""),
        ([[1.0], [2.0]], "regression", [[1.0], [2.0]], (), ""),
    ],
)
def test_labels_that_are_accepted(
    values: Any, task: str | None, targets: Any, classes: Any, note: str
) -> None:
    labels = resolve_labels(values, task=task)
    assert labels.targets.tolist() == targets
    assert labels.classes == classes
    assert labels.classification is bool(classes)
    assert labels.targets.dtype == (np.int64 if classes else np.float32)
    assert note in " ".join(labels.notes)
    assert bool(note) is bool(labels.notes)


# ---- refusals ----


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([])


class Broken(Images):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == 7:
            raise OSError("bad sector")
        return super().__getitem__(index)


class Triples(Images):
    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), 0)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "received 0 samples"),
        (Subset(Images(), [3]), "received 1 sample."),
        (Endless(), "must be map-style"),
        (object(), "object without __len__ and __getitem__"),
        ((np.zeros((3, 2)), np.zeros(4, int)), "lengths [3, 4]"),
        (Broken(v1.Compose([v1.Resize(5), *SCALE])), "OSError: bad sector"),
        (Triples(v1.ToTensor()), "tuple of length 3 at index 0"),
        (Images(v1.Resize(5)), "a PIL image. End the transform with torchvision's ToTensor()"),
        (Images(v1.ToTensor(), mixed=True), "must have one shape"),
        (Images(v1.Compose([v1.RandomCrop(6), v1.ToTensor()])), "Pass eval_transform="),
    ],
)
def test_datasets_that_are_refused(dataset: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(dataset)
    assert text in str(caught.value)


def test_images_without_a_transform_are_scaled_tensors() -> None:
    bare, scaled = prepare(Images()), prepare(Images(v1.ToTensor()))
    rows = np.arange(len(Images()))
    found, expected = opened(bare), opened(scaled)
    assert torch.equal(found.train(rows, 0, 1)[0], expected.train(rows, 0, 1)[0])
    assert torch.equal(found.eval(rows)[0], expected.eval(rows)[0])
    assert [note for note in bare.notes if "has no transform" in note]
    assert not [note for note in scaled.notes if "has no transform" in note]


def test_all_problems_are_told_at_once() -> None:
    dataset = Images(v1.Compose([v1.RandomCrop(6), v1.ToTensor()]))
    dataset.targets[5] = -100
    with pytest.raises(InputError) as caught:
        prepare(dataset, targets=dataset.targets, task="multiclass")
    assert len(caught.value.problems) == 2


def test_features_that_are_not_numbers_are_counted() -> None:
    x = np.ones((6, 2), np.float32)
    x[1, 0], x[4] = np.nan, np.inf
    prepared = prepare((x, np.array([0, 1] * 3)))
    assert "2 of 6 samples hold NaN or infinite features" in prepared.notes
