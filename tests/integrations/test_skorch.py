"""A skorch net on the folds of a run: the bits of a plain loop with skorch's arithmetic."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError
from tests.plain import epoch_order, one_thread, seed_all, stream
from tests.toy import samples

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("skorch") is None, reason="needs the extra skorch"),
    # skorch imports torch_geometric where it is installed, which scripts a function.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning"),
]


class Net(nn.Module):
    def __init__(self, width: int = 4, outputs: int = 3, ends: Any = nn.Identity) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, outputs))
        self.ends = ends()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.ends(self.layers(inputs))
        return found


class Softmax(Net):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width, 3, lambda: nn.Softmax(1))


def swept(root: Path, net: Any, data: Any = None, **given: Any) -> Any:
    from asynckfold.integrations.skorch import parts_of

    parts = parts_of(net)
    settings = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False}
    data = samples() if data is None else data
    kfold = AsyncKFold(3, data, root, parts.criterion, parts.batch_size, **settings)
    return kfold(*parts.call, **given)


def test_a_classifier_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    import skorch

    net = skorch.NeuralNetClassifier(
        Softmax,
        module__width=6,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        optimizer__fused=True,
        lr=0.05,
        max_epochs=2,
        batch_size=10,
        iterator_train__shuffle=True,
        callbacks=[],
        verbose=0,
    )
    results = swept(tmp_path, net, params={"lr": [0.05, 0.01]})
    inputs, targets = map(torch.from_numpy, samples())
    criterion = net.initialize().criterion_
    for job in results.plan.jobs:
        with one_thread():
            seed_all(job.seed)
            model = Softmax(6)
            rate = 0.05 if "lr=0.05" in job.candidate else 0.01
            made = torch.optim.SGD(model.parameters(), rate, momentum=0.9, fused=True)
            for epoch in range(2):
                seed_all(stream(job.seed, epoch + 1))
                order = epoch_order(results.folds[job.fold].train, job.seed, epoch)
                for rows in torch.from_numpy(order).split(10):
                    made.zero_grad()
                    net.criterion_ = criterion
                    net.get_loss(model(inputs[rows]), targets[rows]).backward()
                    made.step()
        found = results.state_dict(job.candidate, fold=job.fold)
        for name, value in model.state_dict().items():
            assert torch.equal(found[f"module.{name}"], value)
    assert {row.name for row in results.candidates} == {
        "Softmax/constant/lr=0.05",
        "Softmax/constant/lr=0.01",
    }


def test_nets_of_other_tasks_are_scored_as_these(tmp_path: Path) -> None:
    import skorch

    inputs, targets = samples()
    words = {"max_epochs": 2, "callbacks": "disable", "batch_size": 10}
    number = inputs.sum(1, keepdims=True)
    regressor = skorch.NeuralNetRegressor(Net, module__outputs=1, **words)
    found = swept(tmp_path / "numbers", regressor, (inputs, number))
    assert found.plan.scoring == ("r2",)
    logits = skorch.NeuralNet(Net(), nn.CrossEntropyLoss, criterion__label_smoothing=0.1, **words)
    assert swept(tmp_path / "classes", logits).plan.scoring == ("accuracy",)
    binary = skorch.NeuralNetBinaryClassifier(Net, module__outputs=1, **words)
    two = (targets == 0).astype(np.int64)
    found = swept(tmp_path / "two", binary, (inputs, two))
    assert found.oof["Net/constant"].shape == (60,)
    outputs = found.oof["Net/constant"].reshape(-1)
    assert found.best_score_ == pytest.approx(((outputs > 0) == two).mean())


def test_what_only_skorch_can_do_is_refused_by_name(tmp_path: Path) -> None:
    import skorch

    from asynckfold.integrations.skorch import parts_of

    class Own(skorch.NeuralNetClassifier):
        def get_loss(self, *args: Any, **kwargs: Any) -> Any: ...

        def predict(self, X: Any) -> Any: ...

    refused: dict[str, tuple[Any, dict[str, Any]]] = {
        r"callbacks=\[.*EarlyStopping.*Leave it out": (
            skorch.NeuralNetClassifier,
            {"callbacks": [skorch.callbacks.EarlyStopping()]},
        ),
        "received warm_start=True": (skorch.NeuralNetClassifier, {"warm_start": True}),
        "device='cuda'.*devices to AsyncKFold": (skorch.NeuralNetClassifier, {"device": "cuda"}),
        "iterator_train__drop_last=True": (
            skorch.NeuralNetClassifier,
            {"iterator_train__drop_last": True},
        ),
        "iterator_train__shuffle=False": (
            skorch.NeuralNetClassifier,
            {"iterator_train__shuffle": False},
        ),
        "optimizer__param_groups": (
            skorch.NeuralNetClassifier,
            {"optimizer__param_groups": [("layers*", {"lr": 1})]},
        ),
        r"received Own\.get_loss": (Own, {}),
    }
    for message, (kind, given) in refused.items():
        with pytest.raises(InputError, match=message) as found:
            parts_of(kind(Softmax, **given))
        assert len(found.value.problems) == 1
    with pytest.raises(InputError, match="net must be a skorch"):
        parts_of(1)
    # An instance is copied for each job.
    given = Softmax()
    made = parts_of(skorch.NeuralNetClassifier(given)).models["Softmax"]()
    assert made.module is not given
    assert torch.equal(made.module.layers[0].weight, given.layers[0].weight)
    assert parts_of(skorch.NeuralNetClassifier(Softmax, classes=[0, 1, 2])).batch_size == 128
