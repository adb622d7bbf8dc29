"""Jobs of several processes that promise the same bits keep that promise in a real sweep."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from asynckfold import CVResults, InputError, RunStore, fit
from tests import fake_gpu
from tests.faults.test_hogwild import (
    ended_well,
    errors_of,
    kfold,
    leads,
    members,
    slow,
    start,
    wait_for,
)
from tests.leftovers import gone
from tests.started import Nursery
from tests.toy import Tiny, adam, samples

BOTH = pytest.mark.parametrize("trainer", ["allreduce", "averaging"])


def run(root: Path, epochs: int, **settings: object) -> CVResults:
    return kfold(root, **settings)({"slow": Tiny}, ["cosine"], adam, {"epochs": epochs})


@BOTH
def test_a_sweep_claims_its_bits_and_books_a_core_for_each(root: Path, trainer: str) -> None:
    found = run(root, epochs=2, trainer=trainer)
    assert {item.status for item in found.results.values()} == {"done"}
    assert {(item.threads, len(item.cores)) for item in found.results.values()} == {(2, 2)}
    assert found.bit_identity.claimed
    with RunStore.read(root) as store:
        told = [event.text for event in store.events() if event.kind == "averaging"]
        kept = {name: item.averaged for name, item in store.results().items()}
    assert len(told) == (2 if trainer == "averaging" else 0)
    assert kept == {name: item.averaged for name, item in found.results.items()}
    rows = found.to_frame("fold")
    assert {"rounds", "samples_epochs"} <= set(rows) or trainer != "averaging"
    for text, averaged in zip(told, kept.values(), strict=False):
        assert averaged is not None
        assert text.startswith(f"{averaged.rounds} rounds in ")
        assert text.endswith(f": {', '.join(map(str, averaged.samples))}")


# A process on a GPU

ON_GPU = """
import sys, time
from pathlib import Path
from asynckfold.system import gpus, machine
from tests import fake_gpu
from tests.faults.test_hogwild import kfold
from tests.toy import adam

machine.load_nvml = fake_gpu.load_nvml
gpus.torch_cuda = lambda: "12.8"
slow = Path(sys.argv[1]).with_name("SLOW")

class Slow(fake_gpu.OnFakeGpu):
    def forward(self, inputs):
        time.sleep(0.02 if self.training and slow.exists() else 0)
        return super().forward(inputs)

