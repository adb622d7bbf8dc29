"""A sweep of two models that predict a written digit as a number."""

from sklearn.datasets import load_digits
from torch import nn, optim

from asynckfold.models import MLP

_digits = load_digits()
dataset = (_digits.data.astype("float32") / 16, _digits.target.astype("float32"))
criterion = nn.MSELoss()


def linear():
    return nn.Sequential(nn.Linear(64, 1), nn.Flatten(0))


def network():
    return nn.Sequential(MLP(64, (128,), 1), nn.Flatten(0))


models = {"linear": linear, "network": network}
schedulers = ["constant", "cosine"]


def opt_fn(model):
    return optim.Adam(model.parameters(), lr=3e-3)


trainer_params = {"epochs": 20}
