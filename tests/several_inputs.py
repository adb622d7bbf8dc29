"""Models and data of several inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

N = 60


class TwoInputs(nn.Module):
    """An image and an age, by name or by position; dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.age = nn.Linear(12, 8), nn.Linear(1, 4)
        self.out = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 3))

    def forward(self, image: Tensor, age: Tensor) -> Tensor:
        ages = self.age(age[:, None].float() / 90).relu()
        return self.out(torch.cat([self.image(image.flatten(1)).relu(), ages], 1))


class OneDict(TwoInputs):
    """The same, of one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["image"], batch["age"])


def arrays() -> tuple[dict[str, Any], Any]:
    """Return ({"image": (N, 3, 2, 2), "age": (N,)}, y), which can be learned."""
    draw = np.random.default_rng(0)
    images = draw.normal(size=(N, 3, 2, 2)).astype(np.float32)
    ages = draw.integers(0, 90, N)
    labels = (images.sum((1, 2, 3)) + ages / 30 > 1.5).astype(np.int64) + (ages > 60)
    return {"image": images, "age": ages}, labels


class Items(Dataset[Any]):
    """A map-style dataset whose items `form` makes of (inputs, target)."""

    def __init__(self, form: Callable[[dict[str, Any], Any], Any] = lambda *pair: pair) -> None:
        self.inputs, self.labels = arrays()
        self.form = form

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        one = {name: array[index] for name, array in self.inputs.items()}
        one["image"] = torch.from_numpy(one["image"])
        return self.form(one, int(self.labels[index]))
