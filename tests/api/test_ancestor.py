"""Scripts of the project that this one grew out of run with only their import lines changed.

The scripts here make its calls, in its order, on a synthetic CIFAR-10.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from asynckfold import (
    AsyncKFold,
    InputError,
    RunStore,
    StorageError,
    export,
    get_scheduler,
    load_results,
)
from tests import cifar
from tests.started import Nursery, Started

KFOLD = """
import os

from torch.multiprocessing import set_start_method
from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torchvision.datasets import CIFAR10

from kfold import AsyncKFold
from models import VGG, LeNet, MobileNet


def get_optimizer(model):
    return Adam(model.parameters(), 1e-3)


if __name__ == "__main__":
    set_start_method("spawn", force=True)
    root_dir = os.path.dirname(os.path.abspath(__file__))
    train_dataset = CIFAR10(root="./data", train=True, download=True)
    trainer_params = {"epochs": 2, "save_checkpoint_frequency": 20, "print_frequency": 15}
    kfold = AsyncKFold(2, train_dataset, root_dir, CrossEntropyLoss(), 32)
    kfold([MobileNet, LeNet, VGG], ["cosine", "warm"], get_optimizer, trainer_params)
"""

DISTRIBUTED = """
import os

import torch
from torch.multiprocessing import set_start_method
from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

from common import DistributedTester, DistributedTrainer
from kfold import get_scheduler
from models import LeNet

epochs, batch_size, num_processes = 2, 32, 2
scaling = [ToTensor(), Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))]


def get_datasets():
    augmented = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), *scaling])
    train_dataset = CIFAR10(root="./data", train=True, download=True, transform=augmented)
    test_dataset = CIFAR10(root="./data", train=False, download=True, transform=Compose(scaling))
    return train_dataset, test_dataset


if __name__ == "__main__":
    set_start_method("spawn", force=True)
    root_dir = os.path.dirname(os.path.abspath(__file__))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LeNet().to(device)
    optimizer = Adam(model.parameters(), 1e-3)
    scheduler = get_scheduler("cosine", optimizer)
    train_dataset, test_dataset = get_datasets()

    trainer = DistributedTrainer(num_processes, CrossEntropyLoss(), root_dir, batch_size)
    trainer(model, train_dataset, optimizer, scheduler, epochs=epochs)

    loader = DataLoader(test_dataset, batch_size=batch_size, shuffle=True)
    tester = DistributedTester(loader, root_dir, 10)
    tester(model)
"""

HOGWILD = """
import os
import sys

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10
from torchvision.transforms import Compose, Normalize, ToTensor

from hogwild import Hogwild, Server
from models import LeNet

epochs, lr, batch_size, num_push, num_pull = 2, 1e-3, 32, 5, 5
transform = Compose([ToTensor(), Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])


def evaluate(net, loader):
    net.eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images)
            loss += F.cross_entropy(outputs, labels).item()
            right += (outputs.argmax(1) == labels).sum().item()
            count += len(labels)
    return loss, right / count


if __name__ == "__main__":
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[3]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

    trainset = CIFAR10(root="./data", train=True, download=True, transform=transform)
    testset = CIFAR10(root="./data", train=False, download=True, transform=transform)
    trainloader = DataLoader(trainset, batch_size=batch_size, shuffle=True, num_workers=1)
    testloader = DataLoader(testset, batch_size=batch_size, shuffle=False, num_workers=1)

    net = LeNet()
    if rank == 0:
        server = Server(net)
        server.run()

    optimizer = Hogwild(net.parameters(), lr=lr, n_push=num_push, n_pull=num_pull, model=net)
    scheduler = ReduceLROnPlateau(optimizer, patience=1, min_lr=1e-3)
    logs = []
    for epoch in range(epochs):
        net.train()
        for inputs, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
        test_loss, test_accuracy = evaluate(net, testloader)
        scheduler.step(test_loss)
        logs.append({"test_loss": test_loss, "test_accuracy": test_accuracy})
    pd.DataFrame(logs).to_csv("log/node{}.csv".format(dist.get_rank()), index_label="index")
"""


def with_our_imports(script: str) -> str:
    ours = re.sub(r"^from models import", "from asynckfold.models import", script, flags=re.M)
    ours = re.sub(
        r"^from (common|kfold|hogwild) import", "from asynckfold import", ours, flags=re.M
    )
    pairs = zip(script.splitlines(), ours.splitlines(), strict=True)
    assert {line.split()[0] for line, other in pairs if line != other} == {"from"}
    return ours


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data, in which scripts run."""
    cifar.write(tmp_path / "data")
    (tmp_path / "log").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(warm: Nursery, place: Path, script: str, *words: object) -> Started:
    path = place / "script" / "script.py"
    # Once: a rank that reads the file while it is written anew would find it empty.
    if not path.exists():
        path.parent.mkdir()
        path.write_text(with_our_imports(script))
    printed = place / "-".join(["printed", *map(str, words[:1])])
    return warm.start([cifar.__file__, path, *words], printed)


