"""The same work by other tools, each at its best: samples in memory, one-thread workers per core.

``pip install 'asynckfold[bench]'`` installs both.
"""

from __future__ import annotations

import os
import time
import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn, optim

from asynckfold.cli.bench.loops import (
    BATCH,
    EVALUATION_BATCH,
    Exercise,
    Outcome,
    cores,
    fast_adam,
    from_memory,
)
from asynckfold.training import lr_schedules

PEERS = ("skorch", "ray")


def installed(peer: str) -> bool:
    """Whether a peer can be imported."""
    return find_spec(peer) is not None


def run(peer: str, exercise: Exercise, inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
    """Train all jobs by a peer; its workers stay for the next call."""
    return {"skorch": _skorch, "ray": _ray}[peer](exercise, inputs, targets)


def _skorch(exercise: Exercise, inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
    """Run scikit-learn's grid search over skorch's nets; it evaluates after the last epoch only."""
    from sklearn.model_selection import GridSearchCV
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback

    class Stepped(Callback):  # type: ignore[misc,unused-ignore]
        """Steps a built-in LR schedule after each epoch."""

        def __init__(self, schedule: str, epochs: int) -> None:
            self.schedule, self.epochs = schedule, epochs

        def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:  # noqa: N803
            self.made_ = lr_schedules.make(self.schedule, net.optimizer_, self.epochs)

        def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
            self.made_.step()

    started = time.perf_counter()
    net = NeuralNetClassifier(
        exercise.model,
        criterion=nn.CrossEntropyLoss,
        optimizer=optim.Adam,
        optimizer__fused=True,
        lr=1e-3,
        max_epochs=exercise.epochs,
        batch_size=BATCH,
        iterator_train__shuffle=True,
        iterator_valid__batch_size=EVALUATION_BATCH,
        train_split=None,
        callbacks=[("stepped", Stepped(exercise.schedules[0], exercise.epochs))],
        verbose=0,
    )
    search = GridSearchCV(
        net,
        {"callbacks__stepped__schedule": list(exercise.schedules)},
        cv=[(fold.train, fold.valid) for fold in exercise.folds],
        scoring="accuracy",
        n_jobs=cores(),
        refit=False,
        error_score="raise",
    )
    search.fit(inputs.numpy(), targets.numpy())
    seconds = time.perf_counter() - started
    return Outcome(seconds, float(np.mean(search.cv_results_["mean_test_score"])))


def _ray(exercise: Exercise, inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
    """Run a task per job, over arrays in Ray's shared memory."""
    import ray

    if not ray.is_initialized():
        # Else Ray 2.60 writes a token into the user's home folder, and uses it from then on.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init("local", num_cpus=cores(), include_dashboard=False, log_to_driver=False)

    def train(exercise: Exercise, inputs: Any, targets: Any, number: int) -> float:
        torch.set_num_threads(1)
        schedule, fold = exercise.jobs[number]
        # Without a copy. Arrays in shared memory are read-only, which torch warns about.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = torch.from_numpy(inputs), torch.from_numpy(targets)
        return exercise.train(fold, from_memory(*samples), schedule, fast_adam)

    task = ray.remote(num_cpus=1)(train)
    started = time.perf_counter()
    held = [ray.put(item) for item in (exercise, inputs.numpy(), targets.numpy())]
    found = ray.get([task.remote(*held, number) for number in range(len(exercise.jobs))])
    return Outcome(time.perf_counter() - started, float(np.mean(found)))
