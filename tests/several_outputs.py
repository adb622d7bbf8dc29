"""Models of several outputs, their data, and a plain PyTorch loop that trains them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from asynckfold import CVResults
from tests.plain import train

N = 60


def arrays() -> tuple[Any, Any]:
    """Return (X, {"kind": (N,), "mass": (N,)}), which can be learned."""
    draw = np.random.default_rng(0)
    samples = draw.normal(size=(N, 4)).astype(np.float32)
    return samples, {"kind": samples[:, :3].argmax(1), "mass": samples.sum(1)}


class Heads(nn.Module):
    """A class and a number; dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2))
        self.kind, self.mass = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, samples: Tensor) -> Any:
        seen = self.body(samples)
        return {"kind": self.kind(seen), "mass": self.mass(seen)[:, 0]}


class Pair(Heads):
    """The same, as a tuple."""

    def forward(self, samples: Tensor) -> Any:
        return tuple(super().forward(samples).values())


class Auxiliary(Heads):
    """Classes; while it trains, a tuple with those of an auxiliary head, as Inception gives."""

    def forward(self, samples: Tensor) -> Any:
        found = super().forward(samples)["kind"]
        return (found, found * 0.5) if self.training else found


def both(outputs: Any, targets: Any) -> Tensor:
    """Return the loss of both heads."""
    kind = nn.functional.cross_entropy(outputs["kind"], targets["kind"])
    return kind + nn.functional.mse_loss(outputs["mass"], targets["mass"])


def both_of_pair(outputs: Any, targets: Any) -> Tensor:
    """Return the same of tuples."""
    names = ("kind", "mass")
    return both(dict(zip(names, outputs, strict=True)), dict(zip(names, targets, strict=True)))


def kind_accuracy(targets: Any, outputs: Any) -> float:
    """Return the share of right classes."""
    return float((outputs["kind"].argmax(1) == targets["kind"]).mean())


def mass_fit(targets: Any, outputs: Any) -> float:
    """Return the negative mean squared error of the numbers."""
    return -float(((outputs["mass"] - targets["mass"]) ** 2).mean())


SCORING = {"kind_accuracy": kind_accuracy, "mass_fit": mass_fit}


class Items(Dataset[Any]):
    """Both as a map-style dataset."""

    def __init__(self) -> None:
        self.samples, self.targets = arrays()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        parts = {"kind": int(self.targets["kind"][index]), "mass": self.targets["mass"][index]}
        return torch.from_numpy(self.samples[index]), parts


def plain_loop(results: CVResults) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train the first job of a run by an ordinary loop; return weights, outputs, losses."""
    dataset, fold = Items(), results.folds[0]
    outputs: list[dict[str, Tensor]] = []
    losses: list[float] = []

    def loss_of(model: nn.Module, inputs: Any, targets: Any) -> Any:
        parts = {name: item.to(FORMATS[name]) for name, item in targets.items()}
        outputs.append(model(inputs))
        return both(outputs[-1], parts)

    def validate(model: nn.Module) -> None:
        (held_out,) = DataLoader(dataset, batch_sampler=[fold.valid.tolist()])
        with torch.no_grad():
            losses.append(float(loss_of(model, *held_out)))

    model = train(results, Heads, dataset, loss_of, after_epoch=validate)
    return model.state_dict(), outputs[-1], losses


FORMATS = {"kind": torch.int64, "mass": torch.float32}


class Boxes(Dataset[Any]):
    """Pictures with one to three bright squares, whose places and classes are to be found."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        draw = np.random.default_rng(index)
        picture = draw.normal(0, 0.1, (3, 32, 32)).astype(np.float32)
        boxes, labels = [], []
        for _ in range(1 + index % 3):
            x, y = draw.integers(0, 24, 2)
            labels.append(int(draw.integers(1, 3)))
            picture[labels[-1], y : y + 8, x : x + 8] += 1
            boxes.append([x, y, x + 8, y + 8])
        target = {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}
        return torch.from_numpy(picture), target


class Detector(nn.Module):
    """Finds a square in each cell of a grid; gives losses for targets, as those of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, pictures: Any, targets: Any = None) -> Any:
        scores = self.cells(torch.stack(list(pictures)))
        if targets is not None:
            wanted = torch.zeros(len(pictures), 4, 4, dtype=torch.int64)
            for number, target in enumerate(targets):
                x, y = ((target["boxes"][:, :2] + 4) / 8).long().clamp(max=3).T
                wanted[number, y, x] = target["labels"]
            return {"cells": nn.functional.cross_entropy(scores, wanted)}
        return [self._found(of_one) for of_one in scores.softmax(1)]

    @staticmethod
    def _found(scores: Tensor) -> Any:
        best, labels = scores.max(0)
        y, x = labels.nonzero(as_tuple=True)
        corners = torch.stack([x, y], 1).float() * 8
        boxes = torch.cat([corners, corners + 8], 1)
        return {"boxes": boxes, "scores": best[y, x], "labels": labels[y, x]}


def collate(samples: Any) -> Any:
    """Return pictures and targets, as everyone writes it for torchvision's detectors."""
    return tuple(zip(*samples, strict=True))


def detection_step(model: nn.Module, batch: Any, state: Any) -> Any:
    """Return the sum of a detector's losses."""
    losses = model(*batch)
    return {"loss": sum(losses.values()), **losses}


def found_share(targets: Any, outputs: Any) -> float:
    """Return the share of squares whose class was found within half a square."""
    hits = [
        any(
            label == other and abs(box - near).max() <= 4
            for near, other in zip(given["boxes"], given["labels"], strict=True)
        )
        for wanted, given in zip(targets, outputs, strict=True)
        for box, label in zip(wanted["boxes"], wanted["labels"], strict=True)
    ]
    return float(np.mean(hits))
