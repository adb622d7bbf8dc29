"""Find drawn squares by small detectors of two widths, scored by the F1 of the boxes.

``python examples/detection.py --quick`` takes a few pictures and one epoch.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from torch import nn
from torchvision.ops import box_iou

from asynckfold import AsyncKFold


def picture_and_boxes(number):
    random = np.random.default_rng(number)
    picture = random.normal(0, 1, (1, 64, 64)).astype("float32")
    corners = [(16 * (at % 4), 16 * (at // 4)) for at in random.permutation(16)[: 1 + number % 3]]
    for x, y in corners:
        picture[0, y : y + 16, x : x + 16] += 0.5
    boxes = torch.tensor([(x, y, x + 16, y + 16) for x, y in corners], dtype=torch.float32)
    return torch.from_numpy(picture), {"boxes": boxes}


class Detector(nn.Module):  # called as those of torchvision
    def __init__(self, width):
        super().__init__()
        self.cells = nn.Sequential(nn.Conv2d(1, width, 16, 16), nn.GELU(), nn.Conv2d(width, 1, 1))

    def forward(self, pictures, targets=None):
        logits = self.cells(torch.stack(pictures))[:, 0]
        if targets is None:
            corners = [16 * (one > 0).nonzero()[:, [1, 0]] for one in logits]
            return [{"boxes": torch.cat([at, at + 16], 1).float()} for at in corners]
        filled = torch.zeros_like(logits)
        for cells, target in zip(filled, targets, strict=True):
            x, y = (target["boxes"][:, :2] // 16).long().T
            cells[y, x] = 1
        return nn.functional.binary_cross_entropy_with_logits(logits, filled)


def f1(targets, outputs):
    pairs = zip(targets, outputs, strict=True)
    boxes = [[torch.from_numpy(part["boxes"]) for part in pair] for pair in pairs]
    right = sum(int((box_iou(*pair) > 0.5).any(1).sum()) for pair in boxes)
    return 2 * right / sum(len(wanted) + len(found) for wanted, found in boxes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few pictures, one epoch")
    parser.add_argument("--root-dir", default="runs/detection", help="folder of the run")
    args = parser.parse_args()
    kfold = AsyncKFold(
        3, [picture_and_boxes(number) for number in range(60 if args.quick else 300)],
        args.root_dir, None, 16, scoring={"f1": f1},
        collate_fn=lambda samples: tuple(zip(*samples, strict=True)),
        training_step=lambda model, batch, state: model(*batch),
    )  # fmt: skip
    models = {"narrow": partial(Detector, 4), "wide": partial(Detector, 16)}
    params = {"epochs": 1 if args.quick else 10}
    results = kfold(models, ["cosine"], lambda m: torch.optim.Adam(m.parameters(), 1e-2), params)
    print(results.verdict, results.report(), sep="\n")


if __name__ == "__main__":
    main()
