"""Cross-validate by a training loop of your own: mixup, and an average of the weights.

``python examples/own_loop.py --quick`` takes two epochs. Stopped and started again, it continues.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.models import MLP

DECAY, ALPHA = 0.98, 0.4


def get_optimizer(model):
    return torch.optim.AdamW(model.parameters(), 2e-3)


def fit(context):
    model, optimizer = context.model, context.optimizer
    averaged = copy.deepcopy(model)
    kept = {"model": model, "averaged": averaged, "optimizer": optimizer}
    for name, state in (context.load() or {}).items():
        kept[name].load_state_dict(state)
    for _ in range(context.epoch_start, context.epochs):
        losses = []
        for images, labels in context.train_loader:
            share = torch.distributions.Beta(ALPHA, ALPHA).sample().to(context.device)
            other = torch.randperm(len(images)).to(context.device)
            outputs = model(share * images + (1 - share) * images[other])
            parts = context.criterion(outputs, labels), context.criterion(outputs, labels[other])
            loss = share * parts[0] + (1 - share) * parts[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for mean, value in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(value.detach(), 1 - DECAY)
            losses.append(loss.item())
        context.report(train_loss=sum(losses) / len(losses), last_loss=losses[-1])
        context.save({name: part.state_dict() for name, part in kept.items()})
    model.load_state_dict(averaged.state_dict())  # what is scored


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two epochs")
    parser.add_argument("--root-dir", default="runs/own-loop", help="folder of the run")
    args = parser.parse_args()
    X, y = load_digits(return_X_y=True)
    data = X.astype("float32") / 16, y
    kfold = AsyncKFold(3, data, args.root_dir, nn.CrossEntropyLoss(), 32, fit_fn=fit)
    params = {"epochs": 2 if args.quick else 30}
    results = kfold({"MLP": lambda: MLP(64)}, ["constant"], get_optimizer, params)
    print(results.report())
