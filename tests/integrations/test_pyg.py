"""Graphs of PyTorch Geometric: pairs of a graph and its label, batched by its own Batch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold
from tests.plain import epoch_order, one_thread, seed_all, stream

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch_geometric") is None, reason="needs the extra pyg"
    ),
]


def graphs() -> list[tuple[Any, int]]:
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(36):
        nodes = 4 + number % 5
        x = torch.randn(nodes, 3, generator=generator)
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
        found.append((Data(x=x, edge_index=edges), int(x[:, 0].sum() > 0)))
    return found


def joined(items: list[tuple[Any, int]]) -> tuple[Any, torch.Tensor]:
    from torch_geometric.data import Batch

    samples, labels = zip(*items, strict=True)
    return Batch.from_data_list(list(samples)), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.conv, self.out = GCNConv(3, 8), nn.Linear(8, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        from torch_geometric.nn import global_mean_pool

        hidden = self.conv(batch.x, batch.edge_index).relu()
        found: torch.Tensor = self.out(global_mean_pool(hidden, batch.batch))
        return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2, fused=True)


@pytest.mark.parametrize("engine", ["serial", "process"])
def test_graphs_have_the_bits_of_a_plain_loop(tmp_path: Path, engine: str) -> None:
    data, criterion = graphs(), nn.CrossEntropyLoss()
    words: dict[str, Any] = {"engine": engine, "verbose": 0, "report": False, "n_jobs": 1}
    kfold = AsyncKFold(3, data, tmp_path / "run", criterion, 8, collate_fn=joined, **words)
    results = kfold({"net": Net}, ["constant"], adam, {"epochs": 2})
    for job, fold in zip(results.plan.jobs, results.folds, strict=True):
        with one_thread():
            seed_all(job.seed)
            model = Net()
            optimizer = adam(model)
            for epoch in range(2):
                seed_all(stream(job.seed, epoch + 1))
                for rows in np.split(epoch_order(fold.train, job.seed, epoch), [8, 16]):
                    inputs, labels = joined([data[row] for row in rows])
                    optimizer.zero_grad()
                    criterion(model(inputs), labels).backward()
                    optimizer.step()
            with torch.no_grad():
                outputs = model.eval()(joined([data[row] for row in fold.valid])[0])
        assert np.array_equal(results.oof["net/constant"][fold.valid], outputs.numpy())
