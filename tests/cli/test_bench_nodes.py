"""One model on nodes of tasks: who trains on what, what passes between nodes, what is told."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asynckfold.cli.bench import loops, node_training, nodes, scaling
from asynckfold.cli.bench.node_training import Link, NodeTraining
from asynckfold.cli.bench.scaling import Cluster
from asynckfold.cli.bench.trainers import Outcome, Work
from asynckfold.errors import WorkerDiedError
from asynckfold.models import DBN, Pretraining
from asynckfold.training.parameter_server import Server

WORK = Work("MLP", loops.digits_mlp, 8, epochs=2, target=0.5, samples=400)


def samples(count: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 64, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


def trained(cluster: Cluster, begun: nn.Module, work: Work = WORK) -> NodeTraining:
    return NodeTraining(work, begun, samples(), cluster)


@given(st.integers(1, 5), st.integers(1, 4))
def test_all_tasks_together_train_on_each_sample_once_an_epoch(count: int, tasks: int) -> None:
    training = trained(Cluster(count, tasks), nn.Linear(64, 2))
    seen = Counter(
        int(row)
        for number in range(training.cluster.workers)
        for rows in training.batches(number)
        for row in rows
    )
    assert seen == Counter(dict.fromkeys(range(40), WORK.epochs))


def test_one_task_takes_the_steps_of_a_plain_loop() -> None:
    begun = nn.Linear(64, 2)
    training = trained(Cluster(1, 1), begun)
    outcome = training.run()
    assert outcome.speed > 0
    inputs, targets = samples()
    optimizer = loops.fast_adam(begun)
    with loops.threads(1):
        for epoch in range(WORK.epochs):
            order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
            for rows in order.split(loops.BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(begun(inputs[rows]), targets[rows]).backward()
                optimizer.step()
    assert torch.equal(training.trained.weight, begun.weight)  # type: ignore[arg-type]
    # The last look is the model at the end.
    assert torch.equal(training.looks[-1], nn.utils.parameters_to_vector(begun.parameters()))


@pytest.fixture
def served() -> Any:
    """A server for two nodes, and what it holds in the end."""
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    server = Server(model, address="127.0.0.1:0", timeout_s=10)
    thread = threading.Thread(target=server.serve, args=(2,))
    thread.start()
    yield server
    server.close()
    thread.join()


def moved(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by


def test_a_node_takes_up_how_far_the_others_have_moved(served: Server) -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    for model in (first, second):
        model.load_state_dict(served.model.state_dict())
    links = [Link(first, served.address), Link(second, served.address)]
    moved(first, 1.0)
    links[0].exchange()
    moved(second, 0.5)
    links[1].exchange()
    assert second.weight.tolist() == [[1.5, 1.5]]
    assert first.weight.tolist() == [[1.0, 1.0]]
    step = links[0].optimizer.step

    def meanwhile(*arguments: Any) -> None:
        step(*arguments)
        moved(first, 0.25)  # another task of the node

    links[0].optimizer.step = meanwhile  # type: ignore[assignment, method-assign]
    links[0].exchange()
    assert first.weight.tolist() == [[1.75, 1.75]]
    links[0].optimizer.step = step  # type: ignore[method-assign]
    for link in links:
        link.leave()
    # Server.serve returns when both have left, and gives its model what it held.
    assert second.weight.tolist() == [[1.75, 1.75]]


def test_several_nodes_of_several_tasks_learn() -> None:
    torch.manual_seed(0)
    work = Work("line", loops.digits_mlp, 8, epochs=60, target=0.7)
    training = NodeTraining(work, loops.digits_mlp(), samples(500), Cluster(2, 2))
    outcome = training.run()
    assert outcome.accuracy > 0.8
    assert outcome.seconds is not None
    assert 0 < outcome.seconds <= 400 * 60 / outcome.speed


class Deadly(nn.Linear):
    """Ends whoever computes with it."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__(64, 2)
        self.end = end

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.end()
        return super().forward(inputs)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise ValueError("not with me")


@pytest.mark.nightly(but=["cluster1-kill-WorkerDiedError", "cluster0-refuse-ValueError"])
@pytest.mark.parametrize(("end", "error"), [(kill, WorkerDiedError), (refuse, ValueError)])
@pytest.mark.parametrize("cluster", [Cluster(1, 2), Cluster(2, 1)])
def test_the_end_of_a_task_ends_all_with_its_error(
    end: Callable[[], None], error: type[Exception], cluster: Cluster
) -> None:
    with pytest.raises(error):
        trained(cluster, Deadly(end)).run()


