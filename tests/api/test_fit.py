"""One model trained alone: the caller's own, with the bits of a run, and continued like one."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset

from asynckfold import (
    AsyncKFold,
    DistributedTester,
    DistributedTrainer,
    Fitted,
    InputError,
    RunStore,
    fit,
)
from tests.toy import Echo, Tiny, adam, samples

X, Y = samples(90)
HELD_OUT = np.arange(60, 90)


def made(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def digest(module: nn.Module) -> list[list[float]]:
    return [value.double().flatten().tolist() for value in module.state_dict().values()]


def fitted(root: Path, model: Any = Tiny, optimizer: Any = adam, **settings: Any) -> Fitted:
    settings = {"valid": HELD_OUT, "epochs": 3, "verbose": 0, "threads_per_job": 1, **settings}
    return fit(model, (X, Y), optimizer, nn.CrossEntropyLoss(), root, 10, **settings)


def test_it_is_a_run_of_one_job_and_gives_its_model(root: Path) -> None:
    found = fitted(root / "fit", scheduler="cosine")
    fold = np.arange(60), HELD_OUT
    run = AsyncKFold(
        [fold], (X, Y), root / "run", nn.CrossEntropyLoss(), 10, baseline=None, verbose=0
    )({"Tiny": Tiny}, ["cosine"], adam, {"epochs": 3})
    (job,) = run.results.values()
    assert found.result.weights == job.weights
    assert [item.number for item in found.epochs] == [1, 2, 3]
    found.model.eval()
    right = found.model(torch.from_numpy(X[60:])).argmax(1).numpy() == Y[60:]
    assert right.mean() == pytest.approx(found.score)


def test_a_module_is_trained_from_its_weights_with_its_own_optimizer_and_schedule(
    root: Path,
) -> None:
    module = made()
    start = digest(module)
    optimizer = optim.Adam(module.parameters(), 1e-2)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = fitted(root / "objects", module, optimizer, scheduler=schedule)
    assert found.model is module
    assert digest(module) != start
    assert [item.lr for item in found.epochs] == pytest.approx([1e-2, 5e-3, 2.5e-3])
    assert "Seems like" not in "".join(p.read_text() for p in root.rglob("log.txt"))

    def halved(optimizer: optim.Optimizer) -> Any:
        return optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    again = fitted(root / "functions", made(), adam, scheduler=halved)
    assert digest(again.model) == digest(module)


def test_without_other_samples_all_are_trained_on_and_some_scored(tmp_path: Path) -> None:
    found = fitted(tmp_path / "run", valid=None, scheduler=None)
    with RunStore.read(tmp_path / "run") as store:
        (fold,), _ = store.splits()
    assert fold.train.tolist() == list(range(90))
    assert fold.valid.tolist() == list(range(90, 180))
    assert found.score > 0.5


def test_other_samples_may_be_arrays_or_a_data_set(root: Path) -> None:
    inside = fitted(root / "numbers")
    arrays = fit(
        *(Tiny, (X[:60], Y[:60]), adam, nn.CrossEntropyLoss(), root / "arrays", 10),
        **{"valid": (X[60:], Y[60:]), "epochs": 3, "verbose": 0, "threads_per_job": 1},
    )
    assert arrays.result.weights == inside.result.weights
    assert arrays.score == inside.score


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.0)


def test_data_sets_keep_their_own_transforms(root: Path) -> None:
    class Shifted(Dataset[Any]):
        def __init__(self, count: int, shift: int) -> None:
            self.count, self.shift = count, shift

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([float(index + self.shift)]), torch.tensor([0.0])

    settings = {"epochs": 1, "verbose": 0, "engine": "serial", "stratify": False, "report": False}
    for valid, shown in ((Shifted(2, 20), [10, 11, 12, 20, 21]), (None, [10, 11, 12, 10, 11, 12])):
        trained = fit(
            Echo,
            Shifted(3, 10),
            sgd,
            nn.MSELoss(),
            root / str(valid is None),
            valid=valid,
            **settings,
        )
        outputs = trained.results.oof["Echo/constant"][:, 0]
        assert outputs[~np.isnan(outputs)].tolist() == shown[3:]


def test_what_does_not_fit_is_refused_before_the_start(root: Path) -> None:
    module, other = made(), made()
    optimizer = optim.SGD(other.parameters(), 0.1)
    with pytest.raises(InputError, match="parameters of the module that is trained"):
        fitted(root, module, optimizer)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(InputError, match="must belong to the optimizer that trains"):
        fitted(root, module, optim.SGD(module.parameters(), 0.1), scheduler=schedule)
    with pytest.raises(InputError, match="must belong to the optimizer that trains"):
        fitted(root, module, adam, scheduler=schedule)
    with pytest.raises(ValueError, match=r"must match exactly.* size 8 .* size 7"):
        fitted(root, valid=(X[:, 1:], Y))
    with pytest.raises(InputError, match="processes must not exceed the cores"):
        DistributedTrainer(4096, nn.CrossEntropyLoss(), root, 10)(
            module, (X, Y), adam, "constant", epochs=1
        )
    assert not root.exists()


# The ancestor's names


class Noting(Tiny):
    """Writes down how many samples each step has."""

    path: Path

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with self.path.open("a") as file:
                file.write(f"{os.getpid()} {len(inputs)}\n")
        return super().forward(inputs)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_distributed_trainer_respects_its_batch_size(root: Path, processes: int) -> None:
    module, path = Noting(), root.with_name("noted")
    module.path = path
    untrained = copy.deepcopy(module.state_dict())
    optimizer = optim.SGD(module.parameters(), 0.05)
    schedule = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = DistributedTrainer(processes, nn.CrossEntropyLoss(), root, 25)
    found = trainer(module, (X, Y), optimizer, schedule, epochs=3, print_frequency=1)
    lines = path.read_text().split("\n")[:-1]
    sizes = Counter(int(line.split()[1]) for line in lines)
    dry_run = sum(sizes.values()) - 3 * 4
    assert sizes[25] == 3 * 3 + dry_run
    assert sizes[15] == 3
    assert len(found.result.cores) == processes
    assert list(root.rglob("checkpoint-*.safetensors"))
    path.unlink()
    # With the trained weights it would be another training.
    module.load_state_dict(untrained)
    again = trainer(module, (X, Y), optimizer, schedule, epochs=3, print_frequency=1)
    assert again.result.weights == found.result.weights
    # The dry run times as many steps as it has time for, and no short batch.
    assert {line.split()[1] for line in path.read_text().split("\n")[:-1]} == {"25"}


def test_a_distributed_tester_tells_accuracy_in_all_and_of_each_class(tmp_path: Path) -> None:
    module = nn.Identity().train()
    outputs, targets = torch.eye(4)[[0, 1, 1, 3]], torch.tensor([0, 1, 0, 3])
    loader = DataLoader(TensorDataset(outputs, targets), batch_size=3)
    found = DistributedTester(loader, tmp_path / "new")(module)
    assert (found.samples, found.accuracy) == (4, 0.75)
    assert found.class_accuracy[:2] == (0.5, 1.0)
    assert found.class_accuracy[2] != found.class_accuracy[2]
    assert module.training
    told = json.loads((tmp_path / "new" / "test.json").read_text())
    assert told == {"samples": 4, "accuracy": 0.75, "class_accuracy": [0.5, 1.0, None, 1.0]}
    confusion = np.load(tmp_path / "new" / "confusion_matrix.npy")
    assert confusion.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    wider = DistributedTester(loader, tmp_path / "new", 6)(module)
    assert wider.accuracy == 0.75
    assert np.load(tmp_path / "new" / "confusion_matrix.npy").shape == (6, 6)


class OnDevice(nn.Module):
    """Stands for a model on a GPU: it takes inputs of its own device only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert inputs.device == self.weight.device
        return Outputs(torch.eye(3))


class Outputs(torch.Tensor):
    """Outputs on a device without numbers, whose copies on the CPU have some."""

    def cpu(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_a_tester_sends_inputs_to_the_device_of_the_model(tmp_path: Path) -> None:
    loader = [(torch.zeros(3, 2), torch.tensor([0, 1, 1]))]
    assert DistributedTester(loader, tmp_path)(OnDevice()).accuracy == 2 / 3


def test_a_tester_refuses_what_it_cannot_test(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must give samples"):
        DistributedTester([], tmp_path)(nn.Identity())
    numbers = [(torch.zeros(2, 1), torch.zeros(2))]
    with pytest.raises(InputError, match="needs class indices"):
        DistributedTester(numbers, tmp_path)(nn.Identity())
    with pytest.raises(InputError, match="at least the model's 3 outputs: received 2"):
        DistributedTester([(torch.eye(3), torch.arange(3))], tmp_path, 2)(nn.Identity())
