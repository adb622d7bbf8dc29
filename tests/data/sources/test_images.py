from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from asynckfold.data.sources import Source, image_transform, load_source
from tests.here import RefusedError, inspected


@pytest.fixture(scope="module")
def digits() -> Source:
    return load_source("digits")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with two images each, of different sizes and modes."""
    for label, mode, size in (("cat", "RGB", (20, 16)), ("dog", "L", (32, 32))):
        (tmp_path / label).mkdir()
        for number in range(2):
            Image.new(mode, size, 40 * (number + 1)).save(tmp_path / label / f"{number}.png")
    return tmp_path


def write_idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


@pytest.fixture
def mnist_root(tmp_path: Path) -> Path:
    """A data root with a tiny MNIST: image i is filled with i and is of class i modulo 10."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        images = np.repeat(np.arange(count), 28 * 28).reshape(count, 28, 28)
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path


def test_digits_are_grey_images_scaled_to_255(digits: Source) -> None:
    image, target = digits.dataset[5]
    expected = [[round(value * 255 / 16) for value in row] for row in load_digits().images[5]]
    assert (image.mode, image.size) == ("L", (8, 8))
    assert np.asarray(image).tolist() == expected
    assert target == load_digits().target[5]
    assert digits.targets.tolist() == load_digits().target.tolist()
    assert digits.classes == digits.dataset.classes == tuple("0123456789")
    assert (digits.kind, digits.sample_shape) == ("image", (1, 8, 8))


def test_a_folder_of_images(folder: Path) -> None:
    source = inspected(f"folder:{folder}")
    assert source.counts == {"cat": 2, "dog": 2}
    assert source.shape == (3, 16, 20)


def test_cifar10_statistics_give_mean_0_and_deviation_1(digits: Source) -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    cifar = replace(digits, name="cifar10", sample_shape=(3, 32, 32), mean=mean, std=std)
    step = image_transform(cifar, (3, 32, 32), augment=False).transforms[-1]
    assert (step.mean, step.std) == (mean, std)
    grey = image_transform(cifar, (1, 32, 32), augment=False).transforms[-1]
    assert grey.mean[0] == pytest.approx(0.4809, abs=1e-3)
    assert grey.std[0] == pytest.approx(0.2466, abs=1e-3)


def test_mnist_from_its_four_files(mnist_root: Path) -> None:
    source = load_source("mnist", data_root=mnist_root)
    image, target = source.dataset[13]
    assert (image.mode, image.size, target) == ("L", (28, 28), 3)
    assert np.asarray(image).max() == 13
    assert source.classes == tuple(source.dataset.classes) == tuple("0123456789")
    assert source.sample_shape == (1, 28, 28)
    assert source.targets.tolist() == [index % 10 for index in range(20)]
    assert source.notes == ("the training part of mnist: 20 images",)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "kmnist", "cifar10"])
def test_missing_files_are_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(RefusedError, match=f"files of {name} must be .*--download.*--data-root"):
        inspected(name, **{"data-root": str(tmp_path)})


def test_damaged_files_are_refused(mnist_root: Path) -> None:
    (mnist_root / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03torn")
    with pytest.raises(RefusedError, match=r"files of mnist must be under .* readable and whole"):
        inspected("mnist", **{"data-root": str(mnist_root)})


@pytest.mark.parametrize(
    ("below", "message"),
    [
        ("", "must hold the images of a class: received .*bird"),
        ("bird", "two folders or more, one per class: received nest"),
        ("cat/0.png", "folder: must name an existing folder"),
    ],
)
def test_folders_that_hold_no_classes(folder: Path, below: str, message: str) -> None:
    (folder / "bird" / "nest").mkdir(parents=True)
    with pytest.raises(RefusedError, match=message):
        inspected(f"folder:{folder / below}")
