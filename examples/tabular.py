"""A table with missing values: does a network beat gradient boosting, or a guess? (or --quick)"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from asynckfold import AsyncKFold, load_model
from asynckfold.models import MLP


def get_model():
    return MLP(9, num_classes=2)


def get_optimizer(model):
    return torch.optim.Adam(model.parameters(), 3e-3)


def make_table(count):
    """Return five numbers, every tenth missing, and a category of four, one column for each."""
    draw = np.random.default_rng(0)
    numbers, kinds = draw.normal(size=(count, 5)), draw.integers(4, size=count)
    signal = numbers[:, 0] * numbers[:, 1] + np.sin(2 * numbers[:, 2]) + (kinds == 2)
    numbers[draw.random(numbers.shape) < 0.1] = np.nan
    labels = np.where(signal + draw.normal(size=count) / 2 > 0.3, "yes", "no")
    return np.column_stack([numbers, np.eye(4)[kinds]]), labels


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows and epochs")
    parser.add_argument("--root-dir", default="runs/tabular", help="folder of the run")
    args = parser.parse_args()

    inputs, labels = make_table(200 if args.quick else 2000)
    fill = make_pipeline(SimpleImputer(), StandardScaler())
    settings = {"preprocess": fill, "scoring": "roc_auc", "pos_label": "yes"}
    loss = torch.nn.CrossEntropyLoss()
    kfold = AsyncKFold(5, (inputs, labels), args.root_dir, loss, 32, **settings)
    params = {"epochs": 3 if args.quick else 30}
    results = kfold({"MLP": get_model}, ["cosine"], get_optimizer, params)
    boosting = HistGradientBoostingClassifier(random_state=0)
    print(results.compare_with([boosting, LogisticRegression(), DummyClassifier()]))
    path = f"{args.root_dir}/MLP.safetensors"
    results.ensemble().save(path, overwrite=True)
    print("first rows:", *load_model(path, get_model).predict(inputs[:3]))
    print(results.report())


if __name__ == "__main__":
    main()
