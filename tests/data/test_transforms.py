"""Laws of divided pipelines: equal to the user's own, and random by place only."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from asynckfold import InputError
from asynckfold.data.transforms.random_numbers import Draw, splitmix64
from asynckfold.data.transforms.steps import RandomCrop, RandomFlip, flatten, is_random
from asynckfold.data.transforms.trees import to_array
from asynckfold.data.views import View, divide, trace

CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def images(count: int = 6, mode: str = "RGB", size: int = 12) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    shape = (size, size, 3) if mode == "RGB" else (size, size)
    return [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]


def view_of(transform: Any, samples: list[Any]) -> View:
    return divide(trace(flatten(transform), samples))


def stored(view: View, samples: list[Any]) -> torch.Tensor:
    arrays = []
    for sample in samples:
        for step in view.prefix:
            sample = step(sample)
        arrays.append(to_array(sample))
    return torch.from_numpy(np.stack(arrays))


def run(view: View, samples: list[Any], rows: list[int], seed: int = 0, epoch: int = 0) -> Any:
    return view(stored(view, samples)[rows], Draw(seed, epoch, np.array(rows)))


DETERMINISTIC = {
    "v1": v1.Compose([v1.Resize(8), v1.ToTensor(), v1.Normalize(0.4, 0.3)]),
    "v1 convert": v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]),
    "v2": v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Compose([v2.Normalize(*CIFAR), v2.ToPureTensor()]),
        ]
    ),
    "v2 unscaled": v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32)]),
    "v2 float64": v2.Compose([v2.PILToTensor(), v2.ConvertImageDtype(torch.float64)]),
    "resize a tensor": v1.Compose([v1.ToTensor(), v1.Resize((7, 9), antialias=True)]),
    "own function last": v1.Compose([v1.ToTensor(), v1.Lambda(lambda x: x.flatten())]),
    "array": v1.Compose([np.array, v1.ToTensor()]),
    "one step": v1.ToTensor(),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_views_equal_the_users_pipeline_to_the_bit(name: str, mode: str) -> None:
    transform, samples = DETERMINISTIC[name], images(mode=mode)
    ours = run(view_of(transform, samples), samples, [3, 0, 5])
    theirs = torch.stack([torch.as_tensor(transform(samples[i])) for i in (3, 0, 5)])
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("namespace", [v1, v2])
@pytest.mark.parametrize("padding", [None, 2, (1, 3), (1, 2, 3, 4)])
def test_a_crop_is_a_window_of_the_padded_image(namespace: Any, padding: Any) -> None:
    samples = images()
    tensors = run(view_of(namespace.RandomCrop((9, 7), padding, fill=7), samples), samples, [2])
    padded = v1.Pad(padding, fill=7)(samples[2]) if padding is not None else samples[2]
    source = to_array(padded)
    windows = [
        source[:, top : top + 9, left : left + 7]
        for top in range(source.shape[1] - 8)
        for left in range(source.shape[2] - 6)
    ]
    assert any(np.array_equal(tensors[0].numpy(), window) for window in windows)


AUGMENTED = {
    "crop and flip": v1.Compose(
        [v1.RandomCrop(12, 3), v1.RandomHorizontalFlip(), v1.RandomVerticalFlip(), v1.ToTensor()]
    ),
    "sample by sample": v1.Compose([v1.ColorJitter(0.5), v1.ToTensor(), v1.RandomErasing(0.5)]),
    "mixed": v2.Compose([v2.RandomRotation(20), v2.ToImage(), v2.RandomHorizontalFlip()]),
}


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmentation_changes_with_seed_and_epoch(name: str) -> None:
    samples = images()
    view = view_of(AUGMENTED[name], samples)
    rows = list(range(6))
    first = run(view, samples, rows, seed=1, epoch=0)
    assert torch.equal(first, run(view, samples, rows, seed=1, epoch=0))
    assert not torch.equal(first, run(view, samples, rows, seed=1, epoch=1))
    assert not torch.equal(first, run(view, samples, rows, seed=2, epoch=0))


def test_splitmix64_gives_the_published_sequence() -> None:
    # First outputs of the reference implementation for seed 1234567 (Vigna, splitmix64.c).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, np.arange(3)).tolist() == expected


def coin(image: Image.Image) -> Image.Image:
    return image.rotate(90) if random.random() < 1e-9 else image


def numpy_noise(image: Image.Image) -> Any:
    return np.asarray(image) + np.random.random()  # noqa: NPY002


class OwnGenerator:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, image: Image.Image) -> Any:
        return np.asarray(image) + self.rng.random()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (v1.RandomCrop(8), True),
        (v1.ColorJitter(0.1), True),
        (v2.RandAugment(), True),
        (v2.RandomApply([v2.Grayscale(3)]), True),
        (v1.GaussianBlur(3, sigma=(0.1, 2.0)), True),
        (v1.GaussianBlur(3, sigma=1.0), False),
        (v1.Resize(8), False),
        (v2.ToImage(), False),
        (v1.Lambda(lambda image: image.rotate(90)), False),
        (v1.Lambda(coin), True),
        (coin, True),
        (numpy_noise, True),
        (OwnGenerator(), True),
        (np.asarray, False),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_random_steps_are_told(step: Any, expected: bool) -> None:
    assert is_random(step, images()) is expected


def test_draws_are_those_of_runs_already_on_disk() -> None:
    draw = Draw(2024, 3, np.arange(6), 1)
    tops, lefts = RandomCrop.corners(9, 9, draw.bits_on(torch.device("cpu")))
    assert (tops.tolist(), lefts.tolist()) == ([0, 1, 8, 0, 6, 6], [3, 0, 2, 6, 2, 1])
    left_right = torch.tensor([0, 1]).repeat(6, 1, 1, 1)
    assert RandomFlip()(left_right, draw)[:, 0, 0, 0].tolist() == [1, 1, 0, 1, 0, 0]


def test_a_failing_step_is_named() -> None:
    with pytest.raises(InputError, match=r"Normalize.*float") as caught:
        trace(flatten(v1.Compose([v1.PILToTensor(), v1.Normalize(*CIFAR)])), images())
    assert len(caught.value.problems) == 1