@pytest.mark.nightly
def test_the_k_fold_script_runs(place: Path, warm: Nursery) -> None:
    ended = start(warm, place, KFOLD)
    assert ended.wait(500) == 0, ended.printed()
    with RunStore.read(place / "script") as store:
        found, events = load_results(store), [event.text for event in store.events()]
    assert found.counts["done"] == 2 * 2 * 3
    assert sum("images are taken as tensors scaled to [0, 1]" in text for text in events) == 1
    written = export(place / "script")
    folds = place / "script" / "LeNet" / "cosine"
    for fold in ("0", "1"):
        losses = np.load(folds / fold / "train-loss-epoch-1.npy")
        result = found.results[f"LeNet/cosine/fold-{fold}"]
        assert losses.tolist() == [epoch.train_loss for epoch in result.epochs]
        assert np.load(folds / fold / "train-loss-epoch-0.npy").tolist() == losses[:1].tolist()
        confusion = np.load(folds / fold / "confusion_matrix.npy")
        assert confusion.shape == (10, 10)
        assert confusion.trace() / confusion.sum() == pytest.approx(result.scores["accuracy"])
        saved = torch.load(folds / fold / "checkpoint_latest.tar")
        assert saved["epoch"] == 1
        weights = found.state_dict("LeNet/cosine", int(fold))
        assert all(torch.equal(saved["model_state_dict"][name], weights[name]) for name in weights)
    times = json.loads((folds / "time.json").read_text())
    assert 0 <= times["start"] < times["end"] <= found.seconds + 60
    assert len(written) == 3 * 2 * (1 + 2 * 4)


@pytest.mark.nightly
def test_the_distributed_script_runs(place: Path, warm: Nursery) -> None:
    ended = start(warm, place, DISTRIBUTED)
    assert ended.wait(500) == 0, ended.printed()
    folder = place / "script"
    assert np.load(folder / "confusion_matrix.npy").sum() == 20
    export(folder, place / "exported")
    tables = [pd.read_csv(place / "exported" / f"train_data_{rank}.csv") for rank in range(2)]
    assert [list(table) for table in tables] == [["Unnamed: 0", "train_loss", "time"]] * 2
    with RunStore.read(folder) as store:
        (result,) = load_results(store).results.values()
    assert tables[0].train_loss.tolist() == [epoch.train_loss for epoch in result.epochs]
    assert tables[1].time.is_monotonic_increasing


@pytest.mark.nightly
def test_the_hogwild_script_runs(place: Path, warm: Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as line:
        free_port = int(line.getsockname()[1])
    ranks = [start(warm, place, HOGWILD, rank, 3, free_port) for rank in range(3)]
    assert [rank.wait(500) for rank in ranks] == [0, 0, 0], [rank.printed() for rank in ranks]
    logs = [pd.read_csv(place / "log" / f"node{rank}.csv") for rank in (1, 2)]
    assert all(len(log) == 2 and np.isfinite(log.test_loss).all() for log in logs)
    assert not (place / "log" / "node0.csv").exists()


def test_keywords_of_its_calls_are_accepted(tmp_path: Path) -> None:
    inputs = torch.randn(12, 4)
    data = inputs, (inputs[:, 0] > 0).long()

    def get_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    kfold = AsyncKFold(
        kfolds=2,
        train_dataset=data,
        root_dir=tmp_path,
        criterion=torch.nn.CrossEntropyLoss(),
        batch_size=4,
        parallelize=False,
        verbose=0,
        report=False,
    )
    results = kfold(
        models={"linear": lambda: torch.nn.Linear(4, 2)},
        schedulers=["constant"],
        get_optimizer=get_optimizer,
        trainer_params={"epochs": 1},
    )
    assert results.counts["done"] == 2
    # Whoever may write everywhere may not write here.
    with pytest.raises(StorageError, match="/proc/x"):
        export(tmp_path, "/proc/x")
    with pytest.raises(TypeError, match=r"'train_dataset'\. It is called 'dataset'"):
        AsyncKFold(2, dataset=data, train_dataset=data, root_dir=tmp_path)


def test_a_schedule_by_name_is_that_of_a_sweep() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 0.1)
    warm = get_scheduler("warm", optimizer, steps=8)
    assert (type(warm).__name__, warm.T_0) == ("CosineAnnealingWarmRestarts", 4)
    with pytest.raises(InputError, match=r"received 'cosin'. Did you mean 'cosine'"):
        get_scheduler("cosin", optimizer)
    with pytest.raises(InputError, match="steps must be a whole number of at least 1: received 0"):
        get_scheduler("cosine", optimizer, 0)


def test_an_export_of_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = "root_dir must be the folder of a run: received nowhere, which holds no"
    with pytest.raises(InputError, match=told):
        export("nowhere")
