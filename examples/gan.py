"""Cross-validate a classifier that is trained as the discriminator of a GAN, on few digits.

``python examples/gan.py --quick`` takes two epochs.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from asynckfold import AsyncKFold

CLASSES, NOISE = 10, 16


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64))
        self.discriminator = nn.Sequential(
            nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, CLASSES + 1)
        )

    def forward(self, images):
        return self.discriminator(images)[:, :CLASSES]  # what is scored


def get_optimizers(model):
    parts = (model.discriminator, model.generator)
    return tuple(torch.optim.Adam(part.parameters(), 2e-3, betas=(0.5, 0.999)) for part in parts)


def training_step(model, batch, state):
    images, labels = batch
    discriminating, generating = state.optimizers
    fakes = model.generator(torch.randn(len(images), NOISE, device=state.device)).sigmoid()
    fake = torch.full_like(labels, CLASSES)
    loss = state.criterion(model.discriminator(torch.cat([images, fakes.detach()])),
                           torch.cat([labels, fake]))  # fmt: skip
    state.backward(loss, discriminating)
    fooled = -cross_entropy(model.discriminator(fakes), fake)
    state.backward(fooled, generating)
    return {"loss": loss, "generator_loss": fooled}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two epochs")
    parser.add_argument("--root-dir", default="runs/gan", help="folder of the run")
    args = parser.parse_args()
    X, y = load_digits(return_X_y=True)
    kfold = AsyncKFold(3, (X.astype("float32") / 16, y), args.root_dir, nn.CrossEntropyLoss(), 32,
                       training_step=training_step)  # fmt: skip
    results = kfold([GAN], ["cosine"], get_optimizers, {"epochs": 2 if args.quick else 30})
    print(results.to_frame("epoch").tail(3))
    print(results.report())