def test_a_dbn_begins_with_pretrained_layers_and_the_caller_keeps_its_own() -> None:
    made = []

    def net() -> nn.Module:
        made.append(DBN(64, (8,), 2, pretraining=Pretraining(epochs=1)))
        return made[-1]

    begun = node_training.beginning(Work("DBN", net, 8), samples()[0])
    torch.manual_seed(0)
    fresh = net()
    assert not torch.equal(begun[1].weight, fresh[1].weight)  # type: ignore[index]
    assert torch.equal(begun[3].weight, fresh[3].weight)  # type: ignore[index]
    before = begun.state_dict()["1.weight"].clone()
    trained(Cluster(1, 1), begun).run()
    assert torch.equal(begun.state_dict()["1.weight"], before)


def test_the_table_holds_what_was_measured_and_extrapolates_nothing_from_two_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nodes, "cores", lambda: 2)
    told: list[str] = []
    table = nodes.table([WORK], turns=1, tell=told.append)
    rows = table.to_json()["rows"]
    assert [(row["table"], row["nodes"], row["tasks a node"]) for row in rows] == [
        ("workers of 1 node", 1, 1),
        ("workers of 1 node", 1, 2),
        ("nodes with 1 task each", 1, 1),
        ("nodes with 1 task each", 2, 1),
    ]
    assert {row["origin"] for row in rows} == {"measured"}
    for row in rows:
        assert row["speedup"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
        assert row["samples/s"] == pytest.approx(2 * 320 / row["seconds"])
        assert row["accuracy"] > 0.15  # chance is 0.1
    assert any("Nothing is extrapolated" in note and "has 2" in note for note in table.notes)
    assert len(told) == len(rows)
    (drawing,) = table.figures.values()
    seconds, *_ = drawing.figure.axes
    assert list(seconds.get_lines()[2].get_ydata()) == [row["seconds"] for row in rows[:2]]
    assert not list(tmp_path.iterdir())


def law(count: int) -> float:
    return 8 / count + 0.1 * (count - 1) + 1


def test_rows_beyond_the_cores_are_marked_as_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(NodeTraining):
        """Takes what the law says, and learns nothing."""

        def run(self) -> Outcome:
            return Outcome(self.count * self.work.epochs / law(self.cluster.workers), None, 0.1)

    monkeypatch.setattr(nodes, "NodeTraining", Told)
    monkeypatch.setattr(nodes, "cores", lambda: 4)
    table = nodes.table([WORK], turns=1)
    rows = [row for row in table.to_json()["rows"] if row["table"] == "nodes with 1 task each"]
    assert [row["nodes"] for row in rows] == [1, 2, 3, 4, 8, 16]
    assert [row["origin"] for row in rows] == ["measured"] * 4 + ["model, not measured"] * 2
    for row in rows:
        assert row["seconds"] == pytest.approx(law(row["nodes"]))
        assert row["speedup"] == pytest.approx(law(1) / law(row["nodes"]))
    assert rows[-1]["accuracy"] is None
    (drawing,) = table.figures.values()
    nodes_grow = drawing.figure.axes[2].get_lines()
    _, curve, measured, modelled, *_ = nodes_grow
    assert list(measured.get_xdata()) == [1, 2, 3, 4]
    assert list(modelled.get_xdata()) == [8, 16]
    assert list(curve.get_ydata()) == pytest.approx([law(n) for n in curve.get_xdata()])
    # Of two nodes with 1 or 2 tasks each: by cores, and without a model.
    assert [list(line.get_xdata()) for line in nodes_grow[4:7]] == [[], [2, 4], []]
    # Two nodes with one or two tasks are two counts: no model for these.
    few = [row for row in table.to_json()["rows"] if row["table"] == "tasks of 2 nodes"]
    assert [row["origin"] for row in few] == ["measured"] * 2
    (note,) = (note for note in table.notes if note.startswith("model, not measured"))
    assert "nodes with 1 task each, MLP: 8 / n + 0.1 × (n − 1) + 1 s, off by at most 0%" in note


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=5))
def test_no_fitted_term_is_negative_and_its_error_is_told(noise: list[float]) -> None:
    measured = {n: law(n) * factor for n, factor in zip((1, 2, 4, 8, 16), noise, strict=True)}
    found = scaling.scaling(measured)
    assert found is not None
    assert min(found.computation, found.communication, found.rest) >= 0
    worst = max(abs(found.seconds(n) / seconds - 1) for n, seconds in measured.items())
    assert found.error == pytest.approx(worst)
