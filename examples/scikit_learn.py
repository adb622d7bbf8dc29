"""An estimator of scikit-learn: a pipeline, nested cross-validation, importances. (or --quick)"""

from __future__ import annotations

import argparse

import torch
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes
from sklearn.inspection import permutation_importance
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn

from asynckfold import AsyncKFoldRegressor


def get_model(in_features, out_features, width=16):
    return nn.Sequential(nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, out_features))


def get_optimizer(model, lr=1e-2):
    return torch.optim.Adam(model.parameters(), lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows and epochs")
    parser.add_argument("--root-dir", default="runs/scikit_learn", help="folder of the runs")
    args = parser.parse_args()

    table, progress = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    table["sex"] = table["sex"].map({1: "a", 2: "b"})
    if args.quick:
        table, progress = table[:150], progress[:150]
    columns = make_column_transformer((OneHotEncoder(), ["sex"]), remainder=StandardScaler())
    network = AsyncKFoldRegressor(
        {"narrow": get_model, "linear": nn.Linear},
        "cosine",
        get_optimizer,
        epochs=3 if args.quick else 40,
        cv=3,
        params={"lr": [1e-2] if args.quick else [1e-2, 1e-1]},
        root_dir=args.root_dir,
        settings={"target_transform": "standardize"},
    )
    for name, last in {"networks": network, "ridge": RidgeCV()}.items():
        print(
            name, "R²", cross_val_score(make_pipeline(columns, last), table, progress, cv=3).mean()
        )
    model = make_pipeline(columns, network).fit(table, progress)
    importance = permutation_importance(model, table, progress, random_state=0).importances_mean
    print("most important:", table.columns[importance.argmax()])
    print(model[-1].results_.report())


if __name__ == "__main__":
    main()
