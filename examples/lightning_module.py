"""Cross-validate a LightningModule, moved over unchanged, on few digits.

``python examples/lightning_module.py --quick`` takes two epochs.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from asynckfold import AsyncKFold

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl


class LitDigits(pl.LightningModule):
    def __init__(self, width=64, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", cross_entropy(self(images), labels), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return [optimizer], [schedule]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two epochs")
    parser.add_argument("--root-dir", default="runs/lightning", help="folder of the run")
    args = parser.parse_args()
    X, y = load_digits(return_X_y=True)
    kfold = AsyncKFold(3, (X.astype("float32") / 16, y), args.root_dir, nn.CrossEntropyLoss(), 32)
    results = kfold([LitDigits], trainer_params={"epochs": 2 if args.quick else 20},
                    params={"width": [32, 64]})  # fmt: skip
    print(results.to_frame("epoch")[["model", "fold", "epoch", "val_loss", "accuracy"]].tail(3))
    print(results.report())