results = kfold(sys.argv[1], trainer="averaging")(
    {"slow": Slow}, ["cosine"], adam, {"epochs": 12, **fake_gpu.KINDS}
)
print(results.best_score_)
"""


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)


def on_gpu(root: Path, epochs: int, **settings: object) -> CVResults:
    words = {"epochs": epochs, **fake_gpu.KINDS}
    asked = kfold(root, trainer="averaging", **settings)
    return asked({"slow": fake_gpu.OnFakeGpu}, ["cosine"], adam, words)


@pytest.mark.usefixtures("_gpu")
def test_a_sweep_books_a_gpu_beside_the_cores(root: Path) -> None:
    found = on_gpu(root, epochs=2)
    rows = found.to_frame("fold")
    assert set(rows["device"]) == {"cuda:0"}
    assert {(item.threads, len(item.cores)) for item in found.results.values()} == {(2, 2)}
    assert {item.averaged.samples for item in found.results.values() if item.averaged} == {
        (80, 400)
    }
    with RunStore.read(root) as store:
        told = [event.text for event in store.events() if event.kind == "averaging"]
        asked = Counter(item.outcome for item in store.attempts())
    assert all(text.endswith("of each process: 80, 400 (the last 1 on the GPU)") for text in told)
    assert (len(told), asked) == (2, {"ok": 2})
    assert all("GPU 0 taken by " in (root / name / "log.txt").read_text() for name in found.results)


@pytest.mark.usefixtures("_gpu")
def test_one_model_alone_has_a_process_on_the_gpu_too(root: Path) -> None:
    found = fit(
        fake_gpu.OnFakeGpu,
        samples(120),
        adam,
        nn.CrossEntropyLoss(),
        root,
        10,
        epochs=1,
        trainer_params=fake_gpu.KINDS,
        trainer="averaging",
        processes=2,
        verbose=0,
    )
    assert found.result.averaged is not None
    assert found.result.averaged.samples == (40, 200)
    assert found.results.to_frame("fold")["device"][0] == "cuda:0"


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", ["member of allreduce", "all of averaging", "GPU of averaging"])
def test_killed_it_continues_and_ends_with_the_same_bits(
    root: Path, case: str, warm: Nursery, request: pytest.FixtureRequest
) -> None:
    whom, _, trainer = case.partition(" of ")
    if whom == "GPU":
        request.getfixturevalue("_gpu")
        slow(root).touch()
        script = warm.start(["-c", ON_GPU, root], root.with_name("printed"), errors=errors_of(root))
    else:
        script = start(warm, root, trainer=trainer)
    (lead,) = wait_for(root, leads)
    family = {lead, *members(lead)}
    if whom == "all":
        script.kill()
        script.wait(60)
        assert gone(family)
        script = start(warm, root, trainer=trainer)
    else:
        os.kill(max(members(lead)), signal.SIGKILL)
    outcomes = ended_well(script, root)
    assert whom != "GPU" or outcomes == ["died", "ok", "ok"]
    assert gone(family)
    with RunStore.read(root) as store:
        found = {name: (item.weights, item.averaged) for name, item in store.results().items()}
        logs = [(root / name / "log.txt").read_text() for name in found]
    assert any("continues after epoch" in log for log in logs)
    again = root.with_name("whole")
    whole = on_gpu(again, 12) if whom == "GPU" else run(again, 12, trainer=trainer)
    assert found == {name: (item.weights, item.averaged) for name, item in whole.results.items()}


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("settings", "params", "told"),
    [
        (
            {"devices": "cuda"},
            {},
            "processes=2, and a GPU. Pass devices='auto', or trainer='averaging' with",
        ),
        (
            {"trainer": "hogwild", "devices": [0]},
            {},
            "the processes of a job train on CPUs only, except the last ones of averaging",
        ),
        (
            {"devices": "cpu"},
            {"epochs_per_round": {"cpu": 1, "gpu": 3}},
            r"needs a GPU: received epochs_per_round=\{'cpu': 1, 'gpu': 3\}, and none: devices is "
            r"'cpu'\. Leave the kind 'gpu' out, or pass devices='auto' \(`asynckfold doctor` exp",
        ),
        (
            {},
            {"partition_size": {"cpu": 121, "gpu": 7}},
            r"(?s)=121 of the kind 'cpu' of 120 samples\. Pass partition_size=120 or less, and "
            r"epochs_.*=7 of the kind 'gpu' and batch_size=8\. "
            r"Pass partition_size=8 or more, or batch_size=7 or less\.",
        ),
        ({}, {"partition_size": {"cpu": 8, "gpu": 121}}, "=121 of the kind 'gpu' of 120 samples"),
    ],
)
def test_what_cannot_be_done_on_a_machine_with_a_gpu_is_refused(
    root: Path, settings: dict[str, object], params: dict[str, object], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        kfold(root, **{"trainer": "averaging", **settings})({"t": Tiny}, ["cosine"], adam, params)
    assert not root.exists()


@pytest.mark.usefixtures("_gpu")
def test_a_trainer_of_several_processes_goes_to_cores_beside_a_gpu(root: Path) -> None:
    found = kfold(root, trainer="hogwild")({"t": Tiny}, ["cosine"], adam, {"epochs": 1})
    assert set(found.to_frame("fold")["device"]) == {"cpu"}


@pytest.mark.parametrize(
    ("settings", "params", "told"),
    [
        ({"trainer": "averaging"}, {"accumulate": 2}, "accumulate applies to"),
        ({"trainer": "hogwild"}, {"steps_per_round": 2}, "steps_per_round applies to"),
        ({"trainer": "averaging", "shared_state": True}, {}, "shared_state applies to"),
        ({"trainer": "averaging"}, {"steps_per_round": 0}, "steps_per_round must be a whole"),
        ({"trainer": "averaging"}, {"partition_size": {"gpu": 8}}, "by kind of process must give"),
        ({"trainer": "allreduce", "processes": 4096}, {}, "processes must not exceed"),
        ({"trainer": "averaging"}, {"partition_size": 7}, "a batch.*Pass partition_size=8 or"),
        (
            {"trainer": "averaging"},
            {"partition_size": 121},
            "must not exceed the training fold.*=121 of the kind 'cpu' of 120 samples.*=120",
        ),
        (
            {"trainer": "averaging", "devices": "cpu"},
            {"partition_size": {"cpu": 8, "gpu": 8000}},
            r"(?s)2 problems.*needs a GPU.*must not exceed",
        ),
        ({"trainer": "allreduce", "batch_size": 1}, {}, "must have a sample of each batch"),
        ({"trainer": "averaging", "batch_size": 100}, {}, "make a batch.*Pass batch_size=60"),
    ],
)
def test_what_has_no_effect_or_no_room_is_refused(
    root: Path, settings: dict[str, object], params: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        kfold(root, **settings)({"tiny": Tiny}, ["cosine"], adam, params)
    assert not root.exists()


def test_parts_for_each_process_give_equal_bits_and_no_speedup_of_other_samples(
    tmp_path: Path,
) -> None:
    words = {"epochs": 2, "partition_size": {"cpu": 90}, "epochs_per_round": 2}

    def found(name: str) -> CVResults:
        asked = kfold(tmp_path / name, trainer="averaging", baseline="estimate")
        return asked({"tiny": Tiny}, ["cosine"], adam, words)

    one, two = found("one"), found("two")
    assert one.fingerprint == two.fingerprint
    assert one.bit_identity.claimed
    assert one.speedup is None
    with RunStore.read(tmp_path / "one") as store:
        told = [event.text for event in store.events() if event.kind in ("averaging", "baseline")]
    assert len(told) == 3
    assert sum("samples × epochs of each process: 360, 360" in text for text in told) == 2
    assert "no serial baseline" in told[2]
