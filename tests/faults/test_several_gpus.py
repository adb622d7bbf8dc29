"""All-reduce on several GPUs in a real sweep; CPUs stand for the slices of one GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from asynckfold import AsyncKFold, CVResults, InputError, RunStore
from asynckfold.jobs.result import DONE
from asynckfold.system import process
from asynckfold.training.process_group.collectives import Collectives
from tests import fake_gpu
from tests.faults.test_hogwild import (
    ended_well,
    errors_of,
    kfold,
    leads,
    members,
    slow,
    wait_for,
)
from tests.leftovers import gone
from tests.nursery import Nursery
from tests.toy import Tiny, adam

SCRIPT = """
import sys, time
from pathlib import Path
from asynckfold.system import machine
from tests import fake_gpu
from tests.faults.test_several_gpus import on_gpus

machine.load_nvml = fake_gpu.load_slices
machine.gpu_trial.failures = lambda uuids: {}
slow = Path(sys.argv[1]).with_name("SLOW")

class Slow(fake_gpu.OnFakeGpu):
    def forward(self, inputs):
        time.sleep(0.02 if self.training and slow.exists() else 0)
        return super().forward(inputs)

print(on_gpus(sys.argv[1], 12, Slow).best_score_)
"""


def on_gpus(root: Any, epochs: int, model: Any = fake_gpu.OnFakeGpu, **settings: Any) -> CVResults:
    words = {"epochs": epochs, "eval_batch_size": 16}
    asked = kfold(root, **{"trainer": "allreduce", "devices": "cuda", **settings})
    return asked({"slow": model}, ["cosine"], adam, words)


def weights(found: CVResults) -> dict[str, str]:
    return {name: item.weights for name, item in found.results.items()}


@pytest.fixture
def _slices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch, fake_gpu.load_slices)


@pytest.fixture
def _two(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch, fake_gpu.load_two)


@pytest.mark.usefixtures("_slices")
def test_each_process_has_a_gpu_and_the_bits_are_those_on_cores(root: Path) -> None:
    found = on_gpus(root / "gpus", 2)
    assert {item.status for item in found.results.values()} == {DONE}
    assert set(found.to_frame("fold")["device"]) == {"cuda:0,1"}
    assert {(item.threads, len(item.cores)) for item in found.results.values()} == {(2, 2)}
    assert found.plan.params.by_kind == "processes={'gpu': 2}"
    for name in found.results:
        log = (root / "gpus" / name / "log.txt").read_text()
        assert log.count(" taken by ") == 2
        assert {"MIG-0", "MIG-1"} <= set(log.split())
    with RunStore.read(root / "gpus") as store:
        assert next(iter(store.software()))["collectives"] == "gloo"
        assert {event.kind for event in store.events()}.isdisjoint({"isolation", "died"})
    on_cores = on_gpus(root / "cores", 2, devices="cpu")
    assert set(on_cores.to_frame("fold")["device"]) == {"cpu"}
    assert weights(on_cores) == weights(found)
    assert [item.digest for item in on_cores.results.values()] == [
        item.digest for item in found.results.values()
    ]


@pytest.mark.nightly
@pytest.mark.usefixtures("_slices")
def test_auto_leaves_several_processes_on_cores_unless_gpus_are_named(root: Path) -> None:
    auto = on_gpus(root / "auto", 1, devices="auto")
    assert set(auto.to_frame("fold")["device"]) == {"cpu"}
    assert "gpu_processes" not in auto.plan.to_json()
    named = on_gpus(root / "named", 1, devices="auto", processes={"gpu": 2})
    assert set(named.to_frame("fold")["device"]) == {"cuda:0,1"}
    # Said in another way, it is the same run.
    again = on_gpus(root / "named", 1, devices=[0, 1])
    assert {name: item.started for name, item in again.results.items()} == {
        name: item.started for name, item in named.results.items()
    }


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("whom", ["member", "all"])
def test_killed_it_continues_and_ends_with_the_same_bits(
    root: Path, whom: str, warm: Nursery
) -> None:
    def started() -> Any:
        slow(root).touch()
        return warm.start(["-c", SCRIPT, root], root.with_name("printed"), errors=errors_of(root))

    script = started()
    (lead,) = wait_for(root, leads)
    family = {lead, *members(lead)}
    if whom == "all":
        script.kill()
        script.wait(60)
        assert gone(family)
        script = started()
    else:
        os.kill(max(members(lead)), signal.SIGKILL)
    outcomes = ended_well(script, root)
    assert outcomes.count("ok") == 2
    assert (whom == "member") == (outcomes == ["died", "ok", "ok"])
    assert gone(family)
    with RunStore.read(root) as store:
        found = {name: item.weights for name, item in store.results().items()}
        logs = [(root / name / "log.txt").read_text() for name in found]
    assert any("continues after epoch" in log for log in logs)
    assert found == weights(on_gpus(root.with_name("whole"), 12))


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_slices")
def test_a_rank_killed_while_its_worker_waits_for_the_gpu_costs_seconds(root: Path) -> None:
    deadly = root.with_name("DEADLY")

    class Waiting(fake_gpu.OnFakeGpu):
        """Kills a rank in the middle of a collective, and waits then, as for a kernel of NCCL."""

        def __init__(self) -> None:
            super().__init__()
            collect = Collectives.collect

            def waiting(self: Collectives, parts: Any) -> None:
                with contextlib.suppress(FileNotFoundError):
                    deadly.unlink()
                    os.kill(min(process.children()), signal.SIGKILL)
                    time.sleep(600)
                collect(self, parts)

            Collectives.collect = waiting  # type: ignore[method-assign]

    deadly.touch()
    found = on_gpus(root, 1, Waiting)
    with RunStore.read(root) as store:
        (broken,) = (item for item in store.attempts() if item.outcome == "died")
        assert [item.outcome for item in store.attempts()].count("ok") == 2
        logs = [(root / name / "log.txt").read_text() for name in found.results]
    assert "another process of the job ended" in broken.error
    assert broken.ended is not None
    assert broken.ended - broken.started < 60
    assert sum("process 2 of the job ended (SIGKILL)" in log for log in logs) == 1


# What cannot be


def asked(root: Path, **settings: Any) -> AsyncKFold:
    return kfold(root, **{"trainer": "allreduce", **settings})


@pytest.mark.usefixtures("_two")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"processes": {"gpu": 2}, "devices": [1]},
            r"needs a GPU of its own: received processes=\{'gpu': 2\}, and 1 GPU to use\. "
            r"Pass processes=\{'gpu': 1\} or fewer, or devices='cpu'",
        ),
        ({"processes": {"gpu": 2}, "devices": "cpu"}, r"needs a GPU: received processes=\{'gpu'"),
        (
            {"processes": {"cpu": 1, "gpu": 1}},
            r"compute on one kind of device, .*: received processes=\{'cpu': 1, 'gpu': 1\}\. Pass "
            r"processes=\{'gpu': 1\} or processes=1; trainer='averaging' trains on both kinds",
        ),
        (
            {"processes": {"gpu": 2}, "trainer": "hogwild"},
            "kind 'gpu' are for the trainers 'allreduce' and 'averaging'",
        ),
        (
            {"processes": {"gpu": 2}, "trainer": "averaging"},
            r"received processes=\{'gpu': 2\}. Pass processes=\{'cpu': 1, 'gpu': 2\};",
        ),
        ({"processes": {"gpu": 0}}, "processes of a kind must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(root: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        asked(root, **settings)({"t": Tiny}, ["cosine"], adam, {"epochs": 1})
    assert not root.exists()


@pytest.mark.usefixtures("_two")
def test_a_torch_without_nccl_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    told = r"needs a torch with NCCL: received torch .* without it\. Install a torch for CUDA"
    with pytest.raises(InputError, match=told):
        asked(root, devices="cuda")({"t": Tiny}, ["cosine"], adam, {"epochs": 1})
    assert not root.exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("_slices")
def test_a_run_goes_on_with_the_backend_that_it_was_begun_with(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(root, 1)
    fake_gpu.install(monkeypatch, fake_gpu.load_two)
    with pytest.raises(InputError, match=r"collectives: gloo there, NCCL \d.* here"):
        kfold(root, trainer="allreduce", devices="cuda")(
            {"slow": fake_gpu.OnFakeGpu, "more": fake_gpu.OnFakeGpu}, ["cosine"], adam
        )
