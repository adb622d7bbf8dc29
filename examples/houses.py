"""A table with text, dates and missing values, prices as they are, and intervals of predictions.

``python examples/houses.py --quick`` takes few rows and epochs.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler, TargetEncoder
from torch import nn

from asynckfold import AsyncKFold


def make_table(count):
    """Return houses, of which some areas are missing, and their prices."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"area": draw.normal(90, 20, count)})
    table["town"] = draw.choice(["Riga", "Lund", "Graz"], count)
    table["sold"] = pd.Timestamp("2025-01-01") + pd.to_timedelta(draw.integers(0, 365, count), "D")
    worth = 2000 * table.area + 50_000 * (table.town == "Lund") + 1000 * table.sold.dt.month
    table.loc[::9, "area"] = np.nan
    return table, worth + draw.normal(0, 8000, count)


def net(width):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rows and epochs")
    parser.add_argument("--root-dir", default="runs/houses", help="folder of the run")
    args = parser.parse_args()
    table, prices = make_table(200 if args.quick else 1500)
    month = FunctionTransformer(lambda dates: dates.apply(lambda column: column.dt.month))
    numbers = make_column_transformer(
        (SimpleImputer(), ["area"]), (TargetEncoder(), ["town"]), (month, ["sold"])
    )
    encode, data = make_pipeline(numbers, StandardScaler()), (table[:-3], prices[:-3])
    settings = {"preprocess": encode, "target_transform": "standardize"}
    kfold = AsyncKFold(5, data, args.root_dir, nn.MSELoss(), 32, **settings)
    models = {"linear": lambda: net(1), "wide": lambda: net(32)}
    params = {"epochs": 2 if args.quick else 20}
    results = kfold(models, ["cosine"], lambda m: torch.optim.Adam(m.parameters(), 1e-2), params)
    print(results.verdict)
    low, high = results.intervals(table[-3:], alpha=0.1)
    print(table[-3:].assign(price=prices, low=low, high=high).to_string(float_format="%.0f"))
    print(results.report())


if __name__ == "__main__":
    main()
