"""Whether several processes for one model pay is said before the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.cli import main
from asynckfold.planning.calibration import BUILT_IN, Exchange, recall, remember
from asynckfold.planning.forecast import Forecast
from tests.toy import adam, samples


@pytest.fixture(autouse=True)
def _nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def forecast(root: Path, **settings: object) -> Forecast:
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 8, verbose=0, **settings)
    return kfold.forecast({"net": net}, ["constant"], adam, {"epochs": 2})


@pytest.mark.parametrize("trainer", ["allreduce", "parameter_server"])
def test_a_small_net_is_said_to_be_slower_on_two_processes(tmp_path: Path, trainer: str) -> None:
    said = forecast(tmp_path, trainer=trainer, processes=2)
    assert "times as fast as one process: slower" in said.choice.why["net"]


def test_processes_that_exchange_nothing_are_said_to_be_faster(tmp_path: Path) -> None:
    said = forecast(tmp_path, trainer="hogwild", processes=2)
    assert "predicted 1." in said.choice.why["net"]
    assert "slower" not in said.choice.why["net"]


def test_a_slow_exchange_makes_the_prediction_longer(tmp_path: Path) -> None:
    hogwild = forecast(tmp_path / "h", trainer="hogwild", processes=2)
    server = forecast(tmp_path / "s", trainer="parameter_server", processes=2)
    gains = [said.choice.costs["net"].processes_gain for said in (hogwild, server)]
    assert gains[0] > 1 > gains[1] > 0
    for said, gain in zip((hogwild, server), gains, strict=True):
        cost = said.choice.costs["net"]
        shared = cost.shared_by(2)
        assert shared.step_seconds[2] == pytest.approx(cost.step_seconds[1] / gain)


@given(
    step=st.floats(1e-5, 1.0),
    size=st.integers(0, 1 << 30),
    more=st.integers(1, 1 << 30),
    processes=st.integers(2, 64),
    trainer=st.sampled_from(sorted(BUILT_IN)),
)
def test_laws_of_the_gain(step: float, size: int, more: int, processes: int, trainer: str) -> None:
    free = Exchange(0.0, 0.0)
    assert free.gain(trainer, processes, step, step / processes, size) == pytest.approx(processes)
    here = BUILT_IN[trainer]
    gain = here.gain(trainer, processes, step, step / processes, size)
    assert 0 < gain < processes
    assert here.gain(trainer, processes, step, step / processes, size + more) < gain


def test_what_was_measured_here_is_used_and_damage_is_not(tmp_path: Path) -> None:
    machine, place = {"cpu": "a"}, tmp_path / "cache"
    assert recall("hogwild", machine, place) == BUILT_IN["hogwild"]
    remember("hogwild", machine, Exchange(1e-3, 1e-9, 0.1), place)
    assert recall("hogwild", machine, place) == Exchange(1e-3, 1e-9, 0.1, is_measured=True)
    assert recall("hogwild", {"cpu": "b"}, place) == BUILT_IN["hogwild"]
    assert recall("allreduce", machine, place) == BUILT_IN["allreduce"]
    (file,) = place.iterdir()
    file.write_text("{")
    assert recall("hogwild", machine, place) == BUILT_IN["hogwild"]


@pytest.mark.parametrize(
    ("words", "remedy"), [(["--model", "mlp"], "--data digits"), (["--data", "digits"], "--model")]
)
def test_doctor_needs_a_model_and_samples(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.nightly
def test_doctor_times_a_model_by_each_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "mlp", "--data", "digits", "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert trials[0]["gain"] == 1
    assert {trial["trainer"] for trial in trials} == {"plain", *BUILT_IN}
    assert all(trial["samples_per_second"] > 0 for trial in trials)
