"""Jobs of several processes that promise the same bits keep that promise in a real sweep."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from asynckfold import CVResults, InputError, RunStore
from asynckfold.result import DONE
from tests.leftovers import gone
from tests.nursery import Nursery
from tests.test_hogwild import ended_well, kfold, leads, members, start, wait_for
from tests.toy import Tiny, adam

BOTH = pytest.mark.parametrize("trainer", ["allreduce", "averaging"])


def run(root: Path, epochs: int, **settings: object) -> CVResults:
    return kfold(root, **settings)({"slow": Tiny}, ["cosine"], adam, {"epochs": epochs})


@BOTH
def test_a_sweep_claims_its_bits_and_books_a_core_for_each(root: Path, trainer: str) -> None:
    found = run(root, epochs=2, trainer=trainer)
    assert {item.status for item in found.results.values()} == {DONE}
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("trainer", "whom"), [("allreduce", "member"), ("averaging", "all")])
def test_killed_it_continues_and_ends_with_the_same_bits(
    root: Path, trainer: str, whom: str, warm: Nursery
) -> None:
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
    ended_well(script, root)
    assert gone(family)
    with RunStore.read(root) as store:
        found = {name: (item.weights, item.averaged) for name, item in store.results().items()}
        logs = [(root / name / "log.txt").read_text() for name in found]
    assert any("continues after epoch" in log for log in logs)
    whole = run(root.with_name("whole"), epochs=12, trainer=trainer)
    assert found == {name: (item.weights, item.averaged) for name, item in whole.results.items()}


@pytest.mark.parametrize(
    ("settings", "params", "told"),
    [
        ({"trainer": "plain", "processes": 1}, {"accumulate": 2}, "accumulate applies to"),
        ({"trainer": "hogwild"}, {"steps_per_round": 2}, "steps_per_round applies to"),
        ({"trainer": "averaging", "shared_state": True}, {}, "shared_state applies to"),
        ({"trainer": "averaging"}, {"steps_per_round": 0}, "steps_per_round must be a whole"),
        ({"trainer": "averaging"}, {"partition_size": {"gpu": 8}}, "processes of a job are forked"),
        ({"trainer": "allreduce", "processes": 4096}, {}, "processes must not exceed"),
    ],
)
def test_what_has_no_effect_or_no_room_is_refused(
    root: Path, settings: dict[str, object], params: dict[str, int], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        kfold(root, **settings)({"tiny": Tiny}, ["cosine"], adam, params)
    assert not root.exists()


@pytest.mark.parametrize(
    ("trainer", "batch_size", "told"),
    [
        ("allreduce", 1, "each process must have a sample of each batch"),
        ("averaging", 100, "the samples of a process must make a batch.*Pass batch_size=60"),
    ],
)
def test_parts_that_are_too_small_are_refused(
    root: Path, trainer: str, batch_size: int, told: str
) -> None:
    asked = kfold(root, trainer=trainer)
    asked.settings = replace(asked.settings, batch_size=batch_size)
    with pytest.raises(InputError, match=told):
        asked({"tiny": Tiny}, ["cosine"], adam, {"epochs": 1})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            {"partition_size": 7},
            "the part of a process must make a batch.*Pass partition_size=8 or",
        ),
        ({"partition_size": 121}, "must not exceed the training fold.*=121 of 120 samples.*=120"),
    ],
)
def test_parts_of_other_sizes_than_there_can_be_are_refused(
    root: Path, words: dict[str, int], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        kfold(root, trainer="averaging")({"tiny": Tiny}, ["cosine"], adam, words)
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
