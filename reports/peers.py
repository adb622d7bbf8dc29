"""What do peers do when they are killed, and do two processes change their numbers?

``python reports/peers.py skorch optuna ray`` prints the answers of ``reports/peers.md``: 4
candidates × 3 folds on digits, with one process and with two, and killed after 8 trainings and
called again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn

FOLDS = StratifiedKFold(3, shuffle=True, random_state=0)
GRID = {"lr": [1e-3, 1e-2], "width": [16, 32]}
KILLED_AFTER = 8
X, y = load_digits(return_X_y=True)
X, y = X.astype("float32") / 16, y.astype("int64")


class Net(nn.Sequential):
    def __init__(self, width=32):
        super().__init__(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def count_training(folder):
    with Path(folder, "trainings").open("a") as file:
        file.write("1\n")
    time.sleep(0.3)  # so that a kill hits a training


def trainings(folder):
    path = Path(folder, "trainings")
    return len(path.read_text().splitlines()) if path.exists() else 0


def mean_score(folder, lr, width):
    """Train and score all folds: the loop that a user of Optuna or Ray Tune writes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    scores = []
    for train, valid in FOLDS.split(X, y):
        count_training(folder)
        model = Net(width)
        optimizer = torch.optim.Adam(model.parameters(), lr)
        for _ in range(3):
            for batch in torch.randperm(len(train)).split(32):
                rows = train[batch.numpy()]
                optimizer.zero_grad()
                outputs = model(torch.from_numpy(X[rows]))
                nn.functional.cross_entropy(outputs, torch.from_numpy(y[rows])).backward()
                optimizer.step()
        guesses = model(torch.from_numpy(X[valid])).argmax(1).numpy()
        scores.append(float(np.mean(guesses == y[valid])))
    return float(np.mean(scores))


def skorch(folder, n_jobs):
    from sklearn.model_selection import GridSearchCV
    from skorch import NeuralNetClassifier

    class Counted(NeuralNetClassifier):
        def fit(self, X, y=None, **words):  # noqa: N803
            count_training(folder)
            return super().fit(X, y, **words)

    torch.manual_seed(0)
    net = Counted(
        Net, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, max_epochs=3, batch_size=32
    )
    net.set_params(train_split=None, iterator_train__shuffle=True, verbose=0)
    grid = {"lr": GRID["lr"], "module__width": GRID["width"]}
    search = GridSearchCV(net, grid, cv=FOLDS, n_jobs=n_jobs, refit=False).fit(X, y)
    return search.cv_results_["mean_test_score"].tolist()


def optuna(folder, n_jobs):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial):
        lr = trial.suggest_float("lr", 1e-3, 1e-2, log=True)
        return mean_score(folder, lr, trial.suggest_int("width", 16, 32))

    study = optuna.create_study(
        study_name="digits",
        storage=f"sqlite:///{folder}/study.db",
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
    )
    study.optimize(objective, n_trials=4, n_jobs=n_jobs)
    return [trial.value for trial in study.trials]


def ray(folder, n_jobs):
    import ray
    from ray import tune

    ray.init(num_cpus=n_jobs, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def trainable(config):
        tune.report({"accuracy": mean_score(folder, config["lr"], config["width"])})

    storage = f"{folder}/storage"
    if tune.Tuner.can_restore(f"{storage}/digits"):
        tuner = tune.Tuner.restore(f"{storage}/digits", trainable)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space={name: tune.grid_search(values) for name, values in GRID.items()},
            run_config=tune.RunConfig(name="digits", storage_path=storage, verbose=0),
        )
    rows = [(*trial.config.values(), trial.metrics["accuracy"]) for trial in tuner.fit()]
    return [accuracy for *_, accuracy in sorted(rows)]


def start(peer, folder, n_jobs):
    return subprocess.Popen(
        [sys.executable, __file__, "call", peer, folder, str(n_jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def scores(process):
    return json.loads(process.communicate()[0].splitlines()[-1])


def main(peers):
    for peer in peers:
        numbers = []
        for n_jobs in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                numbers.append(scores(start(peer, folder, n_jobs)))
        print(f"{peer}: with one process {numbers[0]}, with two {numbers[1]}")
        with tempfile.TemporaryDirectory() as folder:
            process = start(peer, folder, 1)
            while trainings(folder) < KILLED_AFTER and process.poll() is None:
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            before = trainings(folder)
            after = scores(start(peer, folder, 1))
            print(f"{peer}: {before} trainings, killed, {trainings(folder) - before} more: {after}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["call"]:
        peer, folder, n_jobs = sys.argv[2:]
        print(json.dumps(globals()[peer](folder, int(n_jobs))))
    else:
        main(sys.argv[1:])
